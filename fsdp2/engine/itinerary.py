"""The itinerary of a root: which groups its passes use, in which order. Lists and positions, no tensors.

An ``Itinerary`` remembers the *routes* of earlier forwards by the kinds of the passes before them, so that training and
evaluations, or two forwards that alternate, each find their own route. It predicts the next group, so that its gather
can start ahead. A wrong prediction costs only overlap: nobody can know what an eager program does next.

All ranks must remember the same. A pass that launched no collective is not remembered, because ranks may have run
different numbers of these: micro-batches on parameters that stay in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["MOST_CONTEXTS", "BackwardRoute", "Context", "Contexts", "ForwardRoute", "Itinerary", "Stop"]

T = TypeVar("T")

# How many earlier passes make a context, the longest first; 32 passes are 16 micro-batches.
_PASSES_BEFORE = (32, 16, 8, 4, 2, 1)
MOST_CONTEXTS = 4096
"""The largest number of contexts to remember, since a loop without a pattern never stops making new ones. Then all are
forgotten."""
_MOST_CALLS = 1 << 16
"""The largest number of calls to record, since forwards with gradients that no backward follows add calls forever."""


Context = tuple[Hashable, ...]
"""The kinds of the passes before, and the kind of the pass itself."""


class Contexts:
    """The kinds of the latest passes: the keys under which the records of a pass are found by the next one like it."""

    def __init__(self) -> None:
        self._before: Context = ()  # empty at the start, and after a pass was aborted

    @property
    def is_empty(self) -> bool:
        """True if no pass ran since the start, or since the last one that was aborted."""
        return not self._before

    def latest(self) -> list[Context]:
        """Return the kinds of the passes before, the longest list first."""
        return [self._before[-n:] for n in _PASSES_BEFORE if n <= len(self._before)]

    def of_pass(self, kind: Hashable) -> list[Context]:
        """Return the contexts of a pass of ``kind`` that starts now, the longest first."""
        return [*((*before, kind) for before in self.latest()), (kind,)]

    def add(self, kind: Hashable) -> None:
        """Note that a pass of ``kind`` starts."""
        self._before = (*self._before, kind)[-_PASSES_BEFORE[0] :]

    def clear(self) -> None:
        """Forget the passes before: one was aborted, on this rank at least."""
        self._before = ()


class Stop(NamedTuple):
    """One use of a group in a forward."""

    group: Any
    # A use without gradients inside a forward with gradients, before any use with them: that is how momentum teachers
    # run, whose shards the forward often updates first, in ways that no version counter shows. In an evaluation: a use
    # of a group that had such stops, or late ones, in the last training forward or the last evaluation like this one.
    quiet: bool = False
    late: bool = False  # its shards were once written after its gather had been started ahead


class _Trip(Generic[T]):
    """A forward that is over."""

    def __init__(self, stops: list[Stop], ended_with: T | None) -> None:
        self.stops = stops
        self.ended_with = ended_with  # the last group that the forward freed, or would have freed
        self.needed_first: T | None = None  # the first group that the backward after it needed
        # Groups whose shards a forward like it may write before it uses them.
        self.late = {id(stop.group) for stop in stops if stop.quiet or stop.late}


class ForwardRoute(Generic[T]):
    """The stops of the running forward. While they equal those of the last forward like it, they tell the next one.

    A forward that deviates gets no more advice.
    """

    def __init__(
        self,
        kind: str,
        known: _Trip[T] | None,
        contexts: Iterable[Context] = (),
        trained: _Trip[T] | None = None,
        *,
        in_method: bool = False,
    ) -> None:
        """``known`` is the last forward like it, ``trained`` the last one with gradients.

        Later forwards in one of its ``contexts`` are like it; without any, this rank runs it alone.
        """
        self.stops: list[Stop] = []
        self.kind = kind
        self.in_method = in_method  # a registered method is the outermost call, and has called forward
        self.contexts = contexts
        self.known = known
        self._with_gradients: set[int] = set()
        self._late = (set() if known is None else known.late) | (set() if trained is None else trained.late)
        self._ahead: list[Stop] = [] if known is None else known.stops

    @property
    def needed_first(self) -> T | None:
        """The group that the backward will probably need first, or None."""
        return None if self.known is None else self.known.needed_first

    @property
    def repeats(self) -> bool:
        """True if the forward made exactly the expected stops."""
        known = [] if self.known is None else self.known.stops
        if len(known) != len(self.stops):
            return False
        return all(here.group is there.group and here[1:] == there[1:] for here, there in zip(self.stops, known))

    def is_quiet(self, group: T, *, trains: bool, with_gradients: bool) -> bool:
        """Return whether a stop of ``group`` here is quiet, in a forward that ``trains``."""
        if not trains:
            return id(group) in self._late
        return not with_gradients and id(group) not in self._with_gradients

    def comes_late(self, group: T) -> bool:
        """Return whether ``group``'s weights may be written before its use, so that its gather must not start ahead."""
        return id(group) in self._late

    def visit(self, group: T, *, quiet: bool = False, late: bool = False) -> T | None:
        """Note a stop at ``group``; return the group whose gather can start ahead, or None."""
        position, ahead = len(self.stops), self._ahead
        if not quiet:
            self._with_gradients.add(id(group))
        known = ahead[position] if position < len(ahead) and ahead[position].group is group else None
        # A stop that was late stays so: only a gather ahead could show that its shards were written again.
        self.stops.append(Stop(group, quiet, late or (known is not None and known.late)))
        if known is None:
            self._ahead = []
            return None
        following = ahead[position + 1] if position + 1 < len(ahead) else None
        # Weights may be updated before the first of several quiet stops, but not between them.
        if following is None or following.late or (following.quiet and not quiet):
            return None
        return following.group


class Itinerary(Generic[T]):
    """The routes of the forwards under one root."""

    def __init__(self) -> None:
        self._contexts = Contexts()
        self._known: dict[Context, _Trip[T]] = {}
        self._alone: dict[Hashable, _Trip[T]] = {}  # the last forward of each kind that this rank ran alone
        self._latest: dict[bool, _Trip[T]] = {}  # of any kind, by whether a registered method called it
        self._trained: deque[_Trip[T]] = deque(maxlen=_PASSES_BEFORE[0])  # forwards that no backward has followed yet
        self._latest_trained: _Trip[T] | None = None

    def begin(self, kind: str, *, alone: bool = False, in_method: bool = False) -> ForwardRoute[T]:
        """Begin a forward of ``kind``, perhaps one that a registered method calls, and return its route.

        It is remembered when it ends. Other ranks know nothing of a forward that this rank runs ``alone``, so later
        forwards must not depend on it.
        """
        contexts = self._contexts.of_pass(kind)
        known = next((self._known[context] for context in contexts if context in self._known), None)
        known = known or self._latest.get(in_method)
        if alone:
            return ForwardRoute(kind, self._alone.get(kind, known), trained=self._latest_trained, in_method=in_method)
        return ForwardRoute(kind, known, contexts, self._latest_trained, in_method=in_method)

    def end(
        self, route: ForwardRoute[T], *, remembered: bool = True, trains: bool = False, ended_with: T | None = None
    ) -> None:
        """End a forward: expect its ``route`` from the next one like it, if it is ``remembered``.

        ``trains``: a backward may follow, and need ``ended_with`` first, the last group that the forward freed.
        """
        if not remembered:
            return  # other ranks may not have run it
        if route.contexts:
            self._contexts.add(route.kind)
        if not route.stops:
            return
        # Equal routes share one list, so that a repeated iteration takes no memory.
        trip = _Trip(route.known.stops if route.known is not None and route.repeats else route.stops, ended_with)
        trip.needed_first = route.needed_first  # as before, until a backward shows it
        if not route.contexts:
            self._alone[route.kind] = trip
            return
        if len(self._known) > MOST_CONTEXTS:
            self._known.clear()
        self._known.update(dict.fromkeys(route.contexts, trip))
        self._latest[route.in_method] = trip
        if trains:
            self._trained.append(trip)
            self._latest_trained = trip

    def end_backward(self, *, first_stays: bool, remembered: bool = True) -> None:
        """End a backward.

        With ``first_stays``, forwards like the last ones keep the group that it needed first. This is noted here, not
        at the end of the forward: no backward follows the forward of a frozen teacher.
        """
        if not remembered:
            return  # as above
        self._contexts.add("backward")
        for trip in self._trained:
            trip.needed_first = self._trained[-1].ended_with if first_stays else None
        self._trained.clear()

    def break_off(self) -> None:
        """Note that a forward was aborted, perhaps only on this rank."""
        self._contexts.clear()


class BackwardRoute(Generic[T]):
    """The forward calls whose backward is still to come; backward visits them in reverse."""

    def __init__(self) -> None:
        self._calls: list[tuple[T, int]] = []  # groups, and the numbers of their forwards
        self._positions: dict[int, list[int]] = {}  # by id of a group: its calls that no backward has visited

    def record(self, group: T, forward: int) -> None:
        """Note a call of ``group`` in the forward of this number."""
        if len(self._calls) == _MOST_CALLS:  # start again: nothing but advice is lost
            self._calls.clear()
            self._positions.clear()
        self._positions.setdefault(id(group), []).append(len(self._calls))
        self._calls.append((group, forward))

    def has_unvisited(self, group: T) -> bool:
        """Return whether there are calls of ``group`` that no backward has visited."""
        return bool(self._positions.get(id(group)))

    def visit(self, group: T) -> T | None:
        """Note that the backward of ``group``'s latest call starts; return the group expected next, or None."""
        positions = self._positions.get(id(group))
        if not positions:
            return None
        position = positions.pop()
        if position == 0:
            return None
        before, forward = self._calls[position - 1]
        # Calls stay recorded until the last backward on them. If an earlier backward has visited the call before,
        # another backward on the same forward (of two losses) needs it again, but the backward of a later forward does
        # not. A call whose position is still recorded has not been visited.
        if forward == self._calls[position][1] or position - 1 in self._positions[id(before)]:
            return before
        return None
