"""Gathering a group: from this rank's wire shards to full parameters, large ones without any copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsdp2._torch.autograd import lasting_tensors
from fsdp2._torch.tensors import lies_in
from fsdp2.comm.collectives import Work, all_gather, wire_view
from fsdp2.comm.pieces import copy_all, piece_pairs
from fsdp2.comm.streams import ComputeLane, Lane, Lanes
from fsdp2.policies import AllGather, WireFormat
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import CastSpan, FlatPlan, PlannedParam, align

__all__ = ["Buffer", "GatherBuffers", "Gathering", "HostCopies", "finish_gather", "start_gather"]

Planned = Callable[[], object]
"""A call with its tensors bound, planned once and run in every gather: a step makes no views."""


class Buffer:
    """Memory that comes and goes while the tensors that view it stay: the storage is resized, never replaced.

    Autograd saves views of full parameters, so a parameter must keep its tensor object and its storage object for its
    whole life.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._storage = self.bytes.untyped_storage()

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements of ``dtype`` from byte ``offset`` on, 1D, with a version counter of their own.

        A version counter shared with the parameters would make autograd believe that a gather changes them.
        """
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype).data

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in this memory."""
        return lies_in(tensor, self._storage)

    def view_apart(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor like ``tensor``, which lies here, with another storage over this memory.

        It must not be used after that is freed. Its offset is the same: a DTensor around ``tensor`` has that, too.
        """
        with lasting_tensors():
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return empty.set_(self._storage[:], tensor.storage_offset(), tensor.shape, tensor.stride())

    @property
    def exists(self) -> bool:
        """True if there is memory."""
        return self._storage.nbytes() == self.nbytes

    def allocate(self) -> None:
        """Make the memory exist (its content is undefined)."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory back."""
        if self._storage.nbytes() != 0:
            self._storage.resize_(0)


class GatherBuffers:
    """Everything one group's gather reads and writes, made once: views of the wire, full and staging buffers."""

    def __init__(
        self,
        items: Sequence[PlannedParam],
        plan: FlatPlan,
        shards: torch.Tensor,
        full: Buffer,
        *,
        fused: bool | None = None,
    ) -> None:
        """``shards`` is the group's shard buffer as bytes; ``full`` must be allocated while the views are made.

        With ``fused``, one kernel unpacks all packed parameters if the ranks' pieces in order are the parameters. It is
        the default, except on a CPU, where it is no faster than copying them one by one.
        """
        self.items, self.plan, self.full, self.source = items, plan, full, shards
        self._ranks, device = items[0].layout.ranks if items else 1, full.bytes.device
        self.from_host = _on_host(shards, device)
        self.wire = Buffer(plan.wire_bytes, device) if plan.casts or self.from_host else None
        self.fills: list[Planned] = []  # write the wire buffer, from the shards
        wire_bytes = shards if self.wire is None else self._plan_fills(self.wire, shards)
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        for i in plan.direct:
            self._send_directly(i, wire_bytes)
        self.packed = wire_view(wire_bytes[plan.packed_start :].view(self._packed_dtype))
        # Packed parameters are received in ``staging``; ``received`` is that memory as one tensor of the wire dtype.
        self.staging: Buffer | None = None
        self.received = self.packed
        self.unpacks: list[Planned] = []  # copy packed parameters from the staging buffer to their places
        if plan.packed:
            self._receive_packed(fused=device.type != "cpu" if fused is None else fused)
        # The views keep the storages; these have memory only while a gather needs it.
        self.free_temporaries()
        if self.wire is not None:
            self.wire.free()  # free_temporaries leaves it if shards are on the host

    def _send_directly(self, i: int, wire_bytes: torch.Tensor) -> None:
        """Plan a collective that gathers item ``i`` alone, into its place."""
        item, numel = self.items[i], self.items[i].layout.slot_numel
        start = self.plan.wire_offset[i]
        piece = wire_bytes[start : start + numel * item.wire_dtype.itemsize].view(item.wire_dtype)
        place = self.full.view(self.plan.full_offset[i], self._ranks * numel, item.wire_dtype)
        self.inputs.append(wire_view(piece))
        self.outputs.append(wire_view(place))

    def _receive_packed(self, *, fused: bool) -> None:
        """Make the buffer in which packed items are received, and plan the copies from there to their places."""
        ranks, nbytes = self._ranks, self.packed.nbytes
        in_order = all(self.items[i].layout.rank_major for i in self.plan.packed)
        encoded = any(self.items[i].form is not None for i in self.plan.packed)
        segments = self._segments() if fused and in_order and not encoded else []
        # The kernel splits whole rows, so it also needs somewhere to write the gaps between items.
        gap = max((size for offset, size in segments if offset is None), default=0)
        self.staging = Buffer(ranks * (nbytes + gap), self.full.bytes.device)
        self.received = self.staging.bytes[: ranks * nbytes].view(self.packed.dtype)
        rows = self.received.view(torch.uint8).view(ranks, nbytes)
        if not segments:
            self.unpacks = self._plan_unpacks(rows)
            return
        unused = self.staging.bytes[ranks * nbytes :]
        targets = [
            unused[: ranks * size] if offset is None else self.full.view(offset, ranks * size, torch.uint8)
            for offset, size in segments
        ]
        shaped = [target.view(ranks, size) for target, (_, size) in zip(targets, segments)]
        self.unpacks = [partial(torch.split_with_sizes_copy, rows, [size for _, size in segments], 1, out=shaped)]

    def _plan_fills(self, wire: Buffer, shards: torch.Tensor) -> torch.Tensor:
        """Plan how each span of shards is cast or encoded before it is sent, and return the bytes that are sent."""
        for span in self.plan.spans:
            start = span.shard_offset
            shard = shards[start : start + span.numel * span.dtype.itemsize].view(span.dtype)
            form = span.form
            self.fills.append(_casting(span, shard, wire) if form is None else _encoding(span, form, shard, wire))
        return wire.bytes

    def _segments(self) -> list[tuple[int | None, int]]:
        """Return (offset in the full buffer, bytes) of each part of a packed row; the offset of a gap is None."""
        segments: list[tuple[int | None, int]] = []
        end = self.plan.packed_start
        for i in self.plan.packed:
            if self.plan.wire_offset[i] > end:
                segments.append((None, self.plan.wire_offset[i] - end))
            nbytes = self.items[i].layout.slot_numel * self.items[i].wire_dtype.itemsize
            segments.append((self.plan.full_offset[i], nbytes))
            end = self.plan.wire_offset[i] + nbytes
        return segments if end == self.plan.wire_bytes else [*segments, (None, self.plan.wire_bytes - end)]

    def unpack(self, rows: torch.Tensor | None) -> None:
        """Write packed parameters to their places, from ``rows`` (ranks, bytes), by default from the staging buffer."""
        for unpack in self.unpacks if rows is None else self._plan_unpacks(rows):
            unpack()

    @property
    def _packed_dtype(self) -> torch.dtype:
        dtypes = {self.items[i].wire_dtype for i in self.plan.packed}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    def _plan_unpacks(self, rows: torch.Tensor) -> list[Planned]:
        """Plan how packed parameters are copied or decoded from ``rows`` (ranks, bytes) to their places."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        decodings: list[Planned] = []
        for i in self.plan.packed:
            item, layout = self.items[i], self.items[i].layout
            flat = self.full.view(self.plan.full_offset[i], layout.full_storage_numel, item.wire_dtype)
            if item.form is not None:
                decodings.append(self._decoding(i, item.form, rows, flat))
                continue
            start = self.plan.wire_offset[i] - self.plan.packed_start
            sent = rows[:, start : start + layout.slot_numel * item.wire_dtype.itemsize].view(item.wire_dtype)
            if layout.rank_major:  # padding is copied as well
                pairs = [(flat.view(layout.ranks, layout.slot_numel), sent)]
            else:
                pairs = piece_pairs(flat.as_strided(layout.shape, layout.stride), sent, layout)
            for target, source in pairs:
                targets.append(target)
                sources.append(source)
        return [partial(copy_all, targets, sources), *decodings] if targets else decodings

    def _decoding(self, i: int, form: WireFormat, rows: torch.Tensor, flat: torch.Tensor) -> Planned:
        """Plan to decode item ``i``, which was encoded together with its neighbours, to its place ``flat``."""
        span = self.plan.span_of(i)
        start = span.wire_offset - self.plan.packed_start
        sent = rows[:, start : start + form.nbytes(span.numel)]
        first = (self.plan.shard_offset[i] - span.shard_offset) // span.dtype.itemsize
        return partial(_decode, form, sent, span.numel, first, flat, self.items[i].layout)

    def allocate(self, *, staging: bool, full: bool) -> None:
        """Allocate what collectives write; the ``full`` buffer also if only the unpacking will write to it."""
        if full or self.plan.direct:
            self.full.allocate()
        if staging and self.staging is not None:
            self.staging.allocate()

    def fill_wire(self) -> None:
        """Write the wire buffer, if the shards themselves are not what is sent."""
        if self.wire is not None:
            self.wire.allocate()
        for fill in self.fills:
            fill()

    def free_temporaries(self) -> None:
        """Give back what only the gather itself needs.

        ``HostCopies`` gives back a copy of shards that are on the host, when the copy lane has waited for the gather.
        """
        if self.wire is not None and not self.from_host:
            self.wire.free()
        if self.staging is not None:
            self.staging.free()


def _casting(span: CastSpan, shard: torch.Tensor, wire: Buffer) -> Planned:
    """Plan the copy of a span's ``shard`` to its place in ``wire``, in the wire dtype."""
    return partial(wire.view(span.wire_offset, span.numel, span.wire_dtype).copy_, shard, non_blocking=True)


def _encoding(span: CastSpan, form: WireFormat, shard: torch.Tensor, wire: Buffer) -> Planned:
    """Plan to encode a span's ``shard`` to its place in ``wire``."""
    row = wire.bytes[span.wire_offset : span.wire_offset + form.nbytes(span.numel)]
    return partial(form.encode, shard.unsqueeze(0), row.unsqueeze(0), None)


def _decode(
    form: WireFormat, sent: torch.Tensor, numel: int, first: int, flat: torch.Tensor, layout: ShardLayout
) -> None:
    """Decode a parameter straight into its place, or through rows if the ranks' pieces in order are not its memory."""
    if layout.rank_major:
        form.decode(sent, numel, flat.view(layout.ranks, layout.slot_numel), first)
        return
    slots = flat.new_empty(layout.ranks, layout.slot_numel)
    form.decode(sent, numel, slots, first)
    for piece, slot in piece_pairs(flat.as_strided(layout.shape, layout.stride), slots, layout):
        piece.copy_(slot)


@dataclass
class Gathering:
    """A gather in flight. It ends on its own ``lane``, although its unit may have another root's lanes by then.

    On a CPU the host has to wait for ``works``, otherwise the compute stream for ``event``. If one buffer was assembled
    for this gather, its ``rows`` (ranks, bytes) have the packed parameters, then each extra tensor. ``extras`` is the
    place of each in a row: (offset, numel, dtype).
    """

    buffers: GatherBuffers
    lane: Lane
    rows: torch.Tensor | None = None
    extras: tuple[tuple[int, int, torch.dtype], ...] = ()
    works: Sequence[Work] = ()
    event: torch.Event | None = None
    unpacked: bool = False  # its packed parameters are in their places

    def let_outlast(self) -> None:
        """Let what it reads outlast it: somebody is about to free that, and will not wait."""
        buffers = self.buffers
        self.lane.keep(buffers.wire.bytes if buffers.from_host and buffers.wire is not None else buffers.source)


class HostCopies:
    """Copies on the device of shards on the host, made on the copy lane.

    There are two while one unit is gathered and the next one copied, otherwise one in a pass, and none between passes.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self._sent: tuple[Buffer, torch.Event | None] | None = None  # the copy sent last, and the end of its gather
        self._latest: torch.Event | None = None  # the end of the copy that was started last

    def start_copy(self, buffers: GatherBuffers) -> torch.Event | None:
        """Copy what ``buffers`` gather; the gather lane has to wait for the event."""
        self.give_back(buffers)
        with self.lanes.copy.after(self.lanes.shards_written) as done:
            buffers.fill_wire()
        self._latest = done.event
        return done.event

    def wait(self) -> None:
        """Let the host wait until all shards are copied, after which it may write to them."""
        event, self._latest = self._latest, None
        if event is not None:
            event.synchronize()

    def end(self) -> None:
        """End a pass: wait as ``wait`` does, and drop the last copy, which would stay until the next gather."""
        self.wait()
        self._drop()

    def give_back(self, buffers: GatherBuffers | None) -> None:
        """Drop the copy of ``buffers`` if there is one: the next one is written to the same memory."""
        if buffers is not None and self._sent is not None and self._sent[0] is buffers.wire:
            self._drop()

    def _drop(self) -> None:
        if self._sent is not None:
            (wire, gathered), self._sent = self._sent, None
            self.lanes.copy.wait(gathered)
            wire.free()

    def hold(self, buffers: GatherBuffers, gathered: torch.Event | None) -> None:
        """Keep the copy until ``gathered`` of the gather lane, and drop the one before, whose gather ends earlier.

        The next copy waits for that earlier gather alone, so it is made beside this one.
        """
        assert buffers.wire is not None
        self._drop()
        self._sent = buffers.wire, gathered


def _on_host(shards: torch.Tensor, device: torch.device) -> bool:
    """Return whether shards are on another device than full parameters; tests that simulate a device replace this."""
    return shards.device != device


def start_gather(
    buffers: GatherBuffers,
    axis: Axis,
    copies: HostCopies,
    *,
    custom: AllGather | None = None,
    extras: Sequence[torch.Tensor] = (),
    lane: Lane | None = None,
) -> Gathering:
    """Cast and send this rank's shards; ``finish_gather`` completes the full parameters.

    It runs on ``lane``, by default the gather lane. ``extras`` are 1D tensors, of the same sizes on every rank, that
    are sent with the packed parameters. A ``custom`` collective gets one buffer that it allocated itself. Stages 3 and
    4 of the life of a parameter; on a stream stage 5 follows at once.
    """
    lane = lane or copies.lanes.gather
    gathering = Gathering(buffers, lane)
    assembled = custom is not None or bool(extras)
    with lane.after(copies.start_copy(buffers) if buffers.from_host else None) as done:
        buffers.allocate(staging=not assembled, full=lane.on_stream)
        if not buffers.from_host:
            buffers.fill_wire()
        inputs, outputs = list(buffers.inputs), list(buffers.outputs)
        if assembled:
            output, sent = _assemble(gathering, axis, custom, extras)
            inputs.append(sent)
            outputs.append(output)
        elif buffers.staging is not None:
            inputs.append(buffers.packed)
            outputs.append(buffers.received)
        works = all_gather(outputs, inputs, axis, async_op=lane.async_op, custom=custom)
        if lane.on_stream:  # unpack now: later it would be queued behind gathers that were started since
            for work in works:
                work.wait()
            works = []
            _unpack(gathering)
            if not extras:  # ``finish_gather`` returns extras out of these rows; without any, their memory can go
                gathering.rows = None
    if buffers.from_host:
        copies.hold(buffers, done.event)
    gathering.works, gathering.event = works, done.event
    return gathering


def _unpack(gathering: Gathering) -> None:
    """Write packed parameters to their places, and free the buffers; stage 5 of the life of a parameter."""
    buffers = gathering.buffers
    if gathering.unpacked:  # finished again, because an interrupt came right after that: the staging buffer is freed
        return
    if buffers.plan.packed or buffers.wire is not None:  # otherwise all was gathered straight from shards into place
        buffers.full.allocate()  # on a CPU only now: without direct items, only the staging buffer was needed
        buffers.unpack(gathering.rows)
        gathering.unpacked = True
        buffers.free_temporaries()


def _assemble(
    gathering: Gathering, axis: Axis, custom: AllGather | None, extras: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output buffer for the packed parameters and the extras, and this rank's part of it, written."""
    packed = gathering.buffers.packed
    pieces = [piece for piece in (packed, *extras) if piece is not packed or packed.numel()]
    dtypes = {piece.dtype for piece in pieces}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += align(piece.nbytes)
    numel, device = axis.size * end // dtype.itemsize, gathering.buffers.full.bytes.device
    output = (
        torch.empty(numel, dtype=dtype, device=device)
        if custom is None
        else custom.allocate((numel,), dtype=dtype, device=device)
    )
    gathering.rows = output.view(-1).view(torch.uint8).view(axis.size, end)
    for piece, offset in zip(pieces, offsets):
        gathering.rows[axis.rank, offset : offset + piece.nbytes].view(piece.dtype).copy_(piece)
    spans = [(offset, piece.numel(), piece.dtype) for piece, offset in zip(pieces, offsets)]
    gathering.extras = tuple(spans[len(pieces) - len(extras) :])
    part = output.narrow(0, axis.rank * (numel // axis.size), numel // axis.size)
    return wire_view(output), wire_view(part)


def finish_gather(gathering: Gathering, reader: ComputeLane | Lane) -> list[torch.Tensor]:
    """Wait for the collectives, and let ``reader`` (in most cases compute) read the full parameters.

    Return each extra as gathered, (ranks, numel), to be read on the gather's lane.
    """
    for work in gathering.works:
        work.wait()
    gathering.works = ()
    if gathering.lane.on_stream:
        reader.wait(gathering.event)
    else:
        _unpack(gathering)
    rows = gathering.rows
    if rows is None:
        return []
    return [rows[:, start : start + numel * dtype.itemsize].view(dtype) for start, numel, dtype in gathering.extras]
