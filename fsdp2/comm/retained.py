"""Memory that another lane still reads: kept until the lane that allocated it has waited for that lane."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from fsdp2.comm.streams import ComputeLane, Lane, Lanes

__all__ = ["Retained"]


@dataclass
class _Retention:
    """Memory that must not be used again before ``event``."""

    event: torch.Event
    tensors: list[torch.Tensor]
    nbytes: int
    unit: int


class Retained:
    """Memory of reductions on streams. It is empty on a CPU, where operations keep their inputs themselves.

    Of the compute stream's memory it holds at most ``limit_bytes``, or one chunk if that is larger. Chunks whose
    gradients were finished together may exceed this by one unit. Of the pack and reduce lanes' memory it holds what one
    reduction needs: before the next reduction, these lanes wait for all but the last.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.limit_bytes = 0
        self.units = 1  # so many may be held
        self._unit = 0  # the number of the unit whose gradients are being reduced
        self.packed: deque[_Retention] = deque()  # gradients that are copied beside compute
        self._inputs: deque[_Retention] = deque()
        self._nbytes = 0  # of ``packed`` and ``_inputs``, which are memory of the compute stream
        self._encoded: deque[_Retention] = deque()
        self._sums: deque[_Retention] = deque()
        self._used: dict[Lane, None] = {}  # an ordered set of the lanes on which reductions have put work

    def __del__(self) -> None:
        """Let it outlast a model that is dropped behind an exception of a backward, for which nobody waits."""
        for kept in (self.packed, self._inputs, self._encoded, self._sums):
            for tensor in [tensor for retention in kept for tensor in retention.tensors]:
                for lane in self._used:
                    lane.keep(tensor)

    def use(self, lane: Lane) -> Lane:
        """Return ``lane``. An operation is about to put work on it, for which ``drop_all`` has to wait."""
        self._used[lane] = None
        return lane

    def retain_packed(self, event: torch.Event | None, grads: list[torch.Tensor], nbytes: int) -> None:
        """Keep gradients, ``nbytes`` of the compute stream, until ``event`` of the pack lane, which copies them."""
        self._retain(self.packed, event, grads, nbytes)

    def retain_inputs(self, event: torch.Event | None, inputs: list[torch.Tensor], nbytes: int) -> None:
        """Keep inputs, ``nbytes`` of the compute stream, until ``event`` of the lane that reads them."""
        self._retain(self._inputs, event, inputs, nbytes)

    def retain_encoded(self, event: torch.Event | None, rows: list[torch.Tensor]) -> None:
        """Keep encoded ``rows``, of the pack lane, until ``event`` of the reduce lane, which sends them."""
        self._retain(self._encoded, event, rows)

    def retain_sums(self, event: torch.Event | None, sums: torch.Tensor) -> None:
        """Keep ``sums``, of the reduce lane, until ``event`` of the lane that reads them."""
        self._retain(self._sums, event, [sums])

    def _retain(
        self, kept: deque[_Retention], event: torch.Event | None, tensors: list[torch.Tensor], nbytes: int = 0
    ) -> None:
        if event is not None and tensors:
            kept.append(_Retention(event, tensors, nbytes, self._unit))
            self._nbytes += nbytes

    def count_unit(self, nbytes: int) -> None:
        """Let what is held next be of another unit, with ``nbytes`` of gradients."""
        self._unit += 1
        self.limit_bytes = max(self.limit_bytes, self.units * nbytes)

    def expect_unit(self, nbytes: int) -> None:
        """Let compute wait until there is room for a unit whose ``nbytes`` of gradients are about to be made.

        Those of the previous unit may stay: its reduction has only just started.
        """
        self.make_room(nbytes, self._unit - self.units)

    def make_room(self, nbytes: int, last: int | None = None) -> None:
        """Let compute wait until ``nbytes`` more may be held, for units up to number ``last``; without it, for all.

        Packed gradients are given back before inputs, even if these are older: the pack lane is done with them first.
        """
        for kept in (self.packed, self._inputs):
            while kept and (last is None or kept[0].unit <= last) and self._nbytes + nbytes > self.limit_bytes:
                self._drop_oldest(kept, self.lanes.compute)

    def drop(self) -> None:
        """Let compute wait, and give back everything that is held of the compute stream's memory."""
        while self.packed or self._inputs:
            self._drop_oldest(self.packed or self._inputs, self.lanes.compute)

    def drop_packed(self) -> None:
        """Let compute wait for the pack lane, and give back the gradients that it has copied."""
        while self.packed:
            self._drop_oldest(self.packed, self.lanes.compute)

    def drop_encoded(self) -> None:
        """Let the pack lane wait until all encoded rows but the last were read.

        The last rows were sent just now: waiting for them would delay the packing of the next chunk.
        """
        while len(self._encoded) > 1:
            self._drop_oldest(self._encoded, self.lanes.pack)

    def drop_sums(self) -> None:
        """Let the reduce lane wait until all sums but the last were read: it computes the next sum beside that one."""
        while len(self._sums) > 1:
            self._drop_oldest(self._sums, self.lanes.reduce)

    def _drop_oldest(self, kept: deque[_Retention], lane: Lane | ComputeLane) -> None:
        oldest = kept.popleft()
        self._nbytes -= oldest.nbytes
        # Before the references are dropped: then the allocator may give this memory to the lane's next kernel.
        lane.wait(oldest.event)

    def drop_all(self) -> None:
        """Let compute wait for all lanes that were used, and give everything back."""
        # For all their work, not for events: an operation that raised has recorded none, and its inputs and sums may
        # still be read.
        for lane in self._used:
            self.lanes.compute.wait(lane.event())
        self._used.clear()
        for kept in (self.packed, self._inputs, self._encoded, self._sums):
            kept.clear()  # the other lanes wait for compute before they take memory again
        self._nbytes = 0
