"""The order in which groups run, recorded to know what comes next: lists and positions, no tensors."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["BackwardOrder", "ForwardOrder"]

T = TypeVar("T")
_MOST_CALLS = 1 << 16
"""Of recorded calls: forwards with gradients that no backward follows would add to them for ever."""


class ForwardOrder(Generic[T]):
    """The ``calls`` of one forward; as long as they are those of the last one, ``visit`` returns which comes next.

    A forward that goes another way gets no more advice; being wrong costs only overlap.
    """

    def __init__(self, known: list[T]) -> None:
        self.calls: list[T] = []
        self._known = known

    def visit(self, group: T) -> T | None:
        """Note that ``group`` runs now; return the one expected next, or None."""
        position, known = len(self.calls), self._known
        self.calls.append(group)
        if position >= len(known) or known[position] is not group:
            self._known = []  # this forward goes another way
            return None
        return known[position + 1] if position + 1 < len(known) else None


class BackwardOrder(Generic[T]):
    """The forward calls whose backward is to come; backward meets them in reverse."""

    def __init__(self) -> None:
        self._calls: list[tuple[T, int]] = []
        self._positions: dict[int, list[int]] = {}

    def record(self, group: T, forward: int) -> None:
        """Note one call of ``group`` in the forward of this number."""
        if len(self._calls) == _MOST_CALLS:  # start anew: what comes next is advice
            self._calls.clear()
            self._positions.clear()
        self._positions.setdefault(id(group), []).append(len(self._calls))
        self._calls.append((group, forward))

    def expects(self, group: T) -> bool:
        """Return whether there are calls of ``group`` to which no backward has come."""
        return bool(self._positions.get(id(group)))

    def visit(self, group: T) -> T | None:
        """Note that the backward of ``group``'s latest call starts; return the group expected next, or None."""
        positions = self._positions.get(id(group))
        if not positions:
            return None
        position = positions.pop()
        if position == 0:
            return None
        before, forward = self._calls[position - 1]
        # Calls stay recorded until the last backward on them. If an earlier backward met that call, it is needed again
        # by another backward on the same forward (of two losses), but not after the backward of the next forward. A
        # call that is still among the positions has met no backward yet.
        if forward == self._calls[position][1] or position - 1 in self._positions[id(before)]:
            return before
        return None
