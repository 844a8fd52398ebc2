"""One all-to-all that sends pieces of several tensors to their owners, or whole tensors back to their holders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsdp2.comm.collectives import Work, all_to_all_uneven
from fsdp2.comm.pieces import copy_all
from fsdp2.comm.streams import ComputeLane, Lane
from fsdp2.optim.whole.owners import Route
from fsdp2.optim.whole.ownership import Among
from fsdp2.sharding.boxes import Box, narrow, numel, within
from fsdp2.sharding.packing import align

__all__ = ["Arriving", "Layout"]


@dataclass(frozen=True)
class _Slot:
    """A box of entry ``index`` and where it lies in a buffer."""

    index: int
    box: Box
    offset: int


class Layout:
    """The places of all pieces in this rank's send and receive buffers; equal arguments match on all ranks."""

    def __init__(
        self,
        routes: Sequence[Route],
        dtypes: Sequence[torch.dtype],
        among: Among,
        device: torch.device,
        *,
        to_owner: bool,
    ) -> None:
        """Plan what travels on ``routes`` between the ranks of ``among``; routes of other owners are those of others.

        Buffers are allocated on ``device``, which the backend of these ranks supports.
        """
        self.routes, self.dtypes, self.axis, self.device = routes, dtypes, among.axis, device
        self._compute = ComputeLane(device)
        self.own: list[tuple[int, Box]] = []  # pieces that stay on this rank
        self._moves = False  # whether any rank sends anything
        place, here = among.places, among.axis.rank
        sends: list[list[tuple[int, Box]]] = [[] for _ in place]
        receives: list[list[tuple[int, Box]]] = [[] for _ in place]
        for index, route in enumerate(routes):
            if route.owner not in place:
                continue
            owner = place[route.owner]
            for other in route.senders if to_owner else route.holders:
                if other not in place:
                    continue
                source, target = (place[other], owner) if to_owner else (owner, place[other])
                self._moves |= source != target
                piece = (index, route.boxes[other])
                if source == target == here:
                    self.own.append(piece)
                elif source == here:
                    sends[target].append(piece)
                elif target == here:
                    receives[source].append(piece)
        self.sent, self.send_sizes = self._place(sends)
        self.received, self.receive_sizes = self._place(receives)

    def _place(self, pieces: Iterable[list[tuple[int, Box]]]) -> tuple[list[_Slot], list[int]]:
        slots, sizes, end = [], [], 0
        for of_rank in pieces:
            start = end
            for index, box in of_rank:
                slots.append(_Slot(index, box, end))
                end += align(numel(box) * self.dtypes[index].itemsize)
            sizes.append(end - start)
        return slots, sizes

    @property
    def nbytes_sent(self) -> int:
        """The bytes that this rank sends."""
        return sum(self.send_sizes)

    def send(
        self, sources: Sequence[torch.Tensor | None], origins: Sequence[Box], lane: Lane | None = None
    ) -> Arriving:
        """Send this rank's pieces; ``sources[i]`` is the part ``origins[i]`` of entry ``i``, or None.

        They travel on ``lane`` beside the compute stream, or on the current stream. With gloo they travel beside both.
        Nothing is launched if no rank has anything to send.
        """
        sent = torch.empty(sum(self.send_sizes), dtype=torch.uint8, device=self.device)
        targets, pieces = [], []
        for slot in self.sent:
            targets.append(self._view(sent, slot))
            pieces.append(_part(sources[slot.index], slot.box, origins[slot.index]))
        copy_all(targets, pieces)
        received = torch.empty(sum(self.receive_sizes), dtype=torch.uint8, device=self.device)
        kept = [(index, box, _part(sources[index], box, origins[index])) for index, box in self.own]
        if not self._moves:
            return Arriving(self, [], None, sent, received, kept)
        launch = partial(all_to_all_uneven, received, sent, self.receive_sizes, self.send_sizes, self.axis)
        event = None
        if lane is None:
            works = launch(async_op=self.axis.backend == "gloo")
        else:
            with lane.after(self._compute) as done:
                works = launch(async_op=lane.async_op)
            event = done.event
        return Arriving(self, works, event, sent, received, kept)

    def _view(self, buffer: torch.Tensor, slot: _Slot) -> torch.Tensor:
        dtype = self.dtypes[slot.index]
        flat = buffer[slot.offset : slot.offset + numel(slot.box) * dtype.itemsize].view(dtype)
        return flat.view([length for _, length in slot.box])


@dataclass
class Arriving:
    """A running all-to-all. Its memory is that of the stream that started it, and is referenced until it ends."""

    layout: Layout
    works: list[Work]
    event: torch.Event | None  # of the end, on another stream
    sent: torch.Tensor
    received: torch.Tensor
    kept: list[tuple[int, Box, torch.Tensor]]

    def wait(self) -> list[tuple[int, Box, torch.Tensor]]:
        """Wait; return (entry, box, values) of every piece that arrived and of those that stayed on this rank."""
        for work in self.works:
            work.wait()
        layout = self.layout
        layout._compute.wait(self.event)
        return [
            *self.kept,
            *((slot.index, slot.box, layout._view(self.received, slot)) for slot in layout.received),
        ]

    def deliver(self, into: Sequence[torch.Tensor | None], origins: Sequence[Box]) -> None:
        """Wait, then copy every piece to its place in ``into[i]``, which is the part ``origins[i]`` of entry ``i``."""
        targets, pieces = [], []
        for index, box, values in self.wait():
            targets.append(_part(into[index], box, origins[index]))
            pieces.append(values)
        copy_all(targets, pieces)


def _part(tensor: torch.Tensor | None, box: Box, origin: Box) -> torch.Tensor:
    """Return the view of ``box`` in ``tensor``, which is the part ``origin`` of the whole tensor."""
    assert tensor is not None
    return narrow(tensor, within(box, origin))
