"""What one rank alone does must not choose a collective: it goes on right, or every rank raises and names it.

DESIGN.md lists these facts; other rows have their tests in tests/step/test_kept.py, test_scenarios.py and elsewhere.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fsdp2
from tests.ranks.apart import run_apart
from tests.support.models import Three
from tests.support.parity import assert_gradients, beside_one_process, mesh_2d
from tests.support.pool import on_ranks

LAST = 3
"""The step in which one rank differs: what the others do by then they do without a question."""


def models(**options) -> tuple[Three, Three]:
    """A sharded model, and the same in one process."""
    return beside_one_process(Three, lambda module: (module.first, module.middle), **options)


def train(*both: nn.Module, x: torch.Tensor | None = None) -> None:
    """One step of all models on the same rows."""
    for module in both:
        module(torch.ones(2, 8) if x is None else x).square().sum().backward()
    if len(both) == 2:
        assert_gradients(*both)
    for module in both:
        torch.optim.SGD(module.parameters(), lr=0.01).step()
        module.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_an_input_that_needs_a_gradient(rank, world, reshard):
    """Autograd reaches the first unit's input on one rank alone, so backward is through with it at other times."""
    module, alone = models(reshard_after_forward=reshard)
    for step in range(5):
        x = torch.ones(2, 8, requires_grad=rank == 1 and step >= LAST)
        train(module, alone, x=x)


@on_ranks(2)
def test_weights_kept_for_backward_on_one_rank(rank, world):
    """The one setter that gathers: the others were in backward, and all waited until the timeout."""
    module, alone = models()
    for _ in range(LAST):
        train(module, alone)
    module.set_is_last_backward(False)
    loss = module(torch.ones(2, 8)).sum()
    with pytest.raises(RuntimeError, match=r"rank 0: set_reshard_after_backward\(False\); rank 1: backward"):
        if rank == 0:
            module.set_reshard_after_backward(False)
        loss.backward()


@on_ranks(2)
def test_a_weight_written_on_one_rank(rank, world):
    """After an evaluation, which keeps nothing, one rank writes to its shard: nobody communicates."""
    module, alone = models()
    with torch.no_grad():
        module(torch.ones(2, 8))
        if rank == 0:
            module.last.weight.mul_(0.5)
        alone.last.weight[:4].mul_(0.5)
    for _ in range(2):
        train(module, alone)


@on_ranks(4)
def test_a_shard_written_in_one_replica(rank, world):
    """What ``unshard()`` keeps is gathered anew where the shards of one replica were written: by that replica alone,
    which evaluates with the new values, while the other one does nothing."""
    module, alone = models(mesh=mesh_2d())
    train(module, alone)
    shard = module.last.weight
    module.unshard()  # kept for evaluations on all ranks
    x = torch.ones(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(module(x), alone(x))
        if rank < 2:
            shard.to_local().detach().mul_(0.5)
            alone.last.weight.mul_(0.5)
            torch.testing.assert_close(module(x), alone(x))


@on_ranks(4)
def test_one_replica_gathers_by_hand(rank, world):
    """It does not ask the other one, which does nothing; then both go on training."""
    module, alone = models(mesh=mesh_2d())
    for step in range(LAST + 1):
        if rank < 2 and step in (1, LAST):
            module.middle.unshard()
            torch.testing.assert_close(module.middle.weight, alone.middle.weight)
            module.middle.reshard()
        train(module, alone)


def rarely(*case: object) -> object:
    """A case that only ``--all`` runs."""
    return pytest.param(*case, marks=pytest.mark.slow)


def steps(rank: int, act: Callable[[Three], object], since: int = LAST) -> None:
    """Five steps, before one of which a rank does something alone."""
    module, _ = models()
    for step in range(5):
        if rank == 1 and step == since:
            act(module)
        train(module)


def freezes(rank: int, world: int) -> None:
    """One rank freezes a weight."""
    steps(rank, lambda module: module.middle.weight.requires_grad_(False))


def freezes_before_a_new_kind_of_backward(rank: int, world: int) -> None:
    """The same before a backward of a new kind: nobody expects a collective in it, and gloo aborted one whose sizes
    differed before the ranks compared them at the end."""
    module, _ = models()
    for step in range(5):
        if step == LAST:
            module.first.set_requires_gradient_sync(False)
            module.middle.weight.requires_grad_(rank == 0)
        train(module)


def registers(rank: int, world: int) -> None:
    """One rank adds a parameter to a unit."""
    steps(rank, lambda module: module.middle.register_parameter("scale", nn.Parameter(torch.ones(8))))


def prefetches(rank: int, world: int, *, since: int = LAST) -> None:
    """One rank is given a list of units to gather ahead, which are gathered in the same order as without it.

    It agreed anew on the steps of the next backward, which nobody else did, so it waited for the others without end.
    """
    steps(rank, lambda module: module.first.set_modules_to_forward_prefetch([module.middle]), since)


def prefetches_from_the_start(rank: int, world: int) -> None:
    """The same before the first forward."""
    prefetches(rank, world, since=0)


def packs(rank: int, world: int) -> None:
    """One rank gathers large parameters by collectives of their own, and others packed into one."""
    steps(rank, lambda module: module.set_transfer_sizes(direct_param_bytes=0, direct_group_bytes=0))


def takes_part(rank: int, world: int) -> None:
    """One rank is asked to take part in units that it does not use."""
    steps(rank, lambda module: module.set_reduce_scatter_unused_params(True))


def unshards(rank: int, world: int, *, since: int = LAST) -> None:
    """One rank gathers a unit between passes: the others paired that with another unit of this size."""
    steps(rank, lambda module: module.middle.unshard(), since)


def unshards_at_the_start(rank: int, world: int) -> None:
    """The same before the first forward."""
    unshards(rank, world, since=0)


def uses_weights(rank: int, world: int) -> None:
    """One rank uses weights outside of forward."""

    def use(module: Three) -> None:
        with fsdp2.use_weights(module.middle):
            pass

    steps(rank, use)


def unshards_another(rank: int, world: int) -> None:
    """Each rank gathers another unit between passes, in a model with a unit that ranks may skip; both have one size.

    They computed with each other's weights, without a word.
    """
    module, _ = models()
    module.last = fsdp2.fully_shard(nn.Linear(8, 8))
    module.last.set_reduce_scatter_unused_params(True)
    for step in range(5):
        if step == LAST:
            (module.middle if rank else module.first).unshard()
        train(module)


def breaks_off_an_evaluation(rank: int, world: int) -> None:
    """On one rank an evaluation raises after it has gathered everything, and the caller goes on.

    The others knew what the next evaluation gathers, and waited there for this rank, which waited for a meeting.
    """
    module, _ = models()
    with torch.no_grad():
        for step in range(5):
            handle = module.last.register_forward_hook(lambda *_: 1 / 0) if rank == 1 and step == LAST else None
            with contextlib.suppress(ZeroDivisionError):
                module(torch.ones(2, 8))
            if handle is not None:
                handle.remove()


def breaks_off_the_first_forward(rank: int, world: int) -> None:
    """On one rank the first forward raises in the middle, and the caller goes on to the next batch.

    The others waited for its next gather, and this rank for a meeting: nothing that it had done differed from theirs.
    """
    module, _ = models()
    handle = module.first.register_forward_hook(lambda *_: 1 / 0) if rank == 1 else None
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError):
            module(torch.ones(2, 8)).sum().backward()
        if handle is not None:
            handle.remove()


def replaces_a_unit(rank: int, world: int) -> None:
    """One rank puts a new unit in the place of another."""
    steps(rank, lambda module: setattr(module, "middle", fsdp2.fully_shard(nn.Linear(8, 8))))


@pytest.mark.parametrize(
    ("program", "difference"),
    [
        (prefetches, "rank 0: forward; rank 1: forward after set_modules_to_forward_prefetch"),
        rarely(
            prefetches_from_the_start,
            "rank 1: the unit 'first' with 'middle' gathered ahead in forward (set_modules_to_forward_prefetch), "
            "rank 0: the unit 'first' with default options",
        ),
        (packs, "rank 0: forward; rank 1: forward after set_transfer_sizes"),
        rarely(takes_part, "rank 0: forward; rank 1: forward after set_reduce_scatter_unused_params"),
        (unshards, "rank 0: forward; rank 1: unshard()"),
        (unshards_at_the_start, "rank 1: its first pass is unshard(), rank 0: its first pass is forward"),
        (unshards_another, "rank 0: gather 'first' in unshard(); rank 1: gather 'middle' in unshard()"),
        (breaks_off_an_evaluation, "rank 0: evaluation; rank 1: evaluation after a pass that was aborted"),
        (
            breaks_off_the_first_forward,
            "rank 0: gather 'middle' in forward; rank 1: forward broke off (an exception, or reset_iter_state)",
        ),
        rarely(uses_weights, "rank 0: forward; rank 1: use_weights"),
        (
            freezes,
            "rank 0: reduce 'middle' in backward (middle.weight, middle.bias); "
            "rank 1: reduce 'middle' in backward (middle.bias)",
        ),
        (
            freezes_before_a_new_kind_of_backward,
            "rank 0: the unit 'middle' trains middle.weight, middle.bias; rank 1: the unit 'middle' trains middle.bias",
        ),
        (replaces_a_unit, "rank 0: forward; rank 1: forward after units were inserted or removed"),
        (registers, "rank 0: gather 'middle' in forward; rank 1: gather 'middle' in forward (middle.scale)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changed_or_asked_on_one_rank(program, difference):
    """Every rank raises and names it. A parameter that was added had a group of the number that the next one had
    elsewhere, so the ranks found no difference and waited for each other."""
    for ended in run_apart(program, 2):
        error = re.sub(r" \(\d+ reduce, \d+ all-reduce\)", "", ended.error)
        assert ended.status == 1 and difference in error, ended


@on_ranks(2)
def test_a_forward_that_raises_before_its_first_collective(rank, world):
    """All it needs is in memory, so the other rank knows nothing of it, and the backward on the forward before it is a
    pass as any other."""
    module, alone = models(reshard_after_forward=False)
    for step in range(LAST + 1):
        losses = [one(torch.ones(2, 8)).square().sum() for one in (module, alone)]
        if step == LAST and rank == 1:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                module(torch.ones(2, 3))
        for loss in losses:
            loss.backward()
        assert_gradients(module, alone)
        for one in (module, alone):
            one.zero_grad()


@on_ranks(2)
def test_a_parameter_replaced(rank, world):
    """One rank puts a whole parameter in the place of a shard: its own piece has the value, without communication."""
    module, alone = models()
    for step in range(5):
        if step == LAST:
            if rank == 1:
                module.middle.weight = nn.Parameter(torch.ones(8, 8))
            alone.middle.weight.data[4:] = 1
        train(module, alone)


@on_ranks(2)
def test_a_root_that_is_refused(rank, world):
    """One rank's module cannot be a root. It raised alone, before it met the others, which waited for it."""
    for grouped, error in ((True, "requires a single root"), (False, "must be called on the root.* called on first")):
        module = Three()
        if not grouped:
            fsdp2.fully_shard(module.first)
        fsdp2.fully_shard([module.first, module.middle] if grouped and rank else module)
        if not grouped and rank:
            module.first.set_manual_backward_finalization(True)
        with pytest.raises(RuntimeError, match=f"{'' if rank else 'rank 1: .*'}{error}"):
            (module.first if grouped and rank else module)(torch.ones(2, 8))
