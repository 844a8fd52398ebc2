"""Setters that say what communicates, in which memory, and when."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import api
from tests.support.counting import Collectives
from tests.support.inside import options_of
from tests.support.parity import (
    STEPS,
    Run,
    accumulate,
    assert_parity,
    mesh_1d,
    mesh_2d,
    on_one_axis,
    on_two_axes,
    play,
    setting,
    shard_each,
    sharded,
    stack,
)
from tests.support.pool import on_ranks

whens = pytest.mark.parametrize("when", ["before", "after"])
AllGather = api.theirs._fully_shard._fsdp_api.AllGather
ReduceScatter = api.theirs._fully_shard._fsdp_api.ReduceScatter


class Gather(AllGather):
    """An all-gather that counts its calls and where its memory came from."""

    def __init__(self) -> None:
        self.calls, self.allocated = 0, set()

    def allocate(self, size, *, dtype, device):
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.allocated.add(buffer.untyped_storage().data_ptr())
        return buffer

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        assert output_tensor.untyped_storage().data_ptr() in self.allocated
        assert output_tensor.numel() == input_tensor.numel() * group.size()
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(ReduceScatter):
    """A reduce-scatter that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


@on_ranks(2, 4)
@whens
@pytest.mark.parametrize("prepare", [on_one_axis, on_two_axes])
def test_custom_collectives(rank, world, prepare, when):
    """They are called, with memory they allocated, by the unit they were given to only; training is the same."""
    gathers, scatters = [], []

    def setter(module, fsdp):
        gathers.append(Gather())
        scatters.append(Scatter())
        module[1].set_custom_all_gather(gathers[-1])
        module[1].set_custom_reduce_scatter(scatters[-1])

    assert_parity(prepare, program=setting(setter, when))
    steps = STEPS if when == "before" else STEPS - 1
    alone = world == 2 and prepare is on_two_axes  # a shard axis of one rank
    expected = 0 if alone else steps
    assert gathers[0].calls == 2 * expected and scatters[0].calls == expected


class Kept:
    """Memory that is allocated once for each size and dtype, as registered or symmetric memory is."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, torch.Tensor] = {}

    def allocate(self, size, *, dtype, device):
        key = (tuple(size), dtype)
        if key not in self.kept:
            self.kept[key] = torch.empty(*size, dtype=dtype, device=device)
        return self.kept[key]


class GatherInKept(Kept, Gather):
    """The all-gather in such memory."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class ScatterInKept(Kept, Scatter):
    """The reduce-scatter in such memory."""


@api.fsdp2_only
@on_ranks(2, 4)
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("prepare", [on_one_axis, on_two_axes])
def test_custom_collectives_in_memory_that_stays(rank, world, prepare, chunks):
    """A unit's collectives may write the same memory every time, if its reductions go one after the other: gradients,
    and sums that wait for their all-reduce, are not in it.
    """

    def setter(module, fsdp):
        for unit in module:
            comms = GatherInKept(), ScatterInKept()
            unit.set_custom_all_gather(comms[0])
            unit.set_custom_reduce_scatter(comms[1])
        module.set_reduce_scatter_max_input_buffers(1)
        if chunks > 1:
            module.set_transfer_sizes(chunk_bytes=1)

    def program(run: Run) -> None:
        run.configure(setter)
        accumulate(run, 3, "set_requires_all_reduce")

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))

    assert_parity(prepare, build=build, program=program, against=("alone",))


@on_ranks(2)
def test_custom_collectives_exclude_allocators(rank, world):
    """What allocates for default collectives cannot allocate for custom ones."""
    module = sharded()
    module[0].set_custom_all_gather(Gather())
    module[1].set_custom_reduce_scatter(Scatter())
    for unit, kind in ((module[0], "all gather"), (module[1], "reduce scatter")):
        with pytest.raises(AssertionError, match=f"set_allocate_memory_from_process_group.*{kind} comm is custom"):
            unit.set_allocate_memory_from_process_group_for_comm(True)


@on_ranks(2)
@whens
def test_memory_from_the_process_group(rank, world, when):
    """Where the backend has no allocator of its own, ordinary memory serves; it can be turned off again."""

    def setter(module, fsdp):
        for unit in (*module, module):
            unit.set_allocate_memory_from_process_group_for_comm(True)

    run = assert_parity(on_one_axis, program=setting(setter, when))
    assert type(options_of(run.module[0]).all_gather).__name__ == "ProcessGroupAllocAllGather"
    run.module[0].set_allocate_memory_from_process_group_for_comm(False)
    assert options_of(run.module[0]).all_gather is None and options_of(run.module[0]).reduce_scatter is None
    with Collectives() as seen:
        run.module(torch.ones(1, 8)).sum().backward()
    assert seen.gathers == 5  # the unit that forward ends with stays for backward


@on_ranks(2)
def test_symmetric_memory_needs_nccl(rank, world):
    """Another backend is refused at the call, and training goes on without."""
    module = sharded()
    with pytest.raises(NotImplementedError, match="set_symm_mem_for_comm needs NCCL, got the backend 'gloo'"):
        module[0].set_symm_mem_for_comm("NCCL")
    module(torch.ones(1, 8)).sum().backward()
    assert module[0].weight.grad is not None


@on_ranks(2)
@whens
@pytest.mark.parametrize("recurse", [True, False])
def test_separate_reduce_scatter_group(rank, world, when, recurse):
    """Gradients get one communicator of the same ranks, for all units; turned off, they share the gathers' again."""

    def setter(module, fsdp):
        plain_layers = module if recurse else module[0]
        plain_layers.set_separate_reduce_scatter_group(recurse=recurse)

    run = assert_parity(on_one_axis, program=setting(setter, when), against=api.against("2.13"))
    for on in (True, False):
        if not on:
            run.module.set_separate_reduce_scatter_group(False)
        with Collectives() as seen:
            run.module(torch.ones(1, 8)).sum().backward()
        (shared,) = {group.group_name for group in seen.groups["gather"]}
        used = [group.group_name for group in reversed(seen.groups["reduction"])]  # by unit
        assert [name != shared for name in used] == ([on] * 3 if recurse else [on, False, False])
        assert len(set(used)) == (2 if on and not recurse else 1)
        assert {group.size() for group in seen.groups["reduction"]} == {world}


@on_ranks(2, 4)
@whens
def test_all_reduce_hook(rank, world, when):
    """The hook changes what was reduced, before it is added to the gradient; of this unit only."""

    def setter(module, fsdp):
        module[1].set_all_reduce_hook(lambda reduced: reduced.mul_(3))

    run = assert_parity(on_one_axis, program=setting(setter, when), against=("torch",))
    without = play(api.ours, on_one_axis)
    names = [name for name in run.seen if name.startswith("gradient of 1.")][: 2 if when == "before" else 0]
    for name in names:
        torch.testing.assert_close(run.seen[name], 3 * without.seen[name])
    assert not torch.allclose(run.seen["weight 1.weight"], without.seen["weight 1.weight"])


@on_ranks(2)
def test_all_reduce_hook_as_hybrid_sharding(rank, world):
    """With an all-reduce of its own the hook makes replicas of a mesh that is not told about them."""
    alone, pair = mesh_2d("other", "own"), mesh_1d()

    def prepare(module, fsdp):
        shard_each(module, fsdp, mesh=alone["own"])
        for unit in module:
            unit.set_all_reduce_hook(lambda reduced: dist.all_reduce(reduced, dist.ReduceOp.AVG, pair.get_group()))

    assert_parity(prepare, against=("alone",))


@on_ranks(2)
@pytest.mark.parametrize("kept", [False, True], ids=["trained", "a bias is frozen"])
def test_all_reduce_hook_is_called_once_per_unit(rank, world, kept):
    """With all gradients, however large they are. It was called for each chunk, and who counts calls was misled."""
    calls = {}
    for fsdp in (api.ours, api.theirs):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        module[1].bias.requires_grad_(not kept)
        fsdp.fully_shard(module, mesh=mesh_1d())
        if api.name == "fsdp2" and fsdp is api.ours:
            module.set_transfer_sizes(chunk_bytes=1)
        seen = calls.setdefault(fsdp, [])
        module.set_all_reduce_hook(lambda reduced, seen=seen: seen.append((reduced.numel(), reduced.sum().item())))
        for _ in range(2):
            module(torch.ones(1, 16)).sum().backward()
    assert [numel for numel, _ in calls[api.ours]] == [(4 * 16 * 17 - 16 * kept) // 2] * 2
    assert calls[api.ours] == calls[api.theirs]


@on_ranks(2)
def test_all_reduce_hook_and_streams(rank, world):
    """A stream of one's own is refused where the mesh has a replicate axis; None is always fine."""
    for fsdp in (api.ours, api.theirs):
        module = sharded(stack, fsdp, mesh=mesh_2d())
        with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
            module[0].set_all_reduce_hook(lambda reduced: None, stream=object())
    seen = []
    module[0].set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()), stream=None)
    module(torch.ones(1, 8)).sum().backward()
    module = sharded()
    module[0].set_all_reduce_hook(lambda reduced: seen.append(reduced.numel()), stream=None)
    module(torch.ones(1, 8)).sum().backward()
    assert seen == [72, 36]


@on_ranks(2)
def test_post_optim_event(rank, world):
    """The event is used by one forward."""

    def program(run):
        for step in range(3):
            run.configure(lambda module, fsdp: module.set_post_optim_event(torch.Event("cpu")))
            run.backward(step)
            run.update()

    run = assert_parity(on_one_axis, program=program, against=("alone",))

    class Event:
        def record(self) -> None:
            """An event has this method."""

    run.module.set_post_optim_event(event := Event())
    used = weakref.ref(event)
    del event
    assert used() is not None
    for _ in range(2):  # the second has none to wait for
        run.module(torch.ones(1, 8))
    assert used() is None


@on_ranks(2)
def test_share_comm_ctx(rank, world):
    """Two roots use the same lanes and one window of chunks in flight, and train as before."""

    def share(module, fsdp):
        fsdp.share_comm_ctx([module[0], module[2]])
        fsdp.share_comm_ctx([])

    prepare = lambda module, fsdp: [fsdp.fully_shard(unit, mesh=mesh_1d()) for unit in module]
    run = assert_parity(prepare, program=setting(share, "before"))
    with pytest.raises(ValueError, match="Expects FSDPModule"):
        api.ours.share_comm_ctx([run.module[0], torch.nn.Linear(2, 2)])


MOVES = {
    "set_custom_all_gather": lambda unit: unit.set_custom_all_gather(Gather()),
    "set_transfer_sizes": lambda unit: unit.set_transfer_sizes(direct_param_bytes=0, direct_group_bytes=0),
    "set_allocate_memory_from_process_group_for_comm": (
        lambda unit: unit.set_allocate_memory_from_process_group_for_comm(True)
    ),
    "set_compression": lambda unit: unit.set_compression(None),
}


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("setter", MOVES)
def test_a_setter_that_moves_shards_inside_a_pass(rank, world, setter):
    """It is refused, and the pass goes on. It freed what the unit computed with, so an operator or autograd raised."""
    model = sharded(lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 4)))
    refused = []

    def call(*_):
        with pytest.raises(RuntimeError, match=f"0: {setter} was called while its (forward|backward) runs") as error:
            MOVES[setter](model[0])
        refused.append("forward" if "its forward" in str(error.value) else "backward")
        model[0].set_transfer_sizes(chunk_bytes=1, exchange_bytes=1)  # these move nothing

    def inside(module, args, output):
        call()
        output.register_hook(call)

    hook = model[0][1].register_forward_hook(inside)
    before = model(torch.ones(2, 8)).sum()
    before.backward()
    assert refused == ["forward", "backward"]
    gradient = model[0][0].weight.grad.full_tensor()
    hook.remove()
    model.zero_grad()
    MOVES[setter](model[0])
    after = model(torch.ones(2, 8)).sum()
    after.backward()
    torch.testing.assert_close(after, before)
    torch.testing.assert_close(model[0][0].weight.grad.full_tensor(), gradient)
