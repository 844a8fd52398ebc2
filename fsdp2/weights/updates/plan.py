"""What an update sends: the engine's tensors, the parts of them that each rank holds, and buckets of bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp2.sharding.boxes import Box, numel
from fsdp2.weights.buckets import Entry
from fsdp2.weights.offers import Mine, Offered, check_copies, gather_offers, joined
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Place, select
from fsdp2.weights.updates.mapping import Target, targets_of

__all__ = ["Piece", "Plan", "held", "make_plan"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A box of a target that this rank holds and sends: the box ``at`` of the tensor of ``place``."""

    target: int
    box: Box
    place: Place
    at: Box
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return numel(self.box)

    def read(self) -> torch.Tensor:
        """Return the values in the engine's dtype, flat, in memory of their own."""
        shape = [length for _, length in self.at]
        values = torch.empty(shape, dtype=self.dtype, device=self.place.local.device)
        self.place.read(self.at, values)
        return values.view(-1)


@dataclass(frozen=True, eq=False)
class Plan:
    """All targets, this rank's pieces of them, and the target and box of each piece of every rank, in rank order.

    ``digest`` tells whether the model has changed since: names, shapes, dtypes, and the boxes that ranks hold.
    """

    digest: bytes
    targets: list[Target]
    pieces: list[Piece]
    everyones: list[list[tuple[int, Box]]]

    @property
    def entries(self) -> list[Entry]:
        """Shape and dtype of each target."""
        return [target.entry for target in self.targets]

    def with_places(self, mine: Mine) -> Plan:
        """Return the plan with the tensors that the model has now; they have the same names and boxes."""
        by_names = {tuple(place.names): place for place in mine}
        pieces = [replace(piece, place=by_names[tuple(piece.place.names)]) for piece in self.pieces]
        return replace(self, pieces=pieces)


def held(where: str, model: object, *, buffers: bool) -> tuple[Mine, bytes]:
    """Return the tensors that this rank holds, and a digest of their names, shapes, dtypes and boxes.

    Raises:
        RuntimeError: A tensor is on the meta device, or there is none.
        Exception: Those of ``Selection.check``.
    """
    selection = select(model, where)
    selection.check(where, idle=False)
    mine: Mine = {}
    for place in selection.places:
        if not buffers and place.param is None and place.sites[0].name not in place.sites[0].module._parameters:
            continue
        if place.local.is_meta:
            raise RuntimeError(
                f"{where}: {place.name} has no values; got the meta device, expected memory; load or initialize it "
                "first"
            )
        mine[place] = Entry(place.shape, place.dtype)
    if not mine:
        raise RuntimeError(f"{where}: got a model without parameters on this rank, expected some to send")
    kinds = [(place.names, entry, place.box, str(place.mesh)) for place, entry in mine.items()]
    return mine, hashlib.sha256(repr(kinds).encode()).digest()


def make_plan(
    where: str,
    mine: Mine,
    digest: bytes,
    ranks: Ranks,
    names: Any,
    dtypes: Mapping[str, torch.dtype],
    *,
    tracked: bool,
) -> Plan:
    """Return the plan for what the ranks hold. ``ranks`` have one axis; the first rank's mapping counts.

    Raises:
        NotImplementedError: A dtype cannot be compared by its bits, and changes are ``tracked``. Every rank raises.
        Exception: The mapping does not fit the model, or ranks have different tensors of one name. Every rank raises.
    """
    offers = gather_offers(mine, ranks)
    with ranks.agreed():
        found = joined(mine, offers, ranks, where)
    check_copies(mine, ranks, where, "sent")
    targets: list[Target] = []
    with ranks.agreed():
        if ranks.first:
            targets = targets_of(where, [(tensor.names, tensor.entry) for tensor in found], names, dtypes)
            for target in targets if tracked else ():
                if target.entry.dtype.itemsize > 8:
                    raise NotImplementedError(
                        f"{where}: {target.name} is {target.entry.dtype}, whose changes cannot be found; expected "
                        "elements of up to 8 bytes; leave it out by mapping={name: None}, or pass delta=False"
                    )
    targets = ranks.share(targets)
    pieces = list(_pieces(targets, found))
    everyones = ranks.gather([(piece.target, piece.box) for piece in pieces])
    return Plan(digest, targets, pieces, everyones)


def _pieces(targets: Sequence[Target], found: Sequence[Offered]) -> list[Piece]:
    """Return what this rank sends of each target, in their order."""
    pieces = []
    for number, target in enumerate(targets):
        for rows in target.rows:
            place = found[rows.source].place
            common = None if place is None else target.common(rows, place.box)
            if place is not None and common is not None:
                pieces.append(Piece(number, common[1], place, common[0], target.entry.dtype))
    return pieces
