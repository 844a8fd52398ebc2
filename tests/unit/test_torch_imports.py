"""Modules are passed on when they are imported, and are otherwise as if nobody waited for them."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import ROOT
from tests.unit.probing import PRIVATE as _torch
from tests.unit.probing import probes


@probes("WhenImported")
def test_modules_are_passed_now_and_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("waited_early", "waited_late", "waited_never"):
        (tmp_path / f"{name}.py").write_text("def answer():\n    return 42\n")
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # so that it is removed at the end of the test
        del sys.modules[name]
    early, seen = importlib.import_module("waited_early"), []
    waiting = _torch.WhenImported(
        ["waited_early", "waited_late", "waited_never"], lambda module: seen.append((module, module.answer()))
    )
    waiting.start()
    assert seen == [(early, 42)]
    late = importlib.import_module("waited_late")
    assert seen[1:] == [(late, 42)]
    assert inspect.getsource(late.answer) == "def answer():\n    return 42\n"
    assert late.__loader__.get_data(late.__file__) == Path(late.__file__).read_bytes()
    waiting.stop()
    importlib.import_module("waited_never")
    assert len(seen) == 2 and waiting not in sys.meta_path


def test_a_module_whose_import_has_begun_is_not_passed_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "waited_while.py").write_text("import sys\nsys.waiting.stop()\n")
    waiting = _torch.WhenImported(["waited_while"], lambda module: pytest.fail("it was passed"))
    monkeypatch.setattr(sys, "waiting", waiting, raising=False)
    waiting.start()
    importlib.import_module("waited_while")
    del sys.modules["waited_while"]


LATE = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import fsdp2
from fsdp2._torch.compile import around_compilation

calls = []
around_compilation(lambda: calls.append("start"), lambda: calls.append("end"))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.two(x), (x,))


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
model = fsdp2.fully_shard(Branches(), mesh=mesh)
assert "torch._dynamo" not in sys.modules
with torch.no_grad():
    model(torch.ones(1, 4))  # torch.cond imports and uses Dynamo
print("compilations:", *calls)
torch._dynamo.reset()
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
print("compilations:", *calls)

model = nn.Linear(4, 4, bias=False)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, 4)).sum().backward()
optimizer.step()
optimizer.zero_grad()
fsdp2.fully_shard(model, mesh=mesh)
assert "torch.distributed.checkpoint.state_dict" not in sys.modules
import torch.distributed.checkpoint.state_dict as checkpoints

moments = {name: torch.full((4, 4), 2.0) for name in ("exp_avg", "exp_avg_sq")}
group = {**optimizer.param_groups[0], "params": ["weight"]}
loaded = {"state": {"weight": {**moments, "step": torch.tensor(3.0)}}, "param_groups": [group]}
options = checkpoints.StateDictOptions(full_state_dict=True)
checkpoints.set_optimizer_state_dict(model, optimizer, loaded, options=options)
state = optimizer.state[model.weight]
print("loaded:", int(state["step"]), state["exp_avg"].to_local().unique().tolist())
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def late() -> tuple[list[str], str]:
    """Return what a new process prints that imports Dynamo and torch's checkpoints last, and what goes wrong in it."""
    run = subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, capture_output=True, text=True)
    return run.stdout.splitlines(), run.stderr


@probes("around_compilation")
def test_compilations_are_noticed(late: tuple[list[str], str]) -> None:
    """In the first forward, which imports Dynamo, and after a reset, which makes Dynamo forget whom to tell."""
    printed, errors = late
    assert printed[:2] == ["compilations: start end", "compilations: start end start end"], errors


def test_checkpoints_that_are_imported_last_load_a_prebuilt_optimizer(late: tuple[list[str], str]) -> None:
    """Their module is not imported by fsdp2. It looks up parameters that the optimizer was given before they were cut,
    and raised ``KeyError`` for them."""
    printed, errors = late
    assert printed[2:] == ["loaded: 3 [2.0]"], errors
