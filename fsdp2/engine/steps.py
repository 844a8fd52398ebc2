"""The steps of a pass, and the observer that sees each one before it starts.

A *pass* is a forward, a backward or a finalization under one root, or what the caller gathers between passes. Its
*steps* are the collectives that it starts: gathers, and chunks of gradients. Ranks that take different steps would wait
for each other for ever, so ``fsdp2/ranks`` observes them. The engine asks the observer about a step in one function,
``take_step``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Protocol

from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import FSDPParam

__all__ = [
    "AS_COMPUTED",
    "END",
    "Answer",
    "CanJoin",
    "Joins",
    "ObservedGroup",
    "Observer",
    "PassKind",
    "Step",
    "Take",
    "Unobserved",
    "make_observer",
    "nothing",
    "observe_with",
    "take_step",
    "take_unobserved",
]


class ObservedGroup(Protocol):
    """A group of parameters, as far as an observer has to know one (``FSDPParamGroup``, whose file imports this)."""

    name: str
    options: GroupOptions
    params: list[FSDPParam]
    store: ShardStore


class Step(NamedTuple):
    """One collective of a pass.

    ``part`` says what ranks must agree on beside the kind and the group: the formats and sizes of a gather, the
    parameters whose gradients a reduction sends, and ``AS_COMPUTED`` where they are sent narrower than they are summed.
    """

    # "gather", "gather over replicas", "reduce", or "end" for the end of a pass, which has no group. Where ranks
    # compare passes, "stay" and "gather over replicas" at their beginning stand for what their kinds contain.
    kind: str
    group: ObservedGroup | None
    part: tuple[int, ...] = ()


AS_COMPUTED = -1
END = Step("end", None)
"""The end of a pass, shown to the observer like a step."""


class PassKind(NamedTuple):
    """The kind of a pass. Two passes of one kind, after the same kinds of passes, are expected to take the same steps.

    So a kind must contain every fact that changes the steps from one pass to the next on all ranks alike.
    """

    # "forward", "evaluation", "backward", "finalization", "synchronization", or the function that the caller gathered
    # with
    name: str
    detail: str = ""  # which groups reduce, in words because errors show them
    used: tuple[int, ...] = ()
    """Of a backward: the groups marked with ``set_reduce_scatter_unused_params`` that its forwards gathered."""
    stayed: tuple[int, ...] = ()
    """Of a backward: the groups that its forwards ended with and left in memory, which it does not gather again."""
    forwards: int = 0
    """Of a backward with such groups: how many forwards it may be on, those included that took no step."""
    anew: tuple[int, ...] = ()
    """Of other passes: the groups that it first gathers over the replicate axis, because their shards have changed."""

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


class Answer(Enum):
    """An observer's answer about a step; it may also be another step, which the pass must take first."""

    TAKE = 0  # start it now
    LATER = 1  # start it when it is needed: only an optional step, a prefetch, gets this answer


CanJoin = Callable[[Step, bool], bool]
"""``Joins.can_join``."""


class Joins(Protocol):
    """A pass, as far as ``take_step`` has to know one: it can *join*, so take a step that only other ranks need."""

    def can_join(self, step: Step, planned: bool) -> bool:
        """Return whether the pass can take ``step`` now, with a group that this rank does not use at the moment.

        Ranks that follow a known pass have ``planned`` it; else they have just chosen it.
        """

    def join(self, step: Step) -> bool:
        """Take ``step``; return False if there was nothing to take after all."""


class Observer(Protocol):
    """Sees every pass under one root. Each method may raise, and then the pass does not go on."""

    def begin(self, kind: PassKind, *, outermost: bool) -> None:
        """Note that a pass starts.

        If it is ``outermost`` (a forward, or a gather between passes), a pass that is still open was aborted. Otherwise
        it may lie inside the open one: a backward inside a forward.
        """

    def before(self, step: Step, *, optional: bool, can_join: CanJoin) -> Answer | Step:
        """Decide about ``step``, which is about to be taken.

        Returns:
            TAKE, LATER, or a step that ``can_join`` accepts and that the pass must take first, because other ranks do.
        """

    def joins_before_end(self, can_join: CanJoin) -> Step | None:
        """Return the next step that other ranks take before a backward ends, if ``can_join`` accepts it."""

    def end(self) -> None:
        """Note that the pass is over."""

    def suspend(self) -> None:
        """Note that the pass that starts now is not observed: one replica may run it alone."""

    def abandon(self) -> None:
        """Note that the pass was aborted, on this rank at least (recovery)."""

    def forget(self, setter: str) -> None:
        """Expect other steps of the same passes from now on: ``setter`` changed options, on every rank alike."""


class Unobserved:
    """The observer of passes that are not compared: with one process, or with rank checks off."""

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


def take_step(
    observer: Observer, joins: Joins, step: Step, start: Callable[[], None], *, optional: bool = False
) -> bool:
    """Show ``step`` to ``observer`` and call ``start``; the only place where an observer is asked about a step.

    Steps that the other ranks take first are taken first here as well. Returns False if an ``optional`` step is left
    for later.
    """
    can_join = joins.can_join
    while True:
        answer = observer.before(step, optional=optional, can_join=can_join)
        if answer is Answer.TAKE:
            start()
            return True
        if not isinstance(answer, Step):
            return False
        if not joins.join(answer):
            can_join = _cannot_join  # the observer has to decide otherwise, or this would never end


def _cannot_join(step: Step, planned: bool) -> bool:
    """Return False."""
    return False


def nothing() -> None:
    """Start nothing: the end of a pass is shown to the observer, but starts no collective."""


def take_unobserved(step: Step, start: Callable[[], None], *, optional: bool = False) -> bool:
    """Start a step outside of any observed pass."""
    start()
    return True


MakeObserver = Callable[[Any, PassKind, "RuntimeError | None"], "Observer | None"]
_make: MakeObserver | None = None


def observe_with(make: MakeObserver) -> None:
    """Have ``make(root, kind, error)`` make the observer of each root from now on; if it returns None, there is none.

    ``fsdp2/ranks`` calls this when it is imported: the engine cannot import what observes it.
    """
    global _make
    _make = make


def make_observer(root: Any, kind: PassKind, error: RuntimeError | None) -> Observer:
    """Return the observer of ``root`` (a ``RootContext``), whose first pass, of ``kind``, starts.

    ``error`` is what this rank found wrong with its units, if anything: the observer can make all ranks raise it.

    Raises:
        RuntimeError: the ranks have different units, or one of them came with an ``error``.
    """
    observer = None if _make is None else _make(root, kind, error)
    return Unobserved() if observer is None else observer
