"""Tensors from the ranks that hold them to those that want them, through one bucket of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp2.sharding.packing import ALIGN_BYTES, align
from fsdp2.weights.boxes import Entry, Part, buckets
from fsdp2.weights.ranks import Ranks

__all__ = ["broadcast_entries", "bucket_bytes", "sum_entries"]

Touch = Callable[[Part, torch.Tensor], None]
"""Fill or read the part of a bucket that is a block of an entry: the block's shape, the entry's dtype."""


def bucket_bytes(bucket_mb: float) -> int:
    """The size of a bucket in bytes, a multiple of 16.

    Raises:
        ValueError: ``bucket_mb`` is not a positive number.
    """
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)) or not 0 < bucket_mb < 1 << 20:
        raise ValueError(f"bucket_mb must be a positive number of MiB, got {bucket_mb!r}")
    return max(int(bucket_mb * 2**20) // ALIGN_BYTES, 1) * ALIGN_BYTES


def broadcast_entries(
    entries: Sequence[Entry], ranks: Ranks, limit: int, fill: Touch, drain: Touch
) -> Exception | None:
    """Let the first rank ``fill`` all blocks of ``entries`` and every rank ``drain`` them; the first error of either.

    An error does not stop the transfer, since the other ranks go on with it.
    """

    def move(parts: list[tuple[Part, torch.Tensor]], buffer: torch.Tensor) -> Exception | None:
        problem = _touch(fill, parts) if ranks.first else None
        ranks.broadcast(buffer)
        return problem or _touch(drain, parts)

    return _each_bucket(entries, ranks, limit, move)


def sum_entries(entries: Sequence[Entry], ranks: Ranks, limit: int, fill: Touch, drain: Touch) -> Exception | None:
    """Join blocks that every rank ``fill``s with what it holds of them (each element on one rank) and ``drain`` them.

    Bytes are added to zeros, which changes none of them. Errors as in ``broadcast_entries``.
    """

    def move(parts: list[tuple[Part, torch.Tensor]], buffer: torch.Tensor) -> Exception | None:
        buffer.zero_()
        problem = _touch(fill, parts)
        ranks.sum(buffer.view(torch.int64))
        return problem or _touch(drain, parts)

    return _each_bucket(entries, ranks, limit, move)


def _each_bucket(
    entries: Sequence[Entry],
    ranks: Ranks,
    limit: int,
    move: Callable[[list[tuple[Part, torch.Tensor]], torch.Tensor], Exception | None],
) -> Exception | None:
    problem = None
    size = min(limit, sum(align(entry.nbytes) for entry in entries))
    buffer = torch.empty(size, dtype=torch.uint8, device=ranks.device)
    for parts in buckets(entries, limit):
        views = [(part, _view(buffer, part, entries[part.index])) for part in parts]
        used = align(parts[-1].offset + parts[-1].nbytes)
        found = move(views, buffer[:used])
        problem = problem or found
    return problem


def _view(buffer: torch.Tensor, part: Part, entry: Entry) -> torch.Tensor:
    flat = buffer[part.offset : part.offset + part.nbytes].view(entry.dtype)
    return flat.view([length for _, length in part.box])


def _touch(function: Touch, parts: list[tuple[Part, torch.Tensor]]) -> Exception | None:
    try:
        for part, view in parts:
            function(part, view)
    except Exception as error:  # raised on every rank, once all are through
        return error
    return None
