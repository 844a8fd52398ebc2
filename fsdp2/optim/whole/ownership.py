"""The parameters of one optimizer by their ranks, each with its owner and the part that this rank holds."""

from __future__ import annotations

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
from fsdp2.sharding.boxes import Box, numel, whole
from fsdp2.sharding.mesh import Axis, own_group
from fsdp2.sharding.spec import on_this_rank

__all__ = ["Owned", "Ownership", "RankSet"]


@dataclass(frozen=True, eq=False)
class Owned:
    """One parameter, its route, and the index of this rank in the route."""

    param: Any
    route: Route
    rank: int

    @property
    def mine(self) -> bool:
        """True if this rank owns the parameter."""
        return self.route.owner == self.rank

    @property
    def here(self) -> Box:
        """The box that this rank holds."""
        return self.route.boxes[self.rank]

    @property
    def holds_nothing(self) -> bool:
        """True if this rank holds no element."""
        return not numel(self.here)

    @property
    def whole(self) -> Box:
        """The box of the whole parameter."""
        return whole(self.route.shape)

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for the whole tensor, with the strides of the parameter before it was sharded."""
        device = on_this_rank(self.param).device
        return torch.empty_strided(self.route.shape, self.param.stride(), dtype=dtype, device=device)


class RankSet:
    """The parameters that lie on the same ranks, and the axis of these ranks in ascending order."""

    def __init__(self, ranks: tuple[int, ...], params: Sequence[DTensor], owners: Sequence[int]) -> None:
        self.ranks = ranks
        device_type = params[0].device_mesh.device_type
        self.axis = _axis(ranks, device_type)
        self.device = _device(device_type)
        self.owned = []
        for param, owner in zip(params, owners):
            boxes = boxes_of(param, f"use_full_params: a parameter of shape {tuple(param.shape)}")
            self.owned.append(Owned(param, Route(tuple(param.shape), boxes, ranks.index(owner)), self.axis.rank))
        # Of names and shapes in their order, which must be the same on all these ranks.
        described = [(tuple(param.shape), getattr(param_of(param), "name", "")) for param in params]
        self.digest = zlib.crc32(repr(described).encode()) >> 1

    def buckets(
        self, used: Sequence[tuple[Owned, torch.dtype]], limit: int
    ) -> Iterator[list[tuple[Owned, torch.dtype]]]:
        """Yield buckets of ``used``, parameters with the dtypes of their gradients.

        A bucket has up to ``limit`` bytes for each owner, or one larger parameter. Every bucket has parameters of each
        owner that has any left, so that all owners compute at the same time.
        """
        queues: dict[int, list[tuple[Owned, torch.dtype]]] = {}
        for entry in reversed(used):
            queues.setdefault(entry[0].route.owner, []).append(entry)
        while any(queues.values()):
            bucket: list[tuple[Owned, torch.dtype]] = []
            for owner in sorted(queues):
                nbytes, queue = 0, queues[owner]
                while queue:
                    owned, dtype = queue[-1]
                    nbytes += owned.param.numel() * (owned.param.dtype.itemsize + dtype.itemsize)
                    if nbytes > limit and nbytes > owned.param.numel() * (owned.param.dtype.itemsize + dtype.itemsize):
                        break
                    bucket.append(queue.pop())
            yield bucket


class Ownership:
    """The owners of ``params``, in sets of parameters that lie on the same ranks: sets with more ranks first."""

    def __init__(self, params: list[DTensor], cost: Callable[[torch.Tensor], float]) -> None:
        self._params = params
        owners = assign_owners(params, cost)
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for i, param in enumerate(params):
            by_ranks.setdefault(mesh_ranks(param), []).append(i)
        ordered = sorted(by_ranks, key=lambda ranks: (-len(ranks), ranks))
        self.sets = [
            RankSet(ranks, [params[i] for i in by_ranks[ranks]], [owners[i] for i in by_ranks[ranks]])
            for ranks in ordered
        ]
        self._owners: dict[Any, int] = dict(zip(params, owners))

    def is_of(self, params: list[DTensor]) -> bool:
        """Return True if the parameters are ``params``, in this order."""
        return len(params) == len(self._params) and all(map(_same, params, self._params))

    def owner_of(self, param: Any) -> int | None:
        """Return the global rank that owns ``param``, or None if it is not one of the parameters."""
        return self._owners.get(param)


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
