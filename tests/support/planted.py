"""Defects that fsdp2 had, put back into a process one at a time, and for each a program that finds it.

They are those that the random programs of ``tests/support/programs.py`` could once not say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdp2.autograd.boundary import Boundary
from fsdp2.autograd.trees import Tree
from fsdp2.comm import reduce
from fsdp2.comm.collectives import all_to_all, prefers_all_to_all
from fsdp2.engine import gradient_plan, gradients
from fsdp2.engine.gradient_plan import GradientPlan
from fsdp2.engine.root import RootContext
from fsdp2.optim import clip
from fsdp2.ranks.monitor import RankMonitor
from fsdp2.sharding.mesh import Axis
from tests.support import fuzz
from tests.support.programs import Fuzz
from tests.support.trees import Node, Plan

Patch = pytest.MonkeyPatch


def exchange_on_one_rank(patch: Patch) -> None:
    """Let large gradients be exchanged on a shard axis of one rank: nobody widened them before copies were summed."""

    def prefers(axis: Axis, nbytes: int, asked: int | None = None) -> bool:
        alone = axis.size == 1 and asked is None and nbytes >= 256 << 10
        return alone or prefers_all_to_all(axis, nbytes, asked)

    def exchange(output: torch.Tensor, rows: torch.Tensor, axis: Axis, **options: Any) -> list[Any]:
        if axis.size > 1:
            return all_to_all(output, rows, axis, **options)
        output.copy_(rows)
        return []

    patch.setattr(gradient_plan, "prefers_all_to_all", prefers)
    patch.setattr(reduce, "prefers_all_to_all", prefers)
    patch.setattr(reduce, "all_to_all", exchange)


def forget_sums(patch: Patch) -> None:
    """Plan reductions without parameters that were frozen while their sums wait for an all-reduce."""
    patch.setattr(gradients, "GradientPlan", lambda store, axis, comm, waiting: GradientPlan(store, axis, comm, ()))


def average_experts(patch: Patch) -> None:
    """Take experts that only some ranks have for copies, in the norm of all gradients."""
    patch.setattr(clip, "_weights", lambda params, cuts: {})


def compare_every_pass(patch: Patch) -> None:
    """Let ranks compare passes that communicate nothing too."""
    begin = RankMonitor.begin

    def eager(self: RankMonitor, kind: Any, **how: Any) -> None:
        begin(self, kind, **how)
        if self._to_begin is not None:
            self._begin(kind, None)

    patch.setattr(RankMonitor, "begin", eager)


def wait_for_hidden_inputs(patch: Patch) -> None:
    """Keep a unit until the end of backward if there were tensors in an object among its arguments."""
    watch = Boundary.watch_inputs

    def never_done(self: Boundary, given: Tree, done: Callable[[], None], *others: Any) -> bool:
        return watch(self, given, (lambda: None) if given.hidden else done, *others)

    patch.setattr(Boundary, "watch_inputs", never_done)


def go_on_after_a_backward_that_raised(patch: Patch) -> None:
    """Do not notice a backward that raised: neither the root does, nor its units by their phases."""

    def check(self: RootContext[Any]) -> None:
        for group in self.groups:
            group.phases.reset()

    patch.setattr(RootContext, "_check_last_iteration_ended", check)


LINEAR = Node("linear", unit=True)
TRAIN = (("train", 0),)

PLANTED: dict[Callable[[Patch], None], tuple[Fuzz, str]] = {
    exchange_on_one_rank: (
        Fuzz(Plan((Node("large", unit=True),), mesh="copies", policy="low"), TRAIN),
        "gradient of tree.parts.0.* off by",
    ),
    forget_sums: (
        Fuzz(Plan((LINEAR, LINEAR), mesh="hybrid"), (("all_reduce", False), *TRAIN, ("freeze", 0, False, False))),
        "gradients are not reduced",
    ),
    average_experts: (Fuzz(Plan((LINEAR,), experts=True), TRAIN), "norm against .* off by"),
    compare_every_pass: (Fuzz(Plan((LINEAR, LINEAR), mesh="copies"), (("uneven", 0),)), "ranks do not do the same"),
    wait_for_hidden_inputs: (
        Fuzz(Plan((Node("keeps", unit=True), LINEAR, LINEAR), caches=True), TRAIN),
        "units stayed in memory longer",
    ),
    go_on_after_a_backward_that_raised: (
        Fuzz(Plan((LINEAR, LINEAR), last=True), (("break_off", 0, 0, False, False),)),
        "a reset is asked for against .* off by",
    ),
}
"""For each, a program that finds it on two ranks, and what that shows."""


def run(rank: int, world: int, defect: str, program: Fuzz) -> bool:
    """Execute ``program`` in a process with the defect of that name, as ``fuzz.run`` does."""
    with Patch.context() as patch:
        next(plant for plant in PLANTED if plant.__name__ == defect)(patch)
        return fuzz.run(rank, world, program)
