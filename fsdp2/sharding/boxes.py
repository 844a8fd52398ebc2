"""Boxes of tensors: the box that this rank holds, and intersections of boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.spec import ShardedSpec

__all__ = [
    "Box",
    "beyond",
    "box_of",
    "box_on_mesh",
    "copy_common",
    "cut",
    "intersect",
    "narrow",
    "numel",
    "whole",
    "within",
]

Box = tuple[tuple[int, int], ...]
"""The (start, length) of each dimension."""


def whole(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor of ``shape``."""
    return tuple((0, size) for size in shape)


def numel(box: Box) -> int:
    """Return the number of elements in ``box``."""
    return math.prod(length for _, length in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    both = []
    for (start_a, length_a), (start_b, length_b) in zip(a, b):
        start = max(start_a, start_b)
        length = min(start_a + length_a, start_b + length_b) - start
        if length <= 0:
            return None
        both.append((start, length))
    return tuple(both)


def within(box: Box, outer: Box) -> Box:
    """Return ``box`` relative to the start of ``outer``."""
    return tuple((start - origin, length) for (start, length), (origin, _) in zip(box, outer))


def beyond(box: Box, outer: Box) -> Box:
    """Return the absolute position of ``box``, given relative to ``outer``: the inverse of ``within``."""
    return tuple((start + origin, length) for (start, length), (origin, _) in zip(box, outer))


def narrow(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of the part of ``tensor`` in ``box``."""
    for dim, (start, length) in enumerate(box):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def copy_common(source: torch.Tensor, at: Box, target: torch.Tensor, to: Box) -> None:
    """Copy the elements in both boxes from ``source``, the box ``at`` of a tensor, to ``target``, the box ``to``."""
    common = intersect(at, to)
    if common is not None:
        narrow(target, within(common, to)).copy_(narrow(source, within(common, at)))


def cut(box: Box, dim: int | None, ranks: int, rank: int) -> Box:
    """Return the box of ``rank`` if ``box`` is cut along ``dim`` over ``ranks`` ranks; None: it is not cut."""
    if dim is None:
        return box
    start, length = box[dim]
    first, held = ShardLayout((length,), (1,), 0, ranks).bounds(rank)
    return (*box[:dim], (start + first, held), *box[dim + 1 :])


def box_of(spec: ShardedSpec, name: str) -> Box:
    """Return the box that this rank holds of a parameter with this spec."""
    meta = None if spec.full is None else spec.full.tensor_meta
    if spec.full is None or meta is None:
        box = whole(spec.layout.shape)
    else:
        box = box_on_mesh(tuple(meta.shape), spec.full.mesh, spec.full.placements, name)
    for layout, rank in spec.cuts:
        box = cut(box, layout.dim, layout.ranks, rank)
    return box


def box_on_mesh(shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement], name: str) -> Box:
    """Return the box that this rank holds of a DTensor of ``shape``.

    Raises:
        NotImplementedError: The part is not a box, or this rank is not on the mesh.
    """
    here, box = mesh.get_coordinate(), whole(shape)
    for i, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        if type(placement) is not Shard or here is None:
            raise NotImplementedError(
                f"{name}: its pieces are not boxes; got a DTensor placed as {placements} on {mesh}, expected "
                "only Shard and Replicate, on a mesh with this rank; redistribute it first"
            )
        box = cut(box, placement.dim, mesh.size(i), here[i])
    return box
