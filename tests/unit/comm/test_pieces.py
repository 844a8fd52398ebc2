"""Pieces in rows and the tensor they are cut from: the pairs cover everything once, and their number is bounded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fsdp2.comm.pieces import piece_pairs, plan_comparison, zero_gaps
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


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.complex128)
CASTS = [(dtype, dtype) for dtype in DTYPES] + [(torch.float32, torch.bfloat16), (torch.float64, torch.float32)]


@pytest.mark.parametrize(("dtype", "to"), CASTS)
@pytest.mark.parametrize("shape", [(6, 4), (3, 5), (2, 1), ()])
@pytest.mark.parametrize("how", ["dense", "transposed", "from the second element on"])
def test_alike_in_the_dtype_of_the_first(dtype, to, shape, how) -> None:
    """Pieces of full parameters begin anywhere in memory, and shards at the beginning of theirs."""
    torch.manual_seed(0)
    other = torch.randn(shape).to(dtype)
    other = other.t() if how == "transposed" and other.dim() == 2 else other
    changed, missing = other.clone(), other.clone()
    changed[(-1,) * other.dim()] = 9
    missing[(0,) * other.dim()] = float("nan")
    for one in (other, missing):
        mine, shard = one.clone().to(to), one.clone()
        if how == "from the second element on":
            mine = torch.empty(mine.numel() + 1, dtype=to)[1:].view(shape).copy_(mine)
        are_alike = plan_comparison(mine, shard)
        assert are_alike()
        shard.copy_(changed)
        assert not are_alike()
    assert not plan_comparison(other.clone().to(to), missing)()


def test_few_elements_of_a_large_tensor_are_compared() -> None:
    """So that a step takes no longer with larger matrices. What changes most elements is found."""
    one, other = torch.zeros(1000, 300, 3, 3), torch.zeros(1000, 300, 3, 3)
    are_alike = plan_comparison(one, other)
    assert are_alike() and are_alike.args[0].numel() == 8 * 8 * 3 * 3  # type: ignore[attr-defined]
    other.add_(1e-6)
    assert not are_alike()
