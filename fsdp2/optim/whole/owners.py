"""The owner of each whole parameter, balanced by cost, and the box of it that every rank holds.

This is arithmetic on shapes, meshes and placements, so every rank gets the same result without communication.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp2.sharding.boxes import Box, cut, numel, whole
from fsdp2.sharding.mesh import listed_ranks
from fsdp2.sharding.spec import cut_dim, on_this_rank

__all__ = ["Candidates", "Route", "assign_owners", "boxes_of", "copies_of", "default_cost", "mesh_ranks", "parts_of"]


@dataclass(frozen=True)
class Route:
    """The holders and the owner of one tensor of ``shape``, as indices into the ranks of its mesh.

    ``boxes`` are the parts that the ranks hold, in their order; ranks may hold copies, or nothing.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    owner: int

    @property
    def holders(self) -> list[int]:
        """The ranks that hold a part."""
        return [rank for rank, box in enumerate(self.boxes) if numel(box)]

    @cached_property
    def senders(self) -> list[int]:
        """The ranks that send, one for each part: of several ranks with the same part, the one nearest to the owner."""
        nearest: dict[Box, int] = {}
        for rank in self.holders:
            known = nearest.get(self.boxes[rank])
            if known is None or abs(rank - self.owner) < abs(known - self.owner):
                nearest[self.boxes[rank]] = rank
        return list(nearest.values())

    def of_matrix(self, index: int, owner: int) -> Route:
        """Return the route of one matrix of a stack, which has an owner of its own."""
        nothing = ((0, 0),) * (len(self.shape) - 1)
        boxes = [box[1:] if box[0][0] <= index < sum(box[0]) else nothing for box in self.boxes]
        return Route(self.shape[1:], tuple(boxes), owner)

    def everywhere(self, shape: Sequence[int]) -> Route:
        """Return the route of a tensor of another shape that the same owner sends whole to every rank."""
        return Route(tuple(shape), (whole(shape),) * len(self.boxes), self.owner)


def mesh_ranks(param: DTensor) -> tuple[int, ...]:
    """Return the global ranks of a parameter's mesh, in ascending order."""
    return tuple(sorted(listed_ranks(param.device_mesh)))


def copies_of(param: DTensor) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each copy of ``param``: those with one place along the dimensions that it is replicated on.

    All are in ascending order.
    """
    sizes, replicated = param.device_mesh.shape, [isinstance(p, Replicate) for p in param.placements]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinate in zip(listed_ranks(param.device_mesh), itertools.product(*map(range, sizes))):
        place = tuple(at for at, copied in zip(coordinate, replicated) if copied)
        found.setdefault(place, []).append(rank)
    return tuple(sorted(tuple(sorted(ranks)) for ranks in found.values()))


def parts_of(boxes: Sequence[Box], count: int) -> list[tuple[int, ...]]:
    """Return for each of the ``count`` matrices of a stack the ranks that own it and others with it, as indices.

    ``boxes`` are the parts that ranks hold. If groups of equally many ranks hold equally many matrices, and nothing of
    others, each group owns its matrices, and nothing is sent from one group to another. Else all ranks own all of them,
    so that each has as much to do.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for rank, box in enumerate(boxes):
        groups.setdefault(box[0] if numel(box) else (0, 0), []).append(rank)
    sizes = {(length, len(ranks)) for (_, length), ranks in groups.items()}
    if len(sizes) > 1 or sum(length for _, length in groups) != count:
        return [tuple(range(len(boxes)))] * count
    return [tuple(ranks) for (_, length), ranks in sorted(groups.items()) for _ in range(length)]


def boxes_of(param: DTensor, where: str) -> tuple[Box, ...]:
    """Return the part of ``param`` that each of ``mesh_ranks(param)`` holds.

    Raises:
        NotImplementedError: The parts are not boxes (a partial sum, or pieces that interleave).
    """
    mesh, placements = param.device_mesh, param.placements
    known = all(isinstance(p, Replicate) or cut_dim(p) is not None for p in placements)
    found: dict[int, Box] = {}
    if known:
        sizes = tuple(mesh.shape)
        coordinates = itertools.product(*map(range, sizes))  # in the order of the mesh's elements
        for rank, coordinate in zip(listed_ranks(mesh), coordinates):
            found[rank] = _box(tuple(param.shape), placements, sizes, coordinate)
    mine = found.get(mesh.get_rank())
    if mine is None or tuple(length for _, length in mine) != tuple(on_this_rank(param).shape):
        raise NotImplementedError(
            f"{where}: its pieces are not known here; got a DTensor placed as {placements} on {mesh}, expected pieces "
            "sharded by Shard and Replicate on a mesh with this rank; redistribute it, or leave it to another optimizer"
        )
    return tuple(found[rank] for rank in sorted(found))


def _box(
    shape: tuple[int, ...], placements: Sequence[Placement], sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> Box:
    box = whole(shape)
    # A strided dimension is applied last: it cuts the pieces of the other mesh dimensions, wherever it is in the mesh.
    for i in sorted(range(len(sizes)), key=lambda i: type(placements[i]) is not Shard):
        box = cut(box, cut_dim(placements[i]), sizes[i], coordinate[i])
    return box


def default_cost(param: torch.Tensor) -> float:
    """Return rows x columns x the smaller of the two for (batches of) matrices, else the number of elements."""
    if param.ndim < 2:
        return float(param.numel())
    return float(param.numel() * min(param.shape[-2:]))


@dataclass(frozen=True)
class Candidates:
    """The ``ranks`` that may own the tensors of a parameter, or some of them for each tensor, ``of_tensors``.

    Of the ranks that own tensors of a parameter, those in ``near`` are preferred for each: they hold some of it.
    """

    ranks: tuple[int, ...]
    of_tensors: Sequence[tuple[int, ...]] = ()
    near: Sequence[Collection[int]] = ()


def assign_owners(
    params: Sequence[DTensor],
    cost: Callable[[torch.Tensor], float],
    counts: Sequence[int] | None = None,
    candidates: Sequence[Candidates] | None = None,
) -> list[list[int]]:
    """Return the global ranks that own the tensors of each parameter: itself, or the matrices of a stack.

    The most expensive tensors are assigned first, each to the candidate with the least load.

    Args:
        params: The parameters.
        cost: A function that returns the cost of a parameter; the matrices of a stack share it equally.
        counts: The number of tensors of each parameter; None: one each.
        candidates: Which ranks may own them; None: all ranks of a parameter's mesh.
    """
    counts = counts or [1] * len(params)
    candidates = candidates or [Candidates(mesh_ranks(param)) for param in params]
    costs = [float(cost(param)) / count for param, count in zip(params, counts)]
    ranks = [one.ranks for one in candidates]
    loads: dict[tuple[int, ...], _Loads] = {}
    owners: list[list[int]] = [[] for _ in params]
    for i in sorted(range(len(params)), key=lambda i: (-len(ranks[i]), ranks[i], -costs[i], i)):
        one, own = candidates[i], ranks[i]
        if own not in loads:
            loads[own] = _Loads(own, [load for others, load in loads.items() if set(others) >= set(own)])
        owners[i] = [loads[own].give(one.of_tensors[k] if one.of_tensors else own, costs[i]) for k in range(counts[i])]
        if one.near:
            owners[i] = _dealt(one.near, owners[i])
    return owners


class _Loads:
    """What each of some ranks has to do, as far as all of them know.

    They know what parameters on these ranks and more give them. What those on other ranks give, only some know.
    """

    def __init__(self, ranks: tuple[int, ...], known: Iterable[_Loads]) -> None:
        """``known`` are those of more ranks."""
        self._given = dict.fromkeys(ranks, 0.0)
        self._load = {rank: sum(other._given[rank] for other in known) for rank in ranks}
        self._heaps: dict[tuple[int, ...], list[tuple[float, int]]] = {}

    def give(self, ranks: tuple[int, ...], cost: float) -> int:
        """Return the one of ``ranks`` with the least load, after adding ``cost`` to it."""
        if ranks not in self._heaps:
            self._heaps[ranks] = [(self._load[rank], rank) for rank in ranks]
            heapq.heapify(self._heaps[ranks])
        heap = self._heaps[ranks]
        while heap[0][0] < self._load[heap[0][1]]:  # it was given something since, here or by another heap
            heapq.heapreplace(heap, (self._load[heap[0][1]], heap[0][1]))
        owner = heap[0][1]
        self._given[owner] += cost
        self._load[owner] += max(cost, math.ulp(1.0))
        return owner


def _dealt(near: Sequence[Collection[int]], owners: Sequence[int]) -> list[int]:
    """Return ``owners`` in another order, in which as many as possible are among those that are ``near``."""
    left = Counter(owners)
    found: list[int | None] = []
    for ranks in near:
        owner = next((rank for rank in ranks if left[rank]), None)
        if owner is not None:
            left[owner] -= 1
        found.append(owner)
    others = iter(sorted(left.elements()))
    return [next(others) if owner is None else owner for owner in found]
