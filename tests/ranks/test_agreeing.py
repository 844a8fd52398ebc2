"""Ranks that repeat what they did ask each other nothing: an iteration costs no word once it has a pattern."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.ranks.board import Board
from tests.support.parity import sharded
from tests.support.pool import on_ranks

X = torch.ones(2, 8)


def plain(model: nn.Module) -> None:
    """One forward and backward."""
    model(X).sum().backward()


def two_forwards(model: nn.Module) -> None:
    """Two answers are compared; the second forward finds gathered what the first one kept."""
    (model(X) - model(2 * X)).square().sum().backward()


def three_forwards(model: nn.Module) -> None:
    """An anchor, a positive and a negative."""
    (model(X) - model(2 * X) * model(3 * X)).square().sum().backward()


def evaluated(model: nn.Module) -> None:
    """A look at the loss, then a step."""
    with torch.no_grad():
        model(X)
    plain(model)


def accumulated(model: nn.Module) -> None:
    """Three backwards, of which the last one reduces."""
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        plain(model)


def discriminated(model: nn.Module) -> None:
    """A backward through one forward, then one through two."""
    plain(model)
    two_forwards(model)


@on_ranks(2)
@pytest.mark.parametrize(
    "iteration",
    [plain, two_forwards, three_forwards, evaluated, accumulated, discriminated],
    ids=lambda one: one.__name__,
)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_pattern_costs_no_word(rank, world, iteration: Callable[[nn.Module], None], reshard):
    """From the fourth iteration on; the first three teach who prefetches what.

    With one exception: if parameters stay after forward, a second forward takes no step, so ranks see nothing that
    distinguishes a backward on one forward from a backward on two, which takes more steps. Such backwards meet.
    """
    build = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 8))
    model = sharded(build, units=lambda model: [*model][:3], reshard_after_forward=reshard)
    asked, meet = [], Board.meet

    def counting(board, *args):
        asked.append(args)
        return meet(board, *args)

    Board.meet = counting
    try:
        counts = []
        for _ in range(6):
            iteration(model)
            counts.append(len(asked))
            asked.clear()
    finally:
        Board.meet = meet
    meets = 2 if iteration is discriminated and reshard is False else 0
    assert counts[0] > 0 and counts[3:] == [meets] * 3, counts


@on_ranks(2)
@pytest.mark.parametrize("enabled", [True, False])
def test_comparing_can_be_switched_off(rank, world, enabled):
    """Then ranks have nothing to write to each other on, and train alike."""
    made, board = [], Board.__init__

    def counting(self, *args):
        made.append(args)
        board(self, *args)

    fsdp2.set_rank_checks(enabled)
    Board.__init__ = counting
    try:
        torch.manual_seed(0)
        model = fsdp2.fully_shard(nn.Linear(8, 8))
        plain(model)
    finally:
        fsdp2.set_rank_checks(True)
        Board.__init__ = board
    assert bool(made) is enabled
    assert torch.equal(model.bias.grad.full_tensor(), torch.full((8,), 2.0))
