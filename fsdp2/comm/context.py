"""The communication context of one root, or of several: their lanes, and the communication under way on them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from fsdp2.comm.gather import HostCopies
from fsdp2.comm.late_checks import LateChecks
from fsdp2.comm.reduce import Encoding
from fsdp2.comm.reductions import Reductions
from fsdp2.comm.streams import Lanes
from fsdp2.policies import WireFormat

__all__ = ["CommContext"]


class CommContext:
    """The lanes, and what is in flight on them. Several roots may share a context."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lanes = Lanes(device)
        self.copies = HostCopies(self.lanes)
        self.reductions = Reductions(self.lanes)
        self.checks = LateChecks(self.lanes.compute)  # that full parameters in use are those of the shards
        self.largest_bytes = 0  # of the full parameters of any group that communicates here
        self._limits: weakref.WeakKeyDictionary[object, tuple[int, int, int]] = weakref.WeakKeyDictionary()
        self.finalizing: object = None  # the handle of a finalization that was started and not waited for
        self._postponed: dict[object, Callable[[], None]] = {}
        self._states: dict[tuple[type, int], Any] = {}  # what formats keep from call to call, by format and lane

    def set_limits(self, root: object, chunks: int, units: int, largest: int) -> None:
        """Let ``chunks`` of gradients be in flight, and as many bytes as so many ``units`` have.

        ``largest`` is the size of the full parameters of the largest group under ``root``. Where roots share a context,
        the largest values apply; roots are referenced weakly, so those of a freed root no longer count.
        """
        self._limits[root] = chunks, units, largest
        operations, units, self.largest_bytes = (max(some) for some in zip(*self._limits.values()))
        self.reductions.set_limits(operations, units)

    def postpone_gather(self, group: object, start: Callable[[], None]) -> None:
        """Postpone ``start``, which starts the gather of ``group`` that backward needs next, until ``start_postponed``.

        On streams the host is far ahead of the device, and the communicator runs this gather after the previous unit's
        reduction anyway. If it starts when the present unit has its gradients, the inputs of that reduction have been
        given back by then. So the two are never in memory together, and no time is lost.
        """
        self._postponed[group] = start

    def drop_postponed(self, group: object) -> None:
        """Drop the postponed gather of ``group``: backward has reached the group, and gathers it now."""
        self._postponed.pop(group, None)

    def drop_all_postponed(self) -> None:
        """Drop postponed gathers: backward has ended."""
        self._postponed.clear()

    def start_postponed(self) -> None:
        """Start postponed gathers. Compute waits for reductions first, and gives back what they read."""
        if self._postponed:
            starts, self._postponed = self._postponed, {}
            self.reductions.memory.drop()
            for start in starts.values():
                start()

    def forget_states(self) -> None:
        """Drop what formats keep from call to call; they make it anew."""
        self._states.clear()

    def encoding(self, form: WireFormat | None, stream: int) -> Encoding | None:
        """Return what encodes gradients in ``form``: 0 for those of the pack lane, 1 for the replicate lane."""
        if form is None:
            return None
        key = type(form), stream
        if key not in self._states:
            new_state = getattr(form, "new_state", None)
            self._states[key] = None if new_state is None else new_state(stream)
        return Encoding(form, self._states[key])
