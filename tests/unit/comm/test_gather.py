"""Gathering on simulated ranks: whatever the plan, every rank gets every parameter, and memory comes and goes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fsdp2.comm.collectives import wire_view
from fsdp2.comm.gather import Buffer, GatherBuffers, HostCopies, finish_gather, start_gather
from fsdp2.comm.streams import Lanes
from fsdp2.compression.formats import BlockFormat
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import FlatPlan, PlannedParam, TransferSizes, plan_flat
from tests.support.fake import fake_mesh
from tests.support.scenarios import Training
from tests.support.streams import Device
from tests.unit.comm.ranks import axes, sent, simulated
from tests.unit.strategies import chunk, counted, dense_strides, layouts

CPU = torch.device("cpu")
LANES = Lanes(CPU)
DIRECT = TransferSizes(direct_param_bytes=0, direct_group_bytes=0)
PACKED = TransferSizes(direct_group_bytes=1 << 62)
CASTS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float64, torch.float64),
    (torch.int16, torch.int16),
    (torch.bool, torch.bool),
    (torch.complex64, torch.complex64),
]


@dataclass
class Rank:
    """One rank's side of a group."""

    axis: Axis
    shards: Tensor
    buffers: GatherBuffers

    def fulls(self) -> list[Tensor]:
        """Return the full parameters as forward sees them."""
        plan, found = self.buffers.plan, []
        for item, offset in zip(self.buffers.items, plan.full_offset):
            layout = item.layout
            flat = self.buffers.full.view(offset, layout.full_storage_numel, item.wire_dtype)
            found.append(flat.as_strided(layout.shape, layout.stride))
        return found


def write_shards(shards: Tensor, plan: FlatPlan, items: list[PlannedParam], wholes: list[Tensor], rank: int) -> None:
    """Put this rank's pieces into its shard buffer."""
    for item, whole, start in zip(items, wholes, plan.shard_offset):
        layout, numel = item.layout, item.layout.shard_numel(rank)
        flat = shards[start : start + numel * item.dtype.itemsize].view(item.dtype)
        flat.as_strided(layout.shard_shape(rank), layout.shard_stride(rank)).copy_(chunk(whole, layout, rank))


def make_ranks(
    items: list[PlannedParam], sizes: TransferSizes, wholes: list[Tensor], *, fused: bool | None = None
) -> list[Rank]:
    """Return every rank's side of a group with these parameters."""
    plan, made = plan_flat(items, sizes), []
    for axis in axes(items[0].layout.ranks):
        shards = torch.zeros(plan.shard_bytes, dtype=torch.uint8)
        write_shards(shards, plan, items, wholes, axis.rank)
        full = Buffer(plan.full_bytes, CPU)
        made.append(Rank(axis, shards, GatherBuffers(items, plan, shards, full, fused=fused)))
        full.free()
    return made


def gather(ranks: list[Rank], **options: object) -> list[list[Tensor]]:
    """Gather on every rank and return the extras each got."""
    with simulated():
        flights = [start_gather(r.buffers, r.axis, HostCopies(LANES), **options) for r in ranks]
        extras = [finish_gather(flight, LANES.compute) for flight in flights]
        assert not any(flight.works for flight in flights)
        return extras


def numbered(items: list[PlannedParam], first: int = 0) -> list[Tensor]:
    """Return whole parameters with small numbers that every dtype can hold."""
    return [(counted(item.layout, torch.int64) % 5 + first + i % 3).to(item.dtype) for i, item in enumerate(items)]


def assert_gathered(ranks: list[Rank], wholes: list[Tensor]) -> None:
    """Assert that every rank has every parameter, cast as sent."""
    for rank in ranks:
        for item, full, whole in zip(rank.buffers.items, rank.fulls(), wholes):
            assert full.dtype == item.wire_dtype and full.stride() == item.layout.stride
            assert torch.equal(full.to(whole.dtype), whole.to(item.wire_dtype).to(whole.dtype))


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[PlannedParam], TransferSizes]:
    """Up to four parameters of mixed layouts and dtypes, gathered in any way; empty ones only next to another."""
    ranks, fixed = draw(st.integers(1, 4)), draw(st.booleans())
    item = st.builds(
        lambda layout, cast: PlannedParam(layout, *cast),
        layouts(ranks=ranks, nonempty=not fixed),
        st.sampled_from(CASTS),
    )
    items = draw(st.lists(item, min_size=0 if fixed else 1, max_size=3))
    if fixed:
        one = PlannedParam(ShardLayout((1,), (1,), 0, ranks), torch.float32, torch.float32)
        items.insert(draw(st.integers(0, len(items))), one)
    return items, draw(st.sampled_from([DIRECT, PACKED, TransferSizes(64, 100)]))


@settings(max_examples=50)
@given(groups(), st.booleans())
def test_every_rank_has_every_parameter(drawn: tuple[list[PlannedParam], TransferSizes], fused: bool) -> None:
    items, sizes = drawn
    wholes = numbered(items)
    ranks = make_ranks(items, sizes, wholes, fused=fused)
    gather(ranks)
    assert_gathered(ranks, wholes)


@settings(max_examples=50)
@given(groups())
def test_the_same_tensors_are_filled_again_after_they_were_freed(
    drawn: tuple[list[PlannedParam], TransferSizes],
) -> None:
    items, sizes = drawn
    ranks = make_ranks(items, sizes, numbered(items))
    gather(ranks)
    views = [rank.fulls() for rank in ranks]
    versions = [view._version for rank in views for view in rank]
    changed = numbered(items, first=2)
    for rank in ranks:
        rank.buffers.full.free()
        assert rank.buffers.full.bytes.untyped_storage().size() == 0
        write_shards(rank.shards, rank.buffers.plan, items, changed, rank.axis.rank)
    gather(ranks)
    for rank, seen in zip(ranks, views):
        assert all(torch.equal(a.to(torch.complex64), b.to(torch.complex64)) for a, b in zip(seen, rank.fulls()))
    assert_gathered(ranks, changed)
    assert [view._version for rank in views for view in rank] == versions  # autograd must not see a change


@settings(max_examples=50)
@given(groups())
def test_only_the_full_parameters_take_memory_afterwards(drawn: tuple[list[PlannedParam], TransferSizes]) -> None:
    items, sizes = drawn
    ranks = make_ranks(items, sizes, numbered(items))

    def sizes_of(rank: Rank) -> list[int]:
        kept = (rank.buffers.full, rank.buffers.wire, rank.buffers.staging)
        return [0 if buffer is None else buffer.bytes.untyped_storage().size() for buffer in kept]

    assert all(sizes_of(rank) == [0, 0, 0] for rank in ranks)
    gather(ranks)
    assert all(sizes_of(rank) == [rank.buffers.plan.full_bytes, 0, 0] for rank in ranks)


def matrix(rows: int, columns: int, ranks: int = 2, order: tuple[int, int] = (0, 1), dim: int = 0) -> PlannedParam:
    """Return a float32 parameter."""
    stride = dense_strides((rows, columns), order)
    return PlannedParam(ShardLayout((rows, columns), stride, dim, ranks), torch.float32, torch.float32)


def test_a_large_parameter_is_gathered_from_its_shard_into_its_place() -> None:
    items = [matrix(8, 16), matrix(8, 16)]
    ranks = make_ranks(items, DIRECT, numbered(items))
    gather(ranks)
    for rank in ranks:
        first, second = sent(rank.axis)
        assert first.sent.data_ptr() == rank.shards.data_ptr()
        assert [first.output.data_ptr(), second.output.data_ptr()] == [full.data_ptr() for full in rank.fulls()]
        assert rank.buffers.staging is None and rank.buffers.wire is None


def test_what_is_small_travels_together_without_a_copy_before_it() -> None:
    items = [matrix(8, 16), matrix(3, 2), matrix(4, 4, order=(1, 0)), matrix(4, 4, dim=1)]
    ranks = make_ranks(items, TransferSizes(direct_param_bytes=256, direct_group_bytes=0), numbered(items))
    gather(ranks)
    for rank in ranks:
        large, small = sent(rank.axis)
        assert large.output.data_ptr() == rank.fulls()[0].data_ptr()
        assert small.sent.data_ptr() == rank.shards.data_ptr() + rank.buffers.plan.packed_start
        assert small.sent.nbytes == rank.buffers.plan.wire_bytes - rank.buffers.plan.packed_start


def test_a_group_of_one_dtype_is_cast_by_one_kernel() -> None:
    items = [PlannedParam(matrix(8, 16).layout, torch.float32, torch.bfloat16) for _ in range(5)]
    ranks = make_ranks(items, TransferSizes(direct_param_bytes=64, direct_group_bytes=0), numbered(items))
    assert [len(rank.buffers.fills) for rank in ranks] == [1, 1]


@pytest.mark.parametrize("columns", [8, 3], ids=["no gaps", "gaps"])
def test_one_kernel_unpacks_what_lies_in_rank_order(columns: int) -> None:
    """Whatever the alignment leaves between the pieces; a cut along another dimension goes by copies."""
    items = [matrix(4, columns), matrix(3, columns), PlannedParam(matrix(2, 3).layout, torch.float32, torch.bfloat16)]
    ranks = make_ranks(items, PACKED, numbered(items), fused=True)
    assert all([one.func for one in rank.buffers.unpacks] == [torch.split_with_sizes_copy] for rank in ranks)
    gather(ranks)
    assert_gathered(ranks, numbered(items))
    others = make_ranks([*items, matrix(4, 4, dim=1)], PACKED, numbered([*items, matrix(4, 4)]), fused=True)
    assert all(one.func is not torch.split_with_sizes_copy for rank in others for one in rank.buffers.unpacks)


# ---- custom collectives and extras ----


class Arena:
    """An all-gather of the user's own, whose buffers are parts of one allocation."""

    def __init__(self) -> None:
        self.memory = torch.zeros(1 << 14, dtype=torch.uint8)
        self.taken = 64
        self.dtypes: set[torch.dtype] = set()

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the next part."""
        numel = torch.Size(size).numel()
        self.dtypes.add(dtype)
        start, self.taken = self.taken, self.taken + -(-numel * dtype.itemsize // 16) * 16
        return self.memory[start : start + numel * dtype.itemsize].view(dtype).view(size)


@settings(max_examples=50)
@given(groups())
def test_a_custom_collective_gets_one_buffer_that_it_allocated(drawn: tuple[list[PlannedParam], TransferSizes]) -> None:
    items, _ = drawn
    wholes = numbered(items)
    ranks = make_ranks(items, PACKED, wholes)
    arena = Arena()
    gather(ranks, custom=arena)
    assert_gathered(ranks, wholes)
    dtypes = {wire_view(torch.empty(0, dtype=item.wire_dtype)).dtype for item in items if item.layout.numel}
    assert len(ranks) == 1 or arena.taken == 64 or arena.dtypes == (dtypes if len(dtypes) == 1 else {torch.uint8})
    memory = range(arena.memory.data_ptr() + 64, arena.memory.data_ptr() + arena.taken)
    for rank in ranks if len(ranks) > 1 else ():
        assert all(message.output.data_ptr() in memory or not message.output.numel() for message in sent(rank.axis))


@settings(max_examples=50)
@given(groups(), st.lists(st.sampled_from([torch.float32, torch.uint8, torch.bfloat16]), min_size=1, max_size=3))
def test_extras_travel_along(drawn: tuple[list[PlannedParam], TransferSizes], dtypes: list[torch.dtype]) -> None:
    items, sizes = drawn
    wholes = numbered(items)
    ranks = make_ranks(items, sizes, wholes)
    extras = [[torch.full((3 + i,), r + i).to(dtype) for i, dtype in enumerate(dtypes)] for r in range(len(ranks))]
    with simulated():
        flights = [start_gather(r.buffers, r.axis, HostCopies(LANES), extras=own) for r, own in zip(ranks, extras)]
        got = [finish_gather(flight, LANES.compute) for flight in flights]
    assert_gathered(ranks, wholes)
    for gathered in got:
        assert len(gathered) == len(dtypes)
        for i, rows in enumerate(gathered):
            assert torch.equal(rows, torch.stack([own[i] for own in extras]))


# ---- memory ----


def test_a_buffer_keeps_its_storage_while_its_memory_comes_and_goes() -> None:
    buffer = Buffer(64, CPU)
    view, storage = buffer.view(16, 4, torch.float32), buffer.bytes.untyped_storage()
    buffer.free()
    buffer.free()
    assert storage.size() == 0
    buffer.allocate()
    assert storage.size() == 64
    view.fill_(3.0)
    buffer.allocate()  # what is there stays
    assert view.tolist() == [3.0] * 4
    assert buffer.view(16, 4, torch.float32).tolist() == [3.0] * 4
    assert view.untyped_storage().data_ptr() == storage.data_ptr()


def test_shards_on_the_host_are_copied_beside_the_gather_before() -> None:
    """The third copy waits for the first one's gather, and not for the second's; then two are given back."""
    with Device():
        lanes = Lanes(CPU)
        copies, wires = HostCopies(lanes), [Buffer(16, CPU) for _ in range(3)]
        copy, gather = lanes.copy._stream, lanes.gather._stream
        for wire in wires:
            buffers = cast(GatherBuffers, SimpleNamespace(wire=wire, fill_wire=wire.bytes.zero_))
            copied = copies.start_copy(buffers)
            known = copy.clocks.get(gather.name, 0)
            with lanes.gather.after(copied) as gathered:
                wire.bytes + 1
            copies.hold(buffers, gathered.event)
        assert known == gather.clocks[gather.name] // 3
        assert [wire.bytes.untyped_storage().nbytes() for wire in wires] == [0, 0, 16]
        copies.end()
        assert wires[2].bytes.untyped_storage().nbytes() == 0
        assert copy.clocks[gather.name] == gather.clocks[gather.name]


def test_an_empty_buffer_is_harmless() -> None:
    buffer = Buffer(0, CPU)
    buffer.free()
    buffer.allocate()
    assert buffer.view(0, 0, torch.float32).shape == (0,)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_group_of_empty_parameters_is_gathered(shape: tuple[int, int]) -> None:
    items = [matrix(*shape)]
    ranks = make_ranks(items, PACKED, numbered(items))
    gather(ranks)
    assert [tuple(full.shape) for rank in ranks for full in rank.fulls()] == [shape] * 2


FORMS = [None, BlockFormat(torch.int8, 16), BlockFormat(torch.float8_e4m3fn, 32)]


@st.composite
def encoded_groups(draw: st.DrawFn) -> list[PlannedParam]:
    """Up to four parameters of any layout, some of them encoded."""
    ranks = draw(st.integers(2, 4))
    item = st.builds(
        lambda layout, cast, form: PlannedParam(layout, *cast, form=form if layout.dim is not None else None),
        layouts(ranks=ranks, nonempty=True),
        st.sampled_from(CASTS[:3]),
        st.sampled_from(FORMS),
    )
    return draw(st.lists(item, min_size=1, max_size=4))


@settings(max_examples=100)
@given(encoded_groups(), st.sampled_from([DIRECT, PACKED]), st.booleans(), st.booleans())
def test_encoded_parameters_are_decoded_to_their_places(
    items: list[PlannedParam], sizes: TransferSizes, fused: bool, extra: bool
) -> None:
    """Beside others that arrive as they are; on every rank the same values, twice, within a step of the largest."""
    wholes = numbered(items)
    ranks = make_ranks(items, sizes, wholes, fused=fused)
    extras = {"extras": [torch.arange(3.0)]} if extra else {}
    gather(ranks, **extras)
    first = [[full.clone() for full in rank.fulls()] for rank in ranks]
    gather(ranks, **extras)
    for rank, fulls in zip(ranks, first):
        for item, full, again, before, whole in zip(items, rank.fulls(), fulls, first[0], wholes):
            assert torch.equal(full, again) and torch.equal(full, before)
            error = (full.double() - whole.to(item.wire_dtype).double()).abs().max()
            largest = {None: 0.0, torch.int8: 0.5 / 127, torch.float8_e4m3fn: 0.5 / 14}
            assert error <= largest[item.form and item.form.kind] * 8 * 1.01 + (
                0.02 if item.wire_dtype.itemsize < 4 else 0
            )


def test_encoded_parameters_of_a_group_travel_together_with_the_others() -> None:
    """One message: numbers, scales, and what is not encoded; at most 1.05 bytes for each element that is."""
    form = BlockFormat(torch.int8, 256)
    coded = [PlannedParam(matrix(64, 64).layout, torch.float32, torch.float32, form=form) for _ in range(3)]
    items = [matrix(8, 16), *coded, matrix(3, 2)]
    ranks = make_ranks(items, PACKED, numbered(items))
    gather(ranks)
    (message,) = sent(ranks[0].axis)
    plain = 4 * (8 * 16 + 4 * 2) // 2
    assert 3 * 64 * 32 <= message.sent.nbytes - plain <= 1.05 * 3 * 64 * 32
    assert [one.func for one in ranks[0].buffers.fills].count(form.encode) == 1


def test_the_host_is_read_while_the_gather_before_is_on_its_way() -> None:
    """With shards on the host a unit's copy waits for no gather but the one before the last."""
    waited: list[Any] = []
    gathered: list[Any] = []
    copied: list[tuple[list[Any], list[Any]]] = []  # the gathers before a copy, and those that it waits for
    with mock.patch("fsdp2.comm.gather._on_host", return_value=True), fake_mesh(8) as mesh, Device() as device:
        run = Training(mesh, device, "copied from the host", "packed")
        run.step(2)
        copies = run.model._get_fsdp_state().root.comm.copies
        start, hold = copies.start_copy, copies.hold

        def start_copy(buffers: GatherBuffers) -> Any:
            done = start(buffers)
            copied.append(([*gathered], [*waited]))
            return done

        def note_hold(buffers: GatherBuffers, event: Any) -> None:
            hold(buffers, event)
            gathered.append(event)

        with (
            mock.patch.object(copies, "start_copy", start_copy),
            mock.patch.object(copies, "hold", note_hold),
            mock.patch.object(copies.lanes.copy, "wait", side_effect=waited.append),
        ):
            run.forward()
    assert len(copied) == 4
    for before, waits in copied:
        assert [event in waits for event in before] == [True] * (len(before) - 1) + [False] * bool(before)
