"""Compare the collectives of the ranks under one root, so that one that not all ranks start cannot hang.

A pass that follows a known schedule costs one comparison per collective and no communication. A rank that is about to
leave the schedule meets the others before it launches its collective. So all ranks either do what the others expect, or
have met. A pass that leaves a known schedule, or a guessed one for the second time, is *unscheduled* from then on,
unless another known schedule begins like it. It continues without meetings, and the ranks compare its collectives when
it ends, before an optimizer uses the gradients. If unscheduled passes differ and the host waits for collectives, the
ranks find the difference while they wait (``ranks/board.py``).

Units with ``set_reduce_scatter_unused_params`` are an exception: ranks take part in their collectives without using
them. With such units, all ranks together choose each collective that is not scheduled.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from fsdp2.engine.collective import AS_COMPUTED, END, Collective, ObservedGroup, PassKind
from fsdp2.engine.group import FSDPParamGroup, ranks_may_skip
from fsdp2.engine.observer import Answer, CanJoin
from fsdp2.engine.root import RootContext
from fsdp2.ranks.board import Board, History
from fsdp2.ranks.log import PassLog
from fsdp2.ranks.start import Line, options_of

__all__ = ["RankMonitor", "Turns"]

_DEVIATIONS = 1  # how often a guessed pass may deviate and still keep the rest of its guess
_REMEDY = "every rank must run the same units in the same order, after the same calls of setters and of unshard()"
_ELSEWHERE = "a pass of another root"
_REMEDY_FOR_ROOTS = "; run the forwards and backwards of all models in one order on all ranks"
_REMEDY_FOR_PASSES = "; call the model and its methods equally often on all ranks, outside of `if rank == 0:`"
_GUESSED = ("forward", "evaluation")  # not in a method, whose own parameters are in memory already
_Job = Callable[[], None]


class Turns:
    """Which of the roots on the same process groups began the latest pass; all ranks must take turns alike."""

    def __init__(self) -> None:
        self.latest = 0  # the number of the root, or 0


class RankMonitor:
    """Records the passes of one root on one rank, and compares them with those of other ranks.

    ``run`` runs a function that waits for other ranks: immediately, or in the background if the host must not wait.
    ``conflict`` returns the reason why no pass may start now, or "". The ranks have had so many ``meetings`` before.
    The root has this ``number`` among those that take ``turns``.
    """

    def __init__(
        self,
        board: Board,
        root: RootContext,
        run: Callable[[_Job], None],
        conflict: Callable[[RootContext], str] = lambda root: "",
        meetings: int = 0,
        turns: Turns | None = None,
        number: int = 1,
    ) -> None:
        self.board = board
        self._turns, self._number = turns or Turns(), number
        self._has_begun = False  # a pass of this root
        self._root = root
        self.log = PassLog(None if self._may_skip else PassKind("forward"), meetings)
        self._run = run
        self._conflict = conflict
        self._nested = 0  # passes inside the running one, whose collectives count as its own
        self._to_begin: PassKind | None = None  # a pass that has not launched a collective yet
        self._setters: dict[str, None] = {}  # setters that have changed options since the ranks compared them
        self._forward_positions: dict[Any, int] = {}  # the order of the groups in the last forward
        self._needed_in_backward: set[Any] = set()  # groups that ranks may skip and that a backward has gathered
        self._apart: set[ObservedGroup] = set()  # groups that some ranks used and others not, or in another order
        self._irregular: set[ObservedGroup] = set()  # of these, groups that were gathered more than once in a pass
        self._late: dict[Collective, None] = {}  # reductions in the running pass that wait for those of other groups

    @property
    def _may_skip(self) -> bool:
        """True if ranks may skip units that others use: all ranks then choose each collective that is not scheduled."""
        return ranks_may_skip(self._root.groups)

    # ---- passes ----

    def begin(self, kind: PassKind, *, outermost: bool) -> None:
        """Note that a pass starts. For other ranks it begins with its first collective: one without is local."""
        self.board.check()
        log = self.log
        if conflict := self._conflict(self._root):
            self.board.fail(f"rank {self.board.rank}: {conflict}", log.epoch)
        if (log.kind or self._to_begin) and not outermost:  # its collectives count as those of the pass around it
            self._nested += 1
            return
        if log.kind:  # an outermost pass starts, so the last one was aborted by an error
            self.abandon()
        if self._is_elsewhere:  # collectives are matched by their order, also those of different roots
            kind = kind.behind(self._turns.latest)
        self._to_begin = kind
        if self._may_skip:  # other ranks may launch collectives in it that this rank has to join
            self._begin(kind, None)

    def _begin(self, kind: PassKind, first: Collective | None) -> None:
        """Begin a pass for all ranks, with its ``first`` collective if known. Meet unless all ranks expect the pass."""
        log, self._to_begin = self.log, None
        known = log.follows(kind) and not self._setters
        log.begin(kind, self._guess(kind))
        self._has_begun, self._turns.latest = True, self._number
        self._late.clear()
        if self._may_skip and not all(map(self._has_known_gathers, self._of_unknown_position(kind))):
            log.forget_schedule()
        if not known:
            self._meet(first, begins=True)
            self._setters.clear()

    @property
    def _is_elsewhere(self) -> bool:
        """Return True if another root has begun a pass since this one did; before its first pass, ranks have met."""
        return self._has_begun and self._turns.latest != self._number

    def _has_known_gathers(self, group: ObservedGroup) -> bool:
        """Return True if the known pass gathers ``group`` as often as this one will."""
        return group not in self._irregular and self.log.has_gather(group)

    def _of_unknown_position(self, kind: PassKind) -> list[FSDPParamGroup]:
        """Return the groups that any rank may gather in a pass of ``kind``, unless a known pass gathers them.

        These are groups that some ranks may skip: in a forward all of them, in a backward those that a forward before
        it gathered, if they train or an earlier backward gathered them. Until a rank has used such a group, its
        position in the pass is unknown, and a rank may use it before any collective.
        """
        found = []
        for number, group in enumerate(self._root.groups):
            options, residency = group.store.options, group.residency
            if not options.reduce_unused or group.mesh.shard.size == 1 or not residency.needs_gather:
                continue
            if not kind.is_forward:
                trains = any(param.requires_grad for param in group.params)
                needed = options.unshard_in_backward and (trains or group in self._needed_in_backward)
                if number not in kind.used or not needed:
                    continue
            found.append(group)
        return found

    def _guess(self, kind: PassKind) -> list[Collective] | None:
        """Return the probable collectives of the first pass of a kind: a gather of each group in the model's order.

        The gathers of portions that the kind contains come first.
        """
        if kind.name not in _GUESSED or self.log.has_schedule(kind) or self._may_skip:
            return None
        portions = [Collective("gather over replicas", self._root.groups[number]) for number in kind.portions]
        groups = [group for group in self._root.groups if group.mesh.shard.size > 1]
        return [*portions, *(Collective("gather", group, group.store.formats_digest) for group in groups), END]

    def end(self) -> None:
        """Note that the pass is over. If it was unscheduled, the ranks meet and compare its collectives."""
        log = self.log
        if self._nested:
            self._nested -= 1
        elif log.kind:
            if log.unscheduled and not self._may_skip:
                self._meet()
            if log.kind.name == "forward":
                self._forward_positions = {collective.group: i for i, collective in enumerate(log.collectives)}
            elif log.kind.is_backward:
                gathered = [
                    collective.group
                    for collective in log.collectives
                    if collective.kind == "gather" and collective.group is not None
                ]
                self._needed_in_backward.update(group for group in gathered if group.store.options.reduce_unused)
            if self._apart:  # a rank may use a unit twice which another one uses once
                times = Counter([one.group for one in log.collectives if one.kind == "gather"])
                self._irregular.update(group for group in self._apart if times[group] > 1)
            log.end()

    def joins_before_end(self, can_join: CanJoin) -> Collective | None:
        """Return the next collective that other ranks launch before this pass ends, if this rank can join it."""
        expected = self.log.expected
        if expected is None or expected == END or not can_join(expected, self.log.plans_once):
            return None
        return expected

    def abandon(self) -> None:
        """End a pass that was aborted."""
        if self.log.kind:
            self.log.abandon()
        self._nested, self._to_begin = 0, None

    def forget(self, setter: str) -> None:
        """Compare options at the start of the next pass, and learn the collectives of each kind of pass again."""
        self._setters[setter] = None
        self.log.forget()

    def forget_units(self) -> None:
        """Do the same because units were inserted or removed, and refer to none of those that were removed."""
        self.forget("units were inserted or removed")
        self.log.forget_past()
        self._forward_positions = {}
        self._needed_in_backward.intersection_update(self._root.groups)
        self._irregular.intersection_update(self._root.groups)
        self._apart.intersection_update(self._root.groups)

    # ---- collectives ----

    def before(self, collective: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        """Decide whether to launch ``collective`` now, or first another that other ranks launch and this rank can join.

        | what the ranks expect next                                    | answer                           |
        |---------------------------------------------------------------|----------------------------------|
        | this collective, or nothing that is compared                  | launch                           |
        | another, which this rank can join                             | the other                        |
        | another, and this one is optional and comes later             | later                            |
        | another, which all have chosen: this rank cannot do its part  | an error                         |
        | anything else, and ranks may skip units                       | choose together, then as above   |
        | anything else, in an unscheduled pass                         | launch; compared at the end      |
        | anything else                                                 | meet, leave the schedule, launch |

        The first collective of a pass begins it for other ranks, which may change what they expect.

        Raises:
            RuntimeError: Not all ranks can launch this collective. Every rank raises it.
        """
        log = self.log
        if self._nested and collective == END:  # the end of an inner pass is no collective of the pass around it
            return Answer.LAUNCH
        if log.follow(collective):  # almost every collective returns here
            return Answer.LAUNCH
        if self._to_begin is not None:
            kind = self._to_begin
            if collective == END and not log.expects_collectives(kind):  # other ranks do not expect it either
                self._to_begin = None
                return Answer.LAUNCH
            self._begin(kind, collective)
            if log.follow(collective):
                return Answer.LAUNCH
        if log.kind is None:  # between passes, and in a pass of one replica alone, nothing is compared
            return Answer.LAUNCH
        while (expected := log.expected) != collective:
            if expected is not None:
                if can_join(expected, log.plans_once):
                    return expected
                if optional and (collective.kind == "gather" if log.chosen else log.expects_later(collective)):
                    return Answer.LATER
                if log.chosen:  # the other ranks launch a collective that this rank can neither launch nor join
                    did = {self.board.ranks[0]: self._did(log.kind, expected), -1: self._did(log.kind, collective)}
                    self.board.fail(self.refuse(did), log.epoch)
            if self._may_skip:  # choose, and look again at the collective that is expected then
                if optional and collective.kind == "reduce" and self._comes_in_any_order(collective.group):
                    self._late[collective] = None
                    return Answer.LATER
                if (chosen := self._choose(collective, optional, can_join)) is not None:
                    log.choose(chosen)
                elif optional:
                    return Answer.LATER
            elif log.unscheduled:  # compared at the end of the pass
                break
            else:
                self._deviate(collective)
                return Answer.LAUNCH
        log.add(collective)
        return Answer.LAUNCH

    def _comes_in_any_order(self, group: ObservedGroup | None) -> bool:
        """Return True if ranks may meet ``group`` in different orders, as they did before or were told to."""
        return group is not None and (group in self._apart or group.store.options.any_order)

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

    def _meet(self, collective: Collective | None = None, *, begins: bool = False) -> None:
        """Meet. Raise an error on all ranks unless all launched the same in this pass and want ``collective`` next."""
        log, board = self.log, self.board
        epoch, state = log.epoch, self._at_meeting(collective, options=begins and bool(self._setters))

        def meet() -> None:
            if board.meet(epoch, str(state.numbers), state) is None:
                board.raise_difference(state)

        # With units that ranks may skip, the next collective depends on the other ranks, so the host has to wait.
        meet() if self._may_skip else self._run(meet)
        log.met()  # now: in the background the meeting compares the state above, while the host goes on

    def _choose(self, collective: Collective, optional: bool, can_join: CanJoin) -> Collective | None:
        """Return the next collective of all ranks, or None if optional ones are to be left for later.

        This rank wants ``collective``, but can wait with an ``optional`` one.
        """
        log, groups = self.log, self._root.groups
        state = self._at_meeting(collective, compares=False)
        want: dict[str, Any] = {**self._described(collective), "waits": optional}
        if log.kind is not None and log.kind.is_backward:
            # A rank that computes with a unit, or will, cannot join its reduction.
            skippable = [group for group in groups if group.store.options.reduce_unused]
            want["inside"] = [groups.index(g) for g in skippable if not can_join(Collective("reduce", g), True)]
            want["late"] = [self._described(late) for late in self._late if late not in log.collectives]
        chosen = self.board.choose(log.epoch, json.dumps(want), state, _choose_among)
        if chosen is None:  # no collective suits all ranks: raise an error that compares the wanted collectives, too
            self.board.raise_difference(self._at_meeting(collective))
        log.met()
        taken, apart = chosen
        if taken is None:
            return None
        kind, number, part = taken
        group = None if number is None else groups[number]
        if apart and group is not None and group.store.options.reduce_unused:
            self._apart.add(group)
        return Collective(kind, group, tuple(part))

    def _described(self, collective: Collective) -> dict[str, Any]:
        """Return ``collective`` as other ranks read it when all choose together."""
        if collective.group is None:
            return {"collective": [collective.kind, None, []], "optional": False}
        number = self._root.groups.index(cast(FSDPParamGroup, collective.group))
        return {
            "collective": [collective.kind, number, list(collective.part)],
            # If ranks want different units that some may skip, all take the first of them: this is its order.
            "order": self._order(self.log.kind, collective),
            "optional": collective.group.store.options.reduce_unused,
        }

    def _order(self, kind: PassKind | None, collective: Collective) -> int:
        """Return a number that grows along the pass: in the order of groups in a forward, in reverse in a backward."""
        groups: Sequence[ObservedGroup] = self._root.groups
        number = -1 if collective.group is None else groups.index(collective.group)
        backward = kind is not None and kind.is_backward
        return -self._forward_positions.get(collective.group, number) if backward else number

    # ---- the history for other ranks ----

    def _at_meeting(
        self, collective: Collective | None, *, compares: bool = True, options: bool = False
    ) -> _StateAtMeeting:
        """Return the state of this rank when it comes to a meeting and wants ``collective`` next.

        If it ``compares``, the wanted collective must be the same as well, not only those that were launched. With
        ``options``, the options of all units are compared, too, because setters have changed some.
        """
        kind = self.log.kind
        launched = self._with_beginning(kind, self.log.collectives)
        listed = [*launched, *([] if collective is None else [collective])]
        lines: list[Line] = options_of(self._root) if options else []
        title = f"{kind} after {', '.join(sorted(self._setters))}" if options else str(kind)
        numbers = self._digests(title, listed) + [zlib.crc32(line.compared.encode()) for line in lines]

        def texts() -> list[str]:
            return [title, *(self._did(kind, one) for one in listed), *(line.text for line in lines)]

        compared = len(numbers) if compares else len(launched) + 1
        return _StateAtMeeting(self, self.log.position, numbers, compared, texts)

    def position(self) -> tuple[int, int]:
        """Return this rank's position."""
        return self.log.position

    def turns(self) -> tuple[bool, bool]:
        """Return whether the latest pass came directly after one of this root, and whether another root has begun one.

        Not while a pass runs: one of another root may lie inside it.
        """
        kind, _ = self.log.find(*self.log.position) or (None, [])
        return kind is not None and not kind.after, self.log.kind is None and self._is_elsewhere

    def digests(self, epoch: int, number: int, *, shown: bool = False) -> list[int] | None:
        """Return a number for the kind of the pass at a position and for each of its collectives."""
        found = self.log.find(epoch, number)
        return None if found is None else self._digests(found[0], self._with_beginning(*found))

    def _with_beginning(self, kind: PassKind | None, collectives: Sequence[Collective]) -> list[Collective]:
        """Return the collectives that ranks compare: one for each unit gathered at the start, and those of the pass.

        If one rank's forward skips the unit that backward begins with, its backward is of another kind. The other ranks
        know their kind and continue, while this rank waits for a meeting. The units that were gathered at the start are
        then the only difference that the ranks can find. The same is true of the gathers of portions that a kind
        contains: each rank may know its own kind, and the first of these gathers may be the same on all ranks.
        """
        if kind is None:
            return list(collectives)
        groups = self._root.groups
        stayed = [Collective("stay", groups[number]) for number in kind.stayed]
        portions = [Collective("gather over replicas", groups[number]) for number in kind.portions]
        return [*stayed, *portions, *collectives]

    def _digests(self, kind: object, collectives: Sequence[Collective]) -> list[int]:
        # Groups are identified by their unit and parameters, not by number: a rank may have another group for
        # parameters that were added on it alone. And not by full names: those of experts often contain a number that
        # only their rank has.
        groups = {
            group: (number, [param.name.rpartition(".")[2] for param in group.params])
            for number, unit in enumerate(self._root.all_states)
            for group in unit.groups
        }
        numbers = [(one.kind, None if one.group is None else groups[one.group], one.part) for one in collectives]
        return [zlib.crc32(repr(one).encode()) for one in (str(kind), *numbers)]

    def text(self, epoch: int, number: int, index: int) -> str:
        """Return one of these in words, or "" if this rank has not launched it."""
        kind, collectives = self.log.find(epoch, number) or (None, [])
        if not index:
            return str(kind) if kind is not None else _ELSEWHERE if self._is_elsewhere else ""
        collectives = self._with_beginning(kind, collectives)
        return self._did(kind, collectives[index - 1]) if index <= len(collectives) else ""

    def _did(self, kind: PassKind | None, collective: Collective) -> str:
        """Return a collective as JSON, for ``refuse`` on another rank."""
        group, text = collective.group, self._text(kind, collective)
        if group is None:
            return json.dumps(_Did(text))
        order = (collective.kind == "reduce", self._order(kind, collective))
        return json.dumps(_Did(text, group.name, order, group.store.options.reduce_unused))

    def _text(self, kind: object, collective: Collective) -> str:
        group = collective.group
        if group is None:
            return f"the end of {kind}"
        text = f"{collective.kind} {group.name or 'the root'!r} in {kind}"
        if collective.kind == "stay":
            return f"{group.name or 'the root'!r} is gathered since forward in {kind}"
        if collective.kind == "reduce":
            indices = [i for i in collective.part if i != AS_COMPUTED]
            names = ", ".join(group.params[i].name for i in indices[:3])
            names += ", ..." if len(indices) > 3 else ""
            return f"{text} ({names}{' as computed' if AS_COMPUTED in collective.part else ''})"
        sent = collective.part[len(group.store.formats_digest) :]
        if group.store.formats_digest:
            encoded = {str(param.formats): param.name for param in group.params if any(param.formats)}
            text += f" with {'; '.join(f'{name}: {formats}' for formats, name in encoded.items())}"
        if sent and group.store.extensions is not None:
            return f"{text} ({group.store.extensions.describe(sent)})"
        several = sum(other.name == group.name for other in self._root.groups) > 1
        return f"{text} ({group.params[0].name}{', ...' if len(group.params) > 1 else ''})" if several else text

    def refuse(self, texts: dict[int, str]) -> str:
        """Return the error text for ranks that differ."""
        did = {rank: _Did(*json.loads(text)) if text.startswith("[") else text for rank, text in texts.items()}
        by_text: dict[str, list[int]] = {}
        for rank, one in did.items():
            by_text.setdefault(one if isinstance(one, str) else one.text, []).append(rank)
        parts = [
            f"{'this rank' if ranks == [-1] else 'rank ' + ', '.join(map(str, ranks))}: {text}"
            for text, ranks in by_text.items()
        ]
        remedy = _REMEDY_FOR_ROOTS if _ELSEWHERE in by_text else _skipping(list(did.values())) or _REMEDY_FOR_PASSES
        return f"ranks do not do the same: {'; '.join(parts)}. Expected: {_REMEDY}{remedy}"


class _Did(NamedTuple):
    """A collective of one rank in words, and the name of its unit (None for the end of a pass)."""

    text: str
    unit: str | None = None
    order: tuple[bool, int] = (False, 0)  # gathers, which are prefetched, before reductions; then as in the pass
    may_skip: bool = False  # the unit has set_reduce_scatter_unused_params(True)


def _skipping(did: list[_Did | str]) -> str:
    """Return the remedy if some ranks skip a unit, given the collective of each rank; a str is not a collective."""
    collectives = [one for one in did if isinstance(one, _Did)]
    units = [one for one in collectives if one.unit is not None]
    if not units or len(collectives) < len(did) or len({one.unit for one in collectives}) == 1:
        return ""
    first = min(units, key=lambda one: one.order)  # ranks that are further on have skipped this unit
    name = repr(first.unit) if first.unit else "the root"
    if first.may_skip:
        line = f"{_in_python(first.unit or '')}.set_reduce_scatter_unused_params(True, any_order=True)"
        return (
            f"; some ranks may skip {name}, but ranks that have used such units alike must go on to use them in one "
            "order, each as often as before: loop over experts by their index, not by their score, or call "
            f"`{line}` for each of them, on all ranks, which takes more memory"
        )
    line = "{}.set_reduce_scatter_unused_params(True)"
    unit = line.format(_in_python(first.unit or ""))
    every = f", or {line.format('model')} for every unit of the root" if first.unit else ""
    return f"; give each rank some input for {name}, or, where ranks may skip it, call `{unit}`{every}, on all ranks"


def _in_python(name: str) -> str:
    """Return a Python expression for the module of a unit below ``model``; for the first one of several."""
    text = "model"
    for part in name.split(", ")[0].split(".") if name else ():
        text += f"[{part}]" if part.isdigit() else f".{part}"
    return text


class _StateAtMeeting:
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
        """Return the error text where ranks differ."""
        return self._later.refuse(texts)


def _alike(one: ObservedGroup | None, other: ObservedGroup | None) -> bool:
    """Return True if two groups have extensions, and parameters of the same shapes and dtypes."""
    if one is None or other is None or one.store.extensions is None:
        return False
    signatures = [[(param.spec.layout.shape, param.dtype) for param in group.params] for group in (one, other)]
    return signatures[0] == signatures[1]


def _choose_among(wants: dict[int, Any]) -> tuple[Any, bool] | None:
    """Return what all ranks do next, and whether they are apart, given the ranks' ``wants``.

    That is a collective of theirs which all can launch, or None to leave the optional ones for later. If they do not
    do the same, the result is None.
    """
    first, *others = [want["collective"] for want in wants.values()]
    apart = any(other != first for other in others)
    gathers = [want for want in wants.values() if want["collective"][0] == "gather"]
    inside = {number for want in wants.values() for number in want.get("inside", ())}
    # Gathers first. A rank that reduces can join them and wait. One that gathers cannot join every reduction: it may be
    # about to use that unit too, as where a checkpoint recomputes both before the backward of either.
    if may_skip := [want for want in gathers if want["optional"]]:
        return min(may_skip, key=_in_order)["collective"], apart
    late = [one for want in wants.values() for one in want.get("late", ()) if one["collective"][1] not in inside]
    if late:  # in one order, whatever the order in which ranks have come to them
        return min(late, key=_in_order)["collective"], True
    if not apart:
        return first, False
    chosen = _choose_apart(list(wants.values()), inside)
    # Each rank may want to send gradients of a unit with which another one still computes.
    later = any(want["waits"] and want["collective"][0] == "reduce" for want in wants.values())
    return (chosen, True) if chosen is not None or later else None


def _choose_apart(wants: list[Any], inside: set[int]) -> Any:
    """Return a collective that all ranks can launch, although they want different ones, or None.

    They are ``inside`` some units, and want to gather none that some ranks may skip.
    """
    gathers = [want for want in wants if want["collective"][0] == "gather"]
    reductions = [want for want in wants if want["collective"][0] == "reduce"]
    if may_skip := [want for want in reductions if want["optional"] and want["collective"][1] not in inside]:
        return min(may_skip, key=_in_order)["collective"]
    # Where some ranks skip a unit, they may prefetch the next one. The prefetch can wait for what others need, but not
    # for a reduction: who prefetches may still use units inside the reduced one, which the others have skipped.
    needed = [want for want in wants if not (want["waits"] and want in gathers)]
    if gathers and reductions and len(gathers) + len(reductions) == len(wants):
        needed = [want for want in needed if want in gathers] or [min(gathers, key=_in_order)]
    same = bool(needed) and all(want["collective"] == needed[0]["collective"] for want in needed)
    return needed[0]["collective"] if same else None


def _in_order(want: dict[str, Any]) -> tuple[int, list[int]]:
    return want["order"], want["collective"][2]
