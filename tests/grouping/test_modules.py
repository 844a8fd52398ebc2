"""Old names for all units at once, modules left alone, and what cannot be pickled."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp2
from tests.grouping.models import BLOCKS, Block, Net, nodes_mesh, whole
from tests.support import api
from tests.support.counting import Collectives
from tests.support.inside import options_of
from tests.support.parity import Run, assert_gradients, assert_parity, beside_one_process, full, mesh_1d, stack
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


def plain(module, fsdp) -> None:
    """Make a unit of each block."""
    fsdp.fully_shard(module, policy={Block}, mesh=mesh_1d())


# ---- fsdp_modules ----


@on_ranks(2)
def test_fsdp_modules(rank, world):
    """All units in the order of ``modules()``, or the outermost alone, also in a parent that is not sharded."""
    module = Net()
    parent = nn.Sequential(module, nn.Linear(8, 8))
    assert fsdp2.fsdp_modules(parent) == fsdp2.fsdp_modules(parent, root_only=True) == []
    for block in module.blocks:
        fsdp2.fully_shard(block)
    assert fsdp2.fsdp_modules(parent) == list(module.blocks) == fsdp2.fsdp_modules(parent, root_only=True)
    fsdp2.fully_shard(module)
    for _ in range(2):
        assert fsdp2.fsdp_modules(parent) == [module, *module.blocks]
        assert fsdp2.fsdp_modules(parent, root_only=True) == [module]
        assert fsdp2.fsdp_modules(module.blocks[0]) == [module.blocks[0]]
        parent(torch.ones(2, 8))
    assert fsdp2.fsdp_modules(module.blocks[0], root_only=True) == []  # a forward has shown what it lies below
    pair = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    fsdp2.fully_shard(list(pair))
    assert fsdp2.fsdp_modules(pair, root_only=True) == list(pair)


# ---- no_sync ----


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("two", [False, True])
def test_no_sync_accumulates(rank, world, two):
    """Backwards inside communicate no gradient; the first one outside reduces the sum of all."""
    mesh = nodes_mesh() if two else mesh_1d()

    def program(run: Run) -> None:
        for step in range(0, 6, 3):
            with fsdp2.no_sync(run.module), Collectives() as seen:
                run.backward(step)
                run.backward(step + 1)
            expected = 0 if run.fsdp is None else 2  # the means of the losses
            assert seen.reductions == expected
            run.backward(step + 2)
            run.update()

    assert_parity(
        lambda module, fsdp: fsdp.fully_shard(
            module, policy={Block}, mesh=mesh, replicated_params={module.norm.weight}
        ),
        build=lambda: Net(repeat=2, tied=True),
        program=program,
        against=("alone",),
    )


@on_ranks(2)
def test_no_sync_restores_each_units_setting(rank, world):
    """Also after an exception, nested, and where units differ; what else is set inside stays."""
    module = Net()
    plain(module, fsdp2)
    module.blocks[0].set_requires_gradient_sync(False)
    module.blocks[1].set_requires_all_reduce(False)

    def settings():
        found = [options_of(unit) for unit in fsdp2.fsdp_modules(module)]
        return [(options.reduce_gradients, options.all_reduce_gradients) for options in found]

    before = [(True, True), (False, False), (True, False), (True, True)]
    assert settings() == before
    with pytest.raises(KeyError), fsdp2.no_sync(module):
        assert settings() == [(False, False)] * 4
        with fsdp2.no_sync(module.blocks[2]):
            assert settings() == [(False, False)] * 4
        assert settings() == [(False, False)] * 4
        module.set_reshard_after_backward(False)
        raise KeyError
    assert settings() == before
    assert not options_of(module).reshard_after_backward
    with fsdp2.no_sync(module.blocks[2]):
        assert settings() == [*before[:3], (False, False)]
    parent = nn.Sequential(module, nn.Linear(8, 8))
    with fsdp2.no_sync(parent):
        assert settings() == [(False, False)] * 4
    with (
        pytest.raises(ValueError, match="LayerNorm is part of a unit whose FSDPModule is above"),
        fsdp2.no_sync(module.norm),
    ):
        pass
    with fsdp2.no_sync(parent[1]), fsdp2.no_sync(fsdp2.fully_shard(nn.Tanh())):
        pass


def append_layer(module: nn.Module) -> None:
    """Parameters are added to a unit that has others."""
    module[0].append(nn.Linear(8, 8))


def append_to_root(module: nn.Module) -> None:
    """Parameters are added to a unit that has none."""
    module.append(nn.Linear(8, 8))


def tie_weights(module: nn.Module) -> None:
    """A weight leaves its group, because two units share it."""
    module[1].weight = module[0][0].weight


@on_ranks(2)
@pytest.mark.parametrize("changes", [append_layer, append_to_root, tie_weights])
def test_no_sync_restores_the_setting_of_groups_that_are_made_inside(rank, world, changes):
    """Their gradients were never reduced: the block knew the groups that were there when it began."""
    for setting in (True, False):
        module = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
        for unit in (*module, module):
            fsdp2.fully_shard(unit, mesh=mesh_1d())
        module.set_requires_gradient_sync(setting)
        with fsdp2.no_sync(module), fsdp2.no_sync(module[0]):
            changes(module)
            module(torch.ones(2, 8)).sum().backward()
            assert all(parameter.grad is None for parameter in module.parameters())
        module(torch.ones(2, 8)).sum().backward()
        assert {parameter.grad is not None for parameter in module.parameters()} == {setting}


# ---- ignored_modules ----


class Normed(nn.Module):
    """A layer with buffers, to be left alone, one of whose weights another layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        self.last.bias = self.own[2].bias

    def forward(self, x):
        return self.last(torch.tanh(self.own(torch.tanh(self.first(x)))))


@on_ranks(2)
@pytest.mark.parametrize("low", [False, True])
def test_ignored_modules(rank, world, low):
    """Their parameters stay plain, with gradients of this rank alone, their buffers and classes as they were."""
    module = Normed()
    before = whole(module)
    buffers = dict(module.named_buffers())
    storages = {name: buffer.data_ptr() for name, buffer in buffers.items()}
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False) if low else MixedPrecisionPolicy()
    )
    ignored = (part for part in [module.own])  # any iterable
    fsdp2.fully_shard(module, policy={nn.Linear}, ignored_modules=ignored, mesh=mesh_1d(), mp_policy=policy)
    sharded = {name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)}
    assert sharded == {"first.weight", "first.bias", "last.weight"}
    assert module.last.bias is module.own[2].bias and type(module.own[0]) is nn.Linear
    for name, buffer in module.named_buffers():
        assert buffer is buffers[name] and buffer.data_ptr() == storages[name]
    assert not any("_is_fsdp_managed_module" in part.__dict__ for part in module.own.modules())
    if low:
        return
    x = torch.full((4, 8), rank + 1.0)
    module(x).square().sum().backward()
    alone = Normed()
    alone.load_state_dict({**alone.state_dict(), **before, "own.2.bias": before["last.bias"]})
    alone(x).square().sum().backward()
    torch.testing.assert_close(module.own[0].weight.grad, alone.own[0].weight.grad)
    mean = alone.first.weight.grad.clone()
    torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
    torch.testing.assert_close(full(module.first.weight.grad), mean)


@on_ranks(2)
def test_what_appears_in_an_ignored_module_stays_ignored(rank, world):
    """Parameters added there later are not adopted; units below it are units still."""
    module = Net()
    fsdp2.fully_shard(module.blocks[0].up)
    fsdp2.fully_shard(module, ignored_modules={module.blocks})
    module.blocks[1].extra = nn.Parameter(torch.ones(3))
    module.late = nn.Parameter(torch.ones(3))
    module(torch.ones(2, 8)).sum().backward()
    assert not isinstance(module.blocks[1].extra, DTensor) and isinstance(module.late, DTensor)
    assert isinstance(module.blocks[0].up.weight, DTensor) and module.blocks[0].up.weight.grad is not None
    assert not isinstance(module.blocks[0].down.weight, DTensor)


@on_ranks(1)
def test_wrong_ignored_modules(rank, world):
    """Modules, none of them the one to shard."""
    module = stack()
    with pytest.raises(ValueError, match="Sequential is the module to shard and in ignored_modules"):
        fsdp2.fully_shard(module, ignored_modules=[module])
    for wrong in (module[0], ["0"], 3, list(module[0].parameters())):
        with pytest.raises(TypeError, match="ignored_modules must be a set of nn.Module, got"):
            fsdp2.fully_shard(module, ignored_modules=wrong)
    with pytest.raises(ValueError, match="Block is the module to shard and in ignored_modules"):
        fsdp2.fully_shard(Net(), policy=lambda part: {"ignored_modules": [part]} if isinstance(part, Block) else False)


# ---- pickling ----


@on_ranks(2)
def test_pickling_is_refused(rank, world):
    """Of a sharded module and of what holds one, with what to do; deep copies go on working."""
    module = Net()
    plain(module, fsdp2)
    for thing in (module, module.blocks[0], nn.Sequential(module), {"model": module}):
        for attempt in (
            pickle.dumps,
            lambda thing: torch.save(thing, io.BytesIO()),
            lambda thing: pickle.dumps(thing, 2),
        ):
            with pytest.raises(TypeError, match=r"cannot pickle (Net|Block): .*state_dict\(\).*load_state_dict\(\)"):
                attempt(thing)
    twin = copy.deepcopy(nn.Sequential(module))[0]
    assert fsdp2.fsdp_modules(twin)[1:] == [twin.get_submodule(name) for name in BLOCKS]
    twin(torch.ones(2, 8)).sum().backward()
    assert pickle.loads(pickle.dumps(nn.Linear(2, 2))).weight.shape == (2, 2)


# ---- classes ----


class Tagged(nn.Module):
    """Requires a keyword of its subclasses, as registries of models do, and knows their names."""

    known: list[str] = []

    def __init_subclass__(cls, *, tag: str) -> None:
        Tagged.known.append(f"{tag} {cls.__name__}")
        super().__init_subclass__()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Leaf(Tagged, tag="leaf"):
    """One that is known."""


class Final(Tagged, tag="final"):
    """One that allows no subclass, and no attribute that it does not know."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Final allows no subclass")

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("training", "linear"):
            raise AttributeError(name)
        super().__setattr__(name, value)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Leaf, Final])
def test_a_class_that_minds_its_subclasses(rank, world, kind):
    """The class that ``fully_shard`` makes went through ``__init_subclass__`` as if a user had defined it: a keyword
    was missing, or a registry had a model "FSDPLeaf"; and attributes were set as if a user did."""
    before = list(Tagged.known)
    module = fsdp2.fully_shard(kind())
    module(torch.ones(1, 4)).sum().backward()
    assert isinstance(module, kind) and isinstance(module, fsdp2.FSDPModule) and Tagged.known == before
    assert type(copy.deepcopy(module)) is type(module)


@on_ranks(2)
@pytest.mark.parametrize("copied", [False, True])
def test_a_traced_module_is_changed_after_sharding(rank, world, copied):
    """``recompile()`` of a sharded ``torch.fx.GraphModule`` made its forward call itself without an end, as with
    torch's own. What was copied from it computes as before: the forward is on the class, which copies shared."""
    module, alone = beside_one_process(lambda: nn.Sequential(*(torch.fx.symbolic_trace(Block()) for _ in range(2))))
    before = copy.deepcopy(module) if copied else module
    expected = alone(torch.ones(2, 8))
    assert torch.equal(before(torch.ones(2, 8)), expected)
    for one in (module, alone):
        graph = one[1].graph
        output = graph.output_node()
        with graph.inserting_before(output):
            doubled = graph.call_function(torch.mul, (output.args[0], 2))
        output.args = (doubled,)
        one[1].recompile()
        for _ in range(2):
            one(torch.ones(2, 8)).sum().backward()
    assert_gradients(module, alone)
    assert not copied or torch.equal(before(torch.ones(2, 8)), expected)


def test_subclasses_that_users_define_are_noticed():
    """``FSDPModule`` passes on what is not made by ``fully_shard``."""

    class Mine(fsdp2.FSDPModule, Tagged, tag="mine"):
        pass

    assert Tagged.known[-1] == "mine Mine"
