"""Which collective all ranks launch next, if some of them may skip units that others use.

As long as a pass follows a known schedule, the schedule says it. Otherwise all ranks choose each collective together.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, cast

from fsdp2.engine.agreement import Answer, CanJoin
from fsdp2.engine.collective import Collective, ObservedGroup, PassKind
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.root import RootContext
from fsdp2.ranks.board import Board
from fsdp2.ranks.history import PassHistory
from fsdp2.ranks.log import PassLog

__all__ = ["RankAgreement"]


class RankAgreement:
    """The agreement of the ranks under one ``root``."""

    def __init__(self, root: RootContext, board: Board, log: PassLog, history: PassHistory) -> None:
        self._root, self._board, self._log, self._history = root, board, log, history
        self._needed_in_backward: set[Any] = set()  # groups that ranks may skip and that a backward has gathered
        self._apart: set[ObservedGroup] = set()  # groups that some ranks used and others not, or in another order
        self._irregular: set[ObservedGroup] = set()  # of these, groups that were gathered more than once in a pass
        self._late: dict[Collective, None] = {}  # reductions in the running pass that wait for those of other groups

    # ---- passes ----

    def begin(self, kind: PassKind) -> None:
        """Begin a pass. Ranks do not follow the schedule that is known for it if one may use a unit that it lacks."""
        self._late.clear()  # of a pass that was aborted
        if not all(map(self._has_known_gathers, self._of_unknown_position(kind))):
            self._log.forget_schedule()

    def _has_known_gathers(self, group: ObservedGroup) -> bool:
        """Return True if the known pass gathers ``group`` as often as this one will."""
        return group not in self._irregular and self._log.has_gather(group)

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

    def end(self) -> None:
        """End a pass, and learn from its collectives."""
        log = self._log
        self._late.clear()
        gathered = [one.group for one in log.collectives if one.kind == "gather" and one.group is not None]
        if log.kind is not None and log.kind.is_backward:
            self._needed_in_backward.update(group for group in gathered if group.store.options.reduce_unused)
        if self._apart:  # a rank may use a unit twice which another one uses once
            times = Counter(gathered)
            self._irregular.update(group for group in self._apart if times[group] > 1)

    def forget_units(self) -> None:
        """Refer to no unit that was removed."""
        for learned in (self._needed_in_backward, self._irregular, self._apart):
            learned.intersection_update(self._root.groups)

    # ---- collectives ----

    def next(self, collective: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        """Decide whether to launch ``collective`` now, or first another that other ranks launch and this rank can join.

        | what the ranks expect next                                    | answer                           |
        |---------------------------------------------------------------|----------------------------------|
        | this collective, or nothing that is compared                  | launch                           |
        | another, which this rank can join                             | the other                        |
        | another, and this one is optional and comes later             | later                            |
        | another, which all have chosen: this rank cannot do its part  | an error                         |
        | anything else                                                 | choose together, then as above   |

        Raises:
            RuntimeError: Not all ranks can launch this collective. Every rank raises it.
        """
        log = self._log
        if log.follow(collective) or log.kind is None:  # almost every collective returns here
            return Answer.LAUNCH
        while (expected := log.expected) != collective:
            if expected is not None:
                if can_join(expected, log.plans_once):
                    return expected
                if optional and (collective.kind == "gather" if log.chosen else log.expects_later(collective)):
                    return Answer.LATER
                if log.chosen:  # the other ranks launch a collective that this rank can neither launch nor join
                    words, rank = self._history.words, self._board.rank
                    other = next(one for one in self._board.ranks if one != rank)
                    did = {other: words.did(log.kind, expected), rank: words.did(log.kind, collective)}
                    self._board.fail(self._history.refuse(did), log.epoch)  # raises
            # Choose, and look again at the collective that is expected then. If none was chosen, ranks that can wait
            # put theirs off, and the others choose again.
            if optional and collective.kind == "reduce" and self._comes_in_any_order(collective.group):
                self._late[collective] = None
                return Answer.LATER
            if (chosen := self._choose(collective, optional, can_join)) is not None:
                log.choose(chosen)
            elif optional:
                return Answer.LATER
        log.add(collective)
        return Answer.LAUNCH

    def next_before_end(self, can_join: CanJoin) -> Collective | None:
        """Return the next collective that other ranks launch before this pass ends, if this rank can join it."""
        expected = self._log.expected
        if expected is None or not can_join(expected, self._log.plans_once):  # nobody can join an end
            return None
        return expected

    def _comes_in_any_order(self, group: ObservedGroup | None) -> bool:
        """Return True if ranks may meet ``group`` in different orders, as they did before or were told to."""
        return group is not None and (group in self._apart or group.store.options.any_order)

    def _choose(self, collective: Collective, optional: bool, can_join: CanJoin) -> Collective | None:
        """Return the next collective of all ranks, or None if optional ones are to be left for later.

        This rank wants ``collective``, but can wait with an ``optional`` one.
        """
        log, groups = self._log, self._root.groups
        state = self._history.at_meeting(collective, compares=False)
        want: dict[str, Any] = {**self._described(collective), "optional": optional}
        if log.kind is not None and log.kind.is_backward:
            # A rank that computes with a unit, or will, cannot join its reduction.
            skippable = [group for group in groups if group.store.options.reduce_unused]
            want["inside"] = [groups.index(g) for g in skippable if not can_join(Collective("reduce", g), True)]
            want["late"] = [self._described(late) for late in self._late if late not in log.collectives]
        chosen = self._board.choose(log.epoch, json.dumps(want), state, _choose_among)
        if chosen is None:  # no collective suits all ranks: raise an error that compares the wanted collectives, too
            self._board.raise_difference(self._history.at_meeting(collective))
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
            return {"collective": [collective.kind, None, []], "marked": False}
        number = self._root.groups.index(cast(FSDPParamGroup, collective.group))
        return {
            "collective": [collective.kind, number, list(collective.part)],
            # If ranks want different units that some may skip, all take the first of them: this is its order.
            "order": self._history.words.order(self._log.kind, collective.group),
            "marked": collective.group.store.options.reduce_unused,
        }


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
    # about to use that unit too, as when a checkpoint recomputes both before the backward of either.
    if may_skip := [want for want in gathers if want["marked"]]:
        return min(may_skip, key=_in_order)["collective"], apart
    late = [one for want in wants.values() for one in want.get("late", ()) if one["collective"][1] not in inside]
    if late:  # in one order, whatever the order in which ranks have come to them
        return min(late, key=_in_order)["collective"], True
    if not apart:
        return first, False
    chosen = _choose_apart(list(wants.values()), inside)
    # Each rank may want to send gradients of a unit with which another one still computes.
    later = any(want["optional"] and want["collective"][0] == "reduce" for want in wants.values())
    return (chosen, True) if chosen is not None or later else None


def _choose_apart(wants: list[Any], inside: set[int]) -> Any:
    """Return a collective that all ranks can launch, although they want different ones, or None.

    They are ``inside`` some units, and want to gather none that some ranks may skip.
    """
    gathers = [want for want in wants if want["collective"][0] == "gather"]
    reductions = [want for want in wants if want["collective"][0] == "reduce"]
    if may_skip := [want for want in reductions if want["marked"] and want["collective"][1] not in inside]:
        return min(may_skip, key=_in_order)["collective"]
    # Where some ranks skip a unit, they may prefetch the next one. The prefetch can wait for what others need, but not
    # for a reduction: a rank that prefetches may still use units inside the reduced one, which others skipped.
    needed = [want for want in wants if not (want["optional"] and want in gathers)]
    if gathers and reductions and len(gathers) + len(reductions) == len(wants):
        needed = [want for want in needed if want in gathers] or [min(gathers, key=_in_order)]
    same = bool(needed) and all(want["collective"] == needed[0]["collective"] for want in needed)
    return needed[0]["collective"] if same else None


def _in_order(want: dict[str, Any]) -> tuple[int, list[int]]:
    return want["order"], want["collective"][2]
