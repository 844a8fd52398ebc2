"""Copies made equal: what several ranks hold becomes what the first of them holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.weights.boxes import Entry, Part, beyond
from fsdp2.weights.matching import partly_loaded
from fsdp2.weights.materialize import materialize
from fsdp2.weights.ranks import Ranks, device_of
from fsdp2.weights.select import Place, Selection, ranks_of, select
from fsdp2.weights.transfer import broadcast_entries, bucket_bytes, sum_entries

__all__ = ["sync_module_states"]

_WHERE = "sync_module_states"


def sync_module_states(module: nn.Module, *, bucket_mb: float = 64.0) -> None:
    """Make what several ranks hold equal: what it is on the first of them, it is on all afterwards.

    Every rank of the module's mesh must call it, or every rank of the default process group where nothing is sharded.

    * Before ``fully_shard``: every parameter and buffer, non-persistent ones included, becomes rank 0's. Rank 0 alone
      needs memory for them: on the meta device elsewhere, they get it, on rank 0's kind of device. Parameters that
      tensor parallelism made DTensors become those of the mesh that rank 0 is in.
    * After: a shard becomes that of the first replica (of hybrid sharding, or where tensor parallelism replicates it).
      Shards without a replica stay what they are: nobody else has them. Ignored parameters and buffers become rank 0's.

    Beyond the module, every rank holds one bucket of ``bucket_mb`` MiB at a time. Values travel in rank 0's dtype and
    are cast to the module's.

    Raises:
        RuntimeError: what should be copied is on the meta device, ranks differ in names or shapes, or a forward or
            backward is going on; on every rank, before anything is changed.
        TypeError: ``module`` is no module.
        ValueError: ``bucket_mb`` is not a positive number.
    """
    ranks = ranks_of(module, managed=True) or Ranks.world()
    with ranks.agreed():
        limit = bucket_bytes(bucket_mb)
        selection = select(module, _WHERE)
        selection.check(_WHERE, idle=True)
        work = _sort(selection)
    offered: _Offer = ranks.share(work.offer())
    with ranks.agreed():
        work.check(offered, ranks)
    with ranks.agreed():
        for group in selection.groups:
            group.before_load()
        work.materialize(offered)
    try:
        with torch.no_grad():
            work.move(offered, ranks, limit)
    finally:
        for group in selection.groups:
            group.adopt_shards()


@dataclass
class _Offer:
    """What the first rank has: plain tensors by all their names and where they are; names and sizes of the others."""

    plain: list[tuple[list[str], Entry, str]]
    others: list[tuple[str, Entry]]


@dataclass
class _Work:
    """The places of one module: ``plain`` tensors, DTensors that tensor parallelism made, and ``managed`` shards."""

    plain: list[Place]
    parallel: list[Place]
    managed: list[Place]

    def offer(self) -> _Offer:
        """What this rank has."""
        plain = [(place.names, _entry(place), place.local.device.type) for place in self.plain]
        return _Offer(plain, [(place.name, _entry(place)) for place in self.parallel + self.managed])

    def check(self, offered: _Offer, ranks: Ranks) -> None:
        """Raise RuntimeError where this rank cannot take part in copying what is ``offered``."""
        mine = {name: place.shape for place in self.plain for name in place.names}
        theirs = {name: entry.shape for names, entry, _ in offered.plain for name in names}
        wrong = sorted(name for name in {*mine, *theirs} if mine.get(name) != theirs.get(name))
        if wrong:
            name = wrong[0]
            raise RuntimeError(
                f"{_WHERE}: ranks differ in {wrong}; got {mine.get(name)} for {name}, expected {theirs.get(name)} as "
                "on the first rank; build the same module on every rank"
            )
        if self.offer().others != offered.others:
            ours = dict(self.offer().others)
            wrong = [name for name, entry in offered.others if ours.get(name) != entry]
            raise RuntimeError(
                f"{_WHERE}: ranks differ in {wrong or sorted(ours)}; got other names, shapes or dtypes than the first "
                "rank, expected the same; build the same module on every rank"
            )
        empty = [names[0] for names, _, device in offered.plain if device == "meta"]
        empty += [place.name for place in self.managed if place.copies.first and place.local.is_meta]
        empty += [place.name for place in self.parallel if place.speaks_for_all(ranks) and place.local.is_meta]
        if empty:
            raise RuntimeError(
                f"{_WHERE}: no values to copy for {empty}; got the meta device, expected values on the first rank that "
                "holds them; load them with broadcast_from_rank0 or load_safetensors"
            )

    def materialize(self, offered: _Offer) -> None:
        """Give memory to what waits for values."""
        kinds = {name: kind for names, _, kind in offered.plain for name in names}
        for kind in set(kinds.values()):
            materialize([place for place in self.plain if kinds[place.name] == kind], device_of(kind))
        for place in self.parallel:
            materialize([place], device_of(place.mesh.device_type))  # type: ignore[union-attr]  # it has one
        materialize(self.managed, torch.device("cpu"))

    def move(self, offered: _Offer, ranks: Ranks, limit: int) -> None:
        """Copy everything: plain tensors, then those of tensor parallelism, then shards."""
        by_name = {name: place for place in self.plain for name in place.names}
        targets = [list(dict.fromkeys(by_name[name] for name in names)) for names, _, _ in offered.plain]

        def drain(part: Part, view: torch.Tensor) -> None:
            for target in targets[part.index]:
                target.write(part.box, view, last=part.last)

        def fill(part: Part, view: torch.Tensor) -> None:
            place = self.parallel[part.index]
            if place.speaks_for_all(ranks):
                place.read(part.box, view)

        with ranks.agreed(partly_loaded(_WHERE)):
            broadcast_entries(
                [entry for _, entry, _ in offered.plain],
                ranks,
                limit,
                lambda part, view: targets[part.index][0].read(part.box, view),
                drain,
            )
        with ranks.agreed(partly_loaded(_WHERE)):
            sum_entries(
                [_entry(place) for place in self.parallel],
                ranks,
                limit,
                fill,
                lambda part, view: self.parallel[part.index].write(part.box, view, last=part.last),
            )
        by_copies: dict[tuple[object, ...], list[Place]] = {}
        for place in self.managed:
            by_copies.setdefault(tuple(id(axis.group) for axis, _ in place.copies.lines), []).append(place)
        for places in by_copies.values():
            with ranks.agreed(partly_loaded(_WHERE)):
                _copy_shards(places, limit)


def _copy_shards(places: list[Place], limit: int) -> None:
    """Make the boxes of ``places``, which the same ranks have copies of, those of the first of these ranks."""
    if not places[0].copies.lines:
        return

    def fill(part: Part, view: torch.Tensor) -> None:
        places[part.index].read(beyond(part.box, places[part.index].box), view)

    def drain(part: Part, view: torch.Tensor) -> None:
        places[part.index].write(beyond(part.box, places[part.index].box), view, last=part.last)

    entries = [Entry(tuple(length for _, length in place.box), place.dtype) for place in places]
    broadcast_entries(entries, places[0].copies, limit, fill, drain)


def _sort(selection: Selection) -> _Work:
    everything = selection.places + selection.left_out
    plain = [place for place in everything if place.mesh is None]
    parallel = [place for place in everything if place.param is None and place.mesh is not None]
    return _Work(plain, parallel, [place for place in everything if place.param is not None])


def _entry(place: Place) -> Entry:
    return Entry(place.shape, place.dtype)
