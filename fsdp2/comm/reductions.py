"""Reductions in flight: started, and waited for as late as their number and size allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator
from contextlib import ExitStack, suppress
from typing import NamedTuple

from fsdp2 import _trace
from fsdp2.comm.retained import Retained
from fsdp2.comm.streams import Lanes

__all__ = ["Abandoned", "Reductions"]

Operation = Generator[None, None, None]


class Abandoned(Exception):
    """Thrown into an operation whose result nobody wants. It waits for its collectives, then lets this pass."""


class _InFlight(NamedTuple):
    """An operation, the bytes of its gradients, and the group that these belong to."""

    operation: Operation
    nbytes: int
    owner: _trace.Source | None


class Reductions:
    """A window of operations, bounded because they need memory.

    Their gradients may have as many bytes as those of the largest unit that this backward has reduced so far, or of
    several if the user asked for that: a large embedding, to which backward comes last, would otherwise allow those of
    many small layers beside its own. This changes only where an operation is added, in the order that all ranks share:
    what is in flight decides the order of collectives.

    An operation is a generator that yields when the host has to wait. On a CPU it yields at each collective, and its
    inputs stay alive in its frame. So before an operation starts, the oldest ones are resumed, each once, until fewer
    than ``limit`` are left and all gradients fit into the bytes that ``memory`` may hold. Operations at their second
    wait (for the replicate axis) are in a second window, which also has ``limit`` places.

    On streams an operation runs to its end at once, and ``memory`` holds what lanes still read. It yields once if it
    copies its result to the host. That result is memory of the host, so these operations are not bounded.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.memory = Retained(lanes)
        self.limit = 1
        self._owner: _trace.Source | None = None  # of the operation added last
        self._window: deque[_InFlight] = deque()  # at their first wait
        self._window_bytes = 0
        self._past_first_wait: deque[_InFlight] = deque()

    def set_limits(self, operations: int, units: int) -> None:
        """Let so many ``operations`` be in flight, with as many bytes of gradients as so many ``units`` have."""
        self.limit, self.memory.units = operations, units

    def add(
        self, operation: Operation, nbytes: int = 0, owner: _trace.Source | None = None, unit_bytes: int = 0
    ) -> None:
        """Start ``operation`` of ``owner`` on gradients of so many bytes, and keep it in flight.

        ``owner`` has ``unit_bytes`` of gradients in all.
        """
        added = _InFlight(operation, nbytes, owner)
        if owner is not self._owner:
            self._owner = owner
            self.memory.count_unit(unit_bytes)
        if not self.lanes.on_streams:
            self.make_room(nbytes)
        else:
            self.memory.drop_encoded()
            self.memory.drop_sums()
        if _resume(added):
            self._window.append(added)
            self._window_bytes += nbytes

    def make_room(self, nbytes: int) -> None:
        """Wait until there is room for an operation on gradients of so many bytes; on streams compute waits."""
        if self.lanes.on_streams:
            self.memory.make_room(nbytes)
        else:
            while self._is_full(nbytes):
                self._advance_oldest()

    def _is_full(self, nbytes: int) -> bool:
        too_many = len(self._window) >= self.limit
        return bool(self._window) and (too_many or self._window_bytes + nbytes > self.memory.limit_bytes)

    def _advance_oldest(self) -> None:
        oldest = self._window.popleft()
        self._window_bytes -= oldest.nbytes
        if _resume(oldest):
            self._past_first_wait.append(oldest)
        while len(self._past_first_wait) > self.limit:
            _exhaust(self._past_first_wait.popleft())

    def finish(self) -> None:
        """Carry every operation to its end, oldest first."""
        while self._window:
            self._advance_oldest()
        while self._past_first_wait:
            _exhaust(self._past_first_wait.popleft())
        self.memory.drop_all()
        self.memory.limit_bytes = 0  # the next backward may begin with smaller units
        self._owner = None

    def abandon(self, owners: Collection[object]) -> None:
        """Wait for the collectives of ``owners``, and drop their results. Operations of other roots stay in flight."""
        every = [*self._past_first_wait, *self._window]
        self._window = deque(one for one in self._window if one.owner not in owners)
        self._window_bytes = sum([one.nbytes for one in self._window])
        self._past_first_wait = deque(one for one in self._past_first_wait if one.owner not in owners)
        try:
            with ExitStack() as closing:  # abandons all of them, even if waiting for one raises
                for one in reversed(every):
                    if one.owner in owners:
                        closing.callback(_abandon, one.operation)
        finally:
            self.memory.use(self.lanes.gather)  # a gather that raised while it started has recorded no event either
            self.memory.drop_all()


def _resume(one: _InFlight) -> bool:
    """Resume an operation; return whether it is still in flight."""
    if _trace.recorder is not None and one.owner is not None:
        _trace.recorder.enter(one.owner)
    try:
        next(one.operation)
    except StopIteration:
        return False
    return True


def _abandon(operation: Operation) -> None:
    with suppress(Abandoned):
        operation.throw(Abandoned())


def _exhaust(one: _InFlight) -> None:
    while _resume(one):
        pass
