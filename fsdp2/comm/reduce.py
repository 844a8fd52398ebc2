"""Reducing gradients: from full gradients to this rank's shards of their mean, one chunk at a time.

A chunk is one operation with a few waits in it, written as a generator: start, yield while gradients travel, finish. It
takes tensors and gives tensors; which parameters they belong to is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch

from fsdp2.comm.collectives import Work, all_gather, all_reduce, all_to_all, prefers_all_to_all, reduce_scatter
from fsdp2.comm.formats import Draw, decode, decode_sum, encode, encoded_views
from fsdp2.comm.pieces import copy_all, pack_rows, piece_pairs, zero_gaps
from fsdp2.comm.scaling import Scaling, divide_
from fsdp2.comm.streams import Lane, Retained
from fsdp2.policies import ReduceScatter
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import BlockFormat, RowPlan

__all__ = ["Compression", "ReducePlan", "pack_gradients", "reduce_chunk"]


@dataclass(frozen=True)
class Compression:
    """How gradients are encoded on the shard axis and on the replicate axis; None for as they are, or no such axis.

    Each has random numbers of its own to round by, since each runs on a lane of its own; None rounds to the nearest.
    """

    reduce: BlockFormat | None = None
    replicate: BlockFormat | None = None
    draw: Draw | None = None
    draw_again: Draw | None = None


@dataclass(frozen=True)
class ReducePlan:
    """What is the same for every chunk of a group and dtype.

    ``hook`` sees the reduced chunk before the final division and cast, on ``hook_lane`` if there is one. With
    ``offload`` the shards are delivered on the CPU. ``wire_dtype`` may be narrower than ``reduce_dtype``; it must be
    the same on every rank, so it cannot depend on which gradients a rank happens to have. ``exchange_bytes`` is the
    size from which on each rank sums what the others send it, None for what suits the backend. What is encoded has
    rows of whole blocks, and float32 to reduce in.
    """

    shard: Axis
    replicate: Axis
    reduce_dtype: torch.dtype
    out_dtype: torch.dtype
    scaling: Scaling
    wire_dtype: torch.dtype | None = None
    exchange_bytes: int | None = None
    custom: ReduceScatter | None = None
    hook: Callable[[torch.Tensor], None] | None = None
    hook_lane: Lane | None = None
    offload: bool = False
    pin_memory: bool = False
    compression: Compression = field(default_factory=Compression)


def _sends_as_it_is(grads: list[torch.Tensor], row: RowPlan, dtype: torch.dtype) -> bool:
    """Whether the memory of a single gradient already is one row per rank in ``dtype``; rows include their padding."""
    if len(grads) != 1 or row.padding:
        return False
    grad, layout = grads[0], row.layouts[0]
    return grad.dtype == dtype and layout.rank_major and layout.even and grad.stride() == layout.stride


def pack_gradients(grads: list[torch.Tensor], row: RowPlan, rows: torch.Tensor) -> None:
    """Write ``grads`` into ``rows`` (1D, one row per rank), cast to its dtype; padding becomes zero."""
    ranks = row.layouts[0].ranks
    table = rows.view(ranks, row.numel)
    dtypes = [grad.dtype for grad in grads]
    in_order = row.chunk_cat and all([grad.is_contiguous() for grad in grads])
    if in_order and dtypes.count(dtypes[0]) == len(dtypes):
        pack_rows(grads, table, row.padding)
        return
    if in_order and row.even:  # gradients of norms come in float32 beside others
        slots = table.split(row.sizes, 1)
        copy_all(list(slots[: len(grads)]), [grad.view(ranks, -1) for grad in grads])
        if row.padding:
            slots[-1].zero_()
        return
    if row.padding:
        table[:, -row.padding :].zero_()  # an all-reduce hook may look at it
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for grad, layout, offset in zip(grads, row.layouts, row.offsets):
        slot_rows = table[:, offset : offset + layout.slot_numel]
        if layout.dim is None:  # every rank holds it whole, so every rank needs the whole sum
            pairs = [(grad.reshape(1, -1).expand(ranks, -1), slot_rows)]
        else:
            pairs = piece_pairs(grad, slot_rows, layout)
            zero_gaps(slot_rows, layout)
        for piece, slot in pairs:
            targets.append(slot)
            sources.append(piece)
    copy_all(targets, sources)


def reduce_chunk(
    grads: list[torch.Tensor],
    row: RowPlan,
    plan: ReducePlan,
    reductions: Retained,
    deliver: Callable[[list[torch.Tensor]], None],
    defer_or_reduce: Callable[[list[torch.Tensor]], bool] | None = None,
) -> Generator[None, None, None]:
    """Reduce ``grads`` (emptied, none of which needs a gradient itself) and ``deliver`` this rank's shards of them.

    Step 8 of the life of a parameter, which ``deliver`` ends.

    ``defer_or_reduce`` gets the sums over the shard axis, one slot per gradient: it adds what earlier backwards left
    there, and returns whether to go on to the replicate axis (True) or has kept them for a later backward. On streams
    this comes to its end at once, all of it queued, but for what the host must wait for: gradients that go to the CPU.
    """
    lanes, lane = reductions.lanes, reductions.lanes.reduce
    scatter = _start_scatter(grads, row, plan, reductions)
    if scatter.works:
        try:
            yield
        finally:  # also when abandoned: memory must not be used again before communication is through with it
            _wait(scatter.works)
    out, own, exchanged, event = scatter.out, scatter.own, scatter.exchanged, scatter.event
    del scatter
    if exchanged or defer_or_reduce is not None:
        with lane.after() as done:
            if exchanged:
                out = _sum_rows(out, own, plan)
            go_on = defer_or_reduce is None or defer_or_reduce(_slots(out, row))
        event = done.event
        if not go_on:
            reductions.end(lane, event)
            return
    summed, lane = out, lanes.replicate if plan.replicate.size > 1 else lane
    if plan.compression.replicate is not None:
        event = yield from _reduce_over_copies(out, plan, lane, event)
    elif plan.replicate.size > 1:
        with lane.after(event) as done:
            works = all_reduce(out, plan.replicate, average=plan.scaling.average, async_op=lane.async_op)
        event = done.event
        if works:
            yield
            _wait(works)
    if plan.hook is not None:
        lane = plan.hook_lane or lanes.replicate
        with lane.after(event):
            plan.hook(out)
    with lane.after() as done:
        out = _finish(out, plan)
        host_waits = lane.event() if plan.offload else None
        if host_waits is None:
            deliver(_cut(out, row, plan.shard.rank))
    reductions.end(lane, done.event, *([] if lane is lanes.reduce else [summed]))
    if host_waits is not None:
        yield
        host_waits.synchronize()  # the host reads what the copy engine writes
        deliver(_cut(out, row, plan.shard.rank))


@dataclass
class _Scatter:
    """A reduction in flight: ``out`` is this rank's row of every rank (``exchanged``), or their sum already.

    What travels encoded has no row of this rank's for itself, which is ``own``, in float32. The host waits for
    ``works``, with the ``inputs`` that must live until then; ``event`` is its end on a lane.
    """

    out: torch.Tensor
    exchanged: bool
    works: Sequence[Work]
    inputs: torch.Tensor | None
    event: torch.Event | None
    own: torch.Tensor | None = None


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


def _start_scatter(grads: list[torch.Tensor], row: RowPlan, plan: ReducePlan, reductions: Retained) -> _Scatter:
    device, custom, ranks = grads[0].device, plan.custom, plan.shard.size
    if plan.compression.reduce is not None:
        return _start_exchange(grads, row, plan, plan.compression.reduce, reductions)
    nbytes = row.numel * ranks * plan.reduce_dtype.itemsize
    exchange = custom is None and prefers_all_to_all(plan.shard, nbytes, plan.exchange_bytes)
    # What each rank sums itself may travel as it is: widening commutes with sending.
    narrow = exchange and plan.scaling.pre == 1.0
    wire_dtype = plan.wire_dtype if narrow and plan.wire_dtype is not None else plan.reduce_dtype
    # A division before the sum needs memory of our own: the user may hold the gradient itself.
    as_it_is = plan.scaling.pre == 1.0 and custom is None and _sends_as_it_is(grads, row, wire_dtype)
    lanes, lane = reductions.lanes, reductions.lanes.reduce
    packing = lane if custom is not None else lanes.pack  # it may allocate the same memory each time
    if as_it_is:
        rows = grads[0].as_strided((grads[0].numel(),), (1,))
    else:
        with packing.after(lanes.compute) as packed:
            rows = _allocate(row.numel * ranks, wire_dtype, device, custom)
            pack_gradients(grads, row, rows)
        reductions.hold(packed.event, grads)
    grads.clear()
    with lane.after(lanes.compute if as_it_is else packed.event) as done:
        if plan.scaling.pre != 1.0:
            divide_(rows, plan.scaling.pre)
        if exchange:
            out = torch.empty_like(rows)
            works = all_to_all(out, rows, plan.shard, async_op=lane.async_op)
        else:
            out = _allocate(row.numel, plan.reduce_dtype, device, custom)
            average = plan.scaling.average
            works = reduce_scatter(out, rows, plan.shard, average=average, async_op=lane.async_op, custom=custom)
        if not lane.async_op:  # a custom collective may give works all the same
            _wait(works)
            works = []
    if as_it_is:
        reductions.hold(done.event, [rows])
    elif packing is not lane:
        reductions.hold_rows(done.event, rows)
    return _Scatter(out, exchange and ranks > 1, works, rows if works else None, done.event)


def _start_exchange(
    grads: list[torch.Tensor], row: RowPlan, plan: ReducePlan, form: BlockFormat, reductions: Retained
) -> _Scatter:
    """Send each other rank its row, encoded; this rank's own is added as it is."""
    lanes, lane, ranks = reductions.lanes, reductions.lanes.reduce, plan.shard.size
    with lanes.pack.after(lanes.compute) as packed:
        if _sends_as_it_is(grads, row, grads[0].dtype):
            rows = grads[0].as_strided((grads[0].numel(),), (1,))
        else:
            rows = torch.empty(row.numel * ranks, dtype=plan.reduce_dtype, device=grads[0].device)
            pack_gradients(grads, row, rows)
        sent, own = _encode_for_others(rows, plan.shard, form, plan.compression.draw)
        del rows
    reductions.hold(packed.event, grads)
    grads.clear()
    with lane.after(packed.event) as done:
        out = torch.empty_like(sent)
        works = all_to_all(out, sent, plan.shard, async_op=lane.async_op, with_own=False)
        mine = own if lane.async_op else own.clone()  # in this lane's memory, since it becomes the sum
    reductions.hold_rows(done.event, sent, own)
    return _Scatter(out, True, works, sent if works else None, done.event, mine)


def _encode_for_others(
    values: torch.Tensor, axis: Axis, form: BlockFormat, draw: Draw | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of ``values`` (1D, one per rank) for other ranks, as bytes, and a copy of this rank's own in float32."""
    table, rank = values.view(axis.size, -1), axis.rank
    sent = torch.empty(axis.size - 1, form.nbytes(table.shape[1]), dtype=torch.uint8, device=values.device)
    into = encoded_views(sent, table.shape[1], form)
    for rows, part in ((table[:rank], slice(rank)), (table[rank + 1 :], slice(rank, None))):
        if len(rows):
            encode(rows, into.part(part, slice(None)), form, draw)
    return sent.view(-1), table[rank].to(torch.float32, copy=True)


def _add_decoded(
    received: torch.Tensor, own: torch.Tensor, axis: Axis, form: BlockFormat, scaling: Scaling
) -> torch.Tensor:
    """``own``, this rank's row in float32, made the sum (or mean) of it and the encoded rows of others."""
    rows = encoded_views(received.view(axis.size - 1, -1), own.numel(), form)
    decode_sum(rows, own, form, axis.size if scaling.average else 1)
    return own


def _reduce_over_copies(
    out: torch.Tensor, plan: ReducePlan, lane: Lane, event: torch.Event | None
) -> Generator[None, None, torch.Event | None]:
    """Replace ``out`` by its sum (or mean) over the replicate axis: each rank sums a part of it, and all get the sums.

    Both travel encoded. A rank decodes its own part of the sums too, so that copies stay equal bit by bit.
    """
    axis, form, draw = plan.replicate, plan.compression.replicate, plan.compression.draw_again
    assert form is not None
    with lane.after(event):
        sent, own = _encode_for_others(out, axis, form, draw)
        received = torch.empty_like(sent)
        works = all_to_all(received, sent, axis, async_op=lane.async_op, with_own=False)
    yield from _until(works)
    with lane.after():
        total = _add_decoded(received, own, axis, form, plan.scaling)
        mine = torch.empty(1, form.nbytes(total.numel()), dtype=torch.uint8, device=out.device)
        encode(total.unsqueeze(0), encoded_views(mine, total.numel(), form), form, draw)
        del sent, received, own, total
        gathered = mine.new_empty(axis.size * mine.numel())
        works = all_gather([gathered], [mine.view(-1)], axis, async_op=lane.async_op)
    yield from _until(works)
    with lane.after() as done:
        rows = out.view(axis.size, -1)
        decode(encoded_views(gathered.view(axis.size, -1), rows.shape[1], form), rows, form)
    return done.event


def _until(works: Sequence[Work]) -> Generator[None, None, None]:
    """Wait for ``works``, also where what follows is abandoned."""
    if works:
        try:
            yield
        finally:
            _wait(works)


def _allocate(numel: int, dtype: torch.dtype, device: torch.device, custom: ReduceScatter | None) -> torch.Tensor:
    if custom is not None:
        return custom.allocate((numel,), dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device=device)


def _sum_rows(rows: torch.Tensor, own: torch.Tensor | None, plan: ReducePlan) -> torch.Tensor:
    """The sum (or mean) of one row per rank, in float32 at least; others' alone are encoded, where there is an own."""
    form = plan.compression.reduce
    if own is not None and form is not None:
        return _add_decoded(rows, own, plan.shard, form, plan.scaling)
    wide = torch.float32 if plan.reduce_dtype.itemsize < 4 else plan.reduce_dtype
    first, second, *rest = rows.view(plan.shard.size, -1).unbind(0)
    # Adding row by row is up to twice as fast as a sum over the first dimension, and gives the same bits.
    total = torch.add(first, second) if first.dtype == wide else first.to(wide).add_(second)
    for row in rest:
        total.add_(row)
    if plan.scaling.average:
        divide_(total, plan.shard.size)
    return total


def _finish(out: torch.Tensor, plan: ReducePlan) -> torch.Tensor:
    """Divided, cast, and on its way to the CPU where gradients live there."""
    if plan.scaling.post != 1.0:
        divide_(out, plan.scaling.post)
    if out.dtype != plan.out_dtype:
        out = out.to(plan.out_dtype)
    if not plan.offload or out.device.type == "cpu":
        return out
    host = torch.empty(out.shape, dtype=out.dtype, pin_memory=plan.pin_memory)
    return host.copy_(out, non_blocking=True)


def _slots(out: torch.Tensor, row: RowPlan) -> list[torch.Tensor]:
    return [out[offset : offset + layout.slot_numel] for offset, layout in zip(row.offsets, row.layouts)]


def _cut(out: torch.Tensor, row: RowPlan, rank: int) -> list[torch.Tensor]:
    """This rank's piece of every gradient in the reduced row."""
    start = out.storage_offset()  # custom collectives may bring memory that is part of a larger buffer
    return [out.as_strided(shape, stride, start + offset) for shape, stride, offset in row.pieces(rank)]
