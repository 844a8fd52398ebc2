"""Experts, which ranks may skip, in orders that change: from step to step, alike on all ranks or not, some twice.
Evaluations in yet another order may come between the steps. Gradients are the mean over all ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.support.parity import mesh_1d
from tests.support.pool import LIMIT_SECONDS, POOL, on_ranks

Orders = Sequence[Sequence[int]]
"""By rank, the experts that it uses in this order."""


class Experts(nn.Module):
    """Experts by number, perhaps between a dense layer before and one behind."""

    def __init__(self, *, dense: bool, tail: bool, recompute: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8) if dense else None, nn.Linear(8, 8) if tail else None
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.recompute = recompute

    @property
    def units(self) -> list[Any]:
        """Its units, experts first."""
        return [*self.experts, *filter(None, (self.first, self.last)), self]

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        x = x if self.first is None else torch.tanh(self.first(x))
        for number in order:
            expert = self.experts[number]
            y = checkpoint(expert, x, use_reentrant=False) if self.recompute else expert(x)
            x = x + torch.tanh(y)
        return x if self.last is None else self.last(x)


@dataclass(frozen=True)
class Kind:
    """One way to build and run the model."""

    steps: Sequence[Orders]
    evaluations: bool = False  # one before each step, where each rank uses what another does next
    evaluated: Sequence[int] = ()  # the steps that are evaluations
    experts_marked: bool = False  # or the root
    dense: bool = True
    tail: bool = True
    recompute: bool = False
    reshard: bool | None = None
    any_order: bool = False  # as an argument of the setter


ALIKE = tuple([order] * 2 for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2], [2, 1, 0]))
PLANS: dict[str, Sequence[Orders]] = {
    "alike": ALIKE,
    "apart": ([[0, 1, 2], [2, 1, 0]], [[1, 0], [0, 1, 2]], [[2, 0, 1], [1]], [[0, 1, 2], [2, 1, 0]]),
    "skipped": ([[0, 1], [1, 2]], [[], [2, 0]], [[1, 0], []], [[2, 1, 0], [0]], [[0, 1], [1, 2]]),
    "one of them twice": ([[0, 0], [0]], [[0], [0, 0]], [[0, 0], [0]], [[0, 0], [0, 0]]),
}
TWICE = {
    "apart": Kind(([[0, 1, 0], [1, 0]], [[1, 1], [0, 2]], [[2, 0, 2], [0, 0, 1]])),
    "apart, experts marked": Kind(([[0, 1, 0], [1, 0]], [[1, 1], [0, 2]], [[2, 0, 2], [0, 0, 1]]), experts_marked=True),
    "between evaluations": Kind(
        ([[1, 2], [2, 0]], [[0, 0], [2, 0]], [[0, 0], [1, 0]]), evaluated=(0, 2), dense=False, tail=False
    ),
    "on one rank": Kind(([[1, 1], [1]], [[2], [0, 2]], [[0, 0], [2]]), experts_marked=True, dense=False, tail=False),
    "on the other rank": Kind(([[0, 0], [0]], [[0], [2, 1]], [[0], [1, 1]]), experts_marked=True, dense=False),
}


def train_and_compare(rank: int, world: int, kind: Kind) -> None:
    """One rank of a case: train the model and one in a single process, and compare."""
    torch.manual_seed(0)
    alone = Experts(dense=kind.dense, tail=kind.tail, recompute=kind.recompute)
    module: Any = copy.deepcopy(alone)
    for unit in module.units:
        fsdp2.fully_shard(unit, mesh=mesh_1d(), reshard_after_forward=kind.reshard)
    for unit in module.experts if kind.experts_marked else [module]:
        unit.set_reduce_scatter_unused_params(True, any_order=kind.any_order)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (module, alone)]
    for step, orders in enumerate([*kind.steps, [[0, 1, 2]]]):  # at the end all do the same
        inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(world)]
        by_rank = [orders[r % len(orders)] for r in range(world)]
        if kind.evaluations or step in kind.evaluated:
            used = by_rank if step in kind.evaluated else [*by_rank[1:], by_rank[0]]
            with torch.no_grad():
                torch.testing.assert_close(module(inputs[rank], used[rank]), alone(inputs[rank], used[rank]))
        if step in kind.evaluated:
            continue
        loss = module(inputs[rank], by_rank[rank]).square().mean()
        losses = [alone(x, order).square().mean() for x, order in zip(inputs, by_rank)]
        torch.testing.assert_close(loss, losses[rank], msg=lambda text, s=step: f"step {s}: {text}")
        loss.backward()
        (sum(losses) / world).backward()
        for unit in module.units:
            unit.reshard()
        for (name, parameter), piece in zip(alone.named_parameters(), module.parameters(), strict=True):
            mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = mean.chunk(world)[rank]  # no collective here: a rank that is alone in one could not say so
            got = torch.zeros_like(mean) if piece.grad is None else piece.grad.to_local()
            torch.testing.assert_close(got, mean, msg=lambda text, s=step, n=name: f"step {s}, {n}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def cases() -> list[Any]:
    """Return every plan on as many ranks, in various ways."""
    found = []
    for plan, evaluations, marked, recompute, reshard in itertools.product(
        PLANS, (False, True), (False, True), (False, True), (None, False)
    ):
        kind = Kind(PLANS[plan], evaluations, (), marked, recompute=recompute, reshard=reshard)
        quick = evaluations and not recompute and reshard is None and marked == (plan in ("alike", "apart"))
        ways = {"evaluations": evaluations, "experts marked": marked, "recomputed": recompute, "kept": reshard is False}
        name = ", ".join([plan, *(way for way, there in ways.items() if there)])
        for world in (2, 4):
            marks = [] if quick and world == 2 else [pytest.mark.slow]
            found.append(pytest.param(world, kind, marks=marks, id=f"{name}, on {world}"))
    return found


@pytest.mark.parametrize(("world", "kind"), cases())
def test_orders_that_change(world, kind):
    """Every order trains, whatever the ranks used before."""
    POOL.run(world, train_and_compare, {"kind": kind}, LIMIT_SECONDS)


@pytest.mark.parametrize("name", TWICE)
def test_a_unit_twice_on_some_ranks(name):
    """Ranks that have seen that they use a unit a different number of times agree on each of its collectives."""
    POOL.run(2, train_and_compare, {"kind": TWICE[name]}, LIMIT_SECONDS)


@on_ranks(2, 4)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("reshard", [None, False])
def test_any_order(rank, world, recompute, reshard):
    """After two steps that are alike on all ranks, orders change, and units are called more often on some ranks."""
    steps = ([[0, 1, 2]] * 2, [[0, 1, 2]] * 2, [[2, 0], [0, 1, 2]], [[1, 1, 0], [2, 1, 0]], [[], [2, 2]], [[0, 0], []])
    kind = Kind(steps, evaluations=True, recompute=recompute, reshard=reshard, any_order=True)
    train_and_compare(rank, world, kind)
