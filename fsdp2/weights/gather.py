"""Full tensors in order, in bounded memory, each in memory of its own; small neighbours travel together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fsdp2._torch.tensors import foreach_copy
from fsdp2.comm.collectives import all_gather, wire_view
from fsdp2.comm.pieces import piece_pairs
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import align

__all__ = ["Source", "gather_in_order"]


@dataclass(frozen=True)
class Source:
    """A managed parameter to gather, or its gradient, in its own dtype or in ``dtype``."""

    param: FSDPParam
    group: FSDPParamGroup
    gradient: bool = False
    dtype: torch.dtype | None = None

    @property
    def layout(self) -> ShardLayout:
        """How it is cut."""
        return self.param.spec.layout

    @property
    def axis(self) -> Axis:
        """The ranks that hold the pieces."""
        return self.group.mesh.shard

    @property
    def piece(self) -> torch.Tensor:
        """This rank's piece as it is now."""
        piece = self.param.gradient if self.gradient else self.param.data
        assert piece is not None
        return piece

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype it is sent and returned in."""
        return self.dtype or self.piece.dtype

    @property
    def local(self) -> bool:
        """Whether every rank holds it whole."""
        layout = self.layout
        return layout.dim is None or layout.ranks == 1 or not layout.numel

    @property
    def slot_bytes(self) -> int:
        """What one rank sends."""
        return self.layout.slot_numel * self.wire_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """What a gather of it takes, padding included, and the rest that tensor parallelism holds elsewhere."""
        meta = self.param.spec.dtensor.tensor_meta
        whole = 0 if self.param.spec.full is None or meta is None else math.prod(meta.shape)
        ranks = 1 if self.local else self.layout.ranks
        return max(ranks * self.slot_bytes, whole * self.wire_dtype.itemsize)


def gather_in_order(sources: Iterable[Source], bucket_bytes: int) -> Iterator[torch.Tensor]:
    """The full, plain tensor of each source, in memory of its own.

    Neighbours of up to ``bucket_bytes`` together make one collective. All ranks must go on in step. Nothing is in
    flight whenever a tensor is handed out, so the iteration may be left at any point.
    """
    bucket: list[Source] = []
    size = 0
    for source in sources:
        if bucket and (source.axis != bucket[0].axis or size + source.nbytes > bucket_bytes):
            yield from _bucket(bucket)
            bucket, size = [], 0
        bucket.append(source)
        size += source.nbytes
    if bucket:
        yield from _bucket(bucket)


def _bucket(bucket: list[Source]) -> Iterator[torch.Tensor]:
    gathered = _gather(bucket)
    for source in bucket:
        yield source.param.spec.to_plain(gathered.popleft())


@torch.no_grad()
def _gather(bucket: list[Source]) -> deque[torch.Tensor]:
    """What every data-parallel rank computes with, in order."""
    sent = [source for source in bucket if not source.local]
    if len(sent) == 1 and sent[0].layout.rank_major:
        rows = [_gather_in_place(sent[0])]
    else:
        rows = _gather_packed(sent) if sent else []
    shared = iter(rows)
    return deque(_copy(source) if source.local else next(shared) for source in bucket)


def _empty(source: Source) -> torch.Tensor:
    layout = source.layout
    return torch.empty_strided(layout.shape, layout.stride, dtype=source.wire_dtype, device=source.group.mesh.device)


def _copy(source: Source) -> torch.Tensor:
    return _empty(source).copy_(source.piece)


def _write(slot: torch.Tensor, source: Source) -> None:
    """Put this rank's piece into ``slot``, cast; what the slot has in excess of it is never read."""
    spec = source.param.spec
    slot[: spec.shard_numel].as_strided(spec.shard_shape, spec.shard_stride).copy_(source.piece)


def _gather_in_place(source: Source) -> torch.Tensor:
    """The pieces in rank order are the tensor's memory; only padding costs a copy."""
    layout, axis = source.layout, source.axis
    flat = torch.empty(axis.size * layout.slot_numel, dtype=source.wire_dtype, device=source.group.mesh.device)
    slot = flat[axis.rank * layout.slot_numel : (axis.rank + 1) * layout.slot_numel]
    _write(slot, source)
    all_gather([wire_view(flat)], [wire_view(slot)], axis, async_op=False)
    if flat.numel() > layout.numel:
        flat = flat[: layout.numel].clone()
    return flat.as_strided(layout.shape, layout.stride)


def _gather_packed(sources: list[Source]) -> list[torch.Tensor]:
    """One row of bytes from each rank, with every tensor's slot in it."""
    axis, device = sources[0].axis, sources[0].group.mesh.device
    offsets, end = [], 0
    for source in sources:
        offsets.append(end)
        end += align(source.slot_bytes)
    rows = torch.empty(axis.size, end, dtype=torch.uint8, device=device)
    slots = [
        rows[:, offset : offset + source.slot_bytes].view(source.wire_dtype) for source, offset in zip(sources, offsets)
    ]
    for source, slot in zip(sources, slots):
        _write(slot[axis.rank], source)
    all_gather([rows.view(-1)], [rows[axis.rank]], axis, async_op=False)
    fulls = [_empty(source) for source in sources]
    targets, pieces = [], []
    for source, slot, full in zip(sources, slots, fulls):
        for target, piece in piece_pairs(full, slot, source.layout):
            targets.append(target)
            pieces.append(piece)
    foreach_copy(targets, pieces)
    return fulls
