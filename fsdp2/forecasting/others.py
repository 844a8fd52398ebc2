"""Ranks that use what the simulated one skips: it takes part in their gathers, and reduces zeros."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdp2.engine import steps
from fsdp2.engine.root import RootContext
from fsdp2.engine.steps import END, Answer, CanJoin, Observer, PassKind, Step, observe_with

__all__ = ["others_use_everything"]


@contextmanager
def others_use_everything() -> Iterator[None]:
    """In passes of the block, other ranks use every unit that ``set_reduce_scatter_unused_params`` allows to skip."""
    before = steps._make

    def make(root: RootContext[Any], kind: PassKind, error: RuntimeError | None) -> Observer | None:
        if error is None and any(group.options.reduce_unused for group in root.groups):
            return _Others(root)
        return None if before is None else before(root, kind, error)

    observe_with(make)
    try:
        yield
    finally:
        steps._make = before


class _Others:
    """Notes which groups a pass uses, and has it join the others' steps at its end.

    In a real job it joins them where the others come to the unit; what is gathered for them in a forward is kept until
    that ends there as well.
    """

    def __init__(self, root: RootContext[Any]) -> None:
        self._root, self._forward = root, False
        self._taken: set[tuple[str, Any]] = set()

    def begin(self, kind: PassKind, *, outermost: bool) -> None:
        """A pass starts."""
        self._taken.clear()
        self._forward = kind.name == "forward"

    def before(self, step: Step, *, optional: bool, can_join: CanJoin) -> Answer | Step:
        """Let every step be taken at once; a forward joins the others' gathers before it ends."""
        if step == END and self._forward:
            joined = self._next(["gather"], self._root.groups, can_join)
            return Answer.TAKE if joined is None else joined
        self._taken.add((step.kind, step.group))
        return Answer.TAKE

    def joins_before_end(self, can_join: CanJoin) -> Step | None:
        """Return what is left of the others' backward."""
        return self._next(["gather", "reduce"], list(reversed(self._root.groups)), can_join)

    def end(self) -> None:
        """Nothing is compared."""

    def suspend(self) -> None:
        """Nothing is compared."""

    def abandon(self) -> None:
        """Nothing is compared."""

    def forget(self, setter: str) -> None:
        """Nothing is compared."""

    def _next(self, kinds: list[str], groups: list[Any], can_join: CanJoin) -> Step | None:
        for group in groups:
            for kind in kinds if group.options.reduce_unused else ():
                if (kind, group) not in self._taken and can_join(Step(kind, group), True):
                    self._taken.add((kind, group))  # asked once: a group without gradients reduces nothing
                    return Step(kind, group)
        return None
