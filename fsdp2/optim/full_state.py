"""The state of an optimizer that steps on whole parameters: whole at the owner, as DTensors in state dicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2.autograd.trees import map_leaves, take_apart
from fsdp2.comm.collectives import exchange_objects
from fsdp2.optim.exchange import Layout
from fsdp2.optim.owners import Route
from fsdp2.optim.ownership import Owned, Ownership, RankSet
from fsdp2.sharding.boxes import whole
from fsdp2.sharding.spec import dtensor_like, on_this_rank, placed_alike

__all__ = ["OwnedState", "keep_owned", "shown_at_holders"]

_BUCKET_BYTES = 64 << 20


class OwnedState(dict):
    """State of the parameters that this rank owns (plain, whole tensors), and of plain parameters.

    It is true as soon as any rank has state, so that ranks which own nothing decide as the others do.
    """

    def __init__(self, ownership: Ownership) -> None:
        super().__init__()
        self._ownership = ownership
        self.stepped = False

    def __bool__(self) -> bool:
        return self.stepped

    def __missing__(self, param: Any) -> Any:
        owner = self._ownership.owner_of(param)
        if owner is None:
            raise KeyError(param)
        raise RuntimeError(
            f"optimizer.state: the state of this parameter of shape {tuple(param.shape)} is held by its owner, rank "
            f"{owner}, if there is any yet (use_full_params); call optimizer.state_dict() on all ranks to get it"
        )


@dataclass(frozen=True)
class _Leaf:
    """A tensor of an owner's state; ``value`` holds that of one element which is no part of a parameter's shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Any = None


@torch.no_grad()
def shown_at_holders(state: Mapping[Any, Any], ownership: Ownership) -> defaultdict[Any, Any]:
    """What the optimizer would have if it stepped on DTensors; every rank must call this.

    Tensors of a parameter's shape are cut like the parameter, single elements are plain, others are replicated.
    """
    shown: defaultdict[Any, Any] = defaultdict(dict)
    shown.update({param: entry for param, entry in state.items() if not isinstance(param, DTensor)})
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


_Piece = tuple[int, int, Route, _Leaf]  # parameter, leaf, how it travels, what it is


def _pieces(described: Mapping[int, Any], ranks: RankSet) -> Iterator[list[_Piece]]:
    """All tensors that travel, in order, in bounded buckets."""
    bucket: list[_Piece] = []
    nbytes = 0
    for i in sorted(described):
        route = ranks.owned[i].route
        for k, leaf in enumerate(take_apart(described[i])[0]):
            if not isinstance(leaf, _Leaf) or leaf.value is not None:
                continue
            way = route if leaf.shape == route.shape else route.everywhere(leaf.shape)
            size = torch.Size(leaf.shape).numel() * leaf.dtype.itemsize
            if bucket and nbytes + size > _BUCKET_BYTES:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append((i, k, way, leaf))
            nbytes += size
    if bucket:
        yield bucket


def _receive(
    pieces: list[_Piece], state: Mapping[Any, Any], ranks: RankSet, found: dict[int, dict[int, torch.Tensor]]
) -> None:
    """Bring ``pieces`` from their owners to ``found``, by parameter and leaf."""
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
    """``state`` as an optimizer on DTensors has it, whole at the owners; every rank must call this."""
    kept = OwnedState(ownership)
    kept.stepped = bool(state)
    kept.update({param: entry for param, entry in state.items() if ownership.owner_of(param) is None})
    for ranks in ownership.sets:
        for owned in ranks.owned:
            if owned.param not in state:
                continue
            leaves, rebuild = take_apart(state[owned.param])
            found = _bring(leaves, owned, ranks)
            if owned.mine:
                kept[owned.param] = rebuild(found)
    return kept


def _bring(leaves: list[Any], owned: Owned, ranks: RankSet) -> list[Any]:
    """The leaves of one parameter's state, whole at its owner: those cut like the parameter travel together."""
    found = list(leaves)
    cut: list[int] = []
    for k, leaf in enumerate(leaves):
        if not isinstance(leaf, DTensor):
            continue
        if tuple(leaf.shape) == owned.route.shape and placed_alike(leaf, owned.param):
            cut.append(k)
        elif all(isinstance(p, Replicate) for p in leaf.placements):
            found[k] = on_this_rank(leaf)
        else:
            found[k] = leaf.full_tensor()
    dtypes = [leaves[k].dtype for k in cut]
    layout = Layout([owned.route] * len(cut), dtypes, ranks.axis, ranks.device, to_owner=True)
    arriving = layout.start([on_this_rank(leaves[k]) for k in cut], [owned.here] * len(cut))
    wholes = [owned.empty(dtype) if owned.mine else None for dtype in dtypes]
    arriving.deliver(wholes, [owned.whole] * len(cut))
    for k, full in zip(cut, wholes):
        found[k] = full
    return found
