"""The steps of this rank's passes, and the steps that all ranks expect: bookkeeping without communication or tensors.

A *way* is the list of steps of one pass, and a *place* is the kind of a pass after the kinds of the passes before it.
As long as every pass takes the way that the last pass in its place took, all ranks do the same without communication. A
pass that leaves its way must first agree on the step with all ranks. It then follows another known way that begins with
the same steps. If there is none, the pass is *open*: its steps are compared when it ends.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp2.engine.steps import END, PassKind, Step

__all__ = ["StepLog"]

# Numbers of passes before that make a place, the longest known first; 32 are 16 micro-batches.
_PASSES_BEFORE = (32, 16, 8, 4, 2, 1)
_MOST_PLACES = 4096  # known at a time: loops without a pattern make ever new ones
_WAYS = 16  # remembered for each kind of pass
_REMEMBERED = 64  # passes

Way = Sequence[Step]
Place = tuple[PassKind, ...]
"""The kinds of the passes before, and the kind of the pass itself."""


# ---- what all ranks expect of the running pass: one of four values ----


@dataclass(frozen=True)
class _Known:
    """The ``way`` of an earlier pass."""

    way: Way


@dataclass(frozen=True)
class _Guessed:
    """A ``way`` that no pass has taken: the first of its kind, or what is left of a known way after a deviation."""

    way: Way


@dataclass(frozen=True)
class _Chosen:
    """One ``step`` that all ranks have chosen as the next. Nothing is expected after it."""

    step: Step
    way: Way = ()


@dataclass(frozen=True)
class _Open:
    """No step is expected: the steps are compared when the pass ends."""

    way: Way = ()


class StepLog:
    """The steps that this rank took under one root, and the steps that all ranks expect it to take next."""

    def __init__(self) -> None:
        self.kind: PassKind | None = None  # of the running pass; None between passes
        self.steps: list[Step] = []  # of the running pass
        self.deviations = 0  # of the running pass
        self.epoch = 0  # the number of meetings of the ranks so far
        self.first_kind: PassKind | None = None  # the kind of the first pass, if all ranks expect one
        self._expects: _Known | _Guessed | _Chosen | _Open = _Open()  # of the running pass
        self._number = -1  # passes since the last meeting; the pass that runs during a meeting is 0
        self._before: Place = ()  # empty at the start, and after a pass was aborted
        self._next: dict[Place, PassKind] = {}  # the kind that follows these
        self._known: dict[Place, Way] = {}
        self._ways: dict[PassKind, deque[Way]] = {}  # by kind, the latest first
        self._keys: list[Place] = []  # of the running pass
        self._past: deque[tuple[int, int, PassKind | None, Way]] = deque(maxlen=_REMEMBERED)

    # ---- passes ----

    def follows(self, kind: PassKind) -> bool:
        """Return True if all ranks expect a pass of ``kind`` now."""
        if self.kind:
            return False
        known = (self._next[place] for place in self._lately() if place in self._next)
        return next(known, None if self._before else self.first_kind) == kind

    def expects_steps(self, kind: PassKind) -> bool:
        """Return True if all ranks expect a pass of ``kind`` now, and expect it to take a step."""
        way = next((self._known[place] for place in self._places_of(kind) if place in self._known), None)
        return self.follows(kind) and way is not None and way != [END]

    def _places_of(self, kind: PassKind) -> list[Place]:
        return [*((*before, kind) for before in self._lately()), (kind,)]

    def has_way(self, kind: PassKind) -> bool:
        """Return True if there was a pass of ``kind``."""
        return kind in self._ways

    def _lately(self) -> list[Place]:
        return [self._before[-n:] for n in _PASSES_BEFORE if n <= len(self._before)]

    def begin(self, kind: PassKind, guess: Way | None = None) -> None:
        """Start a pass, which all ranks do now; ``guess`` is the expected way if there was none in this place."""
        if len(self._next) > _MOST_PLACES:  # forget all: the next iterations are compared again, and learned anew
            self._next.clear()
            self._known.clear()
        self.first_kind = None
        self._keys = self._places_of(kind)
        self._next.update(dict.fromkeys(self._lately(), kind))
        self._before = (*self._before, kind)[-_PASSES_BEFORE[0] :]
        self.kind, self.steps, self.deviations = kind, [], 0
        known = next((self._known[place] for place in self._keys if place in self._known), None)
        self._expect(known, guess)
        self._number += 1
        self._remember()

    def end(self) -> None:
        """End the pass, which all ranks do now."""
        assert self.kind is not None
        ways = self._ways.setdefault(self.kind, deque(maxlen=_WAYS))
        # Equal ways share one list, so that a repeated iteration takes no memory.
        known = next((way for way in (self._expects.way, *ways) if way == self.steps), None)
        if known is None:
            known = self.steps
            ways.appendleft(known)
        self._known.update(dict.fromkeys(self._keys, known))
        self._past[-1] = (*self._past[-1][:3], known)
        self._leave()

    def abandon(self) -> None:
        """End a pass that was aborted, on this rank at least."""
        self._leave()
        self._before = ()

    def _leave(self) -> None:
        self.kind, self.steps, self._expects = None, [], _Open()

    def forget(self) -> None:
        """Forget all known ways. The running pass continues on its own."""
        self._known.clear()
        self._ways.clear()

    # ---- steps ----

    @property
    def open(self) -> bool:
        """True if nothing is expected of the running pass: its steps are compared when it ends."""
        return isinstance(self._expects, _Open)

    @property
    def guessed(self) -> bool:
        """True if the expected steps are not those of an earlier pass."""
        return isinstance(self._expects, _Guessed)

    @property
    def chosen(self) -> bool:
        """True if all ranks have chosen the next step, which this rank has not taken yet."""
        return isinstance(self._expects, _Chosen)

    @property
    def expected(self) -> Step | None:
        """The next step, if all ranks expect one."""
        if isinstance(self._expects, _Chosen):
            return self._expects.step
        position, way = len(self.steps), self._expects.way
        return way[position] if position < len(way) else None

    @property
    def rest(self) -> Way:
        """The steps that are expected after the next one."""
        return list(self._expects.way[len(self.steps) + 1 :])

    def has_gather(self, group: object) -> bool:
        """Return True if the expected steps of the running pass gather ``group``."""
        return any(step.kind == "gather" and step.group is group for step in self._expects.way)

    def expects_later(self, step: Step) -> bool:
        """Return True if the running pass is on a known way that comes to ``step``, but not next."""
        if not isinstance(self._expects, _Known):
            return False
        return step in itertools.islice(self._expects.way, len(self.steps) + 1, None)

    def follow(self, step: Step) -> bool:
        """Take ``step`` and return True if the way has it next, else return False. It is called for every step."""
        way, steps = self._expects.way, self.steps
        position = len(steps)
        if position >= len(way) or way[position] != step:
            return False
        steps.append(step)
        return True

    def forget_way(self) -> None:
        """Expect no step of the running pass, although passes like it were taken before."""
        self._expects = _Open()

    def take(self, step: Step) -> None:
        """Take ``step``, which is expected, or any step in an open pass."""
        if isinstance(self._expects, _Chosen):
            self._expects = _Open()
        self.steps.append(step)

    def choose(self, step: Step) -> None:
        """Expect ``step`` next, which all ranks have chosen, and nothing after it."""
        self._expects = _Chosen(step)

    def deviate(self, step: Step, guess: Way | None = None) -> None:
        """Take ``step``, on which all ranks have agreed. Then follow a known way that begins so, or else ``guess``."""
        self.deviations += 1
        done = [*self.steps, step]
        ways: Iterable[Way] = [] if self.kind is None else self._ways.get(self.kind, [])
        known = next((way for way in ways if way[: len(done)] == done), None)
        self._expect(known, None if guess is None else [*done, *guess])
        self.steps.append(step)

    def _expect(self, known: Way | None, guess: Way | None) -> None:
        if known is not None:
            self._expects = _Known(known)
        else:
            self._expects = _Open() if guess is None else _Guessed(guess)

    # ---- for other ranks to see ----

    def met(self) -> None:
        """Note a meeting of all ranks: passes are numbered from here."""
        self.epoch += 1
        self._number = 0 if self.kind else -1
        if self.kind:
            self._remember()

    def _remember(self) -> None:
        self._past.append((self.epoch, self._number, self.kind, self.steps))

    @property
    def position(self) -> tuple[int, int]:
        """The position of the latest pass: the number of meetings, and of passes since the last meeting."""
        return self.epoch, self._number

    def find(self, epoch: int, number: int) -> tuple[PassKind | None, Way] | None:
        """Return the kind and the steps of the pass at a position, or None if it has not begun or is long ago."""
        passes = reversed(list(self._past))
        return next((one[2:] for one in passes if one[:2] == (epoch, number)), None)
