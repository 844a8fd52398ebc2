"""Where the pieces of a tensor lie in rows, one row per rank: the pairs of views that gathering and reducing copy."""

from __future__ import annotations

import torch

from fsdp2.sharding.layout import ShardLayout

__all__ = ["Pair", "piece_pairs", "zero_gaps"]

Pair = tuple[torch.Tensor, torch.Tensor]


def piece_pairs(full: torch.Tensor, rows: torch.Tensor, layout: ShardLayout) -> list[Pair]:
    """The (part of ``full``, part of ``rows``) pairs that hold the same elements; ``rows`` is (ranks, slot).

    There are two at most, however many ranks there are: the pieces of one length are one strided view, and at most one
    rank holds a shorter piece that is not empty.
    """
    if not layout.numel:
        return []
    assert layout.dim is not None
    if layout.rank_major and layout.even and full.stride() == layout.stride:
        return [(full.as_strided(rows.shape, (layout.slot_numel, 1)), rows)]  # the same with fewer views
    order, chunk = layout.memory_order, layout.chunk
    place = order.index(layout.dim)
    whole, rest = divmod(layout.shape[layout.dim], chunk)
    pairs = []
    if whole:
        cut = full.narrow(layout.dim, 0, whole * chunk).permute(order).unflatten(place, (whole, chunk))
        slots = rows[:whole].unflatten(1, [layout.shard_shape(0)[d] for d in order])
        pairs.append((cut, slots.movedim(0, place)))
    if rest:
        piece = rows[whole].as_strided(layout.shard_shape(whole), layout.shard_stride(whole))
        pairs.append((full.narrow(layout.dim, whole * chunk, rest), piece))
    return pairs


def zero_gaps(rows: torch.Tensor, layout: ShardLayout) -> None:
    """Zero what ``rows`` (ranks, slot) has in excess of the pieces: behind a shorter one, and where there is none."""
    if layout.dim is None or layout.even or not layout.numel:
        return
    whole, rest = divmod(layout.shape[layout.dim], layout.chunk)
    if rest:
        rows[whole, layout.shard_numel(whole) :].zero_()
    rows[whole + bool(rest) :].zero_()
