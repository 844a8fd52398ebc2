"""Memory of the host that passes through a device, piece by piece: one arrives, one is used, one leaves.

A piece is copied to one of three slots on the device, used and changed there by the compute stream, and copied back. A
link carries bytes in both directions at once, so the copies of the pieces before and after run while one is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2.comm.streams import ComputeLane, Lane
from fsdp2.sharding.platform import platform

__all__ = ["Staging", "has_host", "host_memory"]

_SLOTS = 3


def has_host(device: torch.device) -> bool:
    """Return whether memory of the host is other memory than that of ``device``; tests replace this."""
    return ComputeLane(device).on_stream


def host_memory(nbytes: int, *, pin: bool) -> torch.Tensor:
    """Return bytes of the host, page-locked (``pin``) if there is an accelerator; their content is undefined."""
    host = platform().host
    pin = pin and host == "cpu" and torch.accelerator.is_available()
    return torch.empty(nbytes, dtype=torch.uint8, device=host, pin_memory=pin)


class Staging:
    """The slots of one device, and the two lanes that copies run on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute, self._inward, self._outward = ComputeLane(device), Lane(device), Lane(device)
        self._pieces: Sequence[list[torch.Tensor]] = ()
        self._slots: list[torch.Tensor] = []
        self._arrived: list[torch.Event | None] = []
        self._used = 0  # pieces that were sent back

    def begin(self, pieces: Sequence[list[torch.Tensor]]) -> None:
        """Start to copy ``pieces``, each a list of bytes of the host that are neighbours on the device."""
        self._pieces, self._arrived, self._used = pieces, [], 0
        sizes = [sum(part.numel() for part in piece) for piece in pieces]
        self._slots = [
            torch.empty(max(sizes[i::_SLOTS]), dtype=torch.uint8, device=self.device)
            for i in range(min(_SLOTS, len(pieces)))
        ]
        self._inward.wait(self._compute)  # whose memory the slots are
        for i in range(len(self._slots)):
            self._fetch(i)

    def _fetch(self, i: int) -> None:
        with self._inward.after() as done:
            _copy(self._pieces[i], self._slots[i % _SLOTS], inward=True)
        self._arrived.append(done.event)

    def use(self) -> torch.Tensor:
        """Return the slot with the next piece, for kernels of the compute stream."""
        self._compute.wait(self._arrived[self._used])
        return self._slots[self._used % _SLOTS]

    def send_back(self) -> None:
        """Copy the piece in use back to the host, and fetch the next one that has the same slot."""
        i = self._used
        with self._outward.after(self._compute) as done:
            _copy(self._pieces[i], self._slots[i % _SLOTS], inward=False)
        self._used += 1
        if i + _SLOTS < len(self._pieces):
            self._inward.wait(done.event)
            self._fetch(i + _SLOTS)

    def wait(self) -> None:
        """Let the host wait for copies that were put on the compute stream."""
        event = self._compute.event()
        if event is not None:
            event.synchronize()

    def end(self) -> None:
        """Let the host wait until all pieces are back, and give the memory of the slots back.

        The host may read and write the pieces then. After an error it waits for pieces that nobody has used, too.
        """
        for lane in (self._inward, self._outward):
            event = lane.event()
            if event is not None:
                event.synchronize()
        self._pieces, self._slots, self._arrived = (), [], []


def _copy(parts: list[torch.Tensor], slot: torch.Tensor, *, inward: bool) -> None:
    end = 0
    for part in parts:
        start, end = end, end + part.numel()
        target, source = (slot[start:end], part) if inward else (part, slot[start:end])
        target.copy_(source, non_blocking=True)
