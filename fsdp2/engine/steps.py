"""The operations of a pass, and the observer that sees each one before it starts.

A *pass* is a forward, a backward or a finalization under one root. Its *steps* are the collectives it starts. Ranks
that take different steps would wait for each other for ever, so ``fsdp2/ranks`` observes them; the engine asks the
observer in one function, ``take``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import FSDPParam

__all__ = [
    "END",
    "Answer",
    "CanJoin",
    "Joins",
    "Member",
    "Observer",
    "PassKind",
    "Step",
    "Take",
    "Unobserved",
    "make_observer",
    "nothing",
    "observe_with",
    "take",
    "take_unobserved",
]


class Member(Protocol):
    """A group of parameters, as far as an observer has to know one."""

    name: str
    options: GroupOptions
    params: list[FSDPParam]
    store: ShardStore


class Step(NamedTuple):
    """One collective of a pass.

    ``part`` says what ranks must agree on beside the kind and the group: the formats and sizes of a gather, the
    parameters whose gradients a reduction sends.
    """

    kind: str  # "gather", "reduce", or "end" for the end of a pass, which has no group
    group: Member | None
    part: tuple[int, ...] = ()


END = Step("end", None)
"""The end of a pass, shown to the observer like a step."""


class PassKind(NamedTuple):
    """What a pass is. Ranks expect passes of one kind, after the same kinds of passes, to take the same steps."""

    name: str  # "forward", "evaluation", "backward", "finalization", or the function that the caller gathered with
    detail: str = ""  # for people
    used: tuple[int, ...] = ()
    """Of a backward: the groups marked with ``set_reduce_scatter_unused_params`` that forwards before it gathered."""
    kept: tuple[int, ...] = ()
    """Of a backward: the groups that stayed in memory from the forward, and are not gathered again."""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


class Answer(Enum):
    """An observer's answer to an operation that may start."""

    TAKE = 0  # now
    LATER = 1  # when it is needed: only a prefetch, which is optional, gets this answer


CanJoin = Callable[[Step, bool], bool]
"""``Joins.can_join``."""


class Joins(Protocol):
    """A pass that can take a step that only other ranks need."""

    def can_join(self, step: Step, planned: bool) -> bool:
        """Return whether the pass can take ``step`` now, with a group that this rank does not use at the moment.

        Ranks that follow a known pass have ``planned`` it; else they have just chosen it.
        """

    def join(self, step: Step) -> None:
        """Take ``step``."""


class Observer(Protocol):
    """Sees every pass under one root. Each method may raise, and then the pass does not go on."""

    def begin(self, kind: PassKind, *, outermost: bool) -> None:
        """A pass starts; an ``outermost`` one ends an aborted one before it, another may lie inside the running one."""

    def before(self, step: Step, *, optional: bool, can_join: CanJoin) -> Answer | Step:
        """Decide about ``step``, which is about to be taken.

        Returns:
            TAKE, LATER, or a step that ``can_join`` accepts and that the pass must take first, because other ranks do.
        """

    def joins_before_end(self, can_join: CanJoin) -> Step | None:
        """Return the next step that other ranks take before a backward ends, if ``can_join`` accepts it."""

    def end(self) -> None:
        """The pass is over."""

    def suspend(self) -> None:
        """The pass that starts now is not observed."""

    def abandon(self) -> None:
        """The pass was aborted, on this rank at least (recovery)."""

    def forget(self, setter: str) -> None:
        """``setter`` changed options, so the same passes will take other steps from now on, on every rank."""


class Unobserved:
    """The observer of passes that nobody compares: with one process, or with rank checks off."""

    def begin(self, kind: PassKind, *, outermost: bool) -> None:
        """Do nothing."""

    def before(self, step: Step, *, optional: bool, can_join: CanJoin) -> Answer | Step:
        """Let every step be taken at once."""
        return Answer.TAKE

    def joins_before_end(self, can_join: CanJoin) -> Step | None:
        """Return None."""
        return None

    def end(self) -> None:
        """Do nothing."""

    def suspend(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def forget(self, setter: str) -> None:
        """Do nothing."""


class Take(Protocol):
    """Shows a step to the observer of a pass and calls ``start``, unless an ``optional`` step is left for later."""

    def __call__(self, step: Step, start: Callable[[], None], *, optional: bool = False) -> bool:
        """Return whether ``start`` was called."""


def take(observer: Observer, joins: Joins, step: Step, start: Callable[[], None], *, optional: bool = False) -> bool:
    """Show ``step`` to ``observer`` and call ``start``; the only place where an observer is asked about a step.

    Steps that the other ranks take first are taken first here as well. Returns False if an ``optional`` step is left
    for later.
    """
    while True:
        answer = observer.before(step, optional=optional, can_join=joins.can_join)
        if answer is Answer.TAKE:
            start()
            return True
        if isinstance(answer, Step):
            joins.join(answer)
        else:
            return False


def nothing() -> None:
    """Start nothing: the end of a pass is no operation."""


def take_unobserved(step: Step, start: Callable[[], None], *, optional: bool = False) -> bool:
    """Start an operation outside of any observed pass."""
    start()
    return True


MakeObserver = Callable[[Any, PassKind, "RuntimeError | None"], "Observer | None"]
_make: MakeObserver | None = None


def observe_with(make: MakeObserver) -> None:
    """Let ``make`` return the observer of each root from now on; None leaves a root unobserved."""
    global _make
    _make = make


def make_observer(root: Any, kind: PassKind, error: RuntimeError | None) -> Observer:
    """Return the observer of ``root``, whose first pass starts, or fails with ``error``.

    Raises:
        RuntimeError: the observer refuses the units it was shown, or passes ``error`` on.
    """
    observer = None if _make is None else _make(root, kind, error)
    return Unobserved() if observer is None else observer
