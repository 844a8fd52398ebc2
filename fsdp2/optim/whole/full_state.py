"""The state of an optimizer that steps on whole parameters: whole on the owner, DTensors in state dicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2.autograd.trees import map_leaves, take_apart
from fsdp2.comm.collectives import exchange_objects
from fsdp2.optim.whole.exchange import Layout
from fsdp2.optim.whole.owners import Route
from fsdp2.optim.whole.ownership import Owned, Ownership, RankSet
from fsdp2.sharding.boxes import whole
from fsdp2.sharding.spec import dtensor_like, on_this_rank, placed_alike

__all__ = ["OwnedState", "keep_owned", "names_in", "shown_at_holders"]

_BUCKET_BYTES = 64 << 20


class OwnedState(dict):
    """The state of plain parameters and of the parameters that this rank owns, as plain, whole tensors.

    It is true as soon as any rank has state, so that code which tests it does the same on ranks that own nothing. For a
    parameter of another owner it has only the names of the state's entries.
    """

    def __init__(self, ownership: Ownership) -> None:
        super().__init__()
        self._ownership = ownership
        self.stepped = False
        self.names: dict[Any, list[Any]] = {}  # of all parameters, as of the last step or loading

    def __bool__(self) -> bool:
        return self.stepped

    def __missing__(self, param: Any) -> Any:
        owner = self._ownership.owner_of(param)
        if owner is None:
            raise KeyError(param)
        return _Elsewhere(self.names.get(param, []), tuple(param.shape), owner)


class _Elsewhere(Mapping):
    """The state of a parameter that another rank owns: names without values.

    torch.distributed.checkpoint.state_dict needs the names to find the values in a flattened state dict.
    """

    def __init__(self, names: list[Any], shape: tuple[int, ...], owner: int) -> None:
        self._names, self._shape, self._owner = names, shape, owner

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __getitem__(self, key: Any) -> NoReturn:
        raise RuntimeError(
            f"optimizer.state: the state {key!r} of this parameter of shape {self._shape} is held by its owner, rank "
            f"{self._owner}, if it exists yet (use_full_params); only the owner can read it here. Call "
            "optimizer.state_dict() on all ranks to get it"
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__getitem__(key)


@dataclass(frozen=True)
class _Leaf:
    """A description of a tensor in an owner's state. A single number has its ``value``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Any = None


@torch.no_grad()
def shown_at_holders(state: Mapping[Any, Any], ownership: Ownership) -> defaultdict[Any, Any]:
    """Return the state as if the optimizer had stepped on DTensors. Every rank must call this.

    Tensors of a parameter's shape are sharded like the parameter, single numbers are plain, others are replicated.
    State of parameters without an owner (such as recently sharded ones) has this form already.
    """
    shown: defaultdict[Any, Any] = defaultdict(dict)
    shown.update({param: entry for param, entry in state.items() if ownership.owner_of(param) is None})
    for ranks in ownership.sets:
        mine = {i: _describe(state[owned.param], owned) for i, owned in enumerate(ranks.owned) if owned.param in state}
        described: dict[int, Any] = {}
        for theirs in exchange_objects(mine, ranks.axis, ranks.device):
            described.update(theirs)
        found: dict[int, dict[int, torch.Tensor]] = {i: {} for i in described}
        for pieces in _pieces(described, ranks):
            _receive(pieces, state, ranks, found)
        for i in sorted(described):
            leaves, rebuild = take_apart(described[i])
            owned = ranks.owned[i]
            shown[owned.param] = rebuild(_shown(leaf, owned, found[i].get(k)) for k, leaf in enumerate(leaves))
    return shown


def _describe(entry: Any, owned: Owned) -> Any:
    def leaf(key: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        single = value.numel() == 1 and (key == "step" or tuple(value.shape) != owned.route.shape)
        return _Leaf(tuple(value.shape), value.dtype, value.item() if single else None)

    if isinstance(entry, dict):
        return {key: map_leaves(partial(leaf, key), part) for key, part in entry.items()}
    return map_leaves(partial(leaf, None), entry)


_Piece = tuple[int, int, Route, _Leaf]  # index of the parameter, index of the leaf, route, description


def _pieces(described: Mapping[int, Any], ranks: RankSet) -> Iterator[list[_Piece]]:
    """Yield buckets of bounded size with all tensors to send, in order."""
    return _in_buckets(_sized_pieces(described, ranks))


def _sized_pieces(described: Mapping[int, Any], ranks: RankSet) -> Iterator[tuple[_Piece, int]]:
    for i in sorted(described):
        route = ranks.owned[i].route
        for k, leaf in enumerate(take_apart(described[i])[0]):
            if isinstance(leaf, _Leaf) and leaf.value is None:
                way = route if leaf.shape == route.shape else route.everywhere(leaf.shape)
                yield (i, k, way, leaf), torch.Size(leaf.shape).numel() * leaf.dtype.itemsize


_T = TypeVar("_T")


def _in_buckets(entries: Iterable[tuple[_T, int]]) -> Iterator[list[_T]]:
    """Yield ``entries``, given with their bytes, in lists of up to 64 MiB or of one entry."""
    bucket: list[_T] = []
    total = 0
    for entry, nbytes in entries:
        if bucket and total + nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, total = [], 0
        bucket.append(entry)
        total += nbytes
    if bucket:
        yield bucket


def _receive(
    pieces: list[_Piece], state: Mapping[Any, Any], ranks: RankSet, found: dict[int, dict[int, torch.Tensor]]
) -> None:
    """Receive ``pieces`` from their owners, and store them in ``found`` by parameter and leaf."""
    sources: list[torch.Tensor | None] = []
    targets: list[torch.Tensor | None] = []
    for i, k, way, leaf in pieces:
        owned = ranks.owned[i]
        sources.append(take_apart(state[owned.param])[0][k] if owned.mine else None)
        local = on_this_rank(owned.param)
        if way is owned.route:
            target = torch.empty_like(local, dtype=leaf.dtype, requires_grad=False)
        else:
            target = torch.empty(leaf.shape, dtype=leaf.dtype, device=local.device)
        targets.append(target)
        found[i][k] = target
    routes, dtypes = [way for _, _, way, _ in pieces], [leaf.dtype for _, _, _, leaf in pieces]
    layout = Layout(routes, dtypes, ranks.axis, ranks.device, to_owner=False)
    arriving = layout.start(sources, [whole(way.shape) for way in routes])
    arriving.deliver(targets, [way.boxes[ranks.axis.rank] for way in routes])


def _shown(leaf: Any, owned: Owned, tensor: torch.Tensor | None) -> Any:
    if not isinstance(leaf, _Leaf):
        return leaf
    if tensor is None:
        return torch.full(leaf.shape, leaf.value, dtype=leaf.dtype)
    if leaf.shape == owned.route.shape:
        return dtensor_like(owned.param, tensor)
    mesh = owned.param.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


@torch.no_grad()
def keep_owned(state: Mapping[Any, Any], ownership: Ownership) -> OwnedState:
    """Return ``state``, an optimizer's state on DTensors, as whole tensors on the owners. Every rank must call this."""
    kept = OwnedState(ownership)
    kept.stepped = bool(state)
    kept.update({param: entry for param, entry in state.items() if ownership.owner_of(param) is None})
    for ranks in ownership.sets:
        taken: list[tuple[Owned, list[Any], Any]] = []
        cut: list[tuple[tuple[Owned, list[Any], int], int]] = []
        for owned in ranks.owned:
            if owned.param not in state:
                continue
            entry = state[owned.param]
            kept.names[owned.param] = names_in(entry)
            leaves, rebuild = take_apart(entry)
            leaves = list(leaves)
            taken.append((owned, leaves, rebuild))
            for k, leaf in enumerate(leaves):
                if not isinstance(leaf, DTensor):
                    continue
                if tuple(leaf.shape) == owned.route.shape and placed_alike(leaf, owned.param):
                    cut.append(((owned, leaves, k), leaf.numel() * leaf.dtype.itemsize))
                elif all(isinstance(p, Replicate) for p in leaf.placements):
                    leaves[k] = on_this_rank(leaf)
                else:
                    leaves[k] = leaf.full_tensor()
        for bucket in _in_buckets(cut):
            _send_to_owners(bucket, ranks)
        kept.update({owned.param: rebuild(leaves) for owned, leaves, rebuild in taken if owned.mine})
    return kept


def names_in(entry: Any) -> list[Any]:
    """Return the names in the state of one parameter."""
    return list(entry) if isinstance(entry, dict) else []


def _send_to_owners(pieces: list[tuple[Owned, list[Any], int]], ranks: RankSet) -> None:
    """Replace leaves that are sharded like their parameters by whole tensors on the owners, by None elsewhere."""
    dtypes = [leaves[k].dtype for _, leaves, k in pieces]
    layout = Layout([owned.route for owned, _, _ in pieces], dtypes, ranks.axis, ranks.device, to_owner=True)
    sources = [on_this_rank(leaves[k]) for _, leaves, k in pieces]
    arriving = layout.start(sources, [owned.here for owned, _, _ in pieces])
    wholes = [owned.empty(dtype) if owned.mine else None for (owned, _, _), dtype in zip(pieces, dtypes)]
    arriving.deliver(wholes, [owned.whole for owned, _, _ in pieces])
    for (_, leaves, k), full in zip(pieces, wholes):
        leaves[k] = full
