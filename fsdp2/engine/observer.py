"""The observer of passes, which sees each collective before it is launched.

Ranks that launch different collectives would wait for each other forever, so ``fsdp2/ranks`` observes passes. The
engine shows a collective in one method, ``Pass.launch``. If ranks may skip units, a pass asks an agreement instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fsdp2.engine.agreement import Agreement, NoAgreement
from fsdp2.engine.collective import Collective, PassKind

__all__ = ["Observer", "Unobserved", "make_observer", "observe_with"]


class Observer(Protocol):
    """Sees every pass under one root. If a method raises, the pass does not go on. None returns anything."""

    @property
    def agreement(self) -> Agreement:
        """The agreement that passes ask instead if some ranks may skip units."""

    def begin(self, kind: PassKind, *, agrees: bool) -> None:
        """Note that a pass starts. One that has not ended was aborted, or is around it if it ``may_lie_inside``.

        ``agrees``: it asks the ``agreement``.
        """

    def before(self, collective: Collective) -> None:
        """Note ``collective``, which a pass that asks no agreement is about to launch."""

    def end(self) -> None:
        """Note that the pass is over."""

    def abandon(self) -> None:
        """Note that the last pass, if it has not ended, was aborted, on this rank at least; a recovery says so."""

    def forget(self, setter: str) -> None:
        """Expect other collectives of the same passes from now on: ``setter`` changed options, on every rank alike."""

    def forget_units(self) -> None:
        """Forget as ``forget`` does, because units were inserted or removed, and refer to none that was removed."""


class Unobserved:
    """The observer of passes that are not compared: with one process, or with rank checks off."""

    agreement: Agreement = NoAgreement()

    def begin(self, kind: PassKind, *, agrees: bool) -> None:
        """Do nothing."""

    def before(self, collective: Collective) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def forget(self, setter: str) -> None:
        """Do nothing."""

    def forget_units(self) -> None:
        """Do nothing."""


MakeObserver = Callable[[Any, PassKind, "Exception | None", bool], "Observer | None"]
_make: MakeObserver | None = None


def observe_with(make: MakeObserver | None) -> MakeObserver | None:
    """Have ``make(root, kind, error, within_replica)`` make observers from now on; if it returns None, there is none.

    Return what has made them so far. ``fsdp2/ranks`` calls this when it is imported: the engine cannot import what
    observes it.
    """
    global _make
    before, _make = _make, make
    return before


def make_observer(root: Any, kind: PassKind, error: Exception | None, *, within_replica: bool = False) -> Observer:
    """Return the observer of ``root`` (a ``RootContext``), whose first pass, of ``kind``, starts.

    It observes passes of all ranks, or those ``within_replica``: one replica may run them while the others do something
    else. ``error`` is what this rank found wrong with its units, if anything: the observer can make all ranks raise it.

    Raises:
        RuntimeError: the ranks have different units, or another rank came with an ``error``.
        Exception: the ``error`` of this rank.
    """
    observer = None if _make is None else _make(root, kind, error, within_replica)
    return Unobserved() if observer is None else observer
