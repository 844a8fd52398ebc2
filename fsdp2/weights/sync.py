"""Copies made equal: what several ranks hold becomes what the first of them holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.weights.boxes import Entry, Part, beyond
from fsdp2.weights.matching import partly_loaded
from fsdp2.weights.materialize import materialize
from fsdp2.weights.places import Place, Places, find_places, ranks_of
from fsdp2.weights.ranks import Ranks, device_of
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
    places, problem, limit = Places([], [], {}, []), None, 0
    try:
        limit = bucket_bytes(bucket_mb)
        places = find_places(module, _WHERE)
        places.check_idle(_WHERE)
    except Exception as error:
        problem = error
    work = _sort(places)
    offered: _Offer = ranks.share(work.offer())
    try:
        if problem is None:
            work.check(offered, ranks)
    except Exception as error:
        problem = error
    ranks.agree(problem)
    try:
        for group in places.groups:
            group.before_load()
        work.materialize(offered)
    except Exception as error:
        problem = error
    ranks.agree(problem)
    with torch.no_grad():
        problem = work.move(offered, ranks, limit)
    for group in places.groups:
        group.after_load()
    ranks.agree(partly_loaded(problem, _WHERE))


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
        empty += [place.name for place in self.managed if place.is_first_copy and place.local.is_meta]
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

    def move(self, offered: _Offer, ranks: Ranks, limit: int) -> Exception | None:
        """Copy everything; the first error."""
        by_name = {name: place for place in self.plain for name in place.names}
        targets = [list(dict.fromkeys(by_name[name] for name in names)) for names, _, _ in offered.plain]

        def drain(part: Part, view: torch.Tensor) -> None:
            for target in targets[part.index]:
                target.write(part.box, view, last=part.last)

        problem = broadcast_entries(
            [entry for _, entry, _ in offered.plain],
            ranks,
            limit,
            lambda part, view: targets[part.index][0].read(part.box, view),
            drain,
        )

        def fill(part: Part, view: torch.Tensor) -> None:
            place = self.parallel[part.index]
            if place.speaks_for_all(ranks):
                place.read(part.box, view)

        found = sum_entries(
            [_entry(place) for place in self.parallel],
            ranks,
            limit,
            fill,
            lambda part, view: self.parallel[part.index].write(part.box, view, last=part.last),
        )
        return problem or found or self._move_shards(limit)

    def _move_shards(self, limit: int) -> Exception | None:
        """Along each set of axes that copies lie on, those of the first rank."""
        by_axes: dict[tuple[object, ...], list[Place]] = {}
        for place in self.managed:
            by_axes.setdefault(tuple(id(axis.group) for axis in place.copies), []).append(place)
        problem = None
        for places in by_axes.values():
            axes, mesh = places[0].copies, places[0].mesh
            if not axes or mesh is None:
                continue

            def fill(part: Part, view: torch.Tensor, places: list[Place] = places) -> None:
                places[part.index].read(beyond(part.box, places[part.index].box), view)

            def drain(part: Part, view: torch.Tensor, places: list[Place] = places) -> None:
                places[part.index].write(beyond(part.box, places[part.index].box), view, last=part.last)

            entries = [Entry(tuple(length for _, length in place.box), place.dtype) for place in places]
            found = broadcast_entries(entries, Ranks(axes, device_of(mesh.device_type)), limit, fill, drain)
            problem = problem or found
        return problem


def _sort(places: Places) -> _Work:
    everything = places.found + places.left_out
    plain = [place for place in everything if place.mesh is None]
    parallel = [place for place in everything if place.param is None and place.mesh is not None]
    return _Work(plain, parallel, [place for place in everything if place.param is not None])


def _entry(place: Place) -> Entry:
    return Entry(place.shape, place.dtype)
