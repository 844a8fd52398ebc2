"""Which tensors the ranks hold together: the union over ranks, and whether a name stands for one tensor everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp2._warn import warn
from fsdp2.sharding.boxes import intersect
from fsdp2.weights.buckets import Entry
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Place

__all__ = ["Mine", "Offer", "Offered", "check_copies", "gather_offers", "joined"]

_COMPARED = 4
"""How many elements of each dimension are compared where several meshes have a tensor of one name."""
Mine = dict[Place, Entry]
"""The tensors that this rank holds, each with its shape and the dtype in which it leaves."""
Offer = list[tuple[list[str], Entry]]
"""The names of each tensor of a rank, and its shape and dtype."""


@dataclass(frozen=True)
class Offered:
    """A tensor that some rank has: its names, its shape and dtype, and the place to read this rank's part from.

    ``place`` is None if this rank has no part of the tensor, or if another rank's copy is taken.
    """

    names: tuple[str, ...]
    entry: Entry
    place: Place | None


def gather_offers(mine: Mine, ranks: Ranks) -> dict[int, Offer]:
    """Return every rank's tensors in the order of ranks, or only the first rank's if all ranks have the same."""
    offer: Offer = [(place.names, entry) for place, entry in mine.items()]
    digest = hashlib.sha256(repr(offer).encode()).digest()
    if len(set(ranks.gather(digest))) == 1:
        return {ranks.first_rank: offer}
    here = dist.get_rank()
    return dict(sorted(ranks.gather((here, offer)), key=lambda offered: offered[0]))


def joined(mine: Mine, offers: dict[int, Offer], ranks: Ranks, where: str) -> list[Offered]:
    """Return every tensor that any rank has, in the order of the first rank that has it; errors begin with ``where``.

    Raises:
        RuntimeError: Ranks disagree about the shape or the dtype of a tensor.
    """
    places = {name: place for place in mine for name in place.names}
    known: dict[str, tuple[Entry, int]] = {}
    tensors: list[Offered] = []
    for rank, offer in offers.items():
        for names, entry in offer:
            earlier = next((known[name] for name in names if name in known), None)
            if earlier is not None and earlier[0] != entry:
                raise RuntimeError(
                    f"{where}: ranks differ in {names[0]}; got {entry} on rank {rank}, expected {earlier[0]} as on "
                    f"rank {earlier[1]}; give parameters of different shapes different names"
                )
            if earlier is None:
                place = next((places[name] for name in names if name in places), None)
                takes = place is not None and place.is_sender(ranks, rank)
                tensors.append(Offered(tuple(names), entry, place if takes else None))
            for name in names:
                known.setdefault(name, earlier or (entry, rank))
    return tensors


@dataclass(frozen=True)
class _Copy:
    """What is compared of one copy of a tensor: its first elements, and sums over all of it (values, magnitudes)."""

    first: torch.Tensor
    sums: torch.Tensor

    def __add__(self, other: _Copy) -> _Copy:
        """Join the parts of two ranks of a mesh: each has zeros for what the other has."""
        return _Copy(self.first + other.first, self.sums + other.sums)

    def is_near(self, other: _Copy) -> bool:
        """Return whether the first elements differ by no more than rounding during training may explain."""
        largest = float(other.first.abs().nan_to_num(0.0, 0.0).max())
        return torch.allclose(self.first, other.first, rtol=0.1, atol=0.1 * largest, equal_nan=True)

    def is_same(self, other: _Copy) -> bool:
        """Return whether the sums differ by no more than the order in which they were added."""
        total = float(other.sums[1].nan_to_num(0.0, 0.0))
        return torch.allclose(self.sums, other.sums, rtol=0, atol=1e-9 * total, equal_nan=True)


def check_copies(mine: Iterable[Place], ranks: Ranks, where: str, taken: str) -> None:
    """Compare tensors of one name that ranks, or meshes of some ranks, have for themselves: only one of them is taken.

    Such a name stands for copies of one parameter, or for different ones: each rank's, or each mesh's, experts. Copies
    that differ by rounding count as one tensor; a warning names them, and says that the first one is ``taken``: sent,
    or written.

    Raises:
        RuntimeError: A name stands for several tensors, on every rank.
    """
    found: dict[str, dict[int, _Copy]] = {}
    for values in ranks.gather({place.name: _described(place) for place in mine if _has_others(place, ranks)}):
        for name, entry in values.items():
            if entry is not None:
                mesh, part = entry
                parts = found.setdefault(name, {})
                parts[mesh] = parts[mesh] + part if mesh in parts else part
    unlike = []
    for name, copies in found.items():
        (holder, expected), *others = sorted(copies.items())
        for other, got in others:
            if not got.is_near(expected):
                raise RuntimeError(
                    f"{where}: ranks have different tensors under the name {name}; got the mesh of rank {holder} with "
                    f"{_some(expected)} and the mesh of rank {other} with {_some(got)}, expected one tensor of a name. "
                    "Give the modules names that differ between these ranks (an expert's number among all experts). "
                    "Plain copies that have drifted apart are made equal by fsdp2.sync_module_states(model)"
                )
        if not all(got.is_same(expected) for _, got in others):
            unlike.append(name)
    if unlike:
        warn(
            f"{where}: the copies of {unlike} on different ranks are not equal; the first one is {taken}. If they are "
            "different tensors (experts that began with the same values), give the modules names that differ between "
            "these ranks",
            here=ranks.first,
        )


def _has_others(place: Place, ranks: Ranks) -> bool:
    """Return whether other ranks may have another tensor of this name: this one lies on some ranks alone."""
    if place.mesh is None:
        return ranks.size > 1 and isinstance(place.tensor, torch.nn.Parameter)
    return place.mesh.size() < ranks.size and place.copies.first


def _described(place: Place) -> tuple[int, _Copy] | None:
    """Return this rank's part of what is compared, and the first rank of its mesh; None if it holds nothing."""
    local = place.local.detach()
    trained = place.dtype.is_floating_point or place.dtype.is_complex
    if not local.numel() or not (trained or place.mesh is not None):
        return None
    corner = tuple((0, min(length, _COMPARED)) for length in place.shape)
    first = torch.zeros([length for _, length in corner], dtype=place.dtype, device=local.device)
    if intersect(place.box, corner) is not None:
        place.read(corner, first)
    sums = torch.zeros(2, dtype=torch.float64)
    if trained and type(local) is torch.Tensor:
        sums[0] = _real(local).sum(dtype=torch.float64)
        sums[1] = torch.linalg.vector_norm(_real(local), 1, dtype=torch.float64)
    mesh = dist.get_rank() if place.mesh is None else int(place.mesh.mesh.min())
    return mesh, _Copy(_real(first).cpu().double(), sums)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` in real numbers that have sums: pairs of them for complex ones, float32 for a byte."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.element_size() > 1 else tensor.float()


def _some(copy: _Copy) -> str:
    return f"{copy.first.flatten()[:3].tolist()}"
