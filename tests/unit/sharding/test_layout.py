"""ShardLayout against torch.chunk, for any shape, memory order, dimension and number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fsdp2.sharding.layout import ShardLayout
from tests.unit.strategies import chunk, counted, layouts, offsets


def own_memory(layout: ShardLayout, rank: int) -> torch.Tensor:
    """Return the memory of ``rank``'s piece (1D) as the layout says it lies there."""
    memory = torch.zeros(layout.shard_numel(rank))
    memory.as_strided(layout.shard_shape(rank), layout.shard_stride(rank)).copy_(chunk(counted(layout), layout, rank))
    return memory


@given(layouts())
def test_pieces_are_those_of_torch_chunk(layout: ShardLayout) -> None:
    """Bounds follow each other and cover the dimension."""
    full, end = counted(layout), 0
    for rank in range(layout.ranks):
        expected = chunk(full, layout, rank)
        assert layout.shard_shape(rank) == tuple(expected.shape)
        assert layout.shard_numel(rank) == expected.numel()
        if layout.dim is not None:
            start, length = layout.bounds(rank)
            assert start == end and torch.equal(full.narrow(layout.dim, start, length), expected)
            end = start + length
    assert layout.dim is None or end == layout.shape[layout.dim]


@given(layouts())
def test_a_piece_is_dense_and_keeps_the_memory_order(layout: ShardLayout) -> None:
    for rank in range(layout.ranks):
        shape, stride = layout.shard_shape(rank), layout.shard_stride(rank)
        assert offsets(shape, stride) == list(range(layout.shard_numel(rank)))
        large = [d for d, size in enumerate(shape) if size > 1]
        assert sorted(large, key=lambda d: stride[d]) == sorted(large, key=lambda d: layout.stride[d])


@given(layouts())
def test_the_first_piece_is_the_largest(layout: ShardLayout) -> None:
    sizes = [layout.shard_numel(rank) for rank in range(layout.ranks)]
    assert layout.slot_numel == max(sizes) == sizes[0]
    lengths = {layout.bounds(rank)[1] if layout.shape else 1 for rank in range(layout.ranks)}
    assert layout.even == (len(lengths) == 1)
    assert layout.padding_numel == layout.ranks * layout.slot_numel - layout.numel


@given(layouts())
def test_the_least_padded_cut(layout: ShardLayout) -> None:
    best = ShardLayout.least_padded(layout.shape, layout.stride, layout.ranks)
    others = [ShardLayout(layout.shape, layout.stride, dim, layout.ranks) for dim in range(len(layout.shape))]
    assert best.padding_numel <= min((other.padding_numel for other in others), default=best.padding_numel)
    equal = [other for other in others if other.padding_numel == best.padding_numel]
    assert best.rank_major or not any(other.rank_major for other in equal)
    assert not others or best == next(other for other in equal if other.rank_major == best.rank_major)


@given(layouts())
def test_rank_major_slots_are_the_memory_of_the_full_tensor(layout: ShardLayout) -> None:
    """What the zero-copy gather relies on: one slot per rank, in rank order, and the padding is the tail."""
    slots = torch.zeros(layout.ranks, layout.slot_numel)
    for rank in range(layout.ranks):
        slots[rank, : layout.shard_numel(rank)] = own_memory(layout, rank)
    gathered = slots.flatten()[: layout.numel]
    same = torch.equal(gathered, torch.arange(1.0, layout.numel + 1))
    if layout.rank_major:
        assert same
        assert layout.full_storage_numel >= layout.ranks * layout.slot_numel
    elif layout.shard_numel(1):  # with a single piece that is not empty there is nothing to interleave
        assert not same
    assert layout.full_storage_numel >= layout.numel


def test_a_scalar_is_not_cut() -> None:
    layout = ShardLayout((), (), None, 1)
    assert (layout.numel, layout.slot_numel, layout.chunk, layout.padding_numel) == (1, 1, 0, 0)
    assert layout.shard_shape(0) == () and layout.shard_numel(0) == 1
    assert layout.rank_major and layout.even
    with pytest.raises(ValueError, match="1 without dim, got 4"):
        ShardLayout((), (), None, 4)


@pytest.mark.parametrize("dim", range(4))
def test_channels_last_pieces_are_channels_last(dim: int) -> None:
    weight = torch.randn(6, 4, 3, 5).contiguous(memory_format=torch.channels_last)
    layout = ShardLayout(tuple(weight.shape), weight.stride(), dim, 2)
    for rank, piece in enumerate(weight.chunk(2, dim)):
        assert layout.shard_stride(rank) == piece.contiguous(memory_format=torch.channels_last).stride()
    assert layout.rank_major == (dim == 0)


def test_the_slowest_dimension_of_a_transposed_tensor_is_the_rank_major_one() -> None:
    weight = torch.randn(6, 4).t()
    by_dim = [ShardLayout(tuple(weight.shape), weight.stride(), dim, 2) for dim in range(2)]
    assert [layout.rank_major for layout in by_dim] == [False, True]
    assert [layout.shard_stride(0) for layout in by_dim] == [(1, 2), (1, 4)]


def test_slower_dimensions_of_size_one_do_not_interleave() -> None:
    weight = torch.randn(1, 1, 8)
    assert ShardLayout(tuple(weight.shape), weight.stride(), 2, 4).rank_major


@given(layouts(ranks=1))
def test_one_rank_holds_everything(layout: ShardLayout) -> None:
    assert layout.rank_major
    assert layout.shard_shape(0) == layout.shape
    assert layout.padding_numel == 0 and layout.full_storage_numel == layout.numel


@pytest.mark.parametrize("dim", [-1, 2])
def test_a_dimension_that_does_not_exist_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=r"dim -?\d is not a dimension of shape \(3, 4\)"):
        ShardLayout((3, 4), (4, 1), dim, 2)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks must be at least 1, .* got 0"):
        ShardLayout((3,), (1,), 0, 0)


def test_layouts_are_values() -> None:
    one, other = ShardLayout((3, 4), (4, 1), 0, 2), ShardLayout((3, 4), (4, 1), 0, 2)
    assert one.slot_numel == 8  # cached in one of them only
    assert one == other and hash(one) == hash(other)
    assert one != ShardLayout((3, 4), (4, 1), 1, 2)
