"""The plans of a group's buffers and of its gradients: nothing overlaps, everything is covered, aligned and ordered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.packing import (
    ChunkPlan,
    FlatPlan,
    PlannedParam,
    RowPlan,
    TransferSizes,
    plan_chunks,
    plan_flat,
    reduced_in_place,
)
from tests.unit.strategies import layouts

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.int16)
ALL_DIRECT = TransferSizes(direct_param_bytes=0, direct_group_bytes=0)


@st.composite
def items_and_sizes(draw: st.DrawFn) -> tuple[list[PlannedParam], TransferSizes]:
    """A group of up to 7 parameters of mixed dtypes, and thresholds near their sizes."""
    ranks = draw(st.integers(1, 4))
    dtypes = st.sampled_from(DTYPES[: draw(st.integers(1, len(DTYPES)))])
    item = st.builds(PlannedParam, layouts(ranks=ranks, most=9), dtypes, dtypes)
    items = draw(st.lists(item, min_size=1, max_size=7))
    sizes = st.sampled_from([0, 64, 500, 1 << 62])
    return items, TransferSizes(direct_param_bytes=draw(sizes), direct_group_bytes=draw(sizes))


plans = items_and_sizes().map(lambda drawn: (drawn[0], plan_flat(*drawn)))


def assert_apart(places: Sequence[tuple[int, int]], end: int) -> None:
    """Assert that (offset, bytes) do not overlap and lie before ``end``."""
    last = 0
    for offset, nbytes in sorted(places):
        assert offset >= last
        last = offset + nbytes
    assert last <= end


@given(plans)
def test_nothing_overlaps_in_any_buffer(drawn: tuple[list[PlannedParam], FlatPlan]) -> None:
    items, plan = drawn
    numels = [item.layout.slot_numel for item in items]
    fulls = [item.layout.full_storage_numel * item.wire_dtype.itemsize for item in items]
    kept = [n * item.dtype.itemsize for n, item in zip(numels, items)]
    sent = [n * item.wire_dtype.itemsize for n, item in zip(numels, items)]
    assert_apart(list(zip(plan.shard_offset, kept)), plan.shard_bytes)
    assert_apart(list(zip(plan.wire_offset, sent)), plan.wire_bytes)
    assert_apart(list(zip(plan.full_offset, fulls)), plan.full_bytes)


@given(plans)
def test_everything_is_aligned(drawn: tuple[list[PlannedParam], FlatPlan]) -> None:
    items, plan = drawn
    assert all(offset % 16 == 0 for offset in (*plan.shard_offset, *plan.wire_offset))
    assert all(offset % 256 == 0 for offset in plan.full_offset)
    assert all(offset % item.dtype.itemsize == 0 for offset, item in zip(plan.shard_offset, items))
    assert all(offset % item.wire_dtype.itemsize == 0 for offset, item in zip(plan.wire_offset, items))
    assert plan.wire_bytes % 16 == 0 and plan.packed_start % 16 == 0


@given(plans)
def test_cast_runs_cover_every_piece_and_keep_its_place(drawn: tuple[list[PlannedParam], FlatPlan]) -> None:
    items, plan = drawn
    assert_apart([(span.shard_offset, span.numel * span.dtype.itemsize) for span in plan.spans], plan.shard_bytes)
    assert_apart([(span.wire_offset, span.numel * span.wire_dtype.itemsize) for span in plan.spans], plan.wire_bytes)
    for i, item in enumerate(items):
        homes = []
        for span in plan.spans:
            first, rest = divmod(plan.shard_offset[i] - span.shard_offset, item.dtype.itemsize)
            if (span.dtype, span.wire_dtype) != (item.dtype, item.wire_dtype) or not 0 <= first <= span.numel:
                continue
            if rest == 0 and first + item.layout.slot_numel <= span.numel:
                homes.append((span, first))
        if item.layout.slot_numel:
            ((span, first),) = homes
            assert plan.wire_offset[i] == span.wire_offset + first * item.wire_dtype.itemsize


@given(plans)
def test_neighbouring_runs_differ_and_one_pair_of_dtypes_is_one_run(drawn: tuple[list[PlannedParam], FlatPlan]) -> None:
    items, plan = drawn
    pairs = [(span.dtype, span.wire_dtype) for span in plan.spans]
    assert all(a != b for a, b in zip(pairs, pairs[1:]))
    kinds = {(item.dtype, item.wire_dtype) for item in items}
    assert set(pairs) == kinds and len(pairs) <= 2 * len(kinds) - 1
    assert plan.casts == any(kept != sent for kept, sent in kinds)


@given(plans)
def test_what_is_not_cast_is_sent_from_the_shard_buffer(drawn: tuple[list[PlannedParam], FlatPlan]) -> None:
    items, plan = drawn
    uncast = plan_flat([PlannedParam(i.layout, i.dtype, i.dtype) for i in items], ALL_DIRECT)
    assert not uncast.casts
    assert uncast.shard_offset == uncast.wire_offset and uncast.shard_bytes == uncast.wire_bytes
    assert plan.shard_bytes >= sum(item.layout.slot_numel * item.dtype.itemsize for item in items)


@given(plans)
def test_packed_pieces_are_the_tail_of_the_wire_buffer(drawn: tuple[list[PlannedParam], FlatPlan]) -> None:
    items, plan = drawn
    assert sorted(plan.direct + plan.packed) == [i for i, item in enumerate(items) if item.layout.numel]
    assert list(plan.direct) == sorted(plan.direct)
    assert all(plan.wire_offset[i] >= plan.packed_start for i in plan.packed)
    for i in plan.direct:
        sent = items[i].layout.slot_numel * items[i].wire_dtype.itemsize
        assert plan.wire_offset[i] + sent <= plan.packed_start
    if not plan.packed:
        assert plan.packed_start == plan.wire_bytes


@given(items_and_sizes())
def test_only_large_aligned_rank_major_pieces_go_straight_to_their_place(
    drawn: tuple[list[PlannedParam], TransferSizes],
) -> None:
    items, sizes = drawn
    group = sum(item.layout.numel * item.wire_dtype.itemsize for item in items)
    direct = plan_flat(items, sizes).direct
    for i, item in enumerate(items):
        layout = item.layout
        movable = layout.rank_major and layout.numel > 0
        large = item.full_bytes >= (sizes.direct_param_bytes or 0) and group >= sizes.direct_group_bytes
        aligned = layout.slot_numel * item.wire_dtype.itemsize % 16 == 0
        assert (i in direct) == (movable and (layout.ranks == 1 or (large and aligned)))


def linear(rows: int, columns: int, ranks: int = 4) -> PlannedParam:
    """Return a float32 weight."""
    return PlannedParam(ShardLayout((rows, columns), (columns, 1), 0, ranks), torch.float32, torch.float32)


def test_the_default_sizes_pack_small_groups_and_small_parameters() -> None:
    big, small = linear(1024, 1024), linear(4, 4)
    assert plan_flat([big, small], TransferSizes()).direct == ()  # 4 MiB: not worth several collectives
    assert plan_flat([big, small, big], TransferSizes()).direct == (0, 2)
    assert plan_flat([big, small, big], TransferSizes(direct_group_bytes=1 << 62)).direct == ()


@pytest.mark.parametrize("ranks", [8, 64, 1024])
def test_coalesced_gathers_are_few_and_large_on_every_rank(ranks: int) -> None:
    """Hundreds of experts of a few megabytes each had a collective each, of 4 KiB per rank on many ranks."""
    experts = [linear(rows, 1024, ranks) for rows in (ranks * 8, ranks * 32, ranks * 64) for _ in range(40)]
    assert len(plan_flat(experts, TransferSizes()).direct) == (80 if ranks == 8 else 120)
    largest = tuple(range(80, 96))
    assert plan_flat(experts, TransferSizes(), coalesced=True).direct == largest
    assert plan_flat(experts, ALL_DIRECT, coalesced=True).direct == largest
    small = [linear(ranks * 7, 1024, ranks)] * 64
    assert plan_flat(small, TransferSizes(), coalesced=True).direct == ()


def test_an_empty_group_needs_no_bytes() -> None:
    plan = plan_flat([], TransferSizes())
    assert (plan.shard_bytes, plan.wire_bytes, plan.full_bytes, plan.packed_start) == (0, 0, 0, 0)
    assert not plan.casts and plan.spans == ()


# ---- gradients ----

KEYS = ("bf16", "fp32", "fp8")


@st.composite
def gradients(draw: st.DrawFn) -> tuple[list[str], list[int], TransferSizes]:
    """Keys and sizes of up to 12 gradients, and the smallest chunk."""
    kinds = st.tuples(st.sampled_from(KEYS[: draw(st.integers(1, 3))]), st.sampled_from([0, 1, 10, 64, 100, 1000]))
    drawn = draw(st.lists(kinds, max_size=12))
    sizes = TransferSizes(chunk_bytes=draw(st.sampled_from([1, 50, 100, 400, 1 << 62])))
    return [key for key, _ in drawn], [nbytes for _, nbytes in drawn], sizes


@given(gradients())
def test_chunks_partition_the_gradients(drawn: tuple[list[str], list[int], TransferSizes]) -> None:
    keys, nbytes, sizes = drawn
    plan = plan_chunks(keys, nbytes, sizes)
    assert plan.chunks == plan.streamed + plan.at_end
    assert sorted(i for chunk in plan.chunks for i in chunk) == list(range(len(keys)))
    assert all(plan.chunks)


@given(gradients())
def test_a_chunk_has_one_key_and_the_rest_one_chunk_per_key(drawn: tuple[list[str], list[int], TransferSizes]) -> None:
    keys, nbytes, sizes = drawn
    plan = plan_chunks(keys, nbytes, sizes)
    assert all(len({keys[i] for i in chunk}) == 1 for chunk in plan.chunks)
    rest = [keys[chunk[0]] for chunk in plan.at_end]
    assert len(rest) == len(set(rest))
    assert all(list(chunk) == sorted(chunk) for chunk in plan.at_end)


@given(gradients())
def test_streamed_chunks_follow_backward_and_are_no_larger_than_needed(
    drawn: tuple[list[str], list[int], TransferSizes],
) -> None:
    keys, nbytes, sizes = drawn
    least = max(sum(nbytes) * 9 // 80, sizes.chunk_bytes)  # a little less than an eighth
    streamed = plan_chunks(keys, nbytes, sizes).streamed
    order = [i for chunk in streamed for i in chunk]
    assert order == sorted(order, reverse=True)
    for chunk in streamed:
        assert sum(nbytes[i] for i in chunk) >= least > sum(nbytes[i] for i in chunk[:-1])
        assert all(4 * nbytes[i] >= least - 3 for i in chunk)


@given(gradients())
def test_large_gradients_of_one_key_never_wait_in_vain(drawn: tuple[list[str], list[int], TransferSizes]) -> None:
    """With one dtype, less than one chunk of large gradients is left for the end of the group's backward."""
    _, nbytes, sizes = drawn
    least = max(sum(nbytes) * 9 // 80, sizes.chunk_bytes)  # a little less than an eighth
    left = [i for chunk in plan_chunks(["same"] * len(nbytes), nbytes, sizes).at_end for i in chunk]
    assert sum(nbytes[i] for i in left if nbytes[i] >= max(least // 4, 1)) < least


def test_a_transformer_block_streams_its_matrices_last_one_first() -> None:
    names = ["norm1", "qkv", "proj", "norm2", "up", "down"]
    nbytes = [8 << 10, 12 << 20, 4 << 20, 8 << 10, 16 << 20, 16 << 20]
    plan = plan_chunks(["bf16"] * 6, nbytes, TransferSizes())
    assert [[names[i] for i in chunk] for chunk in plan.streamed] == [["down"], ["up"], ["proj", "qkv"]]
    assert [[names[i] for i in chunk] for chunk in plan.at_end] == [["norm1", "norm2"]]
    plan = plan_chunks(["fp32"] * 3, [25, 24, 80], TransferSizes(chunk_bytes=100))
    assert plan == ChunkPlan(streamed=((2, 0),), at_end=((1,),))  # a quarter of a chunk is large


@pytest.mark.parametrize(("ranks", "chunks"), [(8, 5), (64, 5), (90, 4), (128, 2), (256, 1), (1024, 1), (4096, 1)])
def test_chunks_grow_with_the_ranks_until_a_unit_leaves_at_once(ranks: int, chunks: int) -> None:
    """Each costs latency in proportion to the ranks, which at 1024 is a quarter of a layer's backward."""
    block = [mebi << 20 for mebi in (32, 8, 8, 32, 112, 112, 112)] + [8 << 10] * 2
    assert len(plan_chunks(["bf16"] * 9, block, TransferSizes(), ranks).chunks) == chunks


def test_a_small_unit_leaves_in_chunks_of_what_the_largest_leaves_in() -> None:
    """The attention of a mixture of experts, beside a unit of experts thirty times as large."""
    attention = [16 << 20, 2 << 20, 2 << 20, 16 << 20]
    assert len(plan_chunks(["bf16"] * 4, attention, TransferSizes(), 64).chunks) == 2
    assert len(plan_chunks(["bf16"] * 4, attention, TransferSizes(), 64, 1200 << 20).chunks) == 1


@pytest.mark.parametrize(("ranks", "chunks", "many"), [(8, 2, 2), (64, 2, 2), (128, 1, 2), (256, 1, 1), (1024, 1, 1)])
def test_on_streams_chunks_are_few(ranks: int, chunks: int, many: int) -> None:
    """A Llama 8B block in float32; the last chunk has all that is small. One of 70B is worth two on 128 ranks, and not
    even one of 405B from 256 on."""
    block = [mebi << 20 for mebi in (64, 16, 16, 64, 224, 224, 224)] + [16 << 10] * 2
    for times in (4, 15):
        large = [times * nbytes for nbytes in block]
        assert len(plan_chunks(["fp32"] * 9, large, TransferSizes(), ranks, streams=True).chunks) == many
    plan = plan_chunks(["fp32"] * 9, block, TransferSizes(), ranks, streams=True)
    assert len(plan.chunks) == chunks
    assert len(plan.at_end) == 1 and {7, 8} <= set(plan.at_end[0])


@pytest.mark.parametrize(("ranks", "large"), [(8, (0, 1, 2, 3)), (1024, (0, 3))])
def test_gradients_are_reduced_in_place_where_every_rank_has_enough_of_them(ranks: int, large: tuple[int, ...]) -> None:
    """Small ones, uneven ones, and those that are cut along a faster dimension are packed."""
    matrix, key = ShardLayout((4096, 4096), (4096, 1), 0, ranks), ShardLayout((1024, 4096), (4096, 1), 0, ranks)
    norm, uneven = ShardLayout((4096,), (1,), 0, ranks), ShardLayout((4097, 4096), (4096, 1), 0, ranks)
    columns = ShardLayout((4096, 4096), (4096, 1), 1, ranks)
    assert reduced_in_place([matrix, key, key, matrix, norm, uneven, columns], 2, TransferSizes()) == large
    assert reduced_in_place([matrix] * 20, 2, TransferSizes()) == tuple(range(15))  # in one launch with the packed rest


def test_nothing_to_reduce_is_no_chunk() -> None:
    assert plan_chunks([], [], TransferSizes()) == ChunkPlan((), ())


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_empty_gradients_are_left_to_the_end(chunk_bytes: int) -> None:
    plan = plan_chunks(["a", "a"], [0, 0], TransferSizes(chunk_bytes=chunk_bytes))
    assert plan == ChunkPlan((), ((0, 1),))


rows_of_layouts = st.integers(1, 4).flatmap(lambda ranks: st.lists(layouts(ranks=ranks), min_size=1, max_size=5))


@given(rows_of_layouts)
def test_a_row_has_one_slot_per_gradient_and_no_gaps(drawn: list[ShardLayout]) -> None:
    row, end = RowPlan(drawn), 0
    for layout, offset in zip(drawn, row.offsets):
        assert offset == end
        end += layout.slot_numel
    assert row.numel == end


@given(rows_of_layouts)
def test_the_pieces_of_a_row_are_those_of_the_layouts(drawn: list[ShardLayout]) -> None:
    row = RowPlan(drawn)
    for rank in range(drawn[0].ranks):
        expected = [(layout.shard_shape(rank), layout.shard_stride(rank)) for layout in drawn]
        assert [(shape, stride) for shape, stride, _ in row.pieces(rank)] == expected
        assert tuple(offset for _, _, offset in row.pieces(rank)) == row.offsets
        assert row.pieces(rank) is row.pieces(rank)  # made once


@given(rows_of_layouts)
def test_one_kernel_packs_only_what_torch_chunks_in_memory_order(drawn: list[ShardLayout]) -> None:
    kernel = RowPlan(drawn).chunk_cat
    assert kernel == all(
        layout.numel > 0 and layout.dim == 0 and list(layout.memory_order) == list(range(len(layout.shape)))
        for layout in drawn
    )
    if kernel:
        ranks = drawn[0].ranks
        grads = [torch.arange(1.0, layout.numel + 1).view(layout.shape) for layout in drawn]
        table = torch._chunk_cat(grads, 0, ranks)
        for rank in range(ranks):
            for grad, (shape, stride, offset) in zip(grads, RowPlan(drawn).pieces(rank)):
                pieces = grad.chunk(ranks)
                expected = pieces[rank] if rank < len(pieces) else grad[:0]
                assert torch.equal(table[rank].as_strided(shape, stride, rank * table.shape[1] + offset), expected)


def test_a_slot_has_room_for_what_is_written_behind_a_piece() -> None:
    """The next piece begins behind it, and packed slots are sent with it."""
    layout = ShardLayout((10,), (1,), 0, 2)
    items = [PlannedParam(layout, torch.float32, torch.float32, room=room) for room in (0, 9)]
    plan = plan_flat([*items, items[0]], TransferSizes())
    assert plan.shard_offset == (0, 32, 80) and plan.wire_bytes == 112
