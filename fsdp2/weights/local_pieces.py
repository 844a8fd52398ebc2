"""Local state dicts: this rank's piece of each parameter, and the data needed to join the pieces.

A piece is a plain dictionary: ``piece`` is the local tensor, ``shape`` the shape of the whole tensor, and ``offset``
the index of the piece's first element in it. Pieces are boxes, also under tensor parallelism, so this describes them
for any number of ranks. Replicas have equal offsets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2.sharding.boxes import Box, box_of, box_on_mesh, narrow
from fsdp2.sharding.spec import ShardedSpec, on_this_rank

__all__ = ["foreign_piece", "is_piece", "merge_local_state_dicts", "piece_of"]

_KEYS = {"piece", "shape", "offset"}


def is_piece(value: object) -> bool:
    """Return True if ``value`` is a piece."""
    return isinstance(value, Mapping) and set(value) == _KEYS


def piece_of(value: DTensor, spec: ShardedSpec | None, name: str) -> dict[str, Any]:
    """Return the piece of ``value``, sharing its local tensor; ``spec`` is that of a parameter with the same shards."""
    offset = tuple(start for start, _ in _box(value, spec, name))
    return {"piece": on_this_rank(value).detach(), "shape": tuple(value.shape), "offset": offset}


def _box(value: Any, spec: ShardedSpec | None, name: str) -> Box:
    return box_of(spec, name) if spec else box_on_mesh(tuple(value.shape), value.device_mesh, value.placements, name)


def foreign_piece(value: Mapping[str, Any], tensor: Any, spec: ShardedSpec | None, name: str) -> str:
    """Return the problem with ``value`` as this rank's piece of ``tensor``, which is sharded by ``spec``, or ""."""
    box, piece = _box(tensor, spec, name), value["piece"]
    right = tuple(value["offset"]) == tuple(start for start, _ in box) or not piece.numel()
    lengths = tuple(length for _, length in box)
    if right and (tuple(value["shape"]), tuple(piece.shape)) == (tuple(tensor.shape), lengths):
        return ""
    return (
        f"{name} is the piece of shape {tuple(piece.shape)} at {tuple(value['offset'])} of {tuple(value['shape'])}, "
        f"this rank holds the box {box} of (start, length). To load the local state dicts of other ranks or of another "
        "number of ranks, pass fsdp2.merge_local_state_dicts(the list of all of them)"
    )


def merge_local_state_dicts(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the local state dicts of all ranks, in any order, to one full state dict.

    It works for models and optimizers and does not communicate. The result can be loaded on any number of ranks or into
    the plain model. Values that are not pieces (buffers, ignored parameters, hyperparameters) come from the first.

    Args:
        state_dicts: One local state dict for each rank, all from one save.

    Returns:
        A state dict of whole plain tensors.

    Raises:
        TypeError: The argument is not a list of state dicts.
        ValueError: The keys differ, or pieces are missing or do not fit together.
    """
    dicts = list(state_dicts) if isinstance(state_dicts, Sequence) else []
    if not dicts or not all(isinstance(one, Mapping) for one in dicts):
        raise TypeError(
            f"merge_local_state_dicts: expected a list of all ranks' state dicts, got {type(state_dicts).__name__}"
        )
    merged = _merge(dicts, "")
    metadata = getattr(dicts[0], "_metadata", None)
    if metadata is not None:
        vars(merged)["_metadata"] = metadata
    return merged


def _merge(values: list[Any], name: str) -> Any:
    first = values[0]
    if any(map(is_piece, values)):
        if not all(map(is_piece, values)):
            raise ValueError(f"{name}: a piece in one state dict, something else in another; pass those of one save")
        return _join(values, name)
    if isinstance(first, (list, tuple)):
        return _merge_sequences(values, name)
    if not isinstance(first, Mapping):
        if any(map(_has_pieces, values)):
            raise ValueError(f"{name}: pieces in one state dict, {first!r} in another; pass those of one save")
        return first
    for index, other in enumerate(values):
        if not isinstance(other, Mapping) or other.keys() != first.keys():
            got = sorted(map(str, set(other) ^ set(first))) if isinstance(other, Mapping) else other
            raise ValueError(
                f"{name or 'merge_local_state_dicts'}: state dicts 0 and {index} must have the same keys; only one has "
                f"{got}. Pass the local state dicts of all ranks from one save"
            )
    merged: dict[Any, Any] = OrderedDict() if isinstance(first, OrderedDict) else {}
    for key in first:
        merged[key] = _merge([value[key] for value in values], f"{name}.{key}" if name else str(key))
    return merged


def _merge_sequences(values: list[Any], name: str) -> Any:
    """Merge lists or tuples entry by entry; return the first if there are no pieces in them (hyperparameters)."""
    first = values[0]
    if not any(map(_has_pieces, values)):
        return first
    if any(type(other) is not type(first) or len(other) != len(first) for other in values):
        raise ValueError(
            f"{name}: pieces in sequences of different kinds or lengths; got "
            f"{[f'{type(value).__name__} of {len(value)}' for value in values]}, expected the same in every state "
            "dict. Pass the local state dicts of all ranks from one save"
        )
    merged = [_merge(list(entries), f"{name}.{index}") for index, entries in enumerate(zip(*values))]
    return first._make(merged) if hasattr(first, "_make") else type(first)(merged)


def _has_pieces(value: Any) -> bool:
    """Return True if ``value`` contains a piece at any depth."""
    if isinstance(value, Mapping):
        return is_piece(value) or any(map(_has_pieces, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_has_pieces, value))


@torch.no_grad()
def _join(pieces: list[Mapping[str, Any]], name: str) -> torch.Tensor:
    shape, first = tuple(pieces[0]["shape"]), pieces[0]["piece"]
    full = torch.empty(shape, dtype=first.dtype, device=first.device)
    # Counting elements is not enough: a gap may be as large as an overlap.
    filled = torch.zeros(shape, dtype=torch.bool)
    known: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    for piece in pieces:
        tensor, offset = piece["piece"], tuple(piece["offset"])
        if tuple(piece["shape"]) != shape or tensor.dtype != full.dtype or tensor.ndim != full.ndim:
            raise ValueError(
                f"{name}: pieces of different tensors; got shape {tuple(piece['shape'])} and dtype {tensor.dtype} "
                f"beside {shape} and {full.dtype}. Pass the local state dicts of all ranks from one save"
            )
        if not tensor.numel() or (offset, tuple(tensor.shape)) in known:
            continue  # an empty piece, or a replica
        box = tuple(zip(offset, tensor.shape))
        if narrow(filled, box).any():
            raise ValueError(
                f"{name}: pieces that overlap; got one of shape {tuple(tensor.shape)} at {offset} where others are, as "
                "from another number of ranks. Pass the local state dicts of all ranks from one save"
            )
        narrow(full, box).copy_(tensor)
        narrow(filled, box).fill_(True)
        known.add((offset, tuple(tensor.shape)))
    covered = int(filled.sum())
    if covered != full.numel():
        raise ValueError(
            f"{name}: the pieces hold {covered} elements, expected the {full.numel()} of shape {shape}; pass the local "
            "state dicts of all ranks from one save"
        )
    return full
