"""Gradients that backwards left unreduced, and what finishes, drops or refuses them."""

from __future__ import annotations

from functools import partial, partialmethod
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp2
from fsdp2.comm import host_work
from tests.step.test_communication import Scatter, ScatterInKept
from tests.support import api
from tests.support.counting import Collectives
from tests.support.models import Layers
from tests.support.parity import (
    Run,
    assert_gradients,
    assert_parity,
    beside_one_process,
    full,
    mesh_1d,
    mesh_2d,
    on_one_axis,
    on_two_axes,
    sharded,
    stack,
)
from tests.support.pool import on_ranks

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WITH_TORCH = ("torch", "alone") if hasattr(api.theirs.FSDPModule, "synchronize_gradients") else ("alone",)


def accumulate(run: Run, setter: str, batches: int = 2) -> None:
    """Train on micro-batches that are all alike: none of them reduces, or all-reduces."""
    for step in range(3):
        run.configure(lambda module, fsdp: getattr(module, setter)(False))
        for part in range(batches):
            run.backward(step * batches + part)
        run.configure(lambda module, fsdp: module.synchronize_gradients())
        run.configure(lambda module, fsdp: module.synchronize_gradients())  # nothing is left
        run.update()


SETTERS = ("set_requires_gradient_sync", "set_requires_all_reduce")


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("prepare", [on_one_axis, on_two_axes])
def test_synchronize_gradients(rank, world, prepare, setter):
    """A loop that reduces after its micro-batches, and not in the last of them, trains like one process."""
    prepare = on_one_axis if world == 1 else prepare
    assert_parity(prepare, program=partial(accumulate, setter=setter), against=WITH_TORCH)


@on_ranks(2)
@pytest.mark.parametrize("options", [{"offload_policy": CPUOffloadPolicy()}, {"reshard_after_forward": False}])
def test_where_parameters_are(rank, world, options):
    """Shards on the CPU, and full parameters that stay after forward, get the same gradients."""
    assert_parity(partial(on_one_axis, **options), program=partial(accumulate, setter=SETTERS[0]), against=WITH_TORCH)


@on_ranks(2, 4)
@pytest.mark.parametrize("setter", SETTERS)
def test_mixed_precision(rank, world, setter):
    """Micro-batches accumulate in the reduce dtype until they are reduced."""
    prepare = partial(on_two_axes, mp_policy=LOW)
    program = partial(accumulate, setter=setter)
    assert_parity(prepare, program=program, policy=LOW, against=WITH_TORCH, tolerance=2e-2)


@on_ranks(2, 4)
@pytest.mark.parametrize("setter", SETTERS)
def test_units_that_some_ranks_skip(rank, world, setter):
    """A rank that used other units than the others sends zeros for those, and gets their gradients."""
    module, alone = beside_one_process(lambda: Layers(2), mesh=mesh_2d() if world == 4 else mesh_1d())
    module.set_reduce_scatter_unused_params(True)
    uses = [[(0, 1), (1,), (0,)] if r % 2 else [(0,), (0,), (1,)] for r in range(world)]
    for used in (used for batches in uses for used in batches):
        (alone(torch.ones(2, 8), used).square().sum() / world).backward()
    getattr(module, setter)(False)
    for _ in range(3):
        for used in uses[rank]:
            module(torch.ones(2, 8), used).square().sum().backward()
        module.synchronize_gradients()
        assert_gradients(module, alone)
        module.synchronize_gradients()  # adds nothing, and keeps no rank waiting
        assert_gradients(module, alone)
        module.zero_grad()


@on_ranks(2)
def test_the_last_micro_batch_is_empty_everywhere(rank, world):
    """Micro-batches whose number is known only afterwards: the backward that should have reduced them does not come."""
    module, alone = beside_one_process(stack)
    for step in range(2):
        module.set_requires_gradient_sync(False)
        for one in (module, alone):
            backward(one, rank, world, step)
        module.set_requires_gradient_sync(True)  # for the micro-batch that has no rows
        with Collectives() as seen:
            module.synchronize_gradients()
        assert seen.reductions == 3
        assert_gradients(module, alone)


@on_ranks(2)
def test_some_units_alone(rank, world):
    """With ``recurse=False`` only the module's own parameters, which is nothing where units below have them all."""
    module = sharded()
    module.set_requires_gradient_sync(False)
    module(torch.ones(2, 8)).square().sum().backward()
    module.synchronize_gradients(recurse=False)
    assert all(p.grad is None for p in module.parameters())
    module[1].synchronize_gradients()
    assert [p.grad is not None for p in module.parameters()] == [False, False, True, True, False, False]
    module.synchronize_gradients()
    assert all(p.grad is not None for p in module.parameters())


@on_ranks(2)
def test_between_a_forward_and_its_backward(rank, world):
    """A synchronization of earlier micro-batches neither frees nor disturbs what the next backward needs."""

    def program(run: Run) -> None:
        for step in range(2):
            run.configure(lambda module, fsdp: module.set_requires_gradient_sync(False))
            run.backward(2 * step)
            loss = run.loss(2 * step + 1)
            run.configure(lambda module, fsdp: module.synchronize_gradients())
            run.configure(lambda module, fsdp: module.set_requires_gradient_sync(True))
            loss.backward()
            run.update()

    assert_parity(on_one_axis, program=program, against=("alone",))


@on_ranks(2)
def test_an_interrupt_of_the_wait(rank, world):
    """Gradients of some units were missing, and nothing told: the next step and iteration went on."""
    module, alone = beside_one_process(stack, lambda module: [*module])
    inputs, waits = torch.ones(2, 8), 0

    def interrupt(work: host_work.HostWork) -> None:
        nonlocal waits
        waits += 1
        wait(work)
        if waits == 2:
            raise KeyboardInterrupt

    module.set_requires_gradient_sync(False)
    module(inputs).square().mean().backward()
    wait = host_work.HostWork.wait
    with mock.patch.object(host_work.HostWork, "wait", interrupt), pytest.raises(KeyboardInterrupt):
        module.synchronize_gradients()
    assert not all(parameter.grad is not None for parameter in module.parameters())
    for call in (module.synchronize_gradients, lambda: module(inputs)):
        with pytest.raises(RuntimeError, match=r"[Cc]all it after|call reset_iter_state\(\)"):
            call()
    module.reset_iter_state()
    module.zero_grad()
    module.set_requires_gradient_sync(True)
    for model in (module, alone):
        model(inputs).square().mean().backward()
    assert_gradients(module, alone)


@on_ranks(2)
def test_calls_that_make_no_sense(rank, world):
    """Inside a backward and inside ``summon_full_params`` it is refused, and before the first forward nothing is left.

    Inside a forward, and before ``finalize_backward``, it is refused in ``tests/docs/remedies.py``.
    """
    module = sharded()
    module.synchronize_gradients()
    refused = []

    def call(*unused: object) -> None:
        with pytest.raises(RuntimeError, match="while a forward or backward runs"):
            module.synchronize_gradients()
        refused.append(unused)

    module.set_requires_gradient_sync(False)
    loss = module(torch.ones(2, 8)).square().sum()
    loss.register_hook(call)
    loss.backward()
    assert len(refused) == 1
    with fsdp2.summon_full_params(module), pytest.raises(RuntimeError, match="summon_full_params"):
        module.synchronize_gradients()
    module.synchronize_gradients()


def backward(module: nn.Module, rank: int, world: int, step: int) -> None:
    """Run forward and backward on this rank's rows, or the mean over those of all ranks where nothing is sharded."""
    rows = [torch.full((2, 8), 1.0 + row + step, dtype=module[2].weight.dtype) for row in range(world)]
    if hasattr(module, "unshard"):
        module(rows[rank]).square().mean().backward()
    else:
        (sum(module(row).square().mean() for row in rows) / world).backward()


class ZeroesAPart(nn.Sequential):
    """Zeroes its last layer alone if asked, and answers."""

    def zero_grad(self, *, last: bool = False) -> str:
        """Take other arguments than ``nn.Module``."""
        if last:
            self[-1].zero_grad()
        else:
            super().zero_grad()
        return "zeroed"


class ZeroesByDefault(ZeroesAPart):
    """Zeroes its last layer alone, by what is no function of Python's."""

    zero_grad = partialmethod(ZeroesAPart.zero_grad, last=True)


@on_ranks(1)
def test_a_class_whose_way_to_zero_is_no_function(rank, world):
    """What it calls zeroes a part."""
    module = sharded(lambda: ZeroesByDefault(nn.Linear(4, 4), nn.Linear(4, 4)))
    module(torch.ones(2, 4)).sum().backward()
    module.zero_grad()
    assert [param.grad is None for param in module.parameters()] == [False, False, True, True]


@on_ranks(2)
@pytest.mark.parametrize("layers", [True, False])
def test_a_class_with_another_way_to_zero(rank, world, layers):
    """It raised a TypeError about an argument that nobody had passed, and gradients that the class keeps were dropped.
    Where it calls that of ``nn.Module``, unreduced gradients are dropped too."""
    units = nn.Module.children if layers else lambda module: []
    module, alone = beside_one_process(lambda: ZeroesAPart(nn.Linear(4, 4), nn.Linear(4, 4)), units)
    for last in (True, False):
        module.set_requires_gradient_sync(last)
        for one in (module, alone):
            one(torch.ones(2, 4)).sum().backward()
            assert one.zero_grad(last=last) == "zeroed"
        assert_gradients(module, alone)
        assert not module.get_pending_gradients()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("way", ["optimizer", "to zeros", "module"])
def test_zeroing_drops_unreduced_gradients(rank, world, way, reshard, setter):
    """``optimizer.zero_grad()`` after a micro-batch that is to be thrown away (a loss of NaN) left its gradients on the
    full parameters, and the next backward added them, with torch's fully_shard too.
    """
    mesh = mesh_2d() if world > 1 else mesh_1d()
    module, alone = beside_one_process(stack, mesh=mesh, reshard_after_forward=reshard)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, alone)]

    def zero() -> None:
        for one, optimizer in zip((module, alone), optimizers):
            if way == "module":
                one.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=way == "optimizer")

    for one in (module, alone):  # a reduced gradient beside the unreduced one
        backward(one, rank, world, 0)
    getattr(module, setter)(False)
    for one in (module, alone):
        backward(one, rank, world, 1)
    zero()
    module.reshard(recurse=True)
    assert_gradients(module, alone)
    for one in (module, alone):
        backward(one, rank, world, 2)
    getattr(module, setter)(True)
    for one in (module, alone):
        backward(one, rank, world, 3)
    assert_gradients(module, alone)
    getattr(module, setter)(False)
    backward(module, rank, world, 4)
    zero()
    with Collectives() as seen:
        module.synchronize_gradients()  # nothing is left
    assert not seen.reductions
    assert_gradients(module, alone)


@on_ranks(2)
def test_zeroing_some_parameters(rank, world):
    """Two optimizers have a half of each unit: what one of them zeroes is gone, and the rest is reduced."""
    module, alone = beside_one_process(stack)
    halves = [torch.optim.SGD([p for p in one.parameters() if p.ndim == 1], lr=0.1) for one in (module, alone)]
    module.set_requires_gradient_sync(False)
    for one in (module, alone):
        backward(one, rank, world, 0)
    for half in halves:
        half.zero_grad()
    module.synchronize_gradients()
    assert_gradients(module, alone)


@on_ranks(2, 4)
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("mark", [False, True])
def test_what_reads_gradients_is_refused(rank, world, mark, setter):
    """A step or clipping before the reduction went on without the gradients. It is refused on every rank, also on one
    that skipped the units, and the remedy of the error helps.
    """
    module, alone = beside_one_process(stack, mesh=mesh_2d() if world == 4 or setter == SETTERS[1] else mesh_1d())
    module.set_reduce_scatter_unused_params(mark)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, alone))
    scaler = fsdp2.ShardedGradScaler("cpu")
    getattr(module, setter)(False)
    for one in (module, alone):
        backward(one, rank, world, 0)
    for call, name in (
        (optimizer.step, "optimizer.step"),
        (lambda: fsdp2.clip_grad_norm_(module.parameters(), 1.0), "clip_grad_norm_"),
        (lambda: scaler.unscale_(optimizer), "unscale_"),
    ):
        scaler.scale(torch.ones(()))
        for unit in module.modules():
            unit.reshard()
        with pytest.raises(RuntimeError, match=rf"{name}: got 6 .*0\.weight.*synchronize_gradients\(\)"):
            call()
    module.synchronize_gradients()
    norms = [fsdp2.clip_grad_norm_(module.parameters(), 1e9)]
    norms += [torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)]
    torch.testing.assert_close(*norms)
    for one in (optimizer, other):
        one.step()
        one.zero_grad()
    for mine, its in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full(mine), its)


@on_ranks(2)
def test_other_optimizers_step(rank, world):
    """An optimizer of parameters whose gradients are reduced steps while others accumulate, as with two optimizers on
    parts of one model, of which one steps less often."""
    module = sharded()
    first, last = (torch.optim.SGD(module[i].parameters(), lr=0.1) for i in (0, 2))
    module[2].set_requires_gradient_sync(False)
    for step in range(2):
        backward(module, rank, world, step)
        before = full(module[0].weight)
        first.step()
        first.zero_grad()
        assert not torch.equal(before, full(module[0].weight))
    with pytest.raises(RuntimeError, match="got 2 parameters"):
        last.step()
    module[2].synchronize_gradients()
    last.step()


def persistent(module) -> None:
    """Give every unit memory of its own, for one reduction at a time."""
    module.set_reduce_scatter_max_input_buffers(1)
    for layer in module:
        layer.set_custom_reduce_scatter(ScatterInKept())


INT8 = fsdp2.CompressionPolicy(torch.int8, torch.int8, torch.int8, block=16, min_numel=32, stochastic=False)
CHANGES = {
    "divide factor": lambda module: module.set_gradient_divide_factor(8.0, recurse=True),
    "sums": lambda module: module.set_force_sum_reduction_for_comms(True, recurse=True),
    "hook": lambda module: module.set_all_reduce_hook(lambda sums: sums.mul_(4), recurse=True),
    "reduce-scatter": lambda module: module.set_custom_reduce_scatter(Scatter(), recurse=True),
    "persistent memory": persistent,
    "compression": lambda module: module.set_compression(INT8),
    "dtype": lambda module: module.double(),
    "sizes": lambda module: module.set_transfer_sizes(direct_param_bytes=0, direct_group_bytes=0),
    "zeros": lambda module: module.set_reduce_scatter_unused_params(True),
    "frozen": lambda module: module[0].weight.requires_grad_(False),
    "communicator": lambda module: module.set_separate_reduce_scatter_group(),
}
"""What a program may change between two micro-batches."""


@on_ranks(2, 4)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_changes_between_micro_batches(rank, world, dtype, setter, change):
    """A change between micro-batches holds for the sum of all of them. Sums over the shard axis that waited for their
    all-reduce had been divided as before the change, and were divided once more.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    module, alone = beside_one_process(stack, mesh=mesh_2d(), mp_policy=policy)
    # A hook multiplies what it sees, which is the sum of all micro-batches.
    factor = {"divide factor": world / 8.0, "hook": 4.0}.get(change, 1.0)
    getattr(module, setter)(False)
    for one in (module, alone):
        backward(one, rank, world, 0)
    for one in (module, alone) if change in ("dtype", "frozen") else (module,):
        CHANGES[change](one)
    for step in (1, 2):
        for one in (module, alone):
            backward(one, rank, world, step)
    module.synchronize_gradients()
    for mine, its in zip(module.parameters(), alone.parameters(), strict=True):
        expected = its.grad * factor
        tolerance = 2e-2 if change == "compression" else 1e-5 if dtype is torch.float32 else 4e-3
        torch.testing.assert_close(full(mine.grad), expected, rtol=tolerance, atol=tolerance * expected.abs().max())


@api.fsdp2_only
@on_ranks(2)
def test_a_parameter_is_frozen_while_its_gradient_is_left(rank, world):
    """Full parameters that were made anew could not be hooked: "cannot register a hook on a tensor that doesn't require
    gradient". The gradient that is there is reduced all the same."""

    def program(run: Run) -> None:
        for step in range(2):
            run.configure(lambda module, fsdp: module.set_requires_gradient_sync(False))
            run.backward(step)
            for parameter in run.module[0].parameters():
                parameter.requires_grad_(False)
            run.configure(lambda module, fsdp, step=step: module.set_transfer_sizes(chunk_bytes=1 + step))
            run.configure(lambda module, fsdp: module.set_requires_gradient_sync(True))
            run.backward(step + 1)
            run.update()
            for parameter in run.module[0].parameters():
                parameter.requires_grad_(True)

    assert_parity(on_one_axis, program=program, against=("alone",))


@api.fsdp2_only
@on_ranks(2)
def test_nothing_is_left_after_an_optimizer_dropped_it(rank, world):
    """A frozen bias, which no optimizer holds, counted as unreduced for good: gradients went on being made in the
    reduce dtype, and ``synchronize_gradients`` reduced nothing."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    module[0].bias.requires_grad_(False)
    on_one_axis(module, api.ours)
    optimizer = torch.optim.SGD([param for param in module.parameters() if param.requires_grad], lr=0.1)
    module.set_requires_gradient_sync(False)
    module(torch.ones(2, 8)).sum().backward()
    optimizer.zero_grad()
    assert module.get_pending_gradients() == {}
    with Collectives() as sent:
        module.synchronize_gradients()
    assert not sent.counts


@api.fsdp2_only
@on_ranks(4)
@pytest.mark.parametrize("setter", SETTERS)
def test_get_pending_gradients(rank, world, setter):
    """What a loop changes in place between two micro-batches is what is reduced; reading it sends nothing."""
    module, alone = beside_one_process(stack, mesh=mesh_2d())
    getattr(module, setter)(False)
    place = SETTERS.index(setter)  # of full gradients, or of pieces of sums over the shard dimension
    for part in range(2):
        for one in (module, alone):
            one(torch.full((2, 8), 1.0 + part)).square().sum().backward()
        with Collectives() as sent:
            pending = module.get_pending_gradients()
        assert not sent.counts and set(pending) == set(module.parameters())
        for (shard, tensors), parameter in zip(pending.items(), alone.parameters(), strict=True):
            assert tensors[1 - place] is None
            assert tensors[place].shape == (shard.shape, shard.to_local().shape)[place]
            tensors[place].mul_(3)
            parameter.grad *= 3
    assert module[0].get_pending_gradients().keys() == set(module[0].parameters())
    assert module.get_pending_gradients(recurse=False) == {}
    module.synchronize_gradients()
    assert module.get_pending_gradients() == {}
    assert_gradients(module, alone)
