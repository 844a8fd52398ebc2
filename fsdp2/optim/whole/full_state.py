"""The state of an optimizer that steps on whole parameters: whole on the owner, DTensors in state dicts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2._torch.tensors import inner_tensors
from fsdp2.comm.collectives import exchange_objects
from fsdp2.engine.index import param_of
from fsdp2.optim.alike import is_counter
from fsdp2.optim.leaves import map_leaves, take_apart
from fsdp2.optim.whole.exchange import Layout
from fsdp2.optim.whole.owners import Route
from fsdp2.optim.whole.ownership import Owned, Ownership, RankSet
from fsdp2.optim.whole.stacks import Stacks
from fsdp2.sharding.boxes import whole
from fsdp2.sharding.packing import in_buckets
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
        self.ownership = ownership
        self.stepped = False
        self.names: dict[Any, list[Any]] = {}  # of all parameters, as of the last step or loading

    def __bool__(self) -> bool:
        return self.stepped

    def __missing__(self, param: Any) -> Any:
        owners = self.ownership.owners_of(param)
        if not owners:
            raise KeyError(param)
        return _Elsewhere(self.names.get(param, []), tuple(param.shape), owners)

    def __delitem__(self, param: Any) -> None:
        self.pop(param)

    def pop(self, param: Any, *default: Any) -> Any:
        """Drop the state of a parameter, as all ranks do, and return what ``self[param]`` was.

        Ranks that own nothing of it drop its names.
        """
        if not self.names.get(param):
            return super().pop(param, *default)
        found = self[param]
        for key in self.ownership.keys_of(param):
            super().pop(key, None)
        del self.names[param]
        return found


class _Elsewhere(Mapping):
    """The state of a parameter that another rank owns, or whose matrices have several owners: names without values.

    torch.distributed.checkpoint.state_dict needs the names to find the values in a flattened state dict.
    """

    def __init__(self, names: list[Any], shape: tuple[int, ...], owners: list[int]) -> None:
        self._names, self._shape, self._owners = names, shape, owners

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __getitem__(self, key: Any) -> NoReturn:
        one, *others = self._owners
        where = f"its owner, rank {one}" if not others else f"the owners of its matrices, ranks {self._owners}"
        raise RuntimeError(
            f"optimizer.state: the state {key!r} of this parameter of shape {self._shape} is held by {where}, if it "
            "exists yet (use_full_params); "
            "only the owner can read it here. Call optimizer.state_dict() on all ranks to get it"
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__getitem__(key)


@dataclass(frozen=True)
class _Leaf:
    """A description of a tensor of more than one number in an owner's state.

    ``kind`` is its class if it is made of other tensors, as the codes and scales of a quantized one; else "".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


_Found = dict[tuple[Any, int], torch.Tensor]
"""What this rank gets of the state, by parameter and leaf."""


@torch.no_grad()
def shown_at_holders(state: Mapping[Any, Any], ownership: Ownership) -> defaultdict[Any, Any]:
    """Return the state as if the optimizer had stepped on DTensors. Every rank must call this.

    Tensors of a parameter's shape are sharded like the parameter, single numbers are plain, others are replicated; the
    tensors of a stack's matrices are stacked. State of parameters without an owner (such as recently sharded ones) has
    this form already.

    Raises:
        NotImplementedError: A state is made of other tensors. Every rank raises it.
        RuntimeError: The matrices of a stack have states that cannot be one.
    """
    shown: defaultdict[Any, Any] = defaultdict(dict)
    shown.update({param: entry for param, entry in state.items() if param not in ownership})
    for ranks in ownership.sets:
        mine = {i: _describe(state[owned.key], owned) for i, owned in enumerate(ranks.owned) if owned.key in state}
        described: dict[int, Any] = {}
        for theirs in exchange_objects(mine, ranks.axis, ranks.device):
            described.update(theirs)
        for i, entry in described.items():
            for leaf in take_apart(entry)[0]:
                if isinstance(leaf, _Leaf) and leaf.kind:
                    _refuse(leaf.kind, ranks.owned[i].param)
        found: _Found = {}
        for pieces in in_buckets(_pieces(described, ranks), lambda piece: piece[3].nbytes, _BUCKET_BYTES):
            _receive(pieces, state, ranks, found)
        by_param: defaultdict[Any, list[int]] = defaultdict(list)
        for i in sorted(described):
            by_param[ranks.owned[i].param].append(i)
        for param, some in by_param.items():
            owned = ranks.owned[some[0]]
            entry = described[some[0]] if owned.index is None else Stacks.join_states([described[i] for i in some])
            leaves, rebuild = take_apart(entry)
            shown[param] = rebuild(_shown(leaf, owned, found.get((param, k))) for k, leaf in enumerate(leaves))
    return shown


def _describe(entry: Any, owned: Owned) -> Any:
    def leaf(key: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        single = value.numel() == 1 and (is_counter(key) or tuple(value.shape) != owned.route.shape)
        return value.cpu() if single else _Leaf(tuple(value.shape), value.dtype, _kind_of(value))

    if isinstance(entry, dict):
        return {key: map_leaves(partial(leaf, key), part) for key, part in entry.items()}
    return map_leaves(partial(leaf, None), entry)


def _kind_of(value: torch.Tensor) -> str:
    return type(value).__name__ if len(inner_tensors(value)) > 1 else ""


def _refuse(kind: str, param: Any) -> NoReturn:
    name = getattr(param_of(param), "name", "") or f"a parameter of shape {tuple(param.shape)}"
    raise NotImplementedError(
        f"use_full_params: the state of {name} is of the class {kind}, made of other tensors, and the pieces of it "
        "that ranks would save are not known; expected plain tensors. If the optimizer is elementwise, call "
        "use_local_shards(optimizer, elementwise=True) on a new one in place of use_full_params"
    )


_Piece = tuple[int, int, Route, _Leaf]  # index of the parameter, index of the leaf, route, description


def _pieces(described: Mapping[int, Any], ranks: RankSet) -> Iterator[_Piece]:
    """Yield all tensors to send, in order."""
    for i in sorted(described):
        route = ranks.owned[i].route
        for k, leaf in enumerate(take_apart(described[i])[0]):
            if isinstance(leaf, _Leaf):
                way = route if leaf.shape == route.shape else route.everywhere(leaf.shape)
                yield i, k, way, leaf


def _receive(pieces: list[_Piece], state: Mapping[Any, Any], ranks: RankSet, found: _Found) -> None:
    """Receive ``pieces`` from their owners, and store them in ``found``."""
    sources: list[torch.Tensor | None] = []
    targets: list[torch.Tensor | None] = []
    for i, k, way, leaf in pieces:
        owned = ranks.owned[i]
        sources.append(take_apart(state[owned.key])[0][k] if owned.mine else None)
        local, alike = on_this_rank(owned.param), way is owned.route
        if (owned.param, k) not in found:
            if alike:
                made = torch.empty_like(local, dtype=leaf.dtype, requires_grad=False)
            else:
                count = () if owned.index is None else owned.param.shape[:1]
                made = torch.empty((*count, *leaf.shape), dtype=leaf.dtype, device=local.device)
            found[owned.param, k] = made
        target = found[owned.param, k]
        targets.append(owned.of(target) if alike or owned.index is None else target[owned.index])
    routes, dtypes = [way for _, _, way, _ in pieces], [leaf.dtype for _, _, _, leaf in pieces]
    layout = Layout(routes, dtypes, ranks.copy, ranks.device, to_owner=False)
    arriving = layout.send(sources, [whole(way.shape) for way in routes])
    arriving.deliver(targets, [way.boxes[ranks.axis.rank] for way in routes])


def _shown(leaf: Any, owned: Owned, tensor: torch.Tensor | None) -> Any:
    if not isinstance(leaf, _Leaf):
        return leaf
    assert tensor is not None
    if leaf.shape == owned.route.shape:
        return dtensor_like(owned.param, tensor)
    mesh = owned.param.device_mesh
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


_OnShards = tuple[Owned, list[Any], int]  # what is owned, the leaves of its state, the index of a leaf on shards


@torch.no_grad()
def keep_owned(state: Mapping[Any, Any], ownership: Ownership) -> OwnedState:
    """Return ``state``, an optimizer's state on DTensors, as whole tensors on the owners. Every rank must call this.

    Raises:
        NotImplementedError: A state is made of other tensors.
    """
    kept = OwnedState(ownership)
    kept.stepped = bool(state)
    kept.update({param: entry for param, entry in state.items() if param not in ownership})
    for ranks in ownership.sets:
        known = {param: take_apart(state[param]) for param in ranks.params if param in state}
        leaves_of = {param: [_whole_unless_cut(leaf, param) for leaf in leaves] for param, (leaves, _) in known.items()}
        kept.names.update({param: names_in(state[param]) for param in known})
        taken: list[tuple[Owned, list[Any]]] = []
        cut: list[_OnShards] = []
        for owned in ranks.owned:
            if owned.param not in known:
                continue
            leaves = list(leaves_of[owned.param])
            taken.append((owned, leaves))
            for k, leaf in enumerate(leaves):
                if isinstance(leaf, DTensor):
                    cut.append((owned, leaves, k))
                elif owned.index is not None:
                    leaves[k] = Stacks.cut_state(leaf, owned.index)
        for bucket in in_buckets(cut, lambda one: one[0].numel * one[1][one[2]].dtype.itemsize, _BUCKET_BYTES):
            _send_to_owners(bucket, ranks)
        kept.update({owned.key: known[owned.param][1](leaves) for owned, leaves in taken if owned.mine})
    return kept


def _whole_unless_cut(leaf: Any, param: Any) -> Any:
    """Return ``leaf`` as it is if it is no DTensor, or is cut as ``param``; else the whole tensor."""
    if isinstance(leaf, DTensor) and (kind := _kind_of(on_this_rank(leaf))):
        _refuse(kind, param)
    if not isinstance(leaf, DTensor) or (leaf.shape == param.shape and placed_alike(leaf, param)):
        return leaf
    return on_this_rank(leaf) if all(isinstance(p, Replicate) for p in leaf.placements) else leaf.full_tensor()


def names_in(entry: Any) -> list[Any]:
    """Return the names in the state of one parameter."""
    return list(entry) if isinstance(entry, dict) else []


def _send_to_owners(pieces: list[_OnShards], ranks: RankSet) -> None:
    """Replace leaves that are sharded like their parameters by whole tensors on the owners, by None elsewhere."""
    dtypes = [leaves[k].dtype for _, leaves, k in pieces]
    layout = Layout([owned.route for owned, _, _ in pieces], dtypes, ranks.copy, ranks.device, to_owner=True)
    sources = [owned.of(on_this_rank(leaves[k])) for owned, leaves, k in pieces]
    arriving = layout.send(sources, [owned.here for owned, _, _ in pieces])
    wholes = [owned.empty(dtype) if owned.mine else None for (owned, _, _), dtype in zip(pieces, dtypes)]
    arriving.deliver(wholes, [owned.whole for owned, _, _ in pieces])
    for (_, leaves, k), full in zip(pieces, wholes):
        leaves[k] = full
