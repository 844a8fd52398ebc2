"""The parameters of one optimizer by their ranks, each with its owner and the part that this rank holds."""

from __future__ import annotations

import itertools
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2.engine.index import param_of
from fsdp2.optim.whole.owners import (
    Candidates,
    Route,
    assign_owners,
    boxes_of,
    copies_of,
    mesh_ranks,
    parts_of,
)
from fsdp2.optim.whole.stacks import Stacks
from fsdp2.sharding.boxes import Box, numel, whole
from fsdp2.sharding.mesh import Axis, own_group
from fsdp2.sharding.platform import device_of
from fsdp2.sharding.spec import on_this_rank

__all__ = ["Among", "Owned", "Ownership", "RankSet", "digest_of"]


@dataclass(frozen=True, eq=False)
class Owned:
    """What an optimizer steps on as a whole: a parameter, or one matrix of a parameter that is a stack of them.

    ``key`` stands for it in steps and states: the parameter itself, or a tensor made for the matrix ``index``, of which
    this rank's piece of the parameter has the row ``row`` (None if it has nothing of it). ``rank`` is this rank's index
    in the route.
    """

    param: Any
    key: torch.Tensor
    route: Route
    rank: int
    index: int | None = None
    row: int | None = None

    @property
    def mine(self) -> bool:
        """True if this rank owns it."""
        return self.route.owner == self.rank

    @property
    def here(self) -> Box:
        """The box that this rank holds."""
        return self.route.boxes[self.rank]

    @property
    def whole(self) -> Box:
        """The box of the whole tensor."""
        return whole(self.route.shape)

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.route.shape)

    def of(self, local: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's box in ``local``, a tensor that is cut like the parameter; None if it holds nothing."""
        if self.index is None:
            return local
        return None if self.row is None else local[self.row]

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the whole tensor, with the strides that it had before it was sharded."""
        device, strides = on_this_rank(self.param).device, self.param.stride()
        return torch.empty_strided(self.route.shape, strides[-len(self.route.shape) :], dtype=dtype, device=device)


@dataclass(frozen=True)
class Among:
    """Some ranks of a set, which exchange tensors with one another: their axis, and their places in it."""

    axis: Axis
    places: Mapping[int, int]
    """By the index in the set."""


@dataclass(frozen=True)
class _Circle:
    """Who owns a parameter, and between whom its pieces travel: all that ranks must know alike.

    ``ranks`` are those of its mesh, and ``copies`` the ranks that own and keep a copy of it each. ``parts`` are the
    ranks between which a step sends something of it, by their places in a copy.
    """

    ranks: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]
    parts: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[Any, ...]:
        """The key by which all ranks sort circles: those of more ranks first."""
        return -len(self.ranks), self.ranks, len(self.copies), len(self.parts), self.copies, self.parts

    @property
    def copy(self) -> tuple[int, ...]:
        """The ranks of this rank's copy."""
        return next(ranks for ranks in self.copies if dist.get_rank() in ranks)

    @property
    def part(self) -> tuple[int, ...]:
        """The ranks that this rank exchanges pieces with in a step, and itself."""
        place = self.copy.index(dist.get_rank())
        return tuple(self.copy[i] for i in next(part for part in self.parts if place in part))


class RankSet:
    """The parameters that lie on the same ranks and travel between the same, and the axis of these ranks in order.

    The owner of a parameter that has copies with owners of their own is that of this rank's copy.
    """

    def __init__(
        self,
        circle: _Circle,
        params: Sequence[DTensor],
        boxes: Sequence[Sequence[Box]],
        owners: Sequence[Sequence[int]],
        stacks: Stacks,
    ) -> None:
        """``boxes`` are what the ranks hold, and ``owners`` the global ranks that own each parameter or matrix."""
        self.ranks, self.params = circle.ranks, params
        device_type = params[0].device_mesh.device_type
        self.axis = _axis(self.ranks, device_type)
        self.device = device_of(device_type)
        self.copy, self.part = self._among(circle.copy), self._among(circle.part)
        """The ranks that have this rank's copy, and those of them with which it exchanges pieces in a step."""
        self.owned: list[Owned] = []
        for param, held, own in zip(params, boxes, owners):
            by_index = [self.ranks.index(owner) for owner in own]
            route = Route(tuple(param.shape), tuple(held), by_index[0])
            if stacks.has(param):
                self.owned += self._matrices(param, route, by_index, stacks)
            else:
                self.owned.append(Owned(param, param, route, self.axis.rank))
        self.owned_of: dict[Any, list[Owned]] = {param: [] for param in params}
        for owned in self.owned:
            self.owned_of[owned.param].append(owned)
        self.digest = digest_of(params)

    def _among(self, ranks: tuple[int, ...]) -> Among:
        device_type = self.params[0].device_mesh.device_type
        axis = self.axis if ranks == self.ranks else _axis(ranks, device_type)
        return Among(axis, {self.ranks.index(rank): place for place, rank in enumerate(ranks)})

    def is_sent(self, param: Any) -> bool:
        """Return whether a step sends something of ``param`` to owners: not if each of them holds all that it owns."""
        return any(rank != one.route.owner for one in self.owned_of[param] for rank in one.route.senders)

    def new_part(self, purpose: str) -> Among:
        """Return ``part`` with a process group of its own. Every one of its ranks must call this."""
        if self.part.axis.size == 1:
            return self.part
        ranks = [self.ranks[index] for index in self.part.places]
        axis = Axis.of_group(own_group(ranks, purpose), self.params[0].device_mesh.device_type)
        return replace(self.part, axis=axis)

    def _matrices(self, param: DTensor, of_stack: Route, owners: Sequence[int], stacks: Stacks) -> Iterator[Owned]:
        rank = self.axis.rank
        first = of_stack.boxes[rank][0][0]
        for index, (key, owner) in enumerate(zip(stacks.matrices_of(param), owners)):
            route = of_stack.of_matrix(index, owner)
            row = index - first if numel(route.boxes[rank]) else None
            yield Owned(param, key, route, rank, index, row)

    def buckets(
        self, used: Sequence[tuple[Owned, torch.dtype]], limit: int
    ) -> Iterator[list[tuple[Owned, torch.dtype]]]:
        """Yield buckets of ``used``, parameters with the dtypes of their gradients.

        Parameters whose owners this rank exchanges nothing with are left out. A bucket has up to ``limit`` bytes for
        each owner, or as many as the largest parameter in it. Every owner begins with its largest parameters, and every
        bucket has some of each owner that has any left. So all owners compute at the same time: several small ones
        where another has a large one, and none are left when the large ones are done.
        """
        queues: dict[int, list[tuple[Owned, torch.dtype]]] = {}
        for entry in sorted(used, key=_nbytes):
            if entry[0].route.owner in self.part.places:
                queues.setdefault(entry[0].route.owner, []).append(entry)
        while left := [queues[owner] for owner in sorted(queues) if queues[owner]]:
            bound = max(limit, *(_nbytes(queue[-1]) for queue in left))
            bucket: list[tuple[Owned, torch.dtype]] = []
            for queue in left:
                room = bound
                while queue and _nbytes(queue[-1]) <= room:
                    room -= _nbytes(queue[-1])
                    bucket.append(queue.pop())
            yield bucket


def digest_of(params: Sequence[Any]) -> int:
    """Return a number for the names and shapes of parameters in their order, which all ranks of a mesh must have."""
    described = [(tuple(param.shape), getattr(param_of(param), "name", "")) for param in params]
    return zlib.crc32(repr(described).encode()) >> 1


class Ownership:
    """The owners of ``params``, in sets of parameters that travel between the same ranks: sets with more ranks first.

    With ``over_replicas`` a parameter that is replicated has one owner for all copies, else one for each.
    """

    def __init__(
        self,
        params: list[DTensor],
        cost: Callable[[torch.Tensor], float],
        stacks: Stacks,
        *,
        over_replicas: bool = True,
    ) -> None:
        self._params = params
        homes = [_Home(param, stacks, over_replicas=over_replicas) for param in params]
        owners = assign_owners(params, cost, [home.count for home in homes], [home.candidates for home in homes])
        by_circle: dict[_Circle, list[int]] = {}
        for i, home in enumerate(homes):
            by_circle.setdefault(home.circle, []).append(i)
        self.sets = [
            RankSet(
                circle,
                [params[i] for i in by_circle[circle]],
                [homes[i].boxes for i in by_circle[circle]],
                [owners[i] for i in by_circle[circle]],
                stacks,
            )
            for circle in sorted(by_circle, key=lambda circle: circle.order)
        ]
        self._owners: dict[Any, list[int]] = dict(zip(params, owners))
        self._keys = {owned.key for ranks in self.sets for owned in ranks.owned}

    @property
    def on_same_ranks(self) -> list[list[RankSet]]:
        """The sets, those on the same ranks together."""
        return [[*sets] for _, sets in itertools.groupby(self.sets, lambda ranks: ranks.ranks)]

    def is_of(self, params: list[DTensor]) -> bool:
        """Return True if the parameters are ``params``, in this order."""
        return len(params) == len(self._params) and all(map(_same, params, self._params))

    def owners_of(self, param: Any) -> list[int]:
        """Return the global ranks that own ``param`` or its matrices; none if it is not one of the parameters."""
        return sorted(set(self._owners.get(param, ())))

    def keys_of(self, param: Any) -> list[Any]:
        """Return the keys of the states of ``param`` or its matrices."""
        return [owned.key for ranks in self.sets for owned in ranks.owned_of.get(param, ())]

    def __contains__(self, key: Any) -> bool:
        """Return whether ``key`` is one of the parameters, or stands for a matrix of one."""
        return key in self._owners or key in self._keys


class _Home:
    """Where the pieces of a parameter lie, and who may own it."""

    def __init__(self, param: DTensor, stacks: Stacks, *, over_replicas: bool) -> None:
        ranks = mesh_ranks(param)
        copies = (ranks,) if over_replicas else copies_of(param)
        boxes = boxes_of(param, f"use_full_params: a parameter of shape {tuple(param.shape)}")
        copy = next(one for one in copies if dist.get_rank() in one)
        nothing = ((0, 0),) * param.ndim
        self.boxes = [box if rank in copy else nothing for rank, box in zip(ranks, boxes)]
        stacked, everybody = stacks.has(param), tuple(range(len(copy)))
        self.count = param.shape[0] if stacked else 1
        held = [box for rank, box in zip(ranks, boxes) if rank in copy]
        parts = parts_of(held, self.count) if stacked else [everybody]
        self.circle = _Circle(ranks, copies, tuple(dict.fromkeys(parts)))
        if self.circle.parts == (everybody,):
            near = [[copy[i] for i in holders] for holders in _holders(held, self.count)] if stacked else []
            self.candidates = Candidates(copy, near=near)
        else:
            self.candidates = Candidates(copy, [tuple(copy[i] for i in part) for part in parts])


def _holders(boxes: Sequence[Box], count: int) -> list[list[int]]:
    """Return for each matrix of a stack the places of the ranks that hold some of it."""
    found: list[list[int]] = [[] for _ in range(count)]
    for place, box in enumerate(boxes):
        for row in range(box[0][0], sum(box[0]) if numel(box) else box[0][0]):
            found[row].append(place)
    return found


def _nbytes(used: tuple[Owned, torch.dtype]) -> int:
    """Return the bytes of a parameter and its gradient."""
    owned, dtype = used
    return owned.numel * (owned.param.dtype.itemsize + dtype.itemsize)


def _same(one: Any, other: Any) -> bool:
    return one is other


# Process groups of sets of ranks, by the default process group, which they end with, and by the ranks.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def _axis(ranks: tuple[int, ...], device_type: str) -> Axis:
    """Return the axis of exactly these ranks. Every one of them must call this."""
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == 1:
        return Axis(None, 1, 0, "none")
    if len(ranks) == world.size():
        return Axis.of_group(world, device_type)
    groups = _groups.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = own_group(ranks, "owners")
    return Axis.of_group(groups[ranks], device_type)
