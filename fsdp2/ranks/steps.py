"""The steps of this rank's passes, and those that all ranks know: plain bookkeeping, no communication, no tensors.

As long as every pass takes the steps that the last one took in its place (after the same kinds of passes), all ranks do
the same without a word. A step on which a pass leaves them must be agreed on first; it may lead onto another known
way. Otherwise the pass is *open*: its steps are compared when it ends.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

from fsdp2.engine.steps import END, PassKind, Step

__all__ = ["StepLog"]

_PASSES_BEFORE = (32, 16, 8, 4, 2, 1)  # so many say what comes next, the longest that is known; 32: 16 micro-batches
_MOST_PLACES = 4096  # known at a time: loops without a pattern make ever new ones
_WAYS = 16  # remembered for each kind of pass
_REMEMBERED = 64  # passes

Way = list[Step]
Place = tuple[PassKind, ...]
"""The kinds of the passes before, and the own."""


class StepLog:
    """What this rank did under one root, and what all ranks expect it to do next."""

    def __init__(self) -> None:
        self.kind: PassKind | None = None  # of the pass that runs; None between passes
        self.steps: Way = []  # of the pass that runs
        self.deviations = 0  # in the pass that runs
        self.open = False  # the pass that runs takes steps that are compared at its end
        self.epoch = 0  # how often the ranks have met
        self.first_kind: PassKind | None = None  # that all ranks begin with, if they know
        self._number = -1  # passes since the ranks met, the running one being 0
        self._before: Place = ()  # empty at the start, and after a pass was aborted
        self._next: dict[Place, PassKind] = {}  # kinds, after these
        self._known: dict[Place, Way] = {}
        self._ways: dict[PassKind, deque[Way]] = {}  # by kind, the latest first
        self._keys: list[Place] = []  # of the pass that runs
        self._way: Way | None = None  # the expected steps of the pass that runs
        self.guessed = False  # these come from no earlier pass
        self.decided: Step | None = None  # all ranks chose it as the next one; what follows is not known
        self._past: deque[tuple[int, int, PassKind | None, Way]] = deque(maxlen=_REMEMBERED)

    # ---- passes ----

    def follows(self, kind: PassKind) -> bool:
        """Whether all ranks expect a pass of ``kind`` now."""
        if self.kind:
            return False
        known = (self._next[place] for place in self._lately() if place in self._next)
        return next(known, None if self._before else self.first_kind) == kind

    def expects_steps(self, kind: PassKind) -> bool:
        """Whether all ranks expect a pass of ``kind`` now that takes a step."""
        way = next((self._known[place] for place in self._places_of(kind) if place in self._known), None)
        return self.follows(kind) and way is not None and way != [END]

    def _places_of(self, kind: PassKind) -> list[Place]:
        return [*((*before, kind) for before in self._lately()), (kind,)]

    def knows(self, kind: PassKind) -> bool:
        """Whether there was a pass of ``kind``."""
        return kind in self._ways

    def _lately(self) -> list[Place]:
        return [self._before[-n:] for n in _PASSES_BEFORE if n <= len(self._before)]

    def begin(self, kind: PassKind, guess: Way | None = None) -> None:
        """A pass starts, as all ranks know; ``guess`` is what they expect of it where there was none of its kind."""
        if len(self._next) > _MOST_PLACES:
            self._next.clear()
            self._known.clear()
        self.first_kind = None
        self._keys = self._places_of(kind)
        self._next.update(dict.fromkeys(self._lately(), kind))
        self._before = (*self._before, kind)[-_PASSES_BEFORE[0] :]
        self.kind, self.steps, self.deviations = kind, [], 0
        self._way = next((self._known[place] for place in self._keys if place in self._known), None)
        self.guessed = self._way is None
        self._way = guess if self.guessed else self._way
        self.open = self._way is None
        self._number += 1
        self._remember()

    def end(self) -> None:
        """The pass is over, as all ranks know."""
        assert self.kind is not None
        ways = self._ways.setdefault(self.kind, deque(maxlen=_WAYS))
        # Equal ways share one list, so that an iteration that is repeated costs no memory.
        known = self._way if self._way == self.steps else next((way for way in ways if way == self.steps), None)
        if known is None:
            known = self.steps
            ways.appendleft(known)
        self._known.update(dict.fromkeys(self._keys, known))
        self._past[-1] = (*self._past[-1][:3], known)
        self._leave()

    def abandon(self) -> None:
        """The pass was aborted, on this rank at least."""
        self._leave()
        self._before = ()

    def _leave(self) -> None:
        self.kind, self._way, self.steps, self.open, self.decided = None, None, [], False, None

    def forget(self) -> None:
        """What the next pass of each kind will do is not known; the one that runs goes on as it is."""
        self._known.clear()
        self._ways.clear()

    # ---- steps ----

    def has_gather(self, group: object) -> bool:
        """Whether the expected steps of the running pass gather ``group``."""
        return self._way is not None and any(step.kind == "gather" and step.group is group for step in self._way)

    @property
    def rest(self) -> Way:
        """What is expected after the next step."""
        return [] if self._way is None else self._way[len(self.steps) + 1 :]

    @property
    def expected(self) -> Step | None:
        """The next step, if all ranks know it."""
        if self.decided is not None:
            return self.decided
        position, way = len(self.steps), self._way
        return way[position] if way is not None and position < len(way) else None

    def expects_later(self, step: Step) -> bool:
        """Whether the running pass will come to ``step``, but not now, as an earlier one did."""
        if self._way is None or self.guessed:
            return False
        return step in itertools.islice(self._way, len(self.steps) + 1, None)

    def follow(self, step: Step) -> bool:
        """Take ``step`` if it is expected; whether it was. Every step of every pass comes here."""
        way, steps = self._way, self.steps
        position = len(steps)
        if way is None or position >= len(way) or way[position] != step:
            return False
        steps.append(step)
        return True

    def forget_way(self) -> None:
        """No step of the running pass is known, although passes like it were taken before."""
        self._way, self.open = None, True

    def take(self, step: Step) -> None:
        """Take ``step``, which is expected, or anything in an open pass."""
        self.decided = None
        self.steps.append(step)

    def decide(self, step: Step) -> None:
        """All ranks know that ``step`` is next, and none what follows."""
        self.decided, self._way = step, None

    def deviate(self, step: Step, guess: Way | None = None) -> None:
        """All ranks know that ``step`` is next; they go on as in a known pass that came here, or by ``guess``."""
        self.deviations += 1
        done = [*self.steps, step]
        ways: Iterable[Way] = [] if self.kind is None else self._ways.get(self.kind, [])
        self._way = next((way for way in ways if way[: len(done)] == done), None)
        self.guessed = self._way is None
        if self.guessed and guess is not None:
            self._way = [*done, *guess]
        self.open = self._way is None
        self.steps.append(step)

    # ---- for other ranks to see ----

    def met(self) -> None:
        """The ranks have met: what they do is numbered from here."""
        self.epoch += 1
        self._number = 0 if self.kind else -1
        if self.kind:
            self._remember()

    def _remember(self) -> None:
        self._past.append((self.epoch, self._number, self.kind, self.steps))

    @property
    def position(self) -> tuple[int, int]:
        """The latest pass: (how often the ranks have met, passes since then)."""
        return self.epoch, self._number

    def find(self, epoch: int, number: int) -> tuple[PassKind | None, Way] | None:
        """The kind and the steps of the pass at a position; None if this rank is not there yet, or it is long ago."""
        passes = reversed(list(self._past))
        return next((one[2:] for one in passes if one[:2] == (epoch, number)), None)
