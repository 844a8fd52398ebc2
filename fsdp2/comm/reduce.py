"""Reducing gradients: from full gradients to this rank's shards of their mean, one chunk at a time.

A chunk is one operation with a few waits, written as a generator: start, yield while gradients are on their way,
finish. It takes and returns tensors; only the caller knows which parameters they belong to.

A plan chooses how chunks are summed over the shard axis (`_OverShards`: a reduce-scatter, a caller's own one, an
exchange, an encoded exchange) and over the replicate axis (`_AllReduceOverReplicas`: an all-reduce, an encoded one).
With ``shard_over_replicas``, each rank gets only its part of these sums (`_ScatterOverReplicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol

import torch

from fsdp2.comm.collectives import (
    Work,
    all_gather,
    all_reduce,
    all_to_all,
    prefers_all_to_all,
    reduce_scatter,
    reduce_scatter_together,
)
from fsdp2.comm.pieces import copy_all, pack_rows, piece_pairs, zero_gaps
from fsdp2.comm.reductions import Abandoned
from fsdp2.comm.retained import Retained
from fsdp2.comm.scaling import Scaling, divide_
from fsdp2.comm.streams import Before, ComputeLane, Lane
from fsdp2.policies import ReduceScatter, WireFormat
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import ALIGN_BYTES, RowPlan, align

__all__ = ["Encoding", "Finished", "ReducePlan", "pack_gradients", "reduce_chunk"]


Finished = Literal["early", "last", "together"]
"""When autograd finished the gradients of a chunk, which decides when they are copied:

* "early": before backward has left their unit, or at the end of the whole backward. They are copied at once: in the
  first case they take memory beside activations, in the second no unit follows beside which they could be copied.
* "last" of their unit: they are copied beside the next unit.
* "together" with all others of their unit: they are copied at once, without waiting for room, since their memory is
  taken already.
"""


class Encoding(NamedTuple):
    """A format in which gradients are sent on one axis, and the state that it keeps on the lane that encodes."""

    form: WireFormat
    state: Any = None

    def for_others(self, values: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the rows of ``values`` (1D, one per rank) for other ranks, and copy this rank's own to float32."""
        table, rank = values.view(axis.size, -1), axis.rank
        sent = self._rows(axis.size - 1, table.shape[1], values.device)
        into = self._used(sent, table.shape[1])
        for rows, to in ((table[:rank], into[:rank]), (table[rank + 1 :], into[rank:])):
            if len(rows):
                self.form.encode(rows, to, self.state)
        return sent.view(-1), table[rank].to(torch.float32, copy=True)

    def add_up(self, received: torch.Tensor, own: torch.Tensor, axis: Axis, scaling: Scaling) -> torch.Tensor:
        """Make ``own``, this rank's row in float32, the sum (or mean) of it and the encoded rows of others."""
        rows = self._used(received.view(axis.size - 1, -1), own.numel())
        self.form.add(rows, own, axis.size if scaling.average else 1)
        return own

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the bytes of ``values`` (1D)."""
        sent = self._rows(1, values.numel(), values.device)
        self.form.encode(values.unsqueeze(0), self._used(sent, values.numel()), self.state)
        return sent.view(-1)

    def decode(self, gathered: torch.Tensor, rows: torch.Tensor) -> None:
        """Write to ``rows`` (ranks, elements) what all ranks have encoded."""
        ranks, numel = rows.shape
        self.form.decode(self._used(gathered.view(ranks, -1), numel), numel, rows, 0)

    def _rows(self, rows: int, numel: int, device: torch.device) -> torch.Tensor:
        return torch.empty(rows, align(self.form.nbytes(numel)), dtype=torch.uint8, device=device)

    def _used(self, rows: torch.Tensor, numel: int) -> torch.Tensor:
        return rows[:, : self.form.nbytes(numel)]


@dataclass(frozen=True)
class ReducePlan:
    """Settings that all chunks of a group with the same dtypes share.

    ``hook`` gets the reduced chunk before the final division and cast, on ``hook_lane`` if there is one. With
    ``offload`` the shards are delivered on the CPU. ``wire_dtype`` may be narrower than ``reduce_dtype``; it must be
    the same on every rank, so it cannot depend on which gradients a rank happens to have. From ``exchange_bytes`` on,
    each rank sums what the others send it; None: the backend's default. ``encodings`` are those of the shard and the
    replicate axis, each None if gradients are sent as they are. Encoded gradients have rows of whole blocks, and are
    reduced in float32. ``in_pairs``: gradients are summed as ``_in_pairs`` does, whatever the backend.
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
    in_pairs: bool = False
    encodings: tuple[Encoding | None, Encoding | None] = (None, None)

    @property
    def divided_over_shards(self) -> float:
        """The divisor already applied to a sum over the shard axis; the rest is applied over the replicate axis."""
        return self.scaling.pre * (self.shard.size if self.scaling.average else 1)

    @cached_property
    def all_reduce_over_replicas(self) -> _AllReduceOverReplicas:
        """The algorithm that sums chunks over the replicate axis."""
        encoding = self.encodings[1]
        if encoding is not None:
            return _EncodedAllReduce(self, encoding)
        return _PairedAllReduce(self) if self.in_pairs else _BackendAllReduce(self)

    @cached_property
    def scatter_over_replicas(self) -> _ScatterOverReplicas:
        """The algorithm that sums chunks over the replicate axis if each rank keeps only a part of the sum."""
        return _ScatterOverReplicas(self)

    def over_shards(self, row: RowPlan) -> _OverShards:
        """Choose the algorithm for a chunk of ``row`` on the shard axis, by its size, which is equal on all ranks."""
        if self._fixed is not None:
            return self._fixed
        nbytes = row.numel * self.shard.size * self.reduce_dtype.itemsize
        return self._exchange if prefers_all_to_all(self.shard, nbytes, self.exchange_bytes) else self._scatter

    @cached_property
    def alone(self) -> bool:
        """Whether there is no other rank, and no hook, format or custom collective that needs the steps of a sum."""
        nobody = self.shard.size == self.replicate.size == 1 and self.encodings[0] is None
        return nobody and self.custom is None and self.hook is None

    @cached_property
    def _fixed(self) -> _OverShards | None:
        if self.alone:
            return _Alone(self)
        if self.encodings[0] is not None:
            return _EncodedExchange(self, self.encodings[0])
        return None if self.custom is None else _CustomReduceScatter(self, self.custom)

    @cached_property
    def _exchange(self) -> _OverShards:
        return _Exchange(self)

    @cached_property
    def _scatter(self) -> _OverShards:
        return _ReduceScatter(self)


def pack_gradients(grads: list[torch.Tensor], row: RowPlan, rows: torch.Tensor) -> None:
    """Write ``grads`` into ``rows`` (1D, one row per rank), cast to its dtype; padding becomes zero."""
    ranks = row.layouts[0].ranks
    table = rows.view(ranks, row.numel)
    dtypes = [grad.dtype for grad in grads]
    in_order = row.chunk_cat and all([grad.is_contiguous() for grad in grads])
    if in_order and dtypes.count(dtypes[0]) == len(dtypes):
        pack_rows(grads, table, row.padding)
        return
    if in_order and row.even:  # mixed dtypes: gradients of norms may be float32 beside bfloat16
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
        zero_gaps(slot_rows, layout)
        for piece, slot in piece_pairs(grad, slot_rows, layout):
            targets.append(slot)
            sources.append(piece)
    copy_all(targets, sources)


def reduce_chunk(
    grads: list[torch.Tensor],
    row: RowPlan,
    plan: ReducePlan,
    memory: Retained,
    deliver: Callable[[list[torch.Tensor]], None],
    defer_or_reduce: Callable[[list[torch.Tensor]], bool] | None = None,
    *,
    finished: Finished = "last",
) -> Generator[None, None, None]:
    """Reduce ``grads`` and ``deliver`` this rank's shards of them; stage 8 of the life of a parameter.

    The list is emptied; its tensors must not require gradients. ``defer_or_reduce`` gets the sums over the shard axis,
    one slot per gradient, and adds what earlier backwards have left of them. It returns True to go on to the replicate
    axis, or keeps the sums for a later backward and returns False. On streams everything is queued at once; the host
    waits only for gradients that go to the CPU.
    """
    lanes = memory.lanes
    # A single rank cuts its shards out of its gradients on the compute stream, in memory that activations have freed.
    lane: Lane | ComputeLane = lanes.compute if plan.alone else memory.use(lanes.reduce)
    started = plan.over_shards(row).start(grads, row, memory, finished)
    yield from _until(started.works)
    out, event, add_up = started.received, started.event, started.add_up
    del started  # the inputs must not stay in memory during the next wait
    if add_up is not None or defer_or_reduce is not None:
        with lane.after() as done:
            if add_up is not None:
                out, add_up = add_up(out), None
            go_on = defer_or_reduce is None or defer_or_reduce(_slots(out, row))
        event = done.event
        if not go_on:
            return
    # Memory of the reduce lane, which other lanes read from here on. Over replicas, ``out`` becomes another tensor.
    summed, rank = out, plan.shard.rank
    if row.over_replicas is not None:
        lane = replicate = memory.use(lanes.replicate)
        out, event = yield from plan.scatter_over_replicas.reduce(
            _cut(out, row, rank), row.over_replicas, replicate, event
        )
        row, rank = row.over_replicas, plan.replicate.rank
    elif plan.replicate.size > 1:
        lane = replicate = memory.use(lanes.replicate)
        event = yield from plan.all_reduce_over_replicas.reduce(out, replicate, event)
    if plan.hook is not None:
        lane = memory.use(plan.hook_lane or lanes.replicate)  # not reduce: the hook may communicate
        with lane.after(event):
            plan.hook(out)
    with lane.after() as done:
        out = _deliverable(out, plan)
        host_waits = lane.event() if plan.offload else None
        if host_waits is None:
            deliver(_cut(out, row, rank))
    if not plan.alone and lane is not lanes.reduce:
        memory.retain_sums(done.event, summed)  # the reduce lane's memory, which this lane still reads
    del summed  # or it would stay in memory while the host waits below
    if host_waits is not None:
        yield
        host_waits.synchronize()  # the host reads what the copy engine writes
        deliver(_cut(out, row, rank))


def _until(works: Sequence[Work]) -> Generator[None, None, None]:
    """Yield, then wait for ``works``; wait also if the operation is abandoned, before their memory is used again.

    Do not wait if the generator is closed because nobody refers to it any more, after a backward that raised. The
    garbage collector must not wait: other ranks may never launch the collective, and at the end of the interpreter the
    backend's threads have ended. Backends hold the memory of collectives that are under way.
    """
    if not works:
        return
    try:
        yield
    except Abandoned:
        _wait_for(works)
        raise
    _wait_for(works)


def _wait_for(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


# ---- over the shard axis ----


@dataclass
class _SumInFlight:
    """A sum over the shard axis on its way.

    ``received`` will be the sum, or ``add_up`` makes the sum of it. Both are memory of the reduce lane, or of compute
    if there is one rank. On a CPU the host waits for ``works``, and ``inputs`` must live until then. On a stream
    ``event`` is the end, and `Retained` holds the inputs.
    """

    received: torch.Tensor
    works: Sequence[Work]
    event: torch.Event | None
    inputs: Sequence[torch.Tensor]
    add_up: Callable[[torch.Tensor], torch.Tensor] | None = None


class _OverShards(Protocol):
    def start(self, grads: list[torch.Tensor], row: RowPlan, memory: Retained, finished: Finished) -> _SumInFlight:
        """Start the sum of ``grads``; empties that list, so that their memory can be freed."""
        ...


class _ReduceScatter:
    """The backend sums: gradients are sent in the dtype in which they are summed."""

    def __init__(self, plan: ReducePlan) -> None:
        self._plan = plan

    def start(self, grads: list[torch.Tensor], row: RowPlan, memory: Retained, finished: Finished) -> _SumInFlight:
        """Send gradients in place if their layout allows it, and the others packed, in one launch."""
        plan, lane = self._plan, memory.lanes.reduce
        device, scaling = grads[0].device, plan.scaling
        # A division before the sum writes to the inputs, so they must be copies: the user may hold the gradients.
        inputs, ready = _inputs(grads, row, plan.reduce_dtype, memory, finished, own=scaling.pre != 1.0)
        with lane.after(ready) as done:
            if scaling.pre != 1.0:
                for rows in inputs:
                    divide_(rows, scaling.pre)
            out = torch.empty(row.numel, dtype=plan.reduce_dtype, device=device)
            outputs = _outputs(out, row)
            works = reduce_scatter_together(
                outputs, inputs, plan.shard, average=scaling.average, async_op=lane.async_op
            )
        memory.retain_inputs(done.event, inputs, out.nbytes * plan.shard.size)
        return _SumInFlight(out, works, done.event, inputs)


class _Alone:
    """There is one rank: its gradients, cast and in the order of its shards, are the sum."""

    def __init__(self, plan: ReducePlan) -> None:
        self._plan = plan

    def start(self, grads: list[torch.Tensor], row: RowPlan, memory: Retained, finished: Finished) -> _SumInFlight:
        """Copy, on the compute stream."""
        plan = self._plan
        with memory.lanes.compute.here() as done:
            out = torch.empty(row.numel, dtype=plan.reduce_dtype, device=grads[0].device)
            pack_gradients(grads, row, out)
            if plan.scaling.pre != 1.0:
                divide_(out, plan.scaling.pre)
        grads.clear()
        return _SumInFlight(out, (), done.event, [])


class _Exchange:
    """Each rank sums what the others send it, in float32 at least."""

    def __init__(self, plan: ReducePlan) -> None:
        self._plan = plan
        # Gradients may be sent in a narrower dtype, since the rank that sums them widens them exactly.
        narrow = plan.wire_dtype if plan.scaling.pre == 1.0 else None
        self._dtype = narrow or plan.reduce_dtype

    def start(self, grads: list[torch.Tensor], row: RowPlan, memory: Retained, finished: Finished) -> _SumInFlight:
        """Send each rank its row."""
        plan, lane = self._plan, memory.lanes.reduce
        own = plan.scaling.pre != 1.0
        (rows,), ready = _inputs(grads, row, self._dtype, memory, finished, own=own)
        with lane.after(ready) as done:
            if own:
                divide_(rows, plan.scaling.pre)
            received = torch.empty_like(rows)
            works = all_to_all(received, rows, plan.shard, async_op=lane.async_op)
        memory.retain_inputs(done.event, [rows], rows.nbytes)
        add_up = partial(_sum_rows, axis=plan.shard, plan=plan, dtype=plan.reduce_dtype)
        return _SumInFlight(received, works, done.event, [rows], add_up)


class _CustomReduceScatter:
    """A custom collective sums, in one buffer that it allocated itself, perhaps the same one each time."""

    def __init__(self, plan: ReducePlan, custom: ReduceScatter) -> None:
        self._plan, self._custom = plan, custom

    def start(self, grads: list[torch.Tensor], row: RowPlan, memory: Retained, finished: Finished) -> _SumInFlight:
        """Pack on the reduce lane: the collective may allocate the same memory each time, which this lane reads."""
        plan, custom, lane = self._plan, self._custom, memory.lanes.reduce
        device, dtype, scaling = grads[0].device, plan.reduce_dtype, plan.scaling
        nbytes = sum([grad.nbytes for grad in grads])
        if finished != "together":
            memory.make_room(nbytes)
        with lane.after(memory.lanes.compute) as done:
            rows = custom.allocate((row.numel * plan.shard.size,), dtype=dtype, device=device)
            pack_gradients(grads, row, rows)
            # Before the collective, which may raise. ``rows`` are memory of this lane or of the collective.
            memory.retain_inputs(lane.event(), list(grads), nbytes)
            grads.clear()
            if scaling.pre != 1.0:
                divide_(rows, scaling.pre)
            out = custom.allocate((row.numel,), dtype=dtype, device=device)
            average = scaling.average
            works = reduce_scatter(out, rows, plan.shard, average=average, async_op=lane.async_op, custom=custom)
            if lane.on_stream:  # a custom collective may return works on a stream too
                for work in works:
                    work.wait()
                works = []
        # The sum is a copy: it may wait for later backwards or become a gradient, while the collective may reuse its
        # own memory.
        return _SumInFlight(out, works, done.event, [rows], torch.clone)


class _EncodedExchange:
    """Each rank sums what the others send it encoded, and adds its own row as it is."""

    def __init__(self, plan: ReducePlan, encoding: Encoding) -> None:
        self._plan, self._encoding = plan, encoding

    def start(self, grads: list[torch.Tensor], row: RowPlan, memory: Retained, finished: Finished) -> _SumInFlight:
        """Encode on the pack lane, in its memory: encoded gradients are small, and encoding takes several kernels."""
        plan, encoding, lanes = self._plan, self._encoding, memory.lanes
        lane, ranks, nbytes = lanes.reduce, plan.shard.size, sum([grad.nbytes for grad in grads])
        if finished != "together":
            memory.make_room(nbytes)
        with lanes.pack.after(lanes.compute) as packed:
            if _lies_as(grads, row, grads[0].dtype):
                rows = _flat(grads[0])
            else:
                rows = torch.empty(row.numel * ranks, dtype=plan.reduce_dtype, device=grads[0].device)
                pack_gradients(grads, row, rows)
            sent, own = encoding.for_others(rows, plan.shard)
            del rows
        memory.retain_inputs(packed.event, list(grads), nbytes)
        grads.clear()
        with lane.after(packed.event) as done:
            received = torch.empty_like(sent)
            works = all_to_all(received, sent, plan.shard, async_op=lane.async_op, with_own=False)
            mine = own.clone() if lane.on_stream else own  # in this lane's memory, since it becomes the sum
        memory.retain_encoded(done.event, [sent, own])
        add_up = partial(encoding.add_up, own=mine, axis=plan.shard, scaling=plan.scaling)
        return _SumInFlight(received, works, done.event, [sent], add_up)


def _inputs(
    grads: list[torch.Tensor],
    row: RowPlan,
    dtype: torch.dtype,
    memory: Retained,
    finished: Finished,
    *,
    own: bool,
) -> tuple[list[torch.Tensor], Before]:
    """Make the inputs of a chunk's collectives from ``grads``; return them, and the event when they are ready.

    The list is emptied. A gradient whose memory is one row per rank in ``dtype`` is itself an input, unless the inputs
    must be our ``own``. The others are copied to memory of the compute stream, which gradients and activations free.
    """
    lanes, device = memory.lanes, grads[0].device
    parts: list[_Part] = [(list(grads), row.packed_row)]
    if row.in_place:
        parts = [([grads[i]], row.layouts[i]) for i in row.in_place]
        if row.packed_row.numel:
            parts.append(([grads[i] for i in row.packed], row.packed_row))
    grads.clear()
    copied = [own or not _lies_as(part, layout, dtype) for part, layout in parts]
    left = 0
    if True in copied:
        left = sum([grad.nbytes for (part, _), copies in zip(parts, copied) if copies for grad in part])
    if finished != "together":  # the memory of these is taken already, so there is nothing to wait for
        memory.make_room(row.numel * row.ranks * dtype.itemsize + left)
    if not left:
        return [_flat(part[0]) for part, _ in parts], lanes.compute
    # The last gradients of a unit are copied on the pack lane while compute goes on to the next unit. They stay in
    # memory until that unit has its first gradient, so they are limited to three fifths of ``limit_bytes``, which is
    # one unit by default: two of the three large matrices of a block. The others are copied before, on the compute
    # stream, and each is freed as soon as it is copied.
    beside = memory.limit_bytes * 3 // 5 if finished == "last" else 0
    inputs: list[torch.Tensor] = []
    later: list[tuple[torch.Tensor, _Part]] = []
    with lanes.compute.here() as done:
        for copies in copied:
            part, layout = parts.pop(0)
            if not copies:
                inputs.append(_flat(part[0]))
                continue
            numel = layout.numel if isinstance(layout, ShardLayout) else layout.numel * layout.ranks
            inputs.append(torch.empty(numel, dtype=dtype, device=device))
            if left <= beside:
                later.append((inputs[-1], (part, layout)))
                continue
            left -= sum([grad.nbytes for grad in part])
            _copy(inputs[-1], part, layout)
    if not later:
        return inputs, done.event
    with lanes.pack.after(done.event) as done:
        for rows, (part, layout) in later:
            _copy(rows, part, layout)
    memory.retain_packed(done.event, [grad for _, (part, _) in later for grad in part], left)
    return inputs, done.event


_Part = tuple[list[torch.Tensor], ShardLayout | RowPlan]
"""The gradients that one collective of a chunk sends: a single one that is sharded evenly along its slowest dimension,
or all others, packed."""


def _copy(rows: torch.Tensor, part: list[torch.Tensor], layout: ShardLayout | RowPlan) -> None:
    if isinstance(layout, ShardLayout):
        rows.as_strided(layout.shape, layout.stride).copy_(part[0])
    else:
        pack_gradients(part, layout, rows)


def _lies_as(part: list[torch.Tensor], layout: ShardLayout | RowPlan, dtype: torch.dtype) -> bool:
    """Return whether the memory of ``part`` is one row per rank in ``dtype``, aligned as NCCL needs it to be fast."""
    if isinstance(layout, RowPlan):
        if len(part) > 1 or layout.padding:
            return False
        layout = layout.layouts[0]
    grad = part[0]
    if grad.dtype != dtype or grad.stride() != layout.stride or not (layout.rank_major and layout.even):
        return False
    return grad.storage_offset() * grad.itemsize % ALIGN_BYTES == 0


def _flat(grad: torch.Tensor) -> torch.Tensor:
    return grad.as_strided((grad.numel(),), (1,))


def _outputs(out: torch.Tensor, row: RowPlan) -> list[torch.Tensor]:
    """Return the slice of ``out``, this rank's row, that each collective of a chunk writes."""
    if not row.in_place:
        return [out]
    outputs = [out[row.offsets[i] : row.offsets[i] + row.layouts[i].slot_numel] for i in row.in_place]
    return [*outputs, out[row.packed_offset :]] if row.packed_row.numel else outputs


def _sum_rows(rows: torch.Tensor, axis: Axis, plan: ReducePlan, dtype: torch.dtype) -> torch.Tensor:
    """Add up (or average) one row per rank of ``axis``, in ``dtype`` or in float32 if that is wider."""
    if axis.size == 1:
        return rows
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    by_rank = rows.view(axis.size, -1).unbind(0)
    if plan.in_pairs:
        total = _in_pairs(by_rank, wide)
    else:
        first, second, *rest = by_rank
        # Adding row by row is up to twice as fast as a sum over the first dimension, and gives the same bits.
        total = torch.add(first, second) if first.dtype == wide else first.to(wide).add_(second)
        for row in rest:
            total.add_(row)
    if plan.scaling.average:
        divide_(total, axis.size)
    return total


def _in_pairs(rows: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Add ``rows`` up in ``dtype``: neighbours, then neighbouring sums, and so on.

    So half as many ranks get the same bits if each of them has added its two rows up before.
    """
    while len(rows) > 1:
        pairs = zip(rows[::2], rows[1::2])
        sums = [torch.add(a, b) if a.dtype == dtype else a.to(dtype).add_(b) for a, b in pairs]
        rows = [*sums, rows[-1].to(dtype)] if len(rows) % 2 else sums
    return rows[0]


# ---- over the replicate axis ----


class _AllReduceOverReplicas(Protocol):
    def reduce(
        self, out: torch.Tensor, lane: Lane, event: torch.Event | None
    ) -> Generator[None, None, torch.Event | None]:
        """Replace ``out``, ready at ``event``, by its sum (or mean) over the axis; return the event of the end."""
        ...


class _BackendAllReduce:
    """The backend sums."""

    def __init__(self, plan: ReducePlan) -> None:
        self._axis, self._average = plan.replicate, plan.scaling.average

    def reduce(
        self, out: torch.Tensor, lane: Lane, event: torch.Event | None
    ) -> Generator[None, None, torch.Event | None]:
        """Sum in place."""
        with lane.after(event) as done:
            works = all_reduce(out, self._axis, average=self._average, async_op=lane.async_op)
        yield from _until(works)
        return done.event


class _PairedAllReduce:
    """Each rank sums a part in pairs, and all ranks gather the sums."""

    def __init__(self, plan: ReducePlan) -> None:
        self._axis, self._plan = plan.replicate, plan

    def reduce(
        self, out: torch.Tensor, lane: Lane, event: torch.Event | None
    ) -> Generator[None, None, torch.Event | None]:
        """Exchange, add up, and gather the sums."""
        axis, plan, numel = self._axis, self._plan, out.numel()
        with lane.after(event):
            sent = out.new_zeros(align(numel, axis.size))
            sent[:numel] = out
            received = torch.empty_like(sent)
            works = all_to_all(received, sent, axis, async_op=lane.async_op)
        yield from _until(works)
        with lane.after():
            total = _sum_rows(received, axis, plan, out.dtype)
            gathered = total.new_empty(axis.size * total.numel())
            works = all_gather([gathered], [total], axis, async_op=lane.async_op)
        yield from _until(works)
        with lane.after() as done:
            out.copy_(gathered[:numel])
        return done.event


class _EncodedAllReduce:
    """Each rank sums a part, and all ranks gather the sums; both are sent encoded.

    A rank decodes its own part of the sums too, so that replicas stay equal bit by bit.
    """

    def __init__(self, plan: ReducePlan, encoding: Encoding) -> None:
        self._axis, self._scaling, self._encoding = plan.replicate, plan.scaling, encoding

    def reduce(
        self, out: torch.Tensor, lane: Lane, event: torch.Event | None
    ) -> Generator[None, None, torch.Event | None]:
        """Exchange, add up, and gather the sums."""
        axis, encoding = self._axis, self._encoding
        with lane.after(event):
            sent, own = encoding.for_others(out, axis)
            received = torch.empty_like(sent)
            works = all_to_all(received, sent, axis, async_op=lane.async_op, with_own=False)
        yield from _until(works)
        with lane.after():
            total = encoding.add_up(received, own, axis, self._scaling)
            mine = encoding.encode(total)
            del sent, received, own, total
            gathered = mine.new_empty(axis.size * mine.numel())
            works = all_gather([gathered], [mine], axis, async_op=lane.async_op)
        yield from _until(works)
        with lane.after() as done:
            encoding.decode(gathered, out.view(axis.size, -1))
        return done.event


class _ScatterOverReplicas:
    """A reduce-scatter over the replicate axis: each rank gets the sum of its part, which no other rank keeps."""

    def __init__(self, plan: ReducePlan) -> None:
        self._plan, self._axis = plan, plan.replicate

    def reduce(
        self, pieces: list[torch.Tensor], row: RowPlan, lane: Lane, event: torch.Event | None
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Event | None]]:
        """Return this rank's part of the sums (or means) of ``pieces``, ready at ``event``, and the end event."""
        plan, axis, encoding = self._plan, self._axis, self._plan.encodings[1]
        dtype, device = pieces[0].dtype, pieces[0].device
        with lane.after(event) as done:
            rows = torch.empty(row.numel * axis.size, dtype=dtype, device=device)
            pack_gradients(pieces, row, rows)
            add_up: Callable[[torch.Tensor], torch.Tensor] | None = None
            works: Sequence[Work] = ()
            if encoding is not None:
                sent, own = encoding.for_others(rows, axis)
                out = torch.empty_like(sent)
                works = all_to_all(out, sent, axis, async_op=lane.async_op, with_own=False)
                add_up = partial(encoding.add_up, own=own, axis=axis, scaling=plan.scaling)
            elif prefers_all_to_all(axis, rows.nbytes, plan.exchange_bytes):
                out = torch.empty_like(rows)
                works = all_to_all(out, rows, axis, async_op=lane.async_op)
                add_up = partial(_sum_rows, axis=axis, plan=plan, dtype=dtype)
            else:
                out = torch.empty(row.numel, dtype=dtype, device=device)
                if row.numel:  # a rank of the shard axis may have no elements, alike in all replicas
                    works = reduce_scatter(out, rows, axis, average=plan.scaling.average, async_op=lane.async_op)
        if not works and not lane.on_stream:
            yield  # where there are no elements, too: gradients come in one order on all ranks, or their hooks differ
        yield from _until(works)
        if add_up is not None:
            with lane.after() as done:
                out = add_up(out)
        return out, done.event


# ---- the end ----


def _deliverable(out: torch.Tensor, plan: ReducePlan) -> torch.Tensor:
    """Divide and cast ``out``, and start its copy to the CPU if gradients live there."""
    if plan.scaling.post != 1.0:
        divide_(out, plan.scaling.post)
    if out.dtype != plan.out_dtype:
        out = out.to(plan.out_dtype)
    if not plan.offload or out.device.type == "cpu":
        return out
    host = torch.empty(out.shape, dtype=out.dtype, device="cpu", pin_memory=plan.pin_memory)
    return host.copy_(out, non_blocking=True)


def _slots(out: torch.Tensor, row: RowPlan) -> list[torch.Tensor]:
    return [out[offset : offset + layout.slot_numel] for offset, layout in zip(row.offsets, row.layouts)]


def _cut(out: torch.Tensor, row: RowPlan, rank: int) -> list[torch.Tensor]:
    """Return this rank's piece of every gradient in the reduced row."""
    start = out.storage_offset()  # a custom collective's memory may be a part of a larger buffer
    return [out.as_strided(shape, stride, start + offset) for shape, stride, offset in row.pieces(rank)]
