"""``replicated_params``: whole on every rank, all-reduced, beside sharded parameters of the same unit."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, ShardingStrategy, StateDictType
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from tests.grouping.models import Block, Net, nodes_mesh, whole
from tests.step.test_communication import Gather, Scatter
from tests.step.test_named_dimensions import OnMesh, spread
from tests.support import api
from tests.support.counting import Collectives
from tests.support.parity import Run, assert_gradients, assert_parity, full, mesh_1d, mesh_of, play, stack
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Scaled(Net):
    """Has a scalar and an empty parameter, too."""

    def __init__(self, **options):
        super().__init__(**options)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return super().forward(x) * self.scale + self.nothing.sum()


def chosen(module) -> set[nn.Parameter]:
    """Return a parameter of a block, one of the root, and odd ones."""
    return {module.blocks[0].up.weight, module.norm.weight, module.scale, module.nothing}


def replicating(**options):
    """Return what shards a ``Scaled`` with the chosen parameters whole."""
    return lambda module, fsdp: fsdp.fully_shard(module, policy={Block}, replicated_params=chosen(module), **options)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_training(rank, world, two, reshard):
    """Equals a single process: gradients are the mean over all ranks, those of both axes of a 2D mesh."""
    mesh = nodes_mesh() if two else mesh_1d()
    build = lambda: Scaled(tied=True)
    run = assert_parity(replicating(mesh=mesh, reshard_after_forward=reshard), build=build, against=("alone",))
    for unit in (run.module, run.module.blocks[0]):
        unit.unshard()
    for parameter in chosen(run.module):
        assert not isinstance(parameter, DTensor)
    for unit in (run.module, run.module.blocks[0]):
        unit.reshard()
    for parameter in chosen(run.module):
        assert parameter.device_mesh is mesh and parameter.placements == (Replicate(),) * mesh.ndim
        assert parameter.to_local().shape == parameter.shape
    assert run.module.blocks[0].up.bias.placements[-1] == Shard(0)


@on_ranks(2, 4)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
def test_optimizers_and_accumulation(rank, world, optimizer, foreach):
    """Sharded and replicated parameters share an optimizer; unsynchronised backwards add up; norms are right."""

    def program(run: Run) -> None:
        run.optimizer = optimizer(run.module.parameters(), lr=0.05, foreach=foreach)
        for step in range(3):
            with fsdp2.no_sync(run.module):
                run.backward(step)
            run.backward(step + 1)
            norm = torch.nn.utils.clip_grad_norm_(run.module.parameters(), 0.1)
            run.seen[f"norm {step}"] = full(norm)
            run.update()

    assert_parity(replicating(), build=Scaled, program=program, against=("alone",), tolerance=1e-4)


@on_ranks(2, 4)
@pytest.mark.parametrize("offload", [False, True])
def test_mixed_precision(rank, world, offload):
    """They are computed with in the low dtype, reduced and updated in the high one."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    options = {"offload_policy": CPUOffloadPolicy()} if offload else {}

    def prepare(module, fsdp):
        fsdp.fully_shard(module, mesh=nodes_mesh(), mp_policy=policy, replicated_params=chosen(module), **options)

    run = assert_parity(prepare, build=Scaled, against=("alone",), tolerance=0.05)
    run.module.unshard()
    assert run.module.norm.weight.dtype == run.module.head.weight.dtype == torch.bfloat16
    run.module.reshard()
    assert run.module.norm.weight.dtype == torch.float32


@on_ranks(4)
def test_collectives(rank, world):
    """A group of their own: gathered by nobody, one all-reduce per unit that has some."""
    module = Net()
    some = {module.blocks[0].up.weight, module.norm.weight}
    fsdp2.fully_shard(module, policy={Block}, replicated_params=some, reshard_after_forward=True)
    with Collectives() as seen:
        module(torch.ones(2, 8)).sum().backward()
    assert (seen.gathers, seen.reductions) == (8, 4 + 2)


@on_ranks(2)
def test_state_dict_and_copies(rank, world):
    """Entries are replicated DTensors in the memory of the parameters; they load back and are copied."""
    module = play(fsdp2, replicating(), build=Scaled).module
    state = module.state_dict()
    assert state["norm.weight"].placements == (Replicate(),)
    assert state["norm.weight"].to_local().data_ptr() == module.norm.weight.to_local().data_ptr()
    before = {name: value.clone() for name, value in state.items()}
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    module.load_state_dict(before)
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter.to_local(), before[name].to_local())
        assert torch.equal(module.get_parameter(name).to_local(), before[name].to_local())
    x = torch.full((2, 8), rank + 1.0)
    for one in (module, twin):
        one.zero_grad()
        one(x).square().sum().backward()
    for mine, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())


def two_models(name: str, two: bool) -> tuple[nn.Module, nn.Module]:
    """Return a model with whole units, whole parameters and sharded ones, and the same on one process."""
    alone, module = Scaled(tied=True), Scaled(tied=True)
    module.load_state_dict(alone.state_dict())
    mesh = nodes_mesh() if two else mesh_1d()
    fsdp2.fully_shard(module.blocks[1], strategy=ShardingStrategy.NO_SHARD, mesh=mesh)
    own = {} if two and name == "FULL_SHARD" else {"strategy": ShardingStrategy[name]}
    fsdp2.fully_shard(module, policy={Block}, mesh=mesh, replicated_params=chosen(module), **own)
    return module, alone


def assert_shows(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Assert that the full parameters are these."""
    with fsdp2.summon_full_params(module, writeback=False):
        torch.testing.assert_close({name: value.detach() for name, value in module.named_parameters()}, expected)


def zero(module: nn.Module) -> None:
    """Forget the weights."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()


kinds = pytest.mark.parametrize(("name", "two"), [("NO_SHARD", False), ("FULL_SHARD", False), ("FULL_SHARD", True)])


@on_ranks(1, 2, 4)
@kinds
def test_whole_models_are_seen_saved_and_loaded(rank, world, name, two, tmp_path):
    """What gathers, exports, sends, saves and loads knows parameters without a shard axis, too."""
    module, alone = two_models(name, two)
    expected = whole(alone)
    assert_shows(module, expected)
    exported = {key: value.clone() for key, value in fsdp2.iter_full_params(module)}
    torch.testing.assert_close(exported, expected)
    with torch.no_grad(), fsdp2.summon_full_params(module, writeback=True):
        for parameter in module.parameters():
            parameter.mul_(2)
    twice = {key: value * 2 for key, value in expected.items()}
    assert_shows(module, twice)
    folder = pathlib.Path(tmp_path) / str(world)
    fsdp2.save_safetensors(module, folder)
    zero(module)
    fsdp2.load_safetensors(module, folder)
    assert_shows(module, twice)
    fsdp2.broadcast_from_rank0(module, alone.state_dict() if rank == 0 else None)
    assert_shows(module, expected)


@on_ranks(1, 2, 4)
@kinds
def test_clipping_local_steps_and_state_dicts(rank, world, name, two):
    """One norm, one step and state dicts of every type, of models and optimizers."""
    module, alone = two_models(name, two)
    x = torch.full((2, 8), 0.3)
    for one in (module, alone):
        one(x).square().sum().backward()
    norms = fsdp2.clip_grad_norm_(module.parameters(), 0.5), torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    torch.testing.assert_close(*norms)
    assert_gradients(module, alone)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (module, alone)]
    fsdp2.use_local_shards(optimizers[0])
    for optimizer in optimizers:
        optimizer.step()
    expected, moments = whole(alone), optimizers[1].state_dict()["state"]
    assert_shows(module, expected)
    for kind in StateDictType:
        with fsdp2.state_dict_type(module, kind):
            weights = copy.deepcopy(module.state_dict())
            state = fsdp2.optim_state_dict(module, optimizers[0])["state"]
            zero(module)
            module.load_state_dict(weights)
        assert_shows(module, expected)
        for index, key in enumerate(expected if kind is StateDictType.FULL_STATE_DICT else ()):
            torch.testing.assert_close(weights[key], expected[key])
            if rank == 0:
                torch.testing.assert_close(state[key]["exp_avg"], moments[index]["exp_avg"])


@on_ranks(4)
@pytest.mark.parametrize("dims", [{"shard": "s"}, {"shard": "s", "replicate": "r"}, {"shard": ("r", "s")}])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_on_named_dimensions(rank, world, dims, all_of_them):
    """With ``dp_mesh_dims`` they are replicated over all data-parallel dimensions, by NO_SHARD all parameters are."""
    mesh = mesh_of(2, 2, names=("r", "s"))
    named = fsdp2.DataParallelMeshDims(**dims)

    def prepare(module, fsdp):
        spread(module, mesh, named)
        if all_of_them:
            fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=named, strategy=ShardingStrategy.NO_SHARD)
        else:
            fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=named, replicated_params={module[1].weight})

    parts = (rank % 2, 2) if dims == {"shard": "s"} else (rank, 4)
    run = assert_parity(prepare, build=OnMesh, against=("alone",), part=parts)
    assert run.module[1].weight.placements == (Replicate(), Replicate())
    assert all_of_them == (run.module[0].weight.to_local().numel() == 64)


@on_ranks(2)
def test_what_is_refused(rank, world):
    """Parameters cannot be ignored and replicated, and must be parameters."""
    module = stack()
    with pytest.raises(ValueError, match="1 parameters are in ignored_params and in replicated_params"):
        fsdp2.fully_shard(module, replicated_params={module[0].weight}, ignored_modules=[module[0]])
    with pytest.raises(TypeError, match="replicated_params must be a set of nn.Parameter"):
        fsdp2.fully_shard(module, replicated_params={"0.weight"})
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())


@on_ranks(2, 4)
@pytest.mark.parametrize("two", [False, True])
def test_custom_collectives(rank, world, two):
    """They serve what is sharded. A unit with a scalar was refused, for reasons that were not its own."""
    gathers, scatters = [], []

    def prepare(module, fsdp):
        replicating(mesh=nodes_mesh() if two else mesh_1d())(module, fsdp)
        gathers.append(Gather())
        scatters.append(Scatter())
        module.set_custom_all_gather(gathers[-1])
        module.set_custom_reduce_scatter(scatters[-1])
        with pytest.raises(ValueError, match="set_all_reduce_hook is not supported .* or scalars"):
            module.set_all_reduce_hook(lambda reduced: None)

    assert_parity(prepare, build=Scaled, against=("alone",))
    assert gathers[0].calls == scatters[0].calls > 0
