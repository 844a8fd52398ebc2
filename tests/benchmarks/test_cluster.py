"""On streams with clocks compute waits no longer for communication than with torch's fully_shard, in less memory."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch.distributed.fsdp as torchs

import fsdp2
from tests.support import ROOT, api

sys.path.append(str(ROOT / "benchmarks"))
cluster: Any = importlib.import_module("cluster")

pytestmark = api.fsdp2_only
measure = cache(cluster.measure)
LAYERS = 3
USUAL, *ROWS = (cluster.Row(ranks=ranks, layers=layers) for ranks, layers in ((64, 2), (64, 3), (8, 3), (256, 3)))
MOE, GROUPS = cluster.Row("moe", ranks=64, kind="lists"), cluster.Row(ranks=64, kind="groups")


def one_of(*rows: Any) -> list[Any]:
    """Return the first of these rows for a usual run, and the others as slow: each takes seconds."""
    return [rows[0], *slow(*rows[1:])]


def slow(*rows: Any) -> list[Any]:
    """Return rows that a usual run leaves out."""
    return [pytest.param(row, marks=pytest.mark.slow) for row in rows]


@pytest.mark.parametrize("row", one_of(USUAL, *ROWS), ids=str)
def test_compute_waits_no_longer_than_with_torchs(row):
    """Nor does it have more to do: what is gathered straight into its place is not copied, and half of a block's
    gradients are copied beside the next block. The first of them leave when few activations are left."""
    ours, theirs = measure(row, fsdp2), measure(row, torchs)
    assert ours.exposed <= theirs.exposed
    assert ours.total <= 0.975 * theirs.total
    assert ours.live <= theirs.live - row.block / 2 and ours.reserved <= theirs.reserved - row.block / 2
    assert ours.busy <= theirs.busy
    assert theirs.exposed > 0  # the first gather has nothing to hide behind: what is compared is there


COMPILED = [replace(row, kind="compiled") for row in (USUAL, *ROWS[:2])]


@pytest.mark.parametrize("row", one_of(*COMPILED), ids=str)
def test_compiled_blocks_take_no_longer_than_with_torchs(row):
    """All gradients of a block appear at once, so compute waits for none of their chunks while they leave."""
    ours, theirs = measure(row, fsdp2), measure(row, torchs)
    assert ours.exposed <= theirs.exposed
    assert ours.total <= 0.985 * theirs.total
    assert ours.reserved <= theirs.reserved - row.block / 2


@pytest.mark.parametrize("row", slow(*COMPILED[1:]), ids=str)
def test_compiled_blocks_take_less_than_with_torchs(row):
    """Half a block, from three blocks on: of two, the second's gradients meet no gathered one."""
    assert measure(row, fsdp2).live <= measure(row, torchs).live - row.block / 2


def test_bytes_that_travel_are_the_parameters():
    """A bfloat16 gather in forward, another in backward, and float32 gradients of every layer.

    The last layer stays gathered from forward to backward.
    """
    shape = cluster.SHAPES["8b"]
    keys = shape.width // shape.heads * shape.kv_heads
    layer = 2 * shape.width * (shape.width + keys) + 3 * shape.width * shape.hidden + 2 * shape.width
    assert measure(USUAL, fsdp2).sent == USUAL.layers * layer * (2 + 2 + 4) - 2 * layer


@pytest.mark.parametrize(
    ("row", "ratio"),
    [(replace(GROUPS, layers=2), 1.0), pytest.param(replace(MOE, layers=LAYERS), 0.97, marks=pytest.mark.slow)],
    ids=str,
)
def test_units_with_experts_or_two_groups_take_no_longer_than_with_torchs(row, ratio):
    """What is gathered ahead is unpacked right behind its gather, and all groups of the next unit are."""
    ours = measure(row, fsdp2).total
    if row.kind == "groups" and not api.torch_since("2.12"):
        pytest.skip("torch's own fully_shard takes no mesh for a single parameter before torch 2.12")
    assert ours <= ratio * measure(row, torchs).total


@pytest.mark.parametrize("row", slow(cluster.Row(ranks=256, kind="compiled"), cluster.Row(ranks=1024)), ids=str)
def test_on_many_ranks_a_unit_leaves_in_one_piece(row):
    """One collective fewer than with torch's: the last unit stays gathered from forward to backward."""
    row = replace(row, layers=2)
    ours, theirs = measure(row, fsdp2), measure(row, torchs)
    assert ours.launches == 3 * row.layers - 1 and theirs.launches == 3 * row.layers
    assert ours.total <= theirs.total
