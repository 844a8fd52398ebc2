"""Simulate ranks that use units which the simulated rank skips: it joins their gathers and reduces zeros."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdp2.engine.agreement import Agreement, Answer, CanJoin
from fsdp2.engine.collective import END, Collective, CollectiveKind, PassKind
from fsdp2.engine.joining import ranks_may_skip
from fsdp2.engine.observer import Observer, observe_with
from fsdp2.engine.root import RootContext

__all__ = ["others_use_everything"]


@contextmanager
def others_use_everything() -> Iterator[None]:
    """Simulate that other ranks use every unit that ``set_reduce_scatter_unused_params`` allows to skip."""

    def make(root: RootContext[Any], kind: PassKind, error: Exception | None, within_replica: bool) -> Observer | None:
        if error is None and not within_replica and ranks_may_skip(root.groups):
            return _Others(root)
        return None if before is None else before(root, kind, error, within_replica)

    before = observe_with(make)
    try:
        yield
    finally:
        observe_with(before)


class _Others:
    """An observer and agreement that records the groups that a pass uses, and joins others' collectives at its end.

    A real rank joins these when the others come to the unit. The memory is the same: parameters that are gathered
    for others in a forward stay until its end there, too.
    """

    def __init__(self, root: RootContext[Any]) -> None:
        self._root, self._forward = root, False
        self._launched: set[tuple[str, Any]] = set()

    @property
    def agreement(self) -> Agreement:
        """What passes ask: itself."""
        return self

    def begin(self, kind: PassKind, *, agrees: bool) -> None:
        """Note that a pass starts."""
        self._launched.clear()
        self._forward = kind.is_forward

    def before(self, collective: Collective) -> None:
        """Do nothing: it is no collective of a unit that others use."""

    def end(self) -> None:
        """Do nothing: there is no rank to compare with."""

    def abandon(self) -> None:
        """Do nothing."""

    def forget(self, setter: str) -> None:
        """Do nothing."""

    def forget_units(self) -> None:
        """Do nothing."""

    def next(self, collective: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        """Launch every collective immediately; before a forward ends, join the others' gathers."""
        if collective == END and self._forward:
            joined = self._next(["gather"], self._root.groups, can_join)
            return Answer.LAUNCH if joined is None else joined
        self._launched.add((collective.kind, collective.group))
        return Answer.LAUNCH

    def next_before_end(self, can_join: CanJoin) -> Collective | None:
        """Return the next remaining collective of the others' backward."""
        return self._next(["gather", "reduce"], list(reversed(self._root.groups)), can_join)

    def _next(self, kinds: list[CollectiveKind], groups: list[Any], can_join: CanJoin) -> Collective | None:
        for group in groups:
            for kind in kinds if group.store.options.reduce_unused else ():
                if (kind, group) not in self._launched and can_join(Collective(kind, group), True):
                    self._launched.add((kind, group))  # only once: a group without gradients reduces nothing
                    return Collective(kind, group)
        return None
