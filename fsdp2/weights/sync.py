"""``sync_module_states`` copies values from the first rank that holds a tensor to the other ranks that hold it."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from fsdp2.sharding.boxes import Box, beyond, whole
from fsdp2.sharding.packing import bucket_bytes
from fsdp2.sharding.platform import device_of
from fsdp2.weights.buckets import Entry, Part
from fsdp2.weights.matching import naming, partly_loaded
from fsdp2.weights.materialize import materialize
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Place, ranks_of, select
from fsdp2.weights.transfer import transfer

__all__ = ["sync_module_states"]

_WHERE = "sync_module_states"
_Offer = list[tuple[list[str], Entry, str]]
"""Every tensor of the first rank: names, shape and dtype, and the device type of a plain tensor ("" for a DTensor)."""


def sync_module_states(module: nn.Module, *, bucket_mb: float = 64.0) -> None:
    """Copy the values of the first rank that holds a tensor to all other ranks that hold it.

    Every rank of the module's mesh must call it. If nothing is sharded, every rank of the default process group must.

    * Before ``fully_shard``, every parameter and buffer gets rank 0's value, non-persistent buffers included. Other
      ranks may have theirs on the meta device; memory is then allocated on rank 0's type of device. Parameters that
      tensor parallelism made DTensors get the values of the mesh that contains rank 0.
    * After ``fully_shard``, a shard gets the value of the first replica (of hybrid sharding, or of tensor parallelism
      that replicates it). Shards without a replica keep their values. Ignored parameters and buffers get rank 0's
      values.

    Each rank needs memory for one bucket of ``bucket_mb`` MiB besides. Values are sent in rank 0's dtype and cast to
    the module's.

    Raises:
        RuntimeError: A value to copy is on the meta device, ranks differ in names or shapes, or a forward or backward
            is running. Every rank raises it before anything is changed.
        TypeError: ``module`` is not an nn.Module.
        ValueError: ``bucket_mb`` is not a positive number.

    Example:
        ```python
        model = Transformer(config)  # with a different seed on every rank
        fsdp2.sync_module_states(model)
        fsdp2.fully_shard(model)
        ```
    """
    ranks = ranks_of(module, managed=True) or Ranks.world()
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            limit = bucket_bytes(_WHERE, bucket_mb)
            selection = select(module, _WHERE)
            selection.check(_WHERE, idle=True)
            places = selection.places + selection.left_out
            mine = [
                (place.names, Entry(place.shape, place.dtype), place.local.device.type if place.mesh is None else "")
                for place in places
            ]
        offered: _Offer
        offered, limit = ranks.share((mine, limit))  # with different buckets, ranks would misread each other's bytes
        with ranks.agreed():
            _check(places, mine, offered, ranks)
        with ranks.agreed():
            stack.enter_context(selection.changing())
            kinds = {name: kind for names, _, kind in offered for name in names}
            on = {place: kinds[place.name] or place.mesh.device_type for place in places}  # type: ignore[union-attr]  # it has one of the two
            for kind in set(on.values()):
                materialize([place for place in places if on[place] == kind], device_of(kind))
        _move(places, offered, ranks, limit)


def _check(places: list[Place], mine: _Offer, offered: _Offer, ranks: Ranks) -> None:
    """Raise RuntimeError if this rank's tensors do not match those ``offered``, or if values are missing."""
    ours, theirs = (
        {name: (entry.shape, "any dtype" if kind else entry.dtype) for names, entry, kind in offer for name in names}
        for offer in (mine, offered)
    )
    wrong = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
    if wrong:
        name = wrong[0]
        raise RuntimeError(
            f"{_WHERE}: ranks differ in {wrong}; got {ours.get(name)} for {name}, expected {theirs.get(name)} as on "
            "the first rank; build the same module on every rank"
        )
    empty = [names[0] for names, _, kind in offered if kind == "meta"]
    for place in places:
        if place.mesh is not None and place.local.is_meta:
            if place.copies.first if place.param is not None else place.is_sender(ranks):
                empty.append(place.name)
    if empty:
        raise RuntimeError(
            f"{_WHERE}: no values to copy for {empty}; got the meta device, expected values on the first rank that "
            "holds them; load them with broadcast_from_rank0 or load_safetensors"
        )


def _move(places: list[Place], offered: _Offer, ranks: Ranks, limit: int) -> None:
    """Copy plain tensors, then tensors of tensor parallelism, then each shard among the ranks that hold copies."""
    by_name = {name: place for place in places for name in place.names}
    plain, parallel = [], []
    for names, entry, kind in offered:
        if kind:
            plain.append((entry, whole(entry.shape), list(dict.fromkeys(by_name[name] for name in names))))
        elif by_name[names[0]].param is None:
            parallel.append((entry, whole(entry.shape), [by_name[names[0]]]))
    shards: dict[tuple[object, ...], list[Place]] = {}
    for place in places:
        if place.param is not None:
            shards.setdefault(tuple(id(axis.group) for axis, _ in place.copies.lines), []).append(place)
    _copy(plain, ranks, limit)
    _copy(parallel, ranks, limit, summed=True)
    for alike in shards.values():
        moves = [(Entry(tuple(size for _, size in place.box), place.dtype), place.box, [place]) for place in alike]
        _copy(moves, alike[0].copies, limit)


def _copy(moves: list[tuple[Entry, Box, list[Place]]], ranks: Ranks, limit: int, *, summed: bool = False) -> None:
    """Copy each box to its places, from the first of ``ranks`` or, if ``summed``, from the rank that sends the box."""
    if not ranks.lines:
        return

    def fill(part: Part, view: torch.Tensor) -> None:
        _, box, targets = moves[part.index]
        if not summed or targets[0].is_sender(ranks):
            with naming(targets[0].name):
                targets[0].read(beyond(part.box, box), view)

    def drain(part: Part, view: torch.Tensor) -> None:
        _, box, targets = moves[part.index]
        for target in targets:
            with naming(target.name):
                target.write(beyond(part.box, box), view, last=part.last)

    with ranks.agreed(partly_loaded(_WHERE)), torch.no_grad():
        transfer([entry for entry, _, _ in moves], ranks, limit, fill, drain, summed=summed)
