"""Tensors to send in bounded memory: blocks of them, packed into buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp2.sharding.boxes import Box, numel, whole
from fsdp2.sharding.packing import align

__all__ = ["Entry", "Part", "blocks", "buckets"]


@dataclass(frozen=True)
class Entry:
    """The shape of a tensor to send, and the dtype in which it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """A block of entry ``index`` and its offset in the bucket; ``last`` marks the last block of the entry."""

    index: int
    box: Box
    offset: int
    nbytes: int
    last: bool


def blocks(box: Box, limit: int) -> Iterator[Box]:
    """Yield ``box`` in pieces of up to ``limit`` elements, in row-major order, each of them contiguous in ``box``."""
    total = numel(box)
    if total == 0:
        return
    if total <= limit:
        yield box
        return
    (start, length), rest = box[0], box[1:]
    row = total // length
    if row > limit:
        for i in range(start, start + length):
            for piece in blocks(rest, limit):
                yield ((i, 1), *piece)
        return
    step = max(limit // row, 1)
    for i in range(start, start + length, step):
        yield ((i, min(step, start + length - i)), *rest)


def buckets(entries: Sequence[Entry], limit: int) -> Iterator[list[Part]]:
    """Yield all blocks of ``entries``, in order, in buckets of up to ``limit`` bytes (at least 16)."""
    parts: list[Part] = []
    used = 0
    for index, entry in enumerate(entries):
        size = entry.dtype.itemsize
        pieces = list(blocks(whole(entry.shape), max(limit // size, 1)))
        for i, box in enumerate(pieces):
            nbytes = numel(box) * size
            if parts and used + nbytes > limit:
                yield parts
                parts, used = [], 0
            parts.append(Part(index, box, used, nbytes, i == len(pieces) - 1))
            used += align(nbytes)
    if parts:
        yield parts
