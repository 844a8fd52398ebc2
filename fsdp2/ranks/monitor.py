"""Compare the collectives of the ranks under one root, so that one that not all ranks start cannot hang.

A pass that follows a known schedule costs one comparison per collective and no communication. A rank that is about to
leave the schedule meets the others before it launches its collective. So all ranks either do what the others expect, or
have met. A pass that leaves a known schedule, or a guessed one for the second time, is *unscheduled* from then on,
unless another known schedule begins like it. It continues without meetings, and the ranks compare its collectives when
it ends, before an optimizer uses the gradients. If unscheduled passes differ and the host waits for collectives, the
ranks find the difference while they wait (``ranks/board.py``).

If ranks may skip units, passes ask an agreement instead (``ranks/agreement.py``).

With hybrid sharding one replica may evaluate while the others do something else. Its ranks compare such passes among
themselves, with a monitor of their own, which is also told when passes of all replicas begin: a rank that begins one
of these while another one of its replica evaluates has parted from it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from fsdp2.engine.collective import END, Collective, ObservedGroup, PassKind
from fsdp2.engine.joining import ranks_may_skip
from fsdp2.engine.root import RootContext
from fsdp2.ranks.agreement import RankAgreement
from fsdp2.ranks.board import Board
from fsdp2.ranks.history import PassHistory, Turns
from fsdp2.ranks.log import PassLog
from fsdp2.ranks.start import shared_groups, trained_of

__all__ = ["TRAINING", "RankMonitor", "no_conflict"]

_DEVIATIONS = 1  # how often a guessed pass may deviate and still keep the rest of its guess
_GUESSED = ("forward", "evaluation")  # not in a method, whose own parameters are in memory already
TRAINING = PassKind("training")
"""A pass of all replicas, as the monitor of one replica is told of it, which does not compare its collectives."""
_Job = Callable[[], None]


def no_conflict(root: RootContext) -> str:
    """Return "": a pass may start."""
    return ""


class RankMonitor:
    """Records the passes of one root on one rank, and compares them with those of other ranks.

    ``run`` runs a function that waits for other ranks: immediately, or in the background if the host must not wait.
    ``conflict`` returns the reason why no pass may start now, or "". The ranks have had so many ``meetings`` before.
    The root has this ``number`` among those that take ``turns``. ``replica`` is the monitor of the passes that one
    replica may run alone. All ranks expect the ``first`` pass to be a forward, or of that kind.
    """

    def __init__(
        self,
        board: Board,
        root: RootContext,
        run: Callable[[_Job], None],
        conflict: Callable[[RootContext], str] = no_conflict,
        meetings: int = 0,
        turns: Turns | None = None,
        number: int = 1,
        replica: RankMonitor | None = None,
        first: PassKind | None = None,
    ) -> None:
        self.board = board
        self._replica = replica
        self._root = root
        self._agrees = False  # the running pass asks the agreement
        self.log = PassLog(None if ranks_may_skip(root.groups) else first or PassKind("forward"), meetings)
        if replica is not None:
            replica.board.on_failure = partial(_fail, board, self.log)
        self.history = PassHistory(root, self.log, turns or Turns(), number)
        self.agreement = RankAgreement(root, board, self.log, self.history)
        self._run = run
        self._conflict = conflict
        self._to_begin: PassKind | None = None  # a pass that has not launched a collective yet
        self._setters: dict[str, None] = {}  # setters that have changed options since the ranks compared them

    # ---- passes ----

    def begin(self, kind: PassKind, *, agrees: bool) -> None:
        """Note that a pass starts. For other ranks it begins with its first collective: one without is local."""
        self.board.check()
        log = self.log
        if conflict := self._conflict(self._root):
            self.board.fail(f"rank {self.board.rank}: {conflict}", log.epoch)
        if (log.kind or self._to_begin) and kind.may_lie_inside:  # its collectives count as those of the pass around it
            log.enter_inner()
            return
        if log.kind:  # an error has aborted the last pass
            self.abandon()
        self._to_begin = self.history.with_turn(kind)
        self._agrees = agrees
        if agrees:  # other ranks may launch collectives in it that this rank has to join
            self._begin(self._to_begin, None)

    def _begin(self, kind: PassKind, first: Collective | None) -> None:
        """Begin a pass for all ranks, with its ``first`` collective if known.

        Meet unless all ranks expect the pass, and its collectives if it reduces: of gradients that some ranks alone
        have, gloo would abort before the ranks compare these.
        """
        log, self._to_begin = self.log, None
        known = log.follows(kind) and not self._setters
        log.begin(kind, self._guess(kind), self._setters)
        self.history.take_turn()
        if self._replica is not None:
            self._replica.note_pass_of_all()
        if self._agrees:
            self.agreement.begin(kind)
        reduces = kind.is_backward and log.unscheduled and not self._agrees
        if not known or reduces:
            self._meet(first, begins=True, reduces=reduces)
            self._setters.clear()

    def note_pass_of_all(self) -> None:
        """Note that a pass of all replicas begins here, between those of one replica, which this monitor compares.

        All ranks expect it where they expect nothing else, so that training meets nobody for it.
        """
        self.board.check()
        log, kind = self.log, self.history.with_turn(TRAINING)
        expected = log.next_kind()
        log.begin(kind, [])
        self.history.take_turn()
        if log.behind or expected not in (None, kind):
            self._meet()
        log.end()

    def _guess(self, kind: PassKind) -> list[Collective] | None:
        """Return the probable collectives of the first pass of a kind: a gather of each group in the model's order.

        The gathers of portions that the kind contains come first.
        """
        if kind.name not in _GUESSED or self.log.has_schedule(kind) or self._agrees:
            return None
        groups = self._root.groups
        portions = [Collective("gather over replicas", groups[number]) for number in kind.portions]
        gathered = [group for group in groups if group.mesh.shard.size > 1]
        return [*portions, *(Collective("gather", group, group.store.formats_digest) for group in gathered), END]

    def end(self) -> None:
        """Note that the pass is over. If it was unscheduled, the ranks meet and compare its collectives."""
        log = self.log
        if log.leave_inner():
            return
        if log.kind:
            if self._agrees:
                self.agreement.end()
            elif log.unscheduled:
                self._meet()
            self.history.note_order()
            log.end()
        self._to_begin = None  # it launched nothing

    def abandon(self) -> None:
        """End a pass that was aborted."""
        self.log.abandon()
        self._to_begin = None

    def forget(self, setter: str) -> None:
        """Compare options at the start of the next pass, and learn the collectives of each kind of pass again."""
        self._setters[setter] = None
        self.log.forget()

    def forget_units(self) -> None:
        """Forget as ``forget`` does, because units were inserted or removed, and refer to none that was removed."""
        self.forget("units were inserted or removed")
        self.log.forget_past()
        self.history.forget_units()
        self.agreement.forget_units()

    # ---- collectives ----

    def before(self, collective: Collective) -> None:
        """Note ``collective``, which this rank is about to launch.

        | what the ranks expect next           | what happens                     |
        |--------------------------------------|----------------------------------|
        | this collective                      | nothing                          |
        | nothing, as the pass is unscheduled  | it is compared at the end; a     |
        |                                      | reduction that lacks some: meet  |
        | anything else                        | all meet, and leave the schedule |

        The first collective of a pass begins it for other ranks, which may change what they expect.

        Raises:
            RuntimeError: Not all ranks launch this collective. Every rank raises it.
        """
        log = self.log
        if log.follow(collective):  # almost every collective returns here
            return
        if self._to_begin is not None:
            kind = self._to_begin
            if collective == END and not log.expects_collectives(kind):  # other ranks do not expect it either
                self._to_begin = None
                return
            self._begin(kind, collective)
            if log.follow(collective):
                return
        if log.kind is None:  # between passes nothing is compared
            return
        if log.unscheduled:
            if collective.lacks:  # ranks that have these gradients send more, and gloo would abort
                self._meet(collective)
            log.add(collective)
        else:
            self._deviate(collective)

    def _deviate(self, collective: Collective) -> None:
        """Meet, and leave the schedule with ``collective`` together with all ranks."""
        log = self.log
        rest = [one for one in (log.expected, *log.after_next) if one is not None and one.group is not collective.group]
        if collective.part:  # the sizes that an extension sends are known only now; similar units send the same
            rest = [
                Collective(one.kind, one.group, collective.part) if _alike(one.group, collective.group) else one
                for one in rest
            ]
        self._meet(collective)
        log.deviate(collective, rest if log.guessed and log.deviations < _DEVIATIONS else None)

    def _meet(self, collective: Collective | None = None, *, begins: bool = False, reduces: bool = False) -> None:
        """Meet. Raise an error on all ranks unless all launched the same in this pass and want ``collective`` next."""
        log, board = self.log, self.board
        setters = [*self._setters] if begins else []
        trained = trained_of(shared_groups(self._root, board.ranks)) if reduces else []
        epoch, state = log.epoch, self.history.at_meeting(collective, setters=setters, trained=trained)

        def meet() -> None:
            if board.meet(epoch, str(state.numbers), state) is None:
                board.raise_difference(state)

        # If ranks may skip units, the next collective depends on the other ranks, so the host has to wait.
        meet() if self._agrees else self._run(meet)
        log.met()  # now: in the background the meeting compares the state above, while the host goes on


def _fail(board: Board, log: PassLog, text: str) -> None:
    """Let all ranks of ``board`` raise ``text``."""
    with suppress(RuntimeError):
        board.fail(text, log.epoch)


def _alike(one: ObservedGroup | None, other: ObservedGroup | None) -> bool:
    """Return True if two groups have extensions, and parameters of the same shapes and dtypes."""
    if one is None or other is None or one.store.extensions is None:
        return False
    signatures = [[(param.spec.layout.shape, param.dtype) for param in group.params] for group in (one, other)]
    return signatures[0] == signatures[1]
