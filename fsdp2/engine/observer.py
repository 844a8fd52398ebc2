"""The collectives of a pass, and the observer that sees each one before it is launched.

A *pass* is a forward, a backward, a finalization or a synchronization under one root, or what the caller gathers
between passes. It launches gathers, and reductions of chunks of gradients. Ranks that launch different collectives
would wait for each other for ever, so ``fsdp2/ranks`` observes them. The engine asks the observer about a collective in
one method, ``Pass.launch``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.param import FSDPParam

__all__ = [
    "AS_COMPUTED",
    "END",
    "Answer",
    "CanJoin",
    "Collective",
    "CollectiveKind",
    "Launch",
    "ObservedGroup",
    "Observer",
    "PassKind",
    "Unobserved",
    "launch_unobserved",
    "make_observer",
    "observe_with",
]


class ObservedGroup(Protocol):
    """A group of parameters, as far as an observer has to know one (``FSDPParamGroup``, whose file imports this)."""

    name: str
    params: list[FSDPParam]
    store: ShardStore


CollectiveKind = Literal[
    "gather",
    "gather over replicas",  # at the beginning of a pass, of the groups in PassKind.portions
    "reduce",
    "end",  # of the pass
    "stay",  # only in lists that ranks compare: of the groups in PassKind.stayed, nothing is gathered
]


class Collective(NamedTuple):
    """One collective of a pass.

    ``part`` says what ranks must agree on beside the kind and the group: the formats and sizes of a gather, the
    parameters whose gradients a reduction sends, and ``AS_COMPUTED`` if they are sent narrower than they are summed.
    """

    kind: CollectiveKind
    group: ObservedGroup | None  # None at the end of a pass
    part: tuple[int, ...] = ()


AS_COMPUTED = -1
"""In ``Collective.part`` of a reduction, behind the indices: gradients are sent narrower than they are summed."""
END = Collective("end", None)
"""The end of a pass, shown to the observer like a collective."""


_FORWARDS = ("forward", "evaluation", "evaluation in a method")
_BACKWARDS = ("backward", "finalization", "synchronization")


class PassKind(NamedTuple):
    """The kind of a pass. Two passes of one kind, after the same kinds of passes, are expected to launch the
    same collectives.

    So a kind must contain every fact that changes the collectives from one pass to the next on all ranks alike.
    """

    name: str  # in _FORWARDS or _BACKWARDS, or that of the function that the caller gathered with
    detail: str = ""  # which groups reduce, in words because errors show them
    used: tuple[int, ...] = ()
    """Of a backward: the groups marked with ``set_reduce_scatter_unused_params`` that its forwards gathered."""
    stayed: tuple[int, ...] = ()
    """Of a backward: the groups that its forwards ended with and left in memory, which it does not gather again."""
    forwards: int = 0
    """Of a backward with such groups: how many forwards it may be on, those included that launched no collective."""
    portions: tuple[int, ...] = ()
    """Of other passes: the groups whose portions it gathers first, because their shards have changed."""
    after: int = 0
    """The number of another root, whose pass began before this one; 0 if one of the same root did, or none."""

    def __str__(self) -> str:
        text = f"{self.name} ({self.detail})" if self.detail else self.name
        return f"{text} after a pass of another root" if self.after else text

    def with_portions(self, groups: tuple[int, ...]) -> PassKind:
        """Return the kind of a pass that gathers the portions of these ``groups`` first."""
        return self._replace(portions=groups)

    def behind(self, root: int) -> PassKind:
        """Return the kind of a pass before which one of another ``root``, by its number, began."""
        return self._replace(after=root)

    @property
    def is_forward(self) -> bool:
        """True of a forward, with or without gradients, also if a registered method calls it."""
        return self.name in _FORWARDS

    @property
    def is_backward(self) -> bool:
        """True if it reduces gradients."""
        return self.name in _BACKWARDS


class Answer(Enum):
    """An observer's answer about a collective; it may also be another collective, which the pass must launch first."""

    LAUNCH = 0  # start it now
    LATER = 1  # start it when it is needed: only an optional collective, a prefetch, gets this answer


CanJoin = Callable[[Collective, bool], bool]
"""``Pass.can_join``: whether a pass can *join* a collective, that is launch it because other ranks need it.

Called with the collective, and with True if a known pass has it here and not once more later."""


class Observer(Protocol):
    """Sees every pass under one root. Each method may raise, and then the pass does not go on."""

    def begin(self, kind: PassKind, *, outermost: bool) -> None:
        """Note that a pass starts.

        If it is ``outermost`` (a forward, or a gather between passes), a pass that has not ended was aborted. Otherwise
        it may lie inside that one: a backward inside a forward.
        """

    def before(self, collective: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        """Decide about ``collective``, which is about to be launched.

        Returns:
            LAUNCH, LATER, or a collective that ``can_join`` accepts and that the pass must launch first, as others do.
        """

    def joins_before_end(self, can_join: CanJoin) -> Collective | None:
        """Return the next collective that other ranks launch before a backward ends, if ``can_join`` accepts it."""

    def end(self) -> None:
        """Note that the pass is over."""

    def abandon(self) -> None:
        """Note that the last pass, if it has not ended, was aborted, on this rank at least.

        A recovery says so, and a pass that starts without being observed, because one replica may run it alone.
        """

    def forget(self, setter: str) -> None:
        """Expect other collectives of the same passes from now on: ``setter`` changed options, on every rank alike."""

    def forget_units(self) -> None:
        """Do the same because units were inserted or removed, and refer to none of those that were removed."""


class Unobserved:
    """The observer of passes that are not compared: with one process, or with rank checks off."""

    def begin(self, kind: PassKind, *, outermost: bool) -> None:
        """Do nothing."""

    def before(self, collective: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        """Let every collective be launched at once."""
        return Answer.LAUNCH

    def joins_before_end(self, can_join: CanJoin) -> Collective | None:
        """Return None."""
        return None

    def end(self) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def forget(self, setter: str) -> None:
        """Do nothing."""

    def forget_units(self) -> None:
        """Do nothing."""


class Launch(Protocol):
    """Shows a collective to the observer of a pass and calls ``start``, or leaves an ``optional`` one for later."""

    def __call__(self, collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
        """Return whether ``start`` was called."""


def launch_unobserved(collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
    """Start a collective outside of any observed pass."""
    start()
    return True


MakeObserver = Callable[[Any, PassKind, "Exception | None"], "Observer | None"]
_make: MakeObserver | None = None


def observe_with(make: MakeObserver | None) -> MakeObserver | None:
    """Have ``make(root, kind, error)`` make the observer of each root from now on; if it returns None, there is none.

    Return what has made them so far. ``fsdp2/ranks`` calls this when it is imported: the engine cannot import what
    observes it.
    """
    global _make
    before, _make = _make, make
    return before


def make_observer(root: Any, kind: PassKind, error: Exception | None) -> Observer:
    """Return the observer of ``root`` (a ``RootContext``), whose first pass, of ``kind``, starts.

    ``error`` is what this rank found wrong with its units, if anything: the observer can make all ranks raise it.

    Raises:
        RuntimeError: the ranks have different units, or another rank came with an ``error``.
        Exception: the ``error`` of this rank.
    """
    observer = None if _make is None else _make(root, kind, error)
    return Unobserved() if observer is None else observer
