"""The collectives of this rank's passes, and those that all ranks expect: bookkeeping without communication or tensors.

A *schedule* is the list of collectives of one pass. A *context* is the kind of a pass together with the kinds of the
passes before it. As long as every pass follows the schedule of the last pass in its context, all ranks do the same
without communication. Before a rank leaves the schedule, all ranks agree on the collective. The pass then follows
another known schedule that begins with the same collectives. If there is none, the pass is *unscheduled*: its
collectives are compared when it ends.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp2.engine.collective import BROKEN_OFF, END, Collective, PassKind
from fsdp2.engine.itinerary import MOST_CONTEXTS, Context, Contexts

__all__ = ["PassLog", "PastPass"]

_SCHEDULES = 16  # remembered for each kind of pass
_REMEMBERED = 64  # passes

Schedule = Sequence[Collective]


# ---- the four values of what all ranks expect of the running pass ----


@dataclass(frozen=True)
class _Known:
    """The ``schedule`` of an earlier pass."""

    schedule: Schedule


@dataclass(frozen=True)
class _Guessed:
    """A ``schedule`` that no pass has had: for the first pass of its kind, or after a deviation."""

    schedule: Schedule


@dataclass(frozen=True)
class _Chosen:
    """One ``collective`` that all ranks have chosen as the next. Nothing is expected after it."""

    collective: Collective
    schedule: Schedule = ()


@dataclass(frozen=True)
class _Unscheduled:
    """No collective is expected: the collectives are compared when the pass ends."""

    schedule: Schedule = ()


@dataclass
class PastPass:
    """A pass, from its begin or from a meeting in it, as other ranks compare it."""

    position: tuple[int, int]
    kind: PassKind
    behind: Sequence[str]
    collectives: Schedule

    @property
    def title(self) -> str:
        """The kind of the pass, and why all ranks meet before it."""
        return f"{self.kind} after {', '.join(self.behind)}" if self.behind else str(self.kind)


class PassLog:
    """The collectives that this rank launched under one root, and those that all ranks expect it to launch next."""

    def __init__(self, first_kind: PassKind | None = None, meetings: int = 0) -> None:
        """All ranks expect ``first_kind`` as the first pass, if it is given, and have had so many ``meetings``."""
        self.kind: PassKind | None = None  # of the running pass; None between passes
        self.collectives: list[Collective] = []  # of the running pass
        self.deviations = 0  # of the running pass
        self.behind: Sequence[str] = ()  # why all ranks meet before the running pass, until they have met
        self._aborted = False  # the last pass was
        self._nested = 0  # passes inside the running one, whose collectives count as its own
        self.epoch = meetings  # the number of meetings of the ranks so far
        self._first_kind = first_kind
        self._expects: _Known | _Guessed | _Chosen | _Unscheduled = _Unscheduled()  # of the running pass
        self._number = -1  # passes since the last meeting; the pass that runs during a meeting is 0
        self._contexts = Contexts()
        self._next: dict[Context, PassKind] = {}  # the kind of the pass that followed these kinds
        self._known: dict[Context, Schedule] = {}  # the schedule of the last pass in each context
        self._schedules: dict[PassKind, deque[Schedule]] = {}  # by kind, the latest first
        self._running_contexts: list[Context] = []  # the contexts of the running pass
        # For other ranks to compare: each pass by its position (epoch, number), the running one included.
        self._past: deque[PastPass] = deque(maxlen=_REMEMBERED)

    # ---- passes ----

    def follows(self, kind: PassKind) -> bool:
        """Return True if all ranks expect a pass of ``kind`` now."""
        return not self.kind and self.next_kind() == kind

    def next_kind(self) -> PassKind | None:
        """Return the kind of the pass that all ranks expect now, between passes; None if they expect none."""
        known = (self._next[context] for context in self._contexts.latest() if context in self._next)
        return next(known, self._first_kind if self._contexts.is_empty else None)

    def expects_collectives(self, kind: PassKind) -> bool:
        """Return True if all ranks expect a pass of ``kind`` now, and expect it to launch a collective."""
        schedule = self._last_schedule(self._contexts.of_pass(kind))
        return self.follows(kind) and schedule is not None and schedule != [END]

    def _last_schedule(self, contexts: list[Context]) -> Schedule | None:
        """Return the schedule of the last pass in the first of ``contexts`` that is known."""
        return next((self._known[context] for context in contexts if context in self._known), None)

    def has_schedule(self, kind: PassKind) -> bool:
        """Return True if there was a pass of ``kind``."""
        return kind in self._schedules

    def begin(self, kind: PassKind, guess: Schedule | None = None, setters: Iterable[str] = ()) -> None:
        """Start a pass, which all ranks do now; ``guess`` is the schedule to expect if none is known.

        ``setters`` have changed options since the ranks compared these.
        """
        if len(self._next) > MOST_CONTEXTS:  # forget all: the next iterations are compared, and learned, again
            self._next.clear()
            self._known.clear()
        self._first_kind = None
        # Ranks on which it was not aborted know what follows, and wait in a collective instead of meeting.
        self.behind = [*(["a pass that was aborted"] if self._aborted else []), *sorted(setters)]
        self._aborted = False
        self._running_contexts = self._contexts.of_pass(kind)
        self._next.update(dict.fromkeys(self._contexts.latest(), kind))
        self._contexts.add(kind)
        self.kind, self.collectives, self.deviations = kind, [], 0
        self._expect(self._last_schedule(self._running_contexts), guess)
        self._number += 1
        self._remember()

    def end(self) -> None:
        """End the pass, which all ranks do now."""
        assert self.kind is not None
        schedules = self._schedules.setdefault(self.kind, deque(maxlen=_SCHEDULES))
        # Equal schedules share one list, so that a repeated iteration takes no memory.
        known = next(
            (schedule for schedule in (self._expects.schedule, *schedules) if schedule == self.collectives), None
        )
        if known is None:
            known = self.collectives
            schedules.appendleft(known)
        self._known.update(dict.fromkeys(self._running_contexts, known))
        self._past[-1].collectives = known
        self._leave()

    def abandon(self) -> None:
        """End the pass that runs, if one does: it was aborted, on this rank at least.

        It launches nothing more, for which another rank may be waiting.
        """
        self._nested = 0
        if self.kind:
            if self._past:  # empty if units were inserted after a backward that raised
                self._past[-1].collectives = [*self.collectives, BROKEN_OFF]
            self._leave()
            self._contexts.clear()
            self._aborted = True

    def enter_inner(self) -> None:
        """Begin a pass inside the running one, whose collectives count as its own."""
        self._nested += 1

    def leave_inner(self) -> bool:
        """End the innermost of these, and return True; False if there is none."""
        if not self._nested:
            return False
        self._nested -= 1
        return True

    def _leave(self) -> None:
        self.kind, self.collectives, self._expects = None, [], _Unscheduled()

    def forget(self) -> None:
        """Forget all known schedules. The running pass continues on its own."""
        self._known.clear()
        self._schedules.clear()

    def forget_past(self) -> None:
        """Forget the passes that are over: their groups have other numbers now, or are gone."""
        self._past.clear()

    # ---- collectives ----

    @property
    def unscheduled(self) -> bool:
        """True if nothing is expected of the running pass: its collectives are compared when it ends."""
        return isinstance(self._expects, _Unscheduled)

    @property
    def guessed(self) -> bool:
        """True if the expected collectives are not those of an earlier pass."""
        return isinstance(self._expects, _Guessed)

    @property
    def chosen(self) -> bool:
        """True if all ranks have chosen the next collective, which this rank has not launched yet."""
        return isinstance(self._expects, _Chosen)

    @property
    def expected(self) -> Collective | None:
        """The next collective, if all ranks expect one."""
        if isinstance(self._expects, _Chosen):
            return self._expects.collective
        position, schedule = len(self.collectives), self._expects.schedule
        return schedule[position] if position < len(schedule) else None

    @property
    def plans_once(self) -> bool:
        """True if the schedule has the next collective, and does not have it again later in the pass.

        A group that only some ranks recompute in backward may be reduced several times.
        """
        return not self.chosen and self.expected not in self.after_next

    @property
    def after_next(self) -> Schedule:
        """The collectives that are expected after the next one."""
        return list(self._expects.schedule[len(self.collectives) + 1 :])

    def has_gather(self, group: object) -> bool:
        """Return True if the expected collectives of the running pass gather ``group``."""
        return any(collective.kind == "gather" and collective.group is group for collective in self._expects.schedule)

    def expects_later(self, collective: Collective) -> bool:
        """Return True if the running pass is on a known schedule that has ``collective`` later, but not next."""
        if not isinstance(self._expects, _Known):
            return False
        return collective in itertools.islice(self._expects.schedule, len(self.collectives) + 1, None)

    def follow(self, collective: Collective) -> bool:
        """If the schedule has ``collective`` next, note it and return True. Called for every collective.

        The end of an inner pass is no collective of the pass around it.
        """
        if self._nested and collective is END:
            return True
        schedule, collectives = self._expects.schedule, self.collectives
        position = len(collectives)
        if position >= len(schedule) or schedule[position] != collective:
            return False
        collectives.append(collective)
        return True

    def forget_schedule(self) -> None:
        """Expect no collective of the running pass, although there were passes like it before."""
        self._expects = _Unscheduled()

    def add(self, collective: Collective) -> None:
        """Note ``collective``, which is expected, or any in an unscheduled pass."""
        if isinstance(self._expects, _Chosen):
            self._expects = _Unscheduled()
        self.collectives.append(collective)

    def choose(self, collective: Collective) -> None:
        """Expect ``collective`` next, which all ranks have chosen, and nothing after it."""
        self._expects = _Chosen(collective)

    def deviate(self, collective: Collective, guess: Schedule | None = None) -> None:
        """Note ``collective``, on which all ranks agreed. Follow a known schedule that begins so, or ``guess``."""
        self.deviations += 1
        done = [*self.collectives, collective]
        schedules: Iterable[Schedule] = [] if self.kind is None else self._schedules.get(self.kind, [])
        known = next((schedule for schedule in schedules if schedule[: len(done)] == done), None)
        self._expect(known, None if guess is None else [*done, *guess])
        self.collectives.append(collective)

    def _expect(self, known: Schedule | None, guess: Schedule | None) -> None:
        if known is not None:
            self._expects = _Known(known)
        else:
            self._expects = _Unscheduled() if guess is None else _Guessed(guess)

    # ---- for other ranks to see ----

    def met(self) -> None:
        """Note a meeting of all ranks: passes are numbered from here."""
        self.epoch += 1
        self.behind = ()
        self._number = 0 if self.kind else -1
        if self.kind:
            self._remember()

    def _remember(self) -> None:
        self._past.append(self.running)

    @property
    def running(self) -> PastPass:
        """The running pass."""
        assert self.kind is not None
        return PastPass(self.position, self.kind, self.behind, self.collectives)

    @property
    def position(self) -> tuple[int, int]:
        """The position of the latest pass: the number of meetings, and of passes since the last meeting."""
        return self.epoch, self._number

    def find(self, epoch: int, number: int) -> PastPass | None:
        """Return the pass at a position; None if it has not begun, or was too long ago."""
        return next((one for one in reversed(list(self._past)) if one.position == (epoch, number)), None)
