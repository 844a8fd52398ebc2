"""Send tensors from the ranks that hold them to the ranks that need them, through one bucket of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp2.sharding.packing import align
from fsdp2.weights.buckets import Entry, Part, buckets
from fsdp2.weights.ranks import Ranks

__all__ = ["check_cast", "transfer"]

Touch = Callable[[Part, torch.Tensor], None]
"""A function that fills or reads one block: a view of the bucket with the block's shape and the entry's dtype."""


def check_cast(where: str, dtype: object) -> None:
    """Raise TypeError unless ``dtype``, which values are to be cast to, is None or a floating-point one."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"{where}: dtype must be a floating-point torch.dtype or None, got {dtype!r}")


def transfer(
    entries: Sequence[Entry], ranks: Ranks, limit: int, fill: Touch, drain: Touch, *, summed: bool = False
) -> None:
    """Send all blocks of ``entries``: the first rank calls ``fill`` on each block, every rank then calls ``drain``.

    With ``summed``, every rank fills the part of a block that it holds, and each element is on exactly one rank. The
    bytes are added to zeros, which keeps them as they are. A rank raises its first error only after all blocks were
    filled and sent, because the other ranks continue: they would wait for it, or write what was in the buffer.
    """
    problem: Exception | None = None
    size = align(min(limit, sum(align(entry.nbytes) for entry in entries)))
    buffer = torch.empty(size, dtype=torch.uint8, device=ranks.device)
    for parts in buckets(entries, limit):
        views = [(part, _view(buffer, part, entries[part.index])) for part in parts]
        used = buffer[: align(parts[-1].offset + parts[-1].nbytes)]
        if summed:
            used.zero_()
        if summed or ranks.first:  # also after an error here: the other ranks write what they get
            failed = _touch(fill, views)
            problem = problem or failed
        if summed:
            ranks.sum(used.view(torch.int64))
        else:
            ranks.broadcast(used)
        problem = problem or _touch(drain, views)
    if problem is not None:
        raise problem


def _view(buffer: torch.Tensor, part: Part, entry: Entry) -> torch.Tensor:
    flat = buffer[part.offset : part.offset + part.nbytes].view(entry.dtype)
    return flat.view([length for _, length in part.box])


def _touch(function: Touch, parts: list[tuple[Part, torch.Tensor]]) -> Exception | None:
    """Call ``function`` for all parts; return its first error, which the caller raises after all blocks were sent."""
    problem = None
    for part, view in parts:
        try:
            function(part, view)
        except Exception as error:
            problem = problem or error
    return problem
