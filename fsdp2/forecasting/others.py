"""Ranks that use what the simulated one skips: it takes part in their gathers, and reduces zeros."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdp2.engine import observer
from fsdp2.engine.observer import Answer, Observer, Step, observe_with
from fsdp2.engine.passes import RootContext

__all__ = ["others_use_everything"]


@contextmanager
def others_use_everything() -> Iterator[None]:
    """In passes of the block, other ranks use every unit that ``set_reduce_scatter_unused_params`` allows to skip."""
    before = observer._make

    def make(root: RootContext[Any], kind: str, error: RuntimeError | None) -> Observer | None:
        if error is None and any(group.options.reduce_unused for group in root.groups):
            return _Others(root)
        return None if before is None else before(root, kind, error)

    observe_with(make)
    try:
        yield
    finally:
        observer._make = before


class _Others:
    """Notes which groups a pass uses, and takes part with the others at its end.

    In a real job it takes part where the others come to the unit; what is gathered for them in a forward is kept until
    that ends there as well.
    """

    def __init__(self, root: RootContext[Any]) -> None:
        self._root, self._forward = root, False
        self._used: set[Any] = set()
        self.observes = True

    def begin(self, kind: str, *, outermost: bool, first: Step | None = None) -> None:
        """A pass starts."""
        self._used.clear()
        self._forward = kind == "forward"

    def before(self, step: Step, *, optional: bool = False) -> Answer:
        """A step is taken, and none has to wait."""
        self._used.add(step.group)
        return Answer.GO

    def postpones(self, step: Step) -> bool:
        """No prefetch waits."""
        return False

    def ending(self) -> None:
        """A backward ends: take part in what is left of the others'."""
        for group in reversed(self._skipped()):
            for kind in ("gather", "reduce"):
                self._root.participate(Step(kind, group))

    def end(self) -> None:
        """A pass is over; a forward takes part now."""
        if self._forward:
            for group in self._skipped():
                self._root.participate(Step("gather", group))
        self._forward = False

    def _skipped(self) -> list[Any]:
        return [group for group in self._root.groups if group.options.reduce_unused and group not in self._used]

    def suspend(self) -> None:
        """Nothing is compared."""

    def abandon(self) -> None:
        """Nothing is compared."""

    def forget(self, setter: str) -> None:
        """Nothing is compared."""
