"""Models that are trained together run in one order on all ranks: those that do not would mix up their data."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2.ranks import board
from tests.ranks.apart import SOON, run_apart
from tests.support import api
from tests.support.parity import assert_gradients, beside_one_process, stack
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
WIDTHS = {"same": (4, 4), "other": (4, 6)}
ORDERS = {
    "swapped": ("ab", "ba"),
    "twice at once": ("aab", "aba"),
    "neither as before": ("bba", "aab"),
}
"""What two ranks do after both have trained ``ab``."""


def root(width: int) -> nn.Module:
    """A model of a few units, all of one size, on ranks that look often what the others do."""
    board._LOOK_SECONDS = (SOON, SOON)
    torch.manual_seed(0)
    model = stack(width)
    for unit in (*model, model):
        fsdp2.fully_shard(unit)
    return model


def loss(model: Any) -> torch.Tensor:
    """Of rows of ones."""
    return model(torch.ones(2, model[0].in_features)).sum()


def forwards(order: tuple[str, str], widths: tuple[int, int], rank: int, world: int) -> None:
    """Train two models alike, then each rank in its order."""
    models = dict(zip("ab", map(root, widths)))
    for name in ["ab", "ab", order[rank]]:
        for one in name:
            loss(models[one]).backward()


def backwards(widths: tuple[int, int], rank: int, world: int) -> None:
    """One rank goes back through the second model first."""
    models = [root(width) for width in widths]
    for order in (1, 1, -1 if rank else 1):
        for one in [loss(model) for model in models][::order]:
            one.backward()


def assert_all_raise(program: Any) -> None:
    """Assert that both ranks name what each of them does."""
    for ended in run_apart(program, 2):
        assert ended.status == 1 and "ranks do not do the same: rank 0: " in ended.error, ended
        assert "a pass of another root" in ended.error, ended
        assert ended.error.endswith("run the forwards and backwards of all models in one order on all ranks"), ended


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("order", ORDERS)
def test_forwards_in_another_order(order, widths):
    """Where sizes are the same, each rank computed with the other model's weights, without an error."""
    assert_all_raise(partial(forwards, ORDERS[order], WIDTHS[widths]))


@pytest.mark.parametrize("widths", WIDTHS)
def test_backwards_in_another_order(widths):
    """The same for gradients."""
    assert_all_raise(partial(backwards, WIDTHS[widths]))


@on_ranks(2, 4)
def test_orders_that_change_on_all_ranks(rank, world):
    """Models may take turns in any order that is the same on all ranks, with evaluations and gathers between."""
    pairs = [beside_one_process(partial(stack, 4)) for _ in range(3)]
    for turns in ("ab", "ab", "ba", "aab", "c", "ba", "cab", "a", "b", "ab", "acb", "ab"):
        for one in turns:
            for model in pairs["abc".index(one)]:
                loss(model).backward()
        with torch.no_grad():
            loss(pairs[len(turns) % 3][0])
        pairs[0][0].unshard()
        pairs[0][0].reshard()
        for module, alone in pairs:
            assert_gradients(module, alone)
    for index in (0, 1):
        losses = [[loss(model) for model in pair] for pair in pairs]
        for pair in losses[:: 1 if index else -1]:
            for one in pair:
                one.backward()
        for module, alone in pairs:
            assert_gradients(module, alone)
