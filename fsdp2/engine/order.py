"""The order in which groups run, recorded to know what comes next: lists and positions, no tensors."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["BackwardOrder", "ForwardOrder"]

T = TypeVar("T")


class ForwardOrder(Generic[T]):
    """The order of one forward, followed by the next: ``visit`` says who came after last time.

    A forward that goes another way gets no more advice and is recorded in its place; being wrong costs only overlap.
    """

    def __init__(self) -> None:
        self._known: list[T] = []
        self._current: list[T] = []
        self._on_track = False

    def begin(self) -> None:
        """A new forward of the root starts."""
        if self._current:
            self._known = self._current
        self._current = []
        self._on_track = bool(self._known)

    def visit(self, group: T) -> T | None:
        """Note that ``group`` runs now; the one expected next, or None."""
        position = len(self._current)
        self._current.append(group)
        if not self._on_track:
            return None
        if position >= len(self._known) or self._known[position] is not group:
            self._on_track = False
            return None
        return self._known[position + 1] if position + 1 < len(self._known) else None

    def forget(self) -> None:
        """Start from nothing (the groups changed)."""
        self._known, self._current, self._on_track = [], [], False


class BackwardOrder(Generic[T]):
    """The forward calls whose backward is to come; backward meets them in reverse."""

    def __init__(self) -> None:
        self._calls: list[T] = []
        self._positions: dict[int, list[int]] = {}

    def record(self, group: T) -> None:
        """Note one forward call of ``group``."""
        self._positions.setdefault(id(group), []).append(len(self._calls))
        self._calls.append(group)

    def visit(self, group: T) -> T | None:
        """The backward of ``group``'s latest call starts; the one expected next, or None."""
        positions = self._positions.get(id(group))
        if not positions:
            return None
        position = positions.pop()
        return self._calls[position - 1] if position > 0 else None

    def clear(self) -> None:
        """The backward is over."""
        self._calls.clear()
        self._positions.clear()
