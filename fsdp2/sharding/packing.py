"""Plan the place of each parameter in a group's buffers, and the chunks of gradients: arithmetic on bytes.

A group has three buffers. The *shard* buffer holds this rank's pieces in their own dtypes. The *wire* buffer holds the
same pieces as they are sent; if nothing is cast, it is the shard buffer itself. The *full* buffer holds the gathered
parameters, each of them contiguous. In the shard and wire buffers, pieces that are gathered directly into their place
(*direct* ones) come first. The small rest (*packed* ones) follows without gaps, so it is sent without a copy, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import TypeVar

import torch

from fsdp2.policies import WireFormat
from fsdp2.sharding.layout import ShardLayout

__all__ = [
    "ALIGN_BYTES",
    "NO_LIMIT",
    "CastSpan",
    "ChunkPlan",
    "FlatPlan",
    "PlannedParam",
    "RowPlan",
    "TransferSizes",
    "align",
    "bucket_bytes",
    "in_buckets",
    "plan_chunks",
    "plan_flat",
    "reduced_in_place",
]

# Larger than any size in bytes and any number of elements.
NO_LIMIT = 1 << 62
# NCCL and vectorized kernels need addresses and sizes that are multiples of this; so do elements of every dtype.
ALIGN_BYTES = 16
# cuBLASLt chooses its kernels by the alignment of their operands, up to this many bytes.
_FULL_ALIGN_BYTES = 256
# For a parameter of this size or more, a collective of its own costs less than the copy that it saves.
_DIRECT_BYTES = 1 << 20
# NCCL distributes the collectives of one launch over its channels. With more than _COALESCED they queue, and one that
# sends fewer than _DIRECT_BYTES_PER_RANK from a rank is bound by latency.
_COALESCED = 16
_DIRECT_BYTES_PER_RANK = 32 << 10
# Where the host waits for collectives, a unit's gradients are sent in at most _CHUNKS chunks. The latency of each grows
# with the number of ranks, so there are fewer on more than _CHUNKED_RANKS: a quarter on twice as many ranks, and a
# single one on four times as many.
_CHUNKS, _CHUNKED_RANKS = 8, 64
# On streams every chunk costs host work, and it delays the next gather by its latency, about 5 us for each rank. With
# more than two chunks, the first one (and the gather before it) would start while the activations of the unit take most
# memory. A chunk has at least _LEAST_BYTES_PER_RANK times ``chunk_bytes`` for each rank, and _BYTES_PER_RANK times on
# more than _STREAMED_RANKS: sending 2 MiB at 300 GB/s takes longer than the latency. From _AT_ONCE_RANKS on, a unit is
# one chunk.
_STREAMED_RANKS, _AT_ONCE_RANKS = 64, 256
_LEAST_BYTES_PER_RANK, _BYTES_PER_RANK = 2, 12
_SMALL_PART = 16
"""If at most this part of a unit would be left after a single streamed chunk, the unit is sent as a whole."""


@dataclass(frozen=True)
class TransferSizes:
    """The sizes in bytes that decide how parameters and gradients are sent.

    A parameter of at least ``direct_param_bytes`` (full, as sent) in a group of at least ``direct_group_bytes`` is
    gathered by a collective of its own. If the backend runs such collectives in one launch, its gradient is reduced
    without a copy. Gradients are reduced in chunks of about an eighth of the group, or of a larger part on streams and
    on many ranks, but of at least ``chunk_bytes``. Chunks of at least ``exchange_bytes`` are sent to each rank directly
    and summed there in float32. None stands for a default that depends on the backend and the number of ranks.
    """

    direct_param_bytes: int | None = None
    direct_group_bytes: int = 8 << 20
    chunk_bytes: int = 1 << 20
    exchange_bytes: int | None = None

    @staticmethod
    def given(values: Mapping[str, int | None]) -> dict[str, int]:
        """Return those of ``values`` that are not None.

        Raises:
            ValueError: A value is not a number of bytes.
        """
        found = {name: value for name, value in values.items() if value is not None}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a number of bytes >= 0, got {value!r}")
        return found


@dataclass(frozen=True)
class PlannedParam:
    """One parameter of a plan: its layout, its own dtype, and its dtype as sent.

    With a ``form`` it is packed and sent encoded; it has the wire dtype after decoding. Its slot has space for at least
    ``room`` elements, because a gather that writes to the slot also writes padding.
    """

    layout: ShardLayout
    dtype: torch.dtype
    wire_dtype: torch.dtype
    form: WireFormat | None = None
    room: int = 0

    @property
    def full_bytes(self) -> int:
        """The bytes of the full parameter as sent."""
        return self.layout.numel * self.wire_dtype.itemsize


@dataclass(frozen=True)
class CastSpan:
    """Neighbouring items of equal dtypes that are cast or encoded at once, and their start in both buffers."""

    dtype: torch.dtype
    wire_dtype: torch.dtype
    shard_offset: int
    wire_offset: int
    numel: int = 0
    form: WireFormat | None = None

    @property
    def wire_end(self) -> int:
        """The end of the span in the wire buffer."""
        if self.form is not None:
            return self.wire_offset + align(self.form.nbytes(self.numel))
        return self.wire_offset + self.numel * self.wire_dtype.itemsize


@dataclass(frozen=True)
class FlatPlan:
    """Byte offsets of every item (in item order) in the three buffers, and the buffers' sizes in bytes.

    An encoded item has no offset of its own in the wire buffer: its ``wire_offset`` is that of its span.
    """

    direct: tuple[int, ...]
    packed: tuple[int, ...]
    shard_offset: tuple[int, ...]
    wire_offset: tuple[int, ...]
    full_offset: tuple[int, ...]
    shard_bytes: int
    wire_bytes: int
    full_bytes: int
    spans: tuple[CastSpan, ...]

    @property
    def casts(self) -> bool:
        """True if any item is cast or encoded, so that a wire buffer is needed."""
        return any(span.dtype != span.wire_dtype or span.form is not None for span in self.spans)

    def span_of(self, i: int) -> CastSpan:
        """Return the span that contains item ``i``."""
        return [span for span in self.spans if span.shard_offset <= self.shard_offset[i]][-1]

    @property
    def packed_start(self) -> int:
        """The start of the packed items in the wire buffer; they go to its end."""
        return self.wire_offset[self.packed[0]] if self.packed else self.wire_bytes


def align(value: int, multiple: int = ALIGN_BYTES) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


_T = TypeVar("_T")


def bucket_bytes(where: str, bucket_mb: float) -> int:
    """Return the size in bytes of a bucket of ``bucket_mb`` MiB, the argument of the public function ``where``.

    Raises:
        ValueError: ``bucket_mb`` is not a positive, finite number.
    """
    number = isinstance(bucket_mb, Real) and not isinstance(bucket_mb, bool)
    if not number or not 0 < float(bucket_mb) * 2**20 < math.inf:
        raise ValueError(f"{where}: bucket_mb must be a positive, finite number of MiB, got {bucket_mb!r}")
    return max(int(bucket_mb * 2**20), ALIGN_BYTES)


def in_buckets(items: Iterable[_T], nbytes: Callable[[_T], int], limit: int) -> Iterator[list[_T]]:
    """Yield ``items``, in their order, in lists of up to ``limit`` bytes; a larger item has a list of its own."""
    bucket: list[_T] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if bucket and total + size > limit:
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += size
    if bucket:
        yield bucket


def _slot_numel(item: PlannedParam) -> int:
    """Return the elements of one rank's slot, aligned in both dtypes so that one kernel can cast or encode a span."""
    numel = max(item.layout.slot_numel, item.room)
    smaller = min(item.dtype.itemsize, item.wire_dtype.itemsize)
    multiple = max(ALIGN_BYTES // smaller, 1)
    return align(numel, multiple if item.form is None else math.lcm(multiple, item.form.block))


def _gathered_in_place(items: Sequence[PlannedParam], sizes: TransferSizes, *, coalesced: bool) -> list[int]:
    """Choose the parameters that get a collective of their own: on a single rank, all that can have one."""

    def movable(item: PlannedParam) -> bool:
        layout = item.layout
        return item.form is None and layout.rank_major and layout.numel > 0

    ranks = items[0].layout.ranks if items else 1
    if ranks == 1:
        return [i for i, item in enumerate(items) if movable(item)]
    if sum([item.full_bytes for item in items]) < sizes.direct_group_bytes:
        return []
    least = _least_direct_bytes(sizes, ranks, coalesced=coalesced)
    found = [i for i, item in enumerate(items) if item.full_bytes >= least and movable(item)]
    found = [i for i in found if items[i].layout.slot_numel * items[i].wire_dtype.itemsize % ALIGN_BYTES == 0]
    most = _COALESCED if coalesced else len(found)
    return sorted(sorted(found, key=lambda i: -items[i].full_bytes)[:most])


def _least_direct_bytes(sizes: TransferSizes, ranks: int, *, coalesced: bool) -> int:
    """Return the smallest size of a parameter that gets a collective of its own."""
    if sizes.direct_param_bytes is not None:
        return sizes.direct_param_bytes
    return max(_DIRECT_BYTES, ranks * _DIRECT_BYTES_PER_RANK if coalesced else 0)


def plan_flat(items: Sequence[PlannedParam], sizes: TransferSizes, *, coalesced: bool = False) -> FlatPlan:
    """Lay out a group's parameters in its shard, wire and full buffers.

    With ``coalesced``, the backend runs the collectives of a gather in one launch: few and large ones are best.
    """
    direct = _gathered_in_place(items, sizes, coalesced=coalesced)
    others = sorted(set(range(len(items))) - set(direct))
    # Empty parameters are in neither list: they have nothing to send and nothing to allocate.
    packed = [i for i in others if items[i].layout.numel]
    empty = [i for i in others if not items[i].layout.numel]

    def key(item: PlannedParam | CastSpan) -> tuple[torch.dtype, torch.dtype, WireFormat | None]:
        return item.dtype, item.wire_dtype, item.form

    numbers = {found: number for number, found in enumerate(dict.fromkeys(map(key, items)))}

    def number(i: int) -> int:
        return numbers[key(items[i])]

    # Direct items are sorted by dtype, packed ones in reverse: if both have items of the last dtype, one span covers
    # the last direct and the first packed ones.
    packed = sorted(packed, key=lambda i: -number(i))
    order = sorted(direct + empty, key=number) + packed
    shard_offset, wire_offset, full_offset = [0] * len(items), [0] * len(items), [0] * len(items)
    spans: list[CastSpan] = []
    shard_end = wire_end = full_end = 0
    for i in order:
        item = items[i]
        if not spans or key(spans[-1]) != key(item):
            shard_end, wire_end = align(shard_end), align(wire_end)
            spans.append(CastSpan(item.dtype, item.wire_dtype, shard_end, wire_end, form=item.form))
        span, slot = spans[-1], _slot_numel(item)
        shard_offset[i], wire_offset[i] = shard_end, span.wire_end if span.form is None else span.wire_offset
        shard_end += slot * item.dtype.itemsize
        spans[-1] = span = replace(span, numel=span.numel + slot)
        wire_end = span.wire_end
    for i, item in enumerate(items):
        full_offset[i] = full_end
        full_end += align(item.layout.full_storage_numel * item.wire_dtype.itemsize, _FULL_ALIGN_BYTES)
    return FlatPlan(
        direct=tuple(sorted(direct)),
        packed=tuple(packed),
        shard_offset=tuple(shard_offset),
        wire_offset=tuple(wire_offset),
        full_offset=tuple(full_offset),
        shard_bytes=shard_end,
        wire_bytes=wire_end,
        full_bytes=full_end,
        spans=tuple(spans),
    )


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of gradients, as indices.

    ``streamed`` chunks are sent in this order, each as soon as its gradients are finished. Those ``at_end`` are sent
    when the gradients of the whole group are finished.
    """

    streamed: tuple[tuple[int, ...], ...]
    at_end: tuple[tuple[int, ...], ...]

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """All chunks in the order of launching."""
        return self.streamed + self.at_end


def _number_of_chunks(nbytes: int, ranks: int, sizes: TransferSizes, *, streams: bool) -> int:
    """Return the largest number of chunks for a unit of ``nbytes``."""
    if not streams:
        return min(_CHUNKS, max(_CHUNKS * _CHUNKED_RANKS**2 // ranks**2, 1))
    least = ranks * sizes.chunk_bytes * (_LEAST_BYTES_PER_RANK if ranks <= _STREAMED_RANKS else _BYTES_PER_RANK)
    return 2 if ranks < _AT_ONCE_RANKS and nbytes >= 2 * least else 1


def plan_chunks(
    keys: Sequence[object],
    nbytes: Sequence[int],
    sizes: TransferSizes,
    ranks: int = 1,
    unit_bytes: int = 0,
    *,
    streams: bool = False,
) -> ChunkPlan:
    """Plan chunks of gradients that are reduced together over ``ranks`` ranks, as indices into ``keys``.

    A chunk is an equal part of these gradients, or of ``unit_bytes`` if that is more. The number of ranks, and whether
    collectives run on ``streams``, determine its size.

    Gradients of one chunk share their key (dtypes and formats). Large ones are streamed, the last parameter first
    because backward finishes it first. The small rest makes one chunk per key: a streamed chunk of many small ones
    would wait for the last of them anyway.
    """
    largest = max(sum(nbytes), unit_bytes)
    chunks = _number_of_chunks(largest, ranks, sizes, streams=streams)
    # A little less than an equal part, so that two equal matrices make two chunks although there are small gradients.
    chunk_bytes = max(largest * 9 // (10 * chunks), sizes.chunk_bytes)
    # With one chunk, send it at the end of the unit, together with the small gradients.
    at_once = streams and chunks == 1
    large = [] if at_once else [i for i in reversed(range(len(keys))) if nbytes[i] >= max(chunk_bytes // 4, 1)]
    are_large = set(large)
    at_end = [i for i in range(len(keys)) if i not in are_large]
    streamed: list[tuple[int, ...]] = []
    filling: list[int] = []
    for i in large:
        if filling and keys[filling[0]] != keys[i]:
            at_end += filling
            filling = []
        filling.append(i)
        if sum(nbytes[j] for j in filling) >= chunk_bytes:
            streamed.append(tuple(filling))
            filling = []
    at_end = sorted(at_end + filling)
    if streams and len(streamed) == 1 and sum(nbytes[i] for i in at_end) * _SMALL_PART <= sum(nbytes):
        # An output layer and its norm, say: sent early, it would be packed before the unit's parameters are freed.
        streamed, at_end = [], list(range(len(keys)))
    by_key = [tuple(i for i in at_end if keys[i] == key) for key in dict.fromkeys(keys[i] for i in at_end)]
    return ChunkPlan(tuple(streamed), tuple(by_key))


def reduced_in_place(layouts: Sequence[ShardLayout], itemsize: int, sizes: TransferSizes) -> tuple[int, ...]:
    """Choose gradients that are the input of a reduce-scatter without a copy, of elements of ``itemsize`` bytes.

    They are split along their slowest dimension into equal pieces, so their memory has a row for each rank. Only a few
    large ones are chosen, because each is a collective of its own in the one launch.
    """
    if not layouts or layouts[0].ranks == 1:
        return ()
    least = _least_direct_bytes(sizes, layouts[0].ranks, coalesced=True)
    found = [
        i
        for i, layout in enumerate(layouts)
        if layout.rank_major and layout.even and layout.numel * itemsize >= max(least, 1)
        if layout.slot_numel * itemsize % ALIGN_BYTES == 0
    ]
    return tuple(sorted(sorted(found, key=lambda i: -layouts[i].numel)[: _COALESCED - 1]))


class RowPlan:
    """The layout of one chunk of gradients for sending: one row per rank, with a slot for each gradient.

    ``offsets`` are the starts of the slots, and ``numel`` is the length of a row, both in elements. ``chunk_cat`` is
    True if one kernel can pack all gradients, because every layout cuts the slowest dimension. Rows are padded with
    zeros to a multiple of ``pad_to``.

    Gradients that are reduced ``in_place`` come first. The others are ``packed`` behind them, from ``packed_offset``
    on, and ``packed_row`` is their layout in a separate row.

    With ``shard_over_replicas``, ``over_replicas`` is the layout in which this row is sent over the replicate axis.
    """

    def __init__(
        self,
        layouts: Sequence[ShardLayout],
        pad_to: int = 1,
        in_place: Sequence[int] = (),
        over_replicas: RowPlan | None = None,
    ) -> None:
        self.layouts, self.over_replicas = tuple(layouts), over_replicas
        self.ranks = layouts[0].ranks if layouts else 1
        self.full_numel = sum(layout.numel for layout in self.layouts)  # of all gradients
        self.in_place = tuple(in_place)
        self.packed = tuple(i for i in range(len(self.layouts)) if i not in self.in_place)
        offsets, end = [0] * len(self.layouts), 0
        self.packed_offset = sum(self.layouts[i].slot_numel for i in self.in_place)
        for i in (*self.in_place, *self.packed):
            offsets[i] = end
            end += self.layouts[i].slot_numel
        self.offsets = tuple(offsets)
        self.numel = align(end, pad_to)
        self.padding = self.numel - end
        self.packed_row: RowPlan = RowPlan([self.layouts[i] for i in self.packed], pad_to) if self.in_place else self
        # Gradients that are reduced in place end aligned, so the padding of the others is that of the whole row.
        assert not self.in_place or self.packed_offset + self.packed_row.numel == self.numel
        self.chunk_cat = all(
            layout.dim == 0 and layout.memory_order == tuple(range(len(layout.shape))) and layout.numel > 0
            for layout in layouts
        )
        self.even = all(layout.even for layout in layouts)
        self.sizes = [layout.slot_numel for layout in layouts] + [self.padding] * bool(self.padding)
        self._pieces: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], int]]] = {}

    def pieces(self, rank: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Return (shape, stride, offset in the row) of ``rank``'s piece of every gradient."""
        if rank not in self._pieces:
            self._pieces[rank] = [
                (layout.shard_shape(rank), layout.shard_stride(rank), offset)
                for layout, offset in zip(self.layouts, self.offsets)
            ]
        return self._pieces[rank]
