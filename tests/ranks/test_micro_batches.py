"""Micro-batches that communicate nothing: each rank may have as many as it likes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import nn

import fsdp2
from tests.support.models import linears, mlp
from tests.support.parity import beside_one_process, mesh_of
from tests.support.pool import on_ranks

STEPS = 4


def micro_batches(rank: int, step: int) -> list[torch.Tensor]:
    """Return a number of micro-batches that differs between ranks and steps, and is the same on all in step 1."""
    count = 2 if step == 1 else 1 + (rank + step) % 3
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(3, 6, generator=generator) for _ in range(count)]


def assert_mean(weights: Iterable[nn.Parameter], plain: nn.Module, batches: list[list[torch.Tensor]]) -> None:
    """Assert that gradients are the mean over ranks, of which each has batches of its own, and drop them."""
    for batch in itertools.chain(*batches):
        (plain(batch).square().sum() / len(batches)).backward()
    for got, expected in zip(weights, plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.full_tensor(), expected.grad)
        got.grad = expected.grad = None


@on_ranks(2, 4)
@pytest.mark.parametrize(
    "way", ["kept", "whole on each rank", "kept, tells that more follow", "whole on each rank, had dropped a loss"]
)
def test_ranks_with_different_numbers_of_micro_batches(rank, world, way):
    """Token-balanced and reinforcement-learning batches differ in number, and only the last one of a step communicates.
    The rank checks compared every pass, also those that start no collective, and raised where DDP's ``no_sync`` trains.

    Later, backwards were told apart by the number of forwards that they may be on, forwards that communicate nothing
    included. So where ranks had run different numbers of them (``set_is_last_backward(False)`` before all but the last
    micro-batch, or a loss that nobody went back from), one rank waited for a meeting that no other rank came to."""
    mesh = mesh_of(world) if "kept" in way else mesh_of(world, 1, names=("replicate", "shard"))
    build = partial(mlp, 6, 5, 4)
    module, plain = beside_one_process(build, linears, mesh=mesh, reshard_after_forward=False)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, plain)]
    for step in range(STEPS):
        for unit in (module, module[0], module[2]) if way != "whole on each rank" else ():
            unit.unshard()
        if "had dropped a loss" in way:
            module(torch.ones(3, 6))
        batches = micro_batches(rank, step)
        for i, batch in enumerate(batches):
            last = i + 1 == len(batches)
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last)
            if "tells that more follow" in way:
                module.set_is_last_backward(last)
            module(batch).square().sum().backward()
        for other in range(world):
            for batch in micro_batches(other, step):
                (plain(batch).square().sum() / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for got, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected)


@on_ranks(2, 4)
@pytest.mark.parametrize("before", ["nothing", "a step"])
def test_a_usual_step_behind_different_numbers_of_micro_batches(rank, world, before):
    """Which unit stays for backward followed from the passes before, those that communicate nothing included: one rank
    gathered a unit that another one had kept, and all raised. Found by a random program."""
    module, plain = beside_one_process(partial(mlp, 6, 5, 4), linears, mesh=mesh_of(world))
    units, weights = (module, module[0], module[2]), [*module.parameters()]

    def train(batches: list[torch.Tensor], others: list[list[torch.Tensor]]) -> None:
        for i, batch in enumerate(batches):
            module.set_requires_gradient_sync(i + 1 == len(batches))
            module(batch).square().sum().backward()
        assert_mean(weights, plain, others)

    def usual() -> None:
        batch = torch.ones(3, 6)
        with torch.no_grad():
            module(batch)
        for _ in range(3):
            train([batch], [[batch]] * world)

    if before == "a step":
        usual()
    for step in range(2):
        module.set_reshard_after_forward(False)
        module.set_reshard_after_backward(False)
        for unit in units:
            unit.unshard()
        train(micro_batches(rank, step), [micro_batches(other, step) for other in range(world)])
        module.set_reshard_after_forward(True)
        module.set_reshard_after_backward(True)
        for unit in units:
            unit.reshard()
        usual()


@on_ranks(2, 4)
@pytest.mark.parametrize("gathers", ["second forward", "first backward"])
def test_different_numbers_of_micro_batches_where_such_passes_have_gathered(rank, world, gathers):
    """The second forward of earlier steps had gathered as well, or the first backward had, so ranks expected that: a
    rank with such a pass on kept parameters met the others at its end, and they had none. Found by a random program."""
    module, plain = beside_one_process(partial(mlp, 6, 5, 4), linears, mesh=mesh_of(world), reshard_after_forward=False)
    units, weights = (module, module[0], module[2]), [*module.parameters()]

    def reshard() -> None:
        for unit in units:
            unit.reshard()

    module.set_reshard_after_backward(False)
    for step in range(STEPS):
        reshard()
        batches = [micro_batches(one, step) for one in range(world)]
        if step + 1 < STEPS:
            batches = [[torch.ones(3, 6)] * (1 + (gathers == "first backward"))] * world
            if gathers == "second forward":
                module(torch.ones(3, 6))
                reshard()
        for i, batch in enumerate(batches[rank]):
            module.set_requires_gradient_sync(i + 1 == len(batches[rank]))
            loss = module(batch).square().sum()
            if gathers == "first backward" and i == 0 and step + 1 < STEPS:
                reshard()
            loss.backward()
        assert_mean(weights, plain, batches)


class Recurrent(nn.Module):
    """One layer that runs twice, and a last one."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


@on_ranks(2, 4)
@pytest.mark.parametrize("kept", [False, True])
def test_different_numbers_of_micro_batches_of_a_unit_that_runs_twice(rank, world, kept):
    """Backward leaves its second call before any of its gradients is finished. Ranks sent those of earlier
    micro-batches then, and a rank without any sent another unit's: all raised. Found by a random program."""
    mesh = mesh_of(world) if kept else mesh_of(world, 1, names=("replicate", "shard"))
    module, plain = beside_one_process(
        Recurrent, lambda module: [module.twice], mesh=mesh, reshard_after_forward=False if kept else None
    )
    for step in range(STEPS):
        for unit in (module, module.twice) if kept else ():
            unit.unshard()
        batches = micro_batches(rank, step)
        for i, batch in enumerate(batches):
            module.set_requires_gradient_sync(i + 1 == len(batches))
            module.set_reshard_after_backward(not kept or i + 1 == len(batches))
            module(batch).square().sum().backward()
        assert_mean(module.parameters(), plain, [micro_batches(other, step) for other in range(world)])


@on_ranks(2)
@pytest.mark.parametrize("told", ["all ranks", "ranks with several"])
def test_different_numbers_of_micro_batches_in_low_precision(rank, world, told):
    """Large gradients in bfloat16 that are summed in float32 travel as computed over gloo, but those of several
    micro-batches have accumulated in float32. A rank with a single one sent half the bytes, and gloo ended the process.
    Where a rank does not even say that others accumulate, all raise. Found by a random program."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 300))
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp2.fully_shard(module, mesh=mesh_of(world), mp_policy=policy, reshard_after_forward=False)
    module.unshard()
    x, count = torch.full((2, 300), 0.125), 1 + rank
    for i in range(count):
        module.set_reshard_after_backward(i + 1 == count)
        if told == "all ranks" or count > 1:
            module.set_requires_gradient_sync(i + 1 == count)
        loss = module(x).sum()
        if told == "all ranks" or i + 1 < count:
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="as computed"):
                loss.backward()
    if told == "all ranks":
        assert torch.equal(module[0].weight.grad.full_tensor(), torch.full((300, 300), 0.125 * 2 * 3 / 2))


@on_ranks(2, 4)
def test_different_numbers_of_micro_batches_summed_in_one_order(rank, world):
    """A deterministic reduction over replicas exchanges gradients and gathers their sums on one process group. How many
    were in flight depended on their bytes, and accumulated ones are wider: ranks called these in another order, and
    waited for each other until the timeout. Found by a random program."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 20), nn.Linear(20, 3), nn.Linear(3, 15))  # two of these fit beside each other
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in (*module, module):
        fsdp2.fully_shard(unit, mesh=mesh_of(world, 1, names=("replicate", "shard")), mp_policy=policy)
    module.set_deterministic_reduction(True)
    x, counts = torch.full((2, 6), 0.125), [1 + one % 2 for one in range(world)]
    for i in range(counts[rank]):
        module.set_requires_gradient_sync(i + 1 == counts[rank])
        module(x).sum().backward()
    gradient = module[2].bias.grad.full_tensor()
    assert torch.equal(gradient, torch.full((15,), 2 * sum(counts) / world))
