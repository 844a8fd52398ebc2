"""The communication context: what the groups of one root, or of several, communicate on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property

import torch
import torch.distributed as dist

from fsdp2.comm.formats import Noise
from fsdp2.comm.gather import HostCopies
from fsdp2.comm.reductions import Reductions
from fsdp2.comm.streams import Lanes

__all__ = ["CommContext"]


class CommContext:
    """The lanes, and what is in flight on them. Several roots may share one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lanes = Lanes(device)
        self.copies = HostCopies(self.lanes)
        self.reductions = Reductions(self.lanes)
        self.largest_bytes = 0  # of the full parameters of any group that communicates here
        self._limits: weakref.WeakKeyDictionary[object, tuple[int, int, int]] = weakref.WeakKeyDictionary()
        self.finalizing: object = None  # the handle of a finalization that was started and not waited for
        self._ahead: list[Callable[[], None]] = []

    def set_limits(self, root: object, chunks: int, units: int, largest: int) -> None:
        """Let ``chunks`` of gradients be in flight, and as many bytes as ``units`` groups of ``largest`` bytes have.

        The largest group under ``root`` has so many. The largest values of all roots hold. Weakly referenced, a root
        that is gone has no say.
        """
        self._limits[root] = chunks, units * largest, largest
        operations, nbytes, self.largest_bytes = (max(some) for some in zip(*self._limits.values()))
        self.reductions.set_limits(operations, nbytes)

    def gather_later(self, start: Callable[[], None]) -> None:
        """Leave it to ``gather_now`` to ``start`` the gather of what backward needs after the unit that it enters.

        On streams the host is far ahead of the device, and a communicator takes that gather behind the reduction of
        the unit before in any case. Started when the unit has its gradients, it finds that what the reduction reads
        has been given back, so the two are never in memory together, and no time is lost.
        """
        self._ahead.append(start)

    def forget_later(self) -> None:
        """Drop what was left for later: backward has come to it by another way, or has ended."""
        self._ahead.clear()

    def gather_now(self) -> None:
        """Start what was left for later. Compute waits for reductions first, and gives back what they read."""
        if self._ahead:
            starts, self._ahead = self._ahead, []
            self.reductions.memory.drop()
            for start in starts:
                start()

    @cached_property
    def noise(self) -> tuple[Noise, Noise]:
        """Random numbers of this rank to round by, on the pack lane and on the replicate lane; seeded with torch's."""
        seed = torch.initial_seed() + 2 * dist.get_rank()
        return Noise(seed), Noise(seed + 1)
