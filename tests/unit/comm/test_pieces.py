"""Pieces in rows and the tensor they are cut from: the pairs cover everything once, and their number is bounded."""

from __future__ import annotations

import torch
from hypothesis import given

from fsdp2.comm.pieces import piece_pairs, zero_gaps
from fsdp2.sharding.layout import ShardLayout
from tests.unit.strategies import chunk, counted, layouts


@given(layouts())
def test_pairs_bring_rows_and_tensor_together(layout: ShardLayout) -> None:
    full, rows = counted(layout), torch.full((layout.ranks, layout.slot_numel + 3), -1.0)
    slots = rows[:, 2 : 2 + layout.slot_numel]
    for part, piece in piece_pairs(full, slots, layout):
        piece.copy_(part)
    zero_gaps(slots, layout)
    for rank in range(layout.ranks):
        numel = layout.shard_numel(rank)
        piece = slots[rank, :numel].as_strided(layout.shard_shape(rank), layout.shard_stride(rank))
        assert torch.equal(piece, chunk(full, layout, rank))
        assert not slots[rank, numel:].any() and bool((rows[rank, [0, 1, -1]] == -1).all())
    again = torch.zeros_like(full)
    for part, piece in piece_pairs(again, slots, layout):
        part.copy_(piece)
    assert torch.equal(again, full)


@given(layouts(ranks=1024))
def test_two_copies_are_enough_for_any_number_of_ranks(layout: ShardLayout) -> None:
    rows = torch.zeros(layout.ranks, layout.slot_numel)
    assert len(piece_pairs(counted(layout), rows, layout)) <= 2
