"""The passes of one root as other ranks compare them: as numbers, and in words if they differ."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from fsdp2.engine.collective import Collective, PassKind
from fsdp2.engine.root import RootContext
from fsdp2.ranks.board import History
from fsdp2.ranks.log import PassLog, PastPass
from fsdp2.ranks.start import Line, options_of
from fsdp2.ranks.words import ELSEWHERE, Words, refuse

__all__ = ["PassHistory", "StateAtMeeting", "Turns"]

_REMEMBERED = 64  # meetings


class Turns:
    """Which of the roots on the same process groups began the latest pass; all ranks must take turns alike."""

    def __init__(self) -> None:
        self.latest = 0  # the number of the root, or 0


class PassHistory:
    """The ``log`` of one ``root`` on one rank, as a `History`.

    The root has this ``number`` among those that take ``turns``.
    """

    def __init__(self, root: RootContext, log: PassLog, turns: Turns, number: int) -> None:
        self._root, self._log, self._turns, self._number = root, log, turns, number
        # The list itself: the first forward has the root list its units anew. Other ranks may still compare what was
        # gathered by hand before, and number its units as then.
        self._units = root.all_states
        self._has_begun = False  # a pass of this root
        # This rank at its latest meetings. Behind a meeting the host may be far ahead on streams, while another rank,
        # which is slow to leave it, still shows what it had there.
        self._at_meetings: deque[StateAtMeeting] = deque(maxlen=_REMEMBERED)
        self.words = Words(root)

    @property
    def _is_elsewhere(self) -> bool:
        """True if another root has begun a pass since this one did; False before its first, which follows a meeting."""
        return self._has_begun and self._turns.latest != self._number

    def with_turn(self, kind: PassKind) -> PassKind:
        """Return ``kind`` with the root whose pass began before this one, if another's did.

        A communicator matches the collectives of all roots by their order.
        """
        return kind.behind(self._turns.latest) if self._is_elsewhere else kind

    def take_turn(self) -> None:
        """Note that a pass of this root begins, with a collective."""
        self._has_begun, self._turns.latest = True, self._number

    def note_order(self) -> None:
        """Note in which order the running pass gathered, if that is what backwards mirror."""
        kind, collectives = self._log.kind, self._log.collectives
        if kind is not None and kind.name == "forward":
            self.words.forward_positions = {collective.group: i for i, collective in enumerate(collectives)}

    def forget_units(self) -> None:
        """Forget that order, and number the units anew, since some were inserted or removed."""
        self.words.forward_positions = {}
        self._units = self._root.all_states
        self._at_meetings.clear()

    def at_meeting(
        self,
        collective: Collective | None,
        *,
        compares: bool = True,
        setters: Iterable[str] = (),
        trained: Iterable[Line] = (),
    ) -> StateAtMeeting:
        """Return the state of this rank when it comes to a meeting and wants ``collective`` next.

        If it ``compares``, the wanted collective must be the same as well, not only those that were launched. If
        ``setters`` have changed options, those of all units are compared, too, as is what is ``trained``.
        """
        run = self._log.running
        launched = self._with_beginning(run)
        listed = [*launched, *([] if collective is None else [collective])]
        lines: list[Line] = [*(options_of(self._root) if setters else ()), *trained]
        numbers = self._digests(run.title, listed) + [zlib.crc32(line.compared.encode()) for line in lines]

        def texts() -> list[str]:
            return [run.title, *(self.words.did(run.kind, one) for one in listed), *(line.text for line in lines)]

        compared = len(numbers) if compares else len(launched) + 1
        state = StateAtMeeting(self, run.position, numbers, compared, texts)
        self._at_meetings.append(state)
        return state

    def _met_at(self, epoch: int, number: int) -> StateAtMeeting | None:
        """Return this rank's state at the meeting that it came to at a position, if it did and is past it."""
        if (epoch, number) == self._log.position:
            return None
        return next((state for state in reversed([*self._at_meetings]) if state.position() == (epoch, number)), None)

    def position(self) -> tuple[int, int]:
        """Return this rank's position."""
        return self._log.position

    def turns(self) -> tuple[bool, bool]:
        """Return whether the latest pass came directly after one of this root, and whether another root has begun one.

        Not while a pass runs: one of another root may lie inside it.
        """
        latest = self._log.find(*self._log.position)
        return latest is not None and not latest.kind.after, self._log.kind is None and self._is_elsewhere

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int] | None:
        """Return a number for the kind of the pass at a position and for each of its collectives."""
        if (state := self._met_at(epoch, number)) is not None:
            return state.digests(epoch, number, shown=shown)
        found = self._log.find(epoch, number)
        return None if found is None else self._digests(found.title, self._with_beginning(found))

    def _with_beginning(self, run: PastPass) -> list[Collective]:
        """Return the collectives that ranks compare: one for each unit gathered at the start, and those of the pass.

        If one rank's forward skips the unit that backward begins with, its backward is of another kind. The other ranks
        know their kind and continue, while this rank waits for a meeting. The units that were gathered at the start are
        then the only difference that the ranks can find. The same is true of the gathers of portions that a kind
        contains: each rank may know its own kind, and the first of these gathers may be the same on all ranks.
        """
        groups = list(dict.fromkeys([group for unit in self._units for group in unit.groups]))
        stayed = [Collective("stay", groups[number]) for number in run.kind.stayed]
        portions = [Collective("gather over replicas", groups[number]) for number in run.kind.portions]
        return [*stayed, *portions, *run.collectives]

    def _digests(self, title: str, collectives: Sequence[Collective]) -> list[int]:
        # Groups are identified by their unit and parameters, not by number: a rank may have another group for
        # parameters that were added on it alone. And not by full names: those of experts often contain a number that
        # only their rank has.
        groups = {
            group: (number, [param.name.rpartition(".")[2] for param in group.params])
            for number, unit in enumerate(self._units)
            for group in unit.groups
        }
        numbers = [(one.kind, None if one.group is None else groups[one.group], one.part) for one in collectives]
        return [zlib.crc32(repr(one).encode()) for one in (title, *numbers)]

    def text(self, epoch: int, number: int, index: int) -> str:
        """Return one of these in words, or "" if this rank has not launched it."""
        if (state := self._met_at(epoch, number)) is not None:
            return state.text(epoch, number, index)
        if (found := self._log.find(epoch, number)) is None:
            return ELSEWHERE if not index and self._is_elsewhere else ""
        texts = [found.title, *(self.words.did(found.kind, one) for one in self._with_beginning(found))]
        return texts[index] if index < len(texts) else ""

    def refuse(self, texts: dict[int, str]) -> str:
        """Return the error text for ranks that differ."""
        return refuse(texts)


class StateAtMeeting:
    """The history of a rank when it came to a meeting, and the collective that it wants next."""

    def __init__(
        self, later: History, at: tuple[int, int], numbers: list[int], compared: int, texts: Callable[[], list[str]]
    ) -> None:
        """At the position ``at`` it has these ``numbers``, in words ``texts``; elsewhere what ``later`` has.

        Only the first ``compared`` numbers have to be the same on all ranks.
        """
        self._later = later
        self._at = at
        self.numbers = numbers
        self._compared = compared
        self._texts = texts

    def position(self) -> tuple[int, int]:
        """Return the rank's position."""
        return self._at

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int] | None:
        """Return the numbers at a position, with the wanted collective if it is compared or ``shown``."""
        if (epoch, number) != self._at:
            return self._later.digests(epoch, number)
        return self.numbers if shown else self.numbers[: self._compared]

    def text(self, epoch: int, number: int, index: int) -> str:
        """Return one of these in words."""
        if (epoch, number) != self._at:
            return self._later.text(epoch, number, index)
        texts = self._texts()
        return texts[index] if index < len(texts) else ""

    def turns(self) -> tuple[bool, bool]:
        """Return what the history says, which has the same latest pass."""
        return self._later.turns()

    def refuse(self, texts: dict[int, str]) -> str:
        """Return the error text if ranks differ."""
        return self._later.refuse(texts)
