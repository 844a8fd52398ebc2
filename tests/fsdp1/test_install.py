"""``install()``: libraries that import torch's names get ours, torch's own test helpers included."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from tests.support import api
from tests.support.parity import mesh_1d, stack
from tests.support.pool import on_ranks
from tests.support.processes import ended

pytestmark = api.fsdp2_only

PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)


LATER = """
import sys
from importlib import import_module
import fsdp2
from fsdp2.engine.group import FSDPParamGroup

names = "torch.distributed._tools.fsdp2_mem_tracker", "torch.distributed._composable.fsdp"
for name in names:
    sys.modules.pop(name, None)
fsdp2.install()
tracker, home = map(import_module, names)
assert home.fully_shard is fsdp2.fully_shard, home.fully_shard
assert tracker.FSDPParamGroup is FSDPParamGroup, tracker.FSDPParamGroup
fsdp2.uninstall()
assert tracker.FSDPParamGroup is not FSDPParamGroup

for name in names:
    sys.modules.pop(name, None)
fsdp2.install()
fsdp2.uninstall()
tracker, home = map(import_module, names)
assert home.fully_shard is not fsdp2.fully_shard
assert tracker.FSDPParamGroup is not FSDPParamGroup
"""
"""A program that imports two of torch's modules for the first time after ``install``, and then after ``uninstall``."""


@pytest.fixture(autouse=True)
def clean():
    """Leave torch as it was."""
    yield
    fsdp2.uninstall()


@on_ranks(2)
def test_replaces_and_gives_back(rank, world):
    """Between ``install`` and ``uninstall`` torch's names are ours, and train; then they are torch's again."""
    homes = [importlib.import_module(name) for name in PLACES]
    before = [home.fully_shard for home in homes]
    installation = fsdp2.install()
    assert all(home.fully_shard is fsdp2.fully_shard for home in homes)
    assert homes[0].register_fsdp_forward_method is fsdp2.register_fsdp_forward_method
    assert "torch.distributed.fsdp.fully_shard" in str(installation)
    assert fsdp2.install() is installation
    from torch.distributed.fsdp import FSDPModule, fully_shard

    module = fully_shard(stack(), mesh=mesh_1d())
    assert isinstance(module, fsdp2.FSDPModule) and isinstance(module, FSDPModule)
    module(torch.ones(1, 8)).sum().backward()
    assert module[0].weight.grad is not None
    fsdp2.uninstall()
    fsdp2.uninstall()
    assert [home.fully_shard for home in homes] == before
    theirs = homes[0].fully_shard(stack(), mesh=mesh_1d())
    assert not isinstance(theirs, fsdp2.FSDPModule)


@on_ranks(1)
def test_as_a_context_manager(rank, world):
    """The end of the block gives back, also after an exception."""
    home = importlib.import_module(PLACES[0])
    before = home.fully_shard
    with pytest.raises(KeyError), fsdp2.install():
        assert home.fully_shard is fsdp2.fully_shard
        raise KeyError
    assert home.fully_shard is before


def test_early_importers_are_rebound():
    """An install that comes late names the modules that imported the function, and replaces it in them if asked to;
    ``uninstall`` gives it back."""
    early = ModuleType("an_early_library")
    early.fully_shard = torchs = importlib.import_module(PLACES[0]).fully_shard
    sys.modules[early.__name__] = early
    try:
        text = r"an_early_library.fully_shard.* were imported from torch before .* install\(rebind=True\)"
        with pytest.warns(UserWarning, match=text):
            installation = fsdp2.install()
        assert early.fully_shard is torchs
        assert fsdp2.install(rebind=True) is installation
        assert early.fully_shard is fsdp2.fully_shard and "an_early_library.fully_shard" in installation.replaced
        fsdp2.uninstall()
        assert early.fully_shard is torchs
    finally:
        del sys.modules[early.__name__]


@on_ranks(2)
def test_mixing_is_refused(rank, world):
    """One module tree is managed by one of the two, whichever comes first; ``replicate`` refuses ours."""
    from torch.distributed._composable.replicate import replicate

    for inner, outer in ((api.theirs, fsdp2), (fsdp2, api.theirs)):
        module = stack()
        inner.fully_shard(module[0], mesh=mesh_1d())
        with pytest.raises(ValueError, match="cannot mix"):
            outer.fully_shard(module, mesh=mesh_1d())
    module = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh_1d())
    with pytest.raises(RuntimeError, match="[Cc]annot apply `?replicate"):
        replicate(module)
    module = stack()
    replicate(module[0])
    fsdp2.fully_shard(module, mesh=mesh_1d())
    assert not hasattr(module[0].weight, "placements") and hasattr(module[1].weight, "placements")
    dist.barrier()


@on_ranks(2)
def test_torchs_search_for_the_modules_of_a_unit(rank, world):
    """A library that calls it gets the modules that torch's own would have managed, and mixing is refused as ever."""
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules

    found = []
    for fsdp in (fsdp2, api.theirs):
        module = nn.Sequential(stack(), stack(), nn.Tanh())
        for unit in (module[0][1], module[0], module):
            fsdp.fully_shard(unit, mesh=mesh_1d())
        names = {part: name for name, part in module.named_modules()}
        roots = [(module,), (module[0],), (module[1], module[0]), (module[0][1],)]
        found.append([[names[part] for part in _get_managed_modules(root)] for root in roots])
    assert found[0] == found[1] and found[0][0] == ["1.0", "1.1", "1.2", "1", "2", ""]
    module = fsdp2.fully_shard(stack(), mesh=mesh_1d())
    with pytest.raises(ValueError, match="cannot mix"):
        api.theirs.fully_shard(nn.Sequential(module), mesh=mesh_1d())


def test_blocks_may_be_nested(caplog):
    """A library that installs for a block of its own ended the installation of the program around it.

    The log says once what is replaced.
    """
    home = importlib.import_module(PLACES[0])
    before = home.fully_shard
    caplog.set_level("INFO", "fsdp2")
    with fsdp2.install():
        with fsdp2.install():
            pass
        assert home.fully_shard is fsdp2.fully_shard
    assert home.fully_shard is before
    (said,) = (message for message in caplog.messages if message.startswith("fsdp2 replaced"))
    assert f"{PLACES[0]}.fully_shard" in said
    fsdp2.install()
    with fsdp2.install():
        pass
    assert home.fully_shard is fsdp2.fully_shard
    with fsdp2.install():
        fsdp2.uninstall()
        assert home.fully_shard is before
        fsdp2.install()  # another one, which the end of the block leaves alone
    assert home.fully_shard is fsdp2.fully_shard


def test_modules_imported_meanwhile(tmp_path, monkeypatch):
    """A module that imported torch's function while ours was there kept ours after ``uninstall``. It gets torch's back,
    under any name; one that asked fsdp2 for it keeps it; where nothing tells, a warning names it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = {
        "client_of_torch": "from torch.distributed.fsdp import fully_shard as shard",
        "client_of_fsdp2": "from fsdp2 import fully_shard as shard",
        "client_of_both": "from torch.distributed.fsdp import fully_shard as shard\nfrom fsdp2 import no_sync",
    }
    early = ModuleType("an_early_library")
    early.theirs = theirs = importlib.import_module(PLACES[0]).fully_shard
    monkeypatch.setitem(sys.modules, early.__name__, early)
    fsdp2.install(rebind=True)
    assert early.theirs is fsdp2.fully_shard
    clients = {}
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that it is removed at the end of the test
        del sys.modules[name]
        clients[name] = importlib.import_module(name)
        assert clients[name].shard is fsdp2.fully_shard
    with pytest.warns(
        UserWarning, match="client_of_both.shard were imported while fsdp2 was installed and stay fsdp2's"
    ):
        fsdp2.uninstall()
    assert early.theirs is theirs
    assert clients["client_of_torch"].shard is theirs
    assert clients["client_of_fsdp2"].shard is clients["client_of_both"].shard is fsdp2.fully_shard


def test_modules_of_torch_imported_later():
    """torch's other names for ``fully_shard`` are ours too if nobody had imported them before ``install``, and so is
    the class of groups in torch's memory tracker, until ``uninstall``."""
    status, written = ended(LATER)
    assert status == 0, written


def test_what_others_replaced_meanwhile_stays(monkeypatch):
    """A library may wrap the function that it finds. ``uninstall`` threw its wrapper away."""
    home = importlib.import_module(PLACES[0])
    monkeypatch.setattr(home, "fully_shard", home.fully_shard)  # as it is now, at the end of the test
    fsdp2.install()
    wrapper = lambda module: module
    home.fully_shard = wrapper
    fsdp2.uninstall()
    assert home.fully_shard is wrapper


def test_several_threads():
    """Each thread has a block of its own. One raised ``list.remove(x): x not in list``."""
    home = importlib.import_module(PLACES[0])
    before, errors = home.fully_shard, []
    start = threading.Barrier(4)

    def use() -> None:
        try:
            for _ in range(5):
                start.wait()
                with fsdp2.install():
                    assert home.fully_shard is fsdp2.fully_shard
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and home.fully_shard is before
