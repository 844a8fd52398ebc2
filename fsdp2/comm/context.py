"""The communication context: what the groups of one root, or of several, communicate on."""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist

from fsdp2.comm.formats import Noise
from fsdp2.comm.gather import HostCopies
from fsdp2.comm.streams import Lanes, Retained

__all__ = ["CommContext"]


class CommContext:
    """The lanes, and what is in flight on them. Several roots may share one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lanes = Lanes(device)
        self.copies = HostCopies(self.lanes)
        self.reductions = Retained(self.lanes)
        self.largest_bytes = 0  # of the full parameters of any group that communicates here
        self.finalizing: object = None  # the handle of a finalization that was started and not waited for

    @cached_property
    def noise(self) -> tuple[Noise, Noise]:
        """Random numbers of this rank to round by, on the pack lane and on the replicate lane; seeded with torch's."""
        seed = torch.initial_seed() + 2 * dist.get_rank()
        return Noise(seed), Noise(seed + 1)
