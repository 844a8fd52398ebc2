"""Units that some ranks skip: how a pass launches collectives that only other ranks need.

``set_reduce_scatter_unused_params(True)`` marks such units. A rank that skips one *joins* its gather, frees it with the
others, and sends zeros for its gradients. A pass under a root without marked units has no ``Joining``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from fsdp2.engine.agreement import Agreement, Answer, CanJoin
from fsdp2.engine.collective import Collective
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.phase import Phase

__all__ = [
    "Joining",
    "JoiningInBackward",
    "JoiningInForward",
    "JoiningInSynchronization",
    "JoiningPass",
    "ranks_may_skip",
]


def ranks_may_skip(groups: Iterable[FSDPParamGroup]) -> bool:
    """Return whether some ranks may skip any of ``groups`` while others use it."""
    return any([group.store.options.reduce_unused for group in groups])


def _is_marked(collective: Collective) -> bool:
    """Return whether ``collective`` is one of a unit that some ranks may skip."""
    return collective.group is not None and collective.group.store.options.reduce_unused


def _cannot_join(collective: Collective, planned: bool) -> bool:
    """Return False."""
    return False


def _group_of(collective: Collective) -> FSDPParamGroup | None:
    group = collective.group
    assert group is None or isinstance(group, FSDPParamGroup)
    return group


class JoiningPass(Protocol):
    """A pass, as far as joining has to know one (``passes.Pass``)."""

    groups: list[FSDPParamGroup]
    in_backward: bool
    over: bool  # autograd's backward has ended

    def launch(self, collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
        """Launch ``collective`` when its turn comes."""

    def post_backward(self, group: FSDPParamGroup) -> None:
        """Free ``group`` and reduce its gradients."""


class Joining:
    """What one pass does for other ranks.

    The pass is an argument of each method: a cycle would keep it, and the tensors of its calls, until the garbage
    collector runs.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.gathered: dict[FSDPParamGroup, None] = {}  # of marked units, because some rank uses them; on all alike
        self._agreement = agreement
        self._launched = 0  # collectives so far
        self._being_joined: list[FSDPParamGroup] = []  # its collectives are being launched

    def launch(
        self, run: JoiningPass, collective: Collective, start: Callable[[], None], *, optional: bool = False
    ) -> bool:
        """Call ``start`` when all ranks launch ``collective`` next; until then launch what others need first.

        Returns False if ``collective`` is ``optional`` and left for later.
        """
        can_join: CanJoin = partial(self.can_join, run)
        while (answer := self._agreement.next(collective, optional=optional, can_join=can_join)) is not Answer.LAUNCH:
            if answer is Answer.LATER:
                return False
            if not self._join(run, answer):
                can_join = _cannot_join  # the ranks have to decide otherwise, or this would never end
            elif not optional and not _is_marked(collective):
                self._pass_by(answer)
        start()
        self._launched += 1
        group = _group_of(collective)
        if group is not None and collective.kind == "gather" and group.store.options.reduce_unused:
            self.gathered[group] = None
        return True

    def can_join(self, run: JoiningPass, collective: Collective, planned: bool) -> bool:
        """Return whether ``run`` can launch ``collective`` with a group that this rank does not use at the moment.

        That is possible for marked units. In models with such units it is possible for the others too: ranks that skip
        a unit reach the next ones earlier than those that use it. ``planned``: the ranks follow a known pass, which has
        the collective here and not once more later. Otherwise they have just chosen it together, or it follows again.
        """
        group = _group_of(collective)
        # A join may launch another collective than the expected one. The ranks then still expect that one, and to join
        # the group again in its own join would never end. Nothing that summon_full_params shows is gathered or freed.
        if group is None or group in self._being_joined or group.residency.summoned:
            return False
        if collective.kind == "gather":
            return self._can_join_gather(run, group)
        # All ranks launch a "gather over replicas" when their pass begins. Not those of a teacher, whose portions are
        # gathered when it is used: ranks that differ in that raise.
        return collective.kind == "reduce" and self._can_join_reduction(run, group, planned)

    def join_before_end(self, run: JoiningPass) -> None:
        """Launch what other ranks are known to launch before the pass ends, as far as this rank can."""
        can_join = partial(self.can_join, run)
        while (collective := self._agreement.next_before_end(can_join)) is not None:
            if not self._join(run, collective):
                break

    def end(self, run: JoiningPass) -> None:
        """Free what was gathered for other ranks alone; here that is what the pass was not asked for."""
        for group in self.gathered:
            if group not in run.groups:
                group.residency.lower()

    def _can_join_gather(self, run: JoiningPass, group: FSDPParamGroup) -> bool:
        residency = group.residency
        if not group.store.options.reduce_unused:
            return residency.needs_gather and group.phases.phase is Phase.IDLE
        if residency.is_gathering:
            # A gather that this rank joined is in flight. The others have used and freed the group, and gather it
            # again: in a backward, or in a forward that frees the group.
            return run.in_backward or group.after_forward is not False
        # Not in memory; or it is, but this rank does not use it now, and frees it first (``_join_gather``).
        return residency.needs_gather or run.over or not group.is_entered

    def _can_join_reduction(self, run: JoiningPass, group: FSDPParamGroup, planned: bool) -> bool:
        """Return whether gradients of ``group``, or zeros, may leave before this rank would send them by itself."""
        return group.store.options.reduce_unused and not group.is_entered

    def _join(self, run: JoiningPass, collective: Collective) -> bool:
        """Launch ``collective``, which ``can_join`` accepts, because other ranks do; return whether one was launched.

        What a group launches then goes through ``launch`` again: behind its first chunk other ranks may need something
        else, and its gather may have another format than theirs.
        """
        group, before = _group_of(collective), self._launched
        assert group is not None
        self._being_joined.append(group)
        try:
            if collective.kind == "gather":
                self._join_gather(run, group)
            else:
                run.post_backward(group)
        finally:
            self._being_joined.pop()
        return self._launched > before

    def _join_gather(self, run: JoiningPass, group: FSDPParamGroup) -> None:
        """Gather ``group``. It stays in flight: nothing here waits for it until it is used or freed."""
        if group.residency.is_gathering and not run.in_backward:
            group.release(group.after_forward)  # the gather joined before ends as on the ranks that used the group
        elif group.residency.is_gathering or not group.residency.needs_gather:
            group.reshard()  # the others freed it after their use, or this collective would not be a gather
        group.start_unshard(run.launch, in_backward=run.in_backward)

    def _pass_by(self, joined: Collective) -> None:
        """Note that ``joined`` was launched on the way to a unit that no rank skips, or to the end of the pass.

        So this rank has come past the unit of what it joined.
        """


class JoiningInForward(Joining):
    """In a forward, joined gathers are freed as if this rank had used the units."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self._passed: FSDPParamGroup | None = None  # the last unit that this rank has passed by

    def _pass_by(self, joined: Collective) -> None:
        """Free the unit that was passed by before, so that those that a rank skips are not in memory together."""
        before, self._passed = self._passed, _group_of(joined)
        if before is None or before is self._passed or before.store.options.any_order:
            return
        if before.residency.is_gathering:
            before.release(before.after_forward)

    def end(self, run: JoiningPass) -> None:
        """Leave the marked groups in one state on all ranks; the next pass, and backward, depend on it.

        Some were gathered for the others' sake, or ahead of a use that did not come; or kept, since it might come
        again.
        """
        for group in self.gathered:
            if group.residency.is_gathering or (group.store.options.any_order and not group.is_entered):
                group.release(group.after_forward)  # as on ranks that used it


class JoiningInBackward(Joining):
    """In a backward, reductions are joined, too."""

    def launch(
        self, run: JoiningPass, collective: Collective, start: Callable[[], None], *, optional: bool = False
    ) -> bool:
        """Launch as any pass does, but leave a reduction for later if the other ranks are known to launch it later.

        Ranks that skip a unit meet the others in another order. The reduction is launched in its turn, or when the
        backward ends.
        """
        optional = optional or (collective.kind == "reduce" and not run.over)
        return super().launch(run, collective, start, optional=optional)

    def _can_join_reduction(self, run: JoiningPass, group: FSDPParamGroup, planned: bool) -> bool:
        """Return whether gradients of ``group``, or zeros, may leave before this rank would send them by itself.

        If ranks have ``planned`` it, the group's own backward must be over on this rank, or not come.
        """
        reduced = group.phases.phase is Phase.REDUCED
        if not group.store.options.reduce_unused:  # all ranks use it: its gradients were left for later
            return not group.is_reduced and (run.over or reduced)
        if run.over and not group.is_reduced:
            return True
        done = run.over or not planned or reduced or not group.gradients.will_come()
        return not group.is_entered and done  # also again: others may use it several times


class JoiningInSynchronization(Joining):
    """In a synchronization nothing is joined: all ranks have left gradients of the same groups unreduced."""

    def can_join(self, run: JoiningPass, collective: Collective, planned: bool) -> bool:
        """Return False."""
        return False
