"""What the passes under a root show of themselves: each step before it is taken, to one observer, by default to none.

A *pass* is a forward, a backward or a finalization under one root; its *steps* are the collectives it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

__all__ = ["Admit", "Answer", "Observer", "Step", "make_observer", "observe_with"]


class Step(NamedTuple):
    """One step of a pass: "gather" or "reduce", of which group, and which part of it."""

    kind: str
    group: Any  # an FSDPParamGroup; None at the end of a pass
    part: tuple[int, ...] = ()


class Answer(Enum):
    """What becomes of a step: it is taken now, or left until it is needed."""

    GO = 0
    LATER = 1


Admit = Callable[[Step], Answer]
"""Called with each step before its collective starts: whether to take it now."""


class Observer(Protocol):
    """Sees every pass under one root. Each method may raise, and then the pass does not go on."""

    def begin(self, kind: str, *, outermost: bool, first: Step | None = None) -> None:
        """A pass starts; an ``outermost`` one ends whatever was aborted before it, another may lie inside what runs.

        ``first`` is its first step, where that is known by now.
        """

    def before(self, step: Step, *, optional: bool = False) -> Answer:
        """``step`` is about to be taken; only an ``optional`` one, a prefetch, can be answered by LATER.

        Steps that the root has to take first go to its ``participate``.
        """

    def postpones(self, step: Step) -> bool:
        """Whether an optional ``step`` would be answered by LATER; changes nothing."""

    def ending(self) -> None:
        """A backward has nothing left to do but what nobody's gradients started."""

    @property
    def observes(self) -> bool:
        """Whether a pass is observed now: between passes, and in one that is suspended, none is."""

    def end(self) -> None:
        """The pass is over."""

    def suspend(self) -> None:
        """What comes now is not observed."""

    def abandon(self) -> None:
        """The pass was aborted, on this rank at least (recovery)."""

    def forget(self, setter: str) -> None:
        """``setter`` changed options, so the same passes will take other steps from now on, on every rank."""


MakeObserver = Callable[[Any, str, "RuntimeError | None"], "Observer | None"]
_make: MakeObserver | None = None


def observe_with(make: MakeObserver) -> None:
    """Let ``make`` return the observer of each root from now on, or None."""
    global _make
    _make = make


def make_observer(root: Any, kind: str, error: RuntimeError | None) -> Observer | None:
    """The observer of ``root``, whose first pass, of a ``kind``, starts, or fails with ``error``.

    Raises:
        RuntimeError: the observer refuses what it was shown, or passes ``error`` on.
    """
    return None if _make is None else _make(root, kind, error)
