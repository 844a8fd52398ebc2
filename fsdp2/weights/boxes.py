"""Boxes of tensors and how they are packed into buckets: integers only, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fsdp2.sharding.packing import align

__all__ = ["Box", "Entry", "Part", "beyond", "blocks", "buckets", "intersect", "narrow", "numel", "whole", "within"]

Box = tuple[tuple[int, int], ...]
"""(start, length) of each dimension."""


@dataclass(frozen=True)
class Entry:
    """A tensor that travels: its shape and its dtype on the way."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """A block of entry ``index`` and where it starts in its bucket; ``last`` ends the entry."""

    index: int
    box: Box
    offset: int
    nbytes: int
    last: bool


def whole(shape: Sequence[int]) -> Box:
    """The box of everything."""
    return tuple((0, size) for size in shape)


def numel(box: Box) -> int:
    """Elements in ``box``."""
    return math.prod(length for _, length in box)


def intersect(a: Box, b: Box) -> Box | None:
    """What is in both, None if that is nothing."""
    both = []
    for (start_a, length_a), (start_b, length_b) in zip(a, b):
        start = max(start_a, start_b)
        length = min(start_a + length_a, start_b + length_b) - start
        if length <= 0:
            return None
        both.append((start, length))
    return tuple(both)


def within(box: Box, outer: Box) -> Box:
    """``box`` as seen from the start of ``outer``."""
    return tuple((start - origin, length) for (start, length), (origin, _) in zip(box, outer))


def beyond(box: Box, outer: Box) -> Box:
    """``box``, given from the start of ``outer``, as seen from where ``outer`` is: the reverse of ``within``."""
    return tuple((start + origin, length) for (start, length), (origin, _) in zip(box, outer))


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of ``tensor`` in ``box``, a view."""
    for dim, (start, length) in enumerate(box):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def blocks(box: Box, limit: int) -> Iterator[Box]:
    """``box`` in pieces of up to ``limit`` elements that follow each other in row-major order, each without gaps."""
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
    """All blocks of ``entries``, in order, in buckets of up to ``limit`` bytes (16 at least)."""
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
