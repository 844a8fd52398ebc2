"""The collectives of a pass, as an observer sees them and as ranks compare them.

A *pass* is a forward, a backward, a finalization or a synchronization under one root, or what the caller gathers
between passes. It launches gathers, and reductions of chunks of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.param import FSDPParam

__all__ = [
    "AS_COMPUTED",
    "BROKEN_OFF",
    "END",
    "Collective",
    "CollectiveKind",
    "Launch",
    "ObservedGroup",
    "PassKind",
    "lacking",
    "launch_unobserved",
]


class ObservedGroup(Protocol):
    """A group of parameters, as far as an observer has to know one (``FSDPParamGroup``, whose file imports this)."""

    name: str
    params: list[FSDPParam]
    store: ShardStore


CollectiveKind = Literal[
    "gather",
    "gather over replicas",  # when a pass begins, of the groups in PassKind.portions; of others at their use
    "reduce",
    "end",  # of the pass
    "broken off",  # only in lists that ranks compare, in the place of the end
    "stay",  # only in lists that ranks compare: of the groups in PassKind.stayed, nothing is gathered
]


class Collective(NamedTuple):
    """One collective of a pass.

    ``part`` says what ranks must agree on beside the kind and the group: the formats and sizes of a gather, the
    parameters whose gradients a reduction sends, and ``AS_COMPUTED`` if they are sent narrower than they are summed.
    Of a chunk without some of its gradients, it has those parameters last, as ``lacking`` writes them.
    """

    kind: CollectiveKind
    group: ObservedGroup | None  # None at the end of a pass
    part: tuple[int, ...] = ()

    @property
    def lacks(self) -> list[int]:
        """Of a reduction: the parameters of the chunk that have no gradient here, and may have one on other ranks."""
        return [AS_COMPUTED - 1 - number for number in self.part if number < AS_COMPUTED]


AS_COMPUTED = -1
"""In ``Collective.part`` of a reduction, behind the indices: gradients are sent narrower than they are summed."""
END = Collective("end", None)
"""The end of a pass, shown to the observer like a collective."""
BROKEN_OFF = Collective("broken off", None)
"""The end of a pass that an exception has left, or that was reset; not shown, because nothing waits for it."""


def lacking(index: int) -> int:
    """Return the number in ``Collective.part`` that says that the parameter ``index`` has no gradient here."""
    return AS_COMPUTED - 1 - index


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

    @property
    def may_lie_inside(self) -> bool:
        """True of a backward, which may run inside a forward, for the gradient of an input."""
        return self.name == "backward"


class Launch(Protocol):
    """Shows a collective to the observer of a pass and calls ``start``, or leaves an ``optional`` one for later."""

    def __call__(self, collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
        """Return whether ``start`` was called."""


def launch_unobserved(collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
    """Start a collective outside of any observed pass."""
    start()
    return True
