"""The parameters of one optimizer by their ranks, each with its owner and the part that this rank holds."""

from __future__ import annotations

import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp2.engine.index import param_of
from fsdp2.optim.whole.owners import Route, assign_owners, boxes_of, mesh_ranks
from fsdp2.optim.whole.stacks import Stacks
from fsdp2.sharding.boxes import Box, numel, whole
from fsdp2.sharding.mesh import Axis, own_group
from fsdp2.sharding.spec import on_this_rank

__all__ = ["Owned", "Ownership", "RankSet"]


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


class RankSet:
    """The parameters that lie on the same ranks, and the axis of these ranks in ascending order."""

    def __init__(
        self, ranks: tuple[int, ...], params: Sequence[DTensor], owners: Sequence[Sequence[int]], stacks: Stacks
    ) -> None:
        """``owners`` are the global ranks that own each parameter, or each of its matrices."""
        self.ranks, self.params = ranks, params
        device_type = params[0].device_mesh.device_type
        self.axis = _axis(ranks, device_type)
        self.device = _device(device_type)
        self.owned: list[Owned] = []
        for param, own in zip(params, owners):
            boxes = boxes_of(param, f"use_full_params: a parameter of shape {tuple(param.shape)}")
            by_index = [ranks.index(owner) for owner in own]
            route = Route(tuple(param.shape), boxes, by_index[0])
            if stacks.has(param):
                self.owned += self._matrices(param, route, by_index, stacks)
            else:
                self.owned.append(Owned(param, param, route, self.axis.rank))
        self.owned_of: dict[Any, list[Owned]] = {param: [] for param in params}
        for owned in self.owned:
            self.owned_of[owned.param].append(owned)
        # Of names and shapes in their order, which must be the same on all these ranks.
        described = [(tuple(param.shape), getattr(param_of(param), "name", "")) for param in params]
        self.digest = zlib.crc32(repr(described).encode()) >> 1

    def is_sent(self, param: Any) -> bool:
        """Return whether a step sends something of ``param`` to owners: not if each of them holds all that it owns."""
        return any(rank != one.route.owner for one in self.owned_of[param] for rank in one.route.senders)

    def new_axis(self, purpose: str) -> Axis:
        """Return another axis of the same ranks, with a process group of its own. Every one of them must call this."""
        return Axis.of_group(own_group(self.ranks, purpose), self.params[0].device_mesh.device_type)

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

        A bucket has up to ``limit`` bytes for each owner, or as many as the largest parameter in it. Every owner begins
        with its largest parameters, and every bucket has some of each owner that has any left. So all owners compute at
        the same time: several small ones where another has a large one, and none are left when the large ones are done.
        """
        queues: dict[int, list[tuple[Owned, torch.dtype]]] = {}
        for entry in sorted(reversed(used), key=_nbytes):
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


class Ownership:
    """The owners of ``params``, in sets of parameters that lie on the same ranks: sets with more ranks first."""

    def __init__(self, params: list[DTensor], cost: Callable[[torch.Tensor], float], stacks: Stacks) -> None:
        self._params = params
        counts = [len(stacks.matrices_of(param)) if stacks.has(param) else 1 for param in params]
        owners = assign_owners(params, cost, counts, _holders_of_matrices(params))
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for i, param in enumerate(params):
            by_ranks.setdefault(mesh_ranks(param), []).append(i)
        ordered = sorted(by_ranks, key=lambda ranks: (-len(ranks), ranks))
        self.sets = [
            RankSet(ranks, [params[i] for i in by_ranks[ranks]], [owners[i] for i in by_ranks[ranks]], stacks)
            for ranks in ordered
        ]
        self._owners: dict[Any, list[int]] = dict(zip(params, owners))
        self._keys = {owned.key for ranks in self.sets for owned in ranks.owned}

    def is_of(self, params: list[DTensor]) -> bool:
        """Return True if the parameters are ``params``, in this order."""
        return len(params) == len(self._params) and all(map(_same, params, self._params))

    def owners_of(self, param: Any) -> list[int]:
        """Return the global ranks that own ``param`` or its matrices; none if it is not one of the parameters."""
        return sorted(set(self._owners.get(param, ())))

    def __contains__(self, key: Any) -> bool:
        """Return whether ``key`` is one of the parameters, or stands for a matrix of one."""
        return key in self._owners or key in self._keys


def _holders_of_matrices(params: Sequence[DTensor]) -> Callable[[int, int], list[int]]:
    """Return a function of a parameter's number and a matrix of it, which returns the ranks that hold some of this."""
    known: dict[int, list[list[int]]] = {}

    def near(i: int, index: int) -> list[int]:
        if i not in known:
            param = params[i]
            known[i] = [[] for _ in range(param.shape[0])]
            for rank, box in zip(mesh_ranks(param), boxes_of(param, f"use_full_params: {tuple(param.shape)}")):
                for row in range(*_range(box)):
                    known[i][row].append(rank)
        return known[i][index]

    return near


def _nbytes(used: tuple[Owned, torch.dtype]) -> int:
    """Return the bytes of a parameter and its gradient."""
    owned, dtype = used
    return owned.numel * (owned.param.dtype.itemsize + dtype.itemsize)


def _range(box: Box) -> tuple[int, int]:
    return box[0][0], box[0][0] + box[0][1] if numel(box) else box[0][0]


def _same(one: Any, other: Any) -> bool:
    return one is other


# Process groups of sets of ranks, by the default process group, which they end with, and by the ranks.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()


def _axis(ranks: tuple[int, ...], device_type: str) -> Axis:
    """Return the axis of exactly these ranks. Every one of them must call this."""
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == world.size():
        return Axis.of_group(world, device_type)
    groups = _groups.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = own_group(ranks, "owners")
    return Axis.of_group(groups[ranks], device_type)


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())
