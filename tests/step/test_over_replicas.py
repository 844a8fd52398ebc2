"""``shard_over_replicas``: parameters, gradients and optimizer state are sharded over replicas too. Passes see shards
over the shard axis alone, made of portions that are gathered over the replicate axis when shards have changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

import fsdp2
from fsdp2 import _trace
from tests.ranks.apart import run_apart
from tests.step.test_experts import Mixture, on_their_own
from tests.step.test_extensions import Halves, of_halves
from tests.support import api
from tests.support.composition import composes, refuses
from tests.support.models import Layers, Three
from tests.support.parity import (
    Run,
    accumulate,
    assert_gradients,
    assert_parity,
    assert_same,
    batch,
    beside_one_process,
    mesh_1d,
    mesh_2d,
    mesh_of,
    play,
    shard_each,
    sharded,
    stack,
    train,
)
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def uneven() -> nn.Module:
    """Return layers whose sizes leave some ranks short and others with nothing, over either axis."""
    # The norm has more than one feature: of one it is constant, and gradients behind it are rounding errors.
    return nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1), nn.Linear(1, 3))


def prepare(module: Any, fsdp: Any, **options: Any) -> None:
    """Shard every layer and the rest over replicas too, unless ``options`` say otherwise."""
    shard_each(module, fsdp, **{"mesh": mesh_2d(), "shard_over_replicas": True, **options})


def over_replicas(build: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    """Return such a model, and the same in one process."""
    return beside_one_process(build, mesh=mesh_2d(), shard_over_replicas=True, **options)


def sum_at_last(run: Run) -> None:
    """Steps of two micro-batches, of which the last one sums over replicas."""
    accumulate(run, setter="set_requires_all_reduce")


def leave_open(setter: str, divisor: float, module: Any, fsdp: Any) -> None:
    """Let the next backward leave its gradients to a synchronization, and change what sums are divided by."""
    module.set_requires_gradient_sync(True)
    getattr(module, setter)(False)
    module.set_gradient_divide_factor(divisor, recurse=True)


def synchronize(run: Run) -> None:
    """Three steps of two micro-batches, which leave full gradients, sums over the shard axis, or one and the other."""
    full, sums = "set_requires_gradient_sync", "set_requires_all_reduce"
    for step, setters in enumerate([(full, full), (sums, sums), (full, sums)]):
        for number, setter in enumerate(setters):
            run.configure(partial(leave_open, setter, 8.0 - 4.0 * number))
            run.backward(2 * step + number)
        run.configure(lambda module, fsdp: module.synchronize_gradients())
        run.update()


def assert_same_bits(one: Run, other: Run) -> None:
    """Assert that two runs have seen the same numbers, to the bit."""
    assert list(one.seen) == list(other.seen)
    for name, value in one.seen.items():
        expected = other.seen[name]
        assert value is expected is None or torch.equal(value, expected), name


# ---- it trains ----


@composes("over replicas", "hybrid sharding", "uneven", "SGD")
@composes("over replicas", "accumulation")
@on_ranks(4)
@pytest.mark.parametrize("program", [train, sum_at_last, synchronize])
@pytest.mark.parametrize("build", [stack, uneven])
@pytest.mark.parametrize("reshard", [None, False, pytest.param(True, marks=pytest.mark.slow)])
def test_trains_as_hybrid_sharding_does(rank, world, program, build, reshard):
    """On two replicas each sum has the same two terms, so losses, gradients and weights have the same bits as with
    hybrid sharding. They are those of a single process."""
    ours = assert_parity(
        partial(prepare, reshard_after_forward=reshard), build=build, program=program, against=("alone",)
    )
    hybrid = partial(prepare, reshard_after_forward=reshard, shard_over_replicas=False)
    assert_same_bits(ours, play(api.ours, hybrid, build, program))


@on_ranks(4)
def test_gradients_come_in_one_order(rank, world):
    """Where a column of the mesh has no elements of a unit, nothing was sent over replicas, and the gradient came
    before that of the unit above. A hook that communicates then met another parameter's on the other ranks."""
    module, alone = over_replicas(uneven)
    names: list[str] = []
    whole: dict[str, torch.Tensor] = {}

    def hook(name: str, parameter: Any) -> None:
        names.append(name)
        whole[name] = parameter.grad.full_tensor()

    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(hook, name))
    (rows,) = batch(0)
    alone(rows).square().mean().backward()
    module(rows.chunk(world)[rank]).square().mean().backward()
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, names)
    assert len(names) == len(whole) and all(order == names for order in everywhere)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad)


OPTIONS: dict[str, dict[str, Any]] = {
    "mixed precision": {"mp_policy": BF16},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "biases offloaded": {"offload_policy": {"*bias": CPUOffloadPolicy(pin_memory=False), "": OffloadPolicy()}},
    "offloaded, mixed precision": {"offload_policy": CPUOffloadPolicy(pin_memory=False), "mp_policy": BF16},
    "last dimension": {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
    "least padding": {"shard_placement_fn": "auto"},
}


@composes("over replicas", "mixed precision", "CPU offload", "accumulation")
@composes("over replicas", "shard dim", "uneven")
@on_ranks(4)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("transfer", ["packed", "direct"])
def test_options(rank, world, options, transfer):
    """Dtypes, shards on the host and other dimensions give the bits of hybrid sharding too."""

    def shard(module: Any, fsdp: Any, **more: Any) -> None:
        prepare(module, fsdp, **OPTIONS[options], **more)
        if transfer == "direct":
            module.set_transfer_sizes(direct_param_bytes=0, direct_group_bytes=0, exchange_bytes=0)

    runs = [play(api.ours, partial(shard, shard_over_replicas=over), uneven, sum_at_last) for over in (True, False)]
    assert_same_bits(*runs)


@on_ranks(4)
@pytest.mark.parametrize("replicate", [None, torch.int8])
def test_compressed(rank, world, replicate):
    """What travels over the shard axis is encoded as with hybrid sharding, so it gives the same bits. Sums over the
    replicate axis are not encoded a second time, since nobody else needs them."""
    policy = fsdp2.CompressionPolicy(torch.int8, torch.int8, replicate, block=16, min_numel=16, stochastic=False)
    shard = partial(prepare, compression=policy)
    over, hybrid = (play(api.ours, partial(shard, shard_over_replicas=o), stack, sum_at_last) for o in (True, False))
    if replicate is None:
        assert_same_bits(over, hybrid)
    assert_same(over.seen, hybrid.seen, "hybrid sharding", 0.05)


@composes("over replicas", "tensor parallel")
@on_ranks(4, pytest.param(8, marks=pytest.mark.slow))
def test_beside_tensor_parallelism(rank, world):
    """Tensor parallelism cuts first, then the shard axis, then the replicate axis; on eight ranks each of them does."""
    shards = world // 4
    mesh = mesh_of(2, shards, 2, names=("replicate", "shard", "tp"))
    data = mesh["replicate", "shard"]

    def shard(module: Any, fsdp: Any) -> None:
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard_each(module, fsdp, mesh=data, shard_over_replicas=True)

    part = (rank // 2, 2 * shards)
    module = assert_parity(shard, part=part, against=("alone",)).module
    assert module[0].weight.device_mesh.mesh_dim_names == ("shard", "replicate", "tp")
    assert module[0].weight.to_local().shape == (8 // (4 * shards), 8)


@composes("over replicas", "several meshes", "shard dim")
@on_ranks(4)
def test_beside_parameters_on_another_mesh(rank, world):
    """Parameters of one unit on two meshes: some are sharded over replicas too, the others over a line of all ranks."""

    def shard(module: Any, fsdp: Any) -> None:
        there = fsdp2.ShardPlacementResult(Shard(1), mesh_1d())
        place = lambda parameter: there if parameter is module.middle.weight else None
        fsdp.fully_shard(module, mesh=mesh_2d(), shard_over_replicas=True, shard_placement_fn=place)

    module = assert_parity(shard, build=Three, against=("alone",)).module
    assert module.middle.weight.placements == (Shard(1),)
    assert module.middle.bias.placements == (Shard(0), Shard(0))


@composes("over replicas", "experts", "divide factor")
@on_ranks(4)
def test_beside_experts(rank, world):
    """Experts on a mesh of their own, and dense parameters over replicas."""
    shard = on_their_own(mesh_of(2, 2, names=("edp", "ep")), mesh_2d(), shard_over_replicas=True)
    module = assert_parity(shard, build=lambda: Mixture(4), against=("alone",)).module
    assert module.experts.up.device_mesh.mesh_dim_names == ("edp", "ep")


# ---- what each rank keeps ----


@composes("over replicas", "Adam", "clipping")
@on_ranks(4)
def test_no_two_ranks_keep_the_same(rank, world):
    """Parameters, gradients and optimizer state take exactly 1 / (replicas x shards) on every rank, and DTensor knows
    which part is where."""
    module, whole = over_replicas(stack)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    fsdp2.use_local_shards(optimizer)
    module(torch.ones(2, 8)).sum().backward()
    for name, parameter in module.named_parameters():
        full = whole.get_parameter(name).detach()
        assert parameter.placements == (Shard(0), Shard(0))
        assert parameter.device_mesh.mesh_dim_names == ("shard", "replicate")
        replica, shard = divmod(rank, 2)
        assert torch.equal(parameter.to_local(), full.chunk(2)[shard].chunk(2)[replica])
        assert torch.equal(parameter.full_tensor(), full)
    norm = fsdp2.clip_grad_norm_(module.parameters(), 0.1)
    whole(torch.ones(2, 8)).sum().backward()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
    optimizer.step()
    size = sum(parameter.numel() * 4 for parameter in whole.parameters()) // world
    kept = {"parameters": [], "gradients": [], "exp_avg": [], "exp_avg_sq": []}  # type: dict[str, list[Any]]
    for parameter in module.parameters():
        kept["parameters"].append(parameter)
        kept["gradients"].append(parameter.grad)
        for key in ("exp_avg", "exp_avg_sq"):
            kept[key].append(optimizer.state[parameter][key])
    for what, tensors in kept.items():
        storages = [tensor.to_local().untyped_storage() for tensor in tensors]
        assert sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) == size, what


def _chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return two chunks; the second may be empty."""
    first, *rest = tensor.chunk(2) if len(tensor) else (tensor,)
    return [first, rest[0] if rest else tensor[len(tensor) :]]


@on_ranks(4)
def test_uneven_parts_are_where_dtensor_says(rank, world):
    """The last parts are shorter or empty; the whole is the same."""
    module, whole = over_replicas(uneven)
    for name, parameter in module.named_parameters():
        full = whole.get_parameter(name).detach()
        assert torch.equal(parameter.full_tensor(), full)
        replica, shard = divmod(rank, 2)
        held = [part for row in _chunks(full) for part in _chunks(row)][2 * shard + replica]
        assert torch.equal(parameter.to_local(), held)


# ---- what is sent ----


class Sent:
    """Counts collectives and their bytes by kind and axis."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()

    def heard(self, event: str, source: _trace.Source) -> None:
        """Ignore events."""

    def enter(self, source: _trace.Source) -> None:
        """Ignore the unit."""

    def moment(self) -> None:
        """Ignore the time."""

    def launched(self, what: tuple[str, str], axis: Any, nbytes: int, began: Any, work: Any) -> None:
        """Note a collective: the gathered, or what goes into a reduction."""
        key = what[1], "replicate" if axis.group is mesh_2d().get_group("replicate") else "shard"
        self.calls[key] += 1
        self.bytes[key] += nbytes

    def waited(self, began: Any, work: Any = None) -> None:
        """Ignore waits."""


@on_ranks(4)
@pytest.mark.parametrize("batches", [1, 3])
def test_the_replicate_axis_is_used_once_a_step(rank, world, batches):
    """However many micro-batches a step has, each unit is gathered over the replicate axis once and its gradients are
    reduced over it once. On the shard axis as much is sent as with hybrid sharding."""
    counted = []
    for over in (True, False):
        build = partial(stack, 16)
        module = sharded(build, mesh=mesh_2d(), reshard_after_forward=True, shard_over_replicas=over)
        run = Run(module, api.ours, (rank, world))
        for _ in range(2):  # in the second iteration the last unit stays
            sent = Sent()
            with _trace.recording_with(sent):
                for number in range(batches):
                    module.set_requires_all_reduce(number == batches - 1)
                    module(torch.ones(2, 16)).sum().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        counted.append(sent)
    over, hybrid = counted
    unit = 4 * (256 + 16)  # bytes of a layer
    assert over.calls["all_gather", "replicate"] == 3 and over.bytes["all_gather", "replicate"] == 3 * unit // 2
    assert over.calls["reduce_scatter", "replicate"] == 3 and over.bytes["reduce_scatter", "replicate"] == 3 * unit // 2
    assert hybrid.calls["all_reduce", "replicate"] == 3
    for kind in ("all_gather", "reduce_scatter"):
        assert over.calls[kind, "shard"] == hybrid.calls[kind, "shard"] > 0
        assert over.bytes[kind, "shard"] == hybrid.bytes[kind, "shard"]
    assert over.calls["all_gather", "shard"] == 5 * batches


# ---- when portions are gathered anew ----


def stepped(module: Any) -> None:
    """An optimizer changes the shards."""
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(module.parameters(), lr=0.5, foreach=True).step()
    module.zero_grad()


def written(module: Any) -> None:
    """The caller changes them in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)


def written_locally(module: Any) -> None:
    """The caller changes what of them is on this rank."""
    for parameter in module.parameters():
        if parameter.to_local().numel():
            parameter.to_local().detach().mul_(0.5)


def loaded(module: Any) -> None:
    """Others are loaded."""
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


def summoned(module: Any) -> None:
    """Whole parameters are written."""
    with fsdp2.summon_full_params(module, writeback=True):
        written(module)


def moved(module: Any) -> None:
    """They get another dtype and back."""
    module.double()
    module.float()
    written(module)


@on_ranks(4)
@pytest.mark.parametrize("change", [stepped, written, written_locally, loaded, summoned, moved])
@pytest.mark.parametrize("reshard", [None, False])
def test_the_next_forward_sees_new_shards(rank, world, change: Callable[[Any], None], reshard):
    """Whoever changes shards, the next forward, evaluation or ``unshard()`` computes with the new values."""
    module, alone = over_replicas(uneven, reshard_after_forward=reshard)
    (rows,) = batch(0)
    for by_hand in (False, True):
        with torch.no_grad():
            torch.testing.assert_close(module(rows), alone(rows))
        change(module)
        for name, value in fsdp2.iter_full_params(module):
            alone.get_parameter(name).data.copy_(value)
        if by_hand:
            module.unshard(recurse=True)
        torch.testing.assert_close(module(rows), alone(rows))
        module(rows).sum().backward()
        module.zero_grad()


@on_ranks(4)
@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_a_synchronization_ends_the_iteration(rank, world, setter):
    """``synchronize_gradients`` reduces over the replicate axis, so shards change next. A rank without elements of a
    parameter does not see that another rank has written its shard, but must gather portions anew with it.
    """
    module, alone = over_replicas(uneven)
    getattr(module, setter)(False)
    (rows,) = batch(0)
    for _ in range(3):
        module(rows).sum().backward()
        module.synchronize_gradients()
        written_locally(module)
        for name, value in fsdp2.iter_full_params(module):
            alone.get_parameter(name).data.copy_(value)
        torch.testing.assert_close(module(rows), alone(rows))


@on_ranks(4)
def test_zeroing_goes_on_in_the_iteration(rank, world):
    """``zero_grad`` drops sums over the shard axis that wait for the replicate axis. The shards have not changed, so
    no portion is gathered again, and the gradients of the next micro-batch are right.
    """
    module, alone = over_replicas(stack)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.set_requires_all_reduce(False)
    module(batch(0)[0]).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer.step: got 6 parameters whose gradients are not reduced"):
        optimizer.step()
    optimizer.zero_grad()
    sent = Sent()
    with _trace.recording_with(sent):
        module(batch(1)[0]).sum().backward()
    assert not any(axis == "replicate" for _, axis in sent.calls)
    module.synchronize_gradients()
    alone(batch(1)[0]).sum().backward()
    assert_gradients(module, alone)


@on_ranks(4)
def test_other_values_for_one_forward(rank, world):
    """``functional_call`` with other shards computes with these, and the next forward with the old ones again."""
    module, alone = over_replicas(stack)
    (rows,) = batch(0)
    with torch.no_grad():
        before = module(rows)
        doubled = [{n: nn.Parameter(p.detach() * 2) for n, p in one.named_parameters()} for one in (module, alone)]
        others = [functional_call(one, values, (rows,)) for one, values in zip((module, alone), doubled)]
        torch.testing.assert_close(*others)
        assert torch.equal(module(rows), before)


# ---- ranks that differ ----


def written_between(build: Callable[[], Any], rank: int, world: int) -> None:
    """Write to shards between two micro-batches: rank 0 to those of ``stack``, all to those of ``uneven``, of which
    some ranks have nothing."""
    module, _ = over_replicas(build)
    module.set_requires_all_reduce(False)
    (rows,) = batch(0)
    module(rows).sum().backward()
    if rank == 0 or build is uneven:
        written_locally(module)
    module(rows)
    raise AssertionError("the forward has computed with old values")


@pytest.mark.parametrize("build", [stack, uneven])
def test_ranks_that_do_not_see_the_same_writes(build):
    """They want to gather different units over the replicate axis, and all raise: what one rank writes no other can
    know. The ranks' meeting did not compare these units, so some ranks computed with old values before they noticed.
    """
    for ended in run_apart(partial(written_between, build), 4):
        assert "gather over replicas" in ended.error and "ranks do not do the same" in ended.error, ended


def one_without(rank: int, world: int) -> None:
    """Rank 0 alone keeps copies."""
    sharded(mesh=mesh_2d(), shard_over_replicas=rank > 0)(batch(0)[0])


def test_one_rank_without_the_option():
    """The first forward names the unit and the difference."""
    for ended in run_apart(one_without, 4):
        assert "2 x 2 ranks, sharded over both axes" in ended.error, ended


@on_ranks(4)
def test_units_that_some_ranks_skip(rank, world):
    """A rank that skips a unit gathers its portions with the others, and sends zeros."""
    losses = []
    for over in (True, False):
        module = sharded(Layers, mesh=mesh_2d(), shard_over_replicas=over)
        module.set_reduce_scatter_unused_params(True)
        run = Run(module, api.ours, (rank, world))
        for step in range(3):
            loss = module(run.inputs(step), (0, 1, 2) if (rank + step) % 3 else (0, 2)).square().mean()
            losses.append(run.note_loss(loss).item())
            loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert losses[:3] == losses[3:]


# ---- what is refused ----


@on_ranks(4)
def test_tensors_that_gather_themselves(rank, world):
    """An all-gather extension sees one mesh of one dimension. The error names the parameter before anything changes."""
    layers = of_halves(8, 8)
    match = r"0\.weight: got a Halves with an all-gather extension.*Pass shard_over_replicas=False"
    with pytest.raises(NotImplementedError, match=match):
        fsdp2.fully_shard(layers, mesh=mesh_2d(), shard_over_replicas=True)
    assert type(layers[0].weight.data) is Halves
    fsdp2.fully_shard(layers, mesh=mesh_2d())


@on_ranks(4)
def test_meshes_without_both_axes(rank, world):
    """One dimension has no replicas; what to do is said."""
    with pytest.raises(ValueError, match="needs a mesh with a replicate and a shard dimension"):
        fsdp2.fully_shard(nn.Linear(8, 8), mesh=mesh_1d(), shard_over_replicas=True)
    with pytest.raises(TypeError, match="shard_over_replicas must be a bool"):
        fsdp2.fully_shard(nn.Linear(8, 8), mesh=mesh_2d(), shard_over_replicas=1)


@refuses("over replicas", "named dimensions", by="fsdp2", reason="a mesh of their own says how parameters are sharded")
@on_ranks(4)
def test_named_dimensions_are_refused(rank, world):
    """It is said by name, and nothing has changed."""
    layer, dims = nn.Linear(8, 8), fsdp2.DataParallelMeshDims(shard="shard", replicate="replicate")
    with pytest.raises(NotImplementedError, match="shard_over_replicas is not supported with dp_mesh_dims"):
        fsdp2.fully_shard(layer, mesh=mesh_2d(), dp_mesh_dims=dims, shard_over_replicas=True)
    assert type(layer.weight) is nn.Parameter


@pytest.mark.slow
@refuses("over replicas", "reshard to int", by="fsdp2", reason="portions stay in memory instead of pieces")
@on_ranks(8)
def test_pieces_of_a_subgroup_are_refused(rank, world):
    """It is said by name, and nothing has changed."""
    layer = nn.Linear(8, 8)
    with pytest.raises(NotImplementedError, match="reshard_after_forward=2 is not supported with shard_over_replicas"):
        fsdp2.fully_shard(layer, mesh=mesh_2d(), shard_over_replicas=True, reshard_after_forward=2)
    assert type(layer.weight) is nn.Parameter
