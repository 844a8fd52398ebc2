"""The places of a tensor's pieces in rows, one row per rank, and the copies that gathers and reductions make."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fsdp2._torch.tensors import chunk_cat, foreach_copy
from fsdp2.sharding.layout import ShardLayout

__all__ = [
    "INTEGERS",
    "Pair",
    "copy_all",
    "has_memory",
    "pack_rows",
    "part_of",
    "piece_pairs",
    "zero_gaps",
]

Pair = tuple[torch.Tensor, torch.Tensor]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, integers that show its bits."""


def part_of(
    flat: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a dense tensor from byte ``start`` of ``flat`` on, with a storage of its own inside that memory.

    It fills its storage, so that copying, saving and pickling take it alone. Storages of fake tensors have no parts;
    there it is a view. A tensor without elements has memory nowhere: torch.save refuses two dtypes at one address.
    """
    end = start + math.prod(shape) * dtype.itemsize
    if start == end:
        return torch.empty_strided(shape, stride, dtype=dtype, device=flat.device)
    if not has_memory(flat):
        return flat[start:end].view(dtype).as_strided(shape, stride).data
    return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage()[start:end], 0, shape, stride)


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has elements. A fake one, in forecasts, or in torch's memory trackers and estimators,
    has a device and a size alone.
    """
    return tensor.untyped_storage().device.type != "meta"


def copy_all(targets: list[torch.Tensor], pieces: list[torch.Tensor]) -> None:
    """Copy each of ``pieces`` to its target, in the target's dtype, by one kernel; the lists may be empty."""
    if targets:
        foreach_copy(targets, pieces)


def pack_rows(tensors: list[torch.Tensor], rows: torch.Tensor, padding: int) -> None:
    """Chunk each of the contiguous ``tensors`` along its first dimension; chunk i fills its part of row i of ``rows``.

    They are cast to the dtype of ``rows``; short chunks, and the last ``padding`` elements of each row, become zero.
    """
    # Made each time: if a graph capture made these zeros, they would be in memory only after the graph's first replay.
    zeros = [tensors[0].new_zeros(rows.shape[0], padding)] if padding else []
    chunk_cat([*tensors, *zeros], 0, rows.shape[0], out=rows)


def piece_pairs(full: torch.Tensor, rows: torch.Tensor, layout: ShardLayout) -> list[Pair]:
    """Return pairs (part of ``full``, part of ``rows``) with the same elements; ``rows`` is (ranks, slot).

    There are two at most, however many ranks there are: the pieces of one length are one strided view, and at most one
    rank holds a shorter piece that is not empty.
    """
    if not layout.numel:
        return []
    if layout.rank_major and layout.even and full.stride() == layout.stride:
        return [(full.as_strided(rows.shape, (layout.slot_numel, 1)), rows)]  # the same with fewer views
    assert layout.dim is not None
    order, chunk = layout.memory_order, layout.chunk
    position = order.index(layout.dim)
    whole, rest = divmod(layout.shape[layout.dim], chunk)
    pairs = []
    if whole:
        cut = full.narrow(layout.dim, 0, whole * chunk).permute(order).unflatten(position, (whole, chunk))
        slots = rows[:whole].unflatten(1, [layout.shard_shape(0)[d] for d in order])
        pairs.append((cut, slots.movedim(0, position)))
    if rest:
        piece = rows[whole].as_strided(layout.shard_shape(whole), layout.shard_stride(whole))
        pairs.append((full.narrow(layout.dim, whole * chunk, rest), piece))
    return pairs


def zero_gaps(rows: torch.Tensor, layout: ShardLayout) -> None:
    """Zero the padding of ``rows`` (ranks, slot): behind a shorter piece, and the rows of ranks without a piece."""
    if layout.even or not layout.numel:
        return
    assert layout.dim is not None
    whole, rest = divmod(layout.shape[layout.dim], layout.chunk)
    if rest:
        rows[whole, layout.shard_numel(whole) :].zero_()
    rows[whole + bool(rest) :].zero_()
