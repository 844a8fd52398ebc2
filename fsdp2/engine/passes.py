"""The base of forward and backward passes, which run under one root and launch their collectives before its observer.

A pass is made when the outermost unit enters a forward, and when the first hook of a backward runs. It holds what is
true only while it runs, and is dropped when it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import nn

from fsdp2._torch.autograd import graph_task_id
from fsdp2._torch.hooks import dispatch_modes
from fsdp2.autograd.boundary import Boundary
from fsdp2.engine.collective import END, Collective
from fsdp2.engine.group import FSDPParamGroup, ranks_may_skip
from fsdp2.engine.observer import Answer, Observer
from fsdp2.engine.phase import Phase

__all__ = ["Call", "CallKind", "Pass", "Unit", "backward_runs"]


def backward_runs() -> bool:
    """Return whether this is called from inside a backward of autograd, on its thread."""
    return graph_task_id() != -1


class Unit(Protocol):
    """A unit, as far as a root has to know one: its name, and the groups it drives."""

    name: str
    groups: list[FSDPParamGroup]

    def reconcile(self) -> None:
        """Take in what others have put on the modules, since that is the truth."""

    def forget_calls(self, run: Pass) -> None:
        """Forget calls that ``run`` has left unended."""


def _may_be_skipped(collective: Collective) -> bool:
    """Return whether ``collective`` is one of a unit that some ranks may skip."""
    return collective.group is not None and collective.group.store.options.reduce_unused


def _cannot_join(collective: Collective, planned: bool) -> bool:
    """Return False."""
    return False


class CallKind(Enum):
    """The kind of a forward call of a unit; it is settled at its entry."""

    NORMAL = 0
    RECOMPUTED = 1  # inside the unit's own backward: parameters are there or gathered, nothing else happens
    RECURSIVE = 2  # inside a call of the same module, part of which it is


@dataclass
class Call:
    """One forward call of a unit, or of all members of a grouped one, from its entry to its end."""

    kind: CallKind
    run: Pass
    boundary: Boundary
    depth: int = 0  # of a recursive one: how many calls of the module are on the stack
    members: set[nn.Module] = field(default_factory=set)  # that have not run yet


class Pass:
    """One pass under a root: a forward, a backward, or a part of one that the caller asks for."""

    in_backward = False
    is_running = True  # until it ends, or breaks off
    in_forward = False  # it is a forward, or lies inside one, which may write to shards
    quietly = False  # the latest use of a group was quiet, as ``itinerary.Stop`` says
    outermost: Any = None  # the unit that a forward entered first

    def __init__(self, groups: list[FSDPParamGroup], observer: Observer) -> None:
        self.groups = groups
        self.observer = observer
        # The latest call of each unit that has not ended. What is left when the outermost ends are grouped calls whose
        # other members did not run, and calls that raised.
        self.entered: dict[Any, Call] = {}
        self.outer_modes = dispatch_modes()  # around the pass; others may belong to a checkpoint inside it
        self._users: dict[FSDPParamGroup, set[Any]] = {}  # of a group that several units share, those that use it now
        self.gathered_skippable: dict[Any, None] = {}  # groups that some ranks may skip; alike on all ranks
        self._launched = 0  # collectives so far
        self._joining: list[FSDPParamGroup] = []  # whose collectives are being launched because other ranks need them
        # Asked for each reduction, so it is found once.
        self._some_skip = ranks_may_skip(groups)

    # ---- collectives ----

    def launch(self, collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
        """Show ``collective`` to the observer and call ``start``, or leave an ``optional`` one for later.

        This is the only place that asks an observer about a collective. If other ranks launch another collective first,
        launch that one first. Returns False if ``collective`` is left for later.
        """
        can_join = self.can_join
        while (answer := self.observer.before(collective, optional=optional, can_join=can_join)) is not Answer.LAUNCH:
            if answer is Answer.LATER:
                return False
            if not self.join(answer):
                can_join = _cannot_join  # the observer has to decide otherwise, or this would never end
            elif not optional and not _may_be_skipped(collective):
                self.pass_by(answer)
        start()
        self._launched += 1
        if collective.kind == "gather" and _may_be_skipped(collective):
            self.gathered_skippable[collective.group] = None
        return True

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Start gathering what is needed later in the pass, unless other ranks gather it only later."""
        group.start_unshard(self.launch, in_backward=self.in_backward, optional=True)
        if self.in_forward:
            group.residency.note_ahead(loud=not self.quietly)

    def end(self) -> None:
        """End the pass. The observer may first have this rank join collectives that other ranks wait for."""
        self.launch(END, lambda: None)
        self.observer.end()

    # ---- units that only other ranks use ----

    def is_done_with(self, group: FSDPParamGroup) -> bool:
        """Return whether this pass will not use ``group`` any more."""
        return not group.is_entered

    def can_join(self, collective: Collective, planned: bool) -> bool:
        """Return whether the pass can launch ``collective`` with a group that this rank does not use at the moment.

        That is possible for units marked with ``set_reduce_scatter_unused_params(True)``. In models with such units it
        is possible for the others too: ranks that skip a unit reach the next ones earlier than those that use it.
        ``planned``: the ranks follow a known pass, which has the collective here and not once more later. Otherwise
        they have just chosen it together, or it follows again.
        """
        group = self._group_of(collective)
        # A join may launch another collective than the expected one, and asking for that again would never end. And
        # nothing that summon_full_params shows is gathered or freed.
        if group is None or group in self._joining or group.residency.summoned:
            return False
        if collective.kind == "gather":
            return self._can_join_gather(group)
        # All ranks launch a "gather over replicas" when their pass begins.
        return collective.kind == "reduce" and self._can_join_reduction(group, planned)

    def _can_join_gather(self, group: FSDPParamGroup) -> bool:
        residency = group.residency
        if not group.store.options.reduce_unused:
            return self._some_skip and residency.needs_gather and group.phases.phase is Phase.IDLE
        if residency.is_gathering:
            # A gather that this rank joined is in flight. The others have used and freed the group, and gather it
            # again: in a backward, or in a forward that frees the group.
            return self.in_backward or group.after_forward is not False
        return residency.needs_gather or self.is_done_with(group)

    def _can_join_reduction(self, group: FSDPParamGroup, planned: bool) -> bool:
        """Return whether gradients of ``group``, or zeros, may leave before this rank would send them by itself."""
        return group.store.options.reduce_unused and not group.is_entered

    def join(self, collective: Collective) -> bool:
        """Launch ``collective``, which ``can_join`` accepts, because other ranks do; return whether one was launched.

        This runs inside ``launch``, before this rank's own collective.
        """
        group, before = self._group_of(collective), self._launched
        assert group is not None
        self._joining.append(group)
        try:
            if collective.kind == "gather":
                self._join_gather(group)
            else:
                self.post_backward(group)
        finally:
            self._joining.pop()
        return self._launched > before

    def pass_by(self, collective: Collective) -> None:
        """Note that ``collective`` was joined on the way to one of a unit that no rank skips, or to the end.

        So this rank has come past the unit of what it joined.
        """

    def _join_gather(self, group: FSDPParamGroup) -> None:
        """Gather ``group``. It stays in flight: nothing here waits for it until it is used or freed."""
        if group.residency.is_gathering and not self.in_backward:
            group.release(group.after_forward)  # the gather joined before ends as on the ranks that used the group
        elif group.residency.is_gathering or not group.residency.needs_gather:
            group.reshard()  # the others freed it after their use, or this collective would not be a gather
        group.start_unshard(self.launch, in_backward=self.in_backward)

    def join_before_end(self) -> None:
        """Launch what other ranks are known to launch before a backward ends; nothing in other passes."""

    def post_backward(self, group: FSDPParamGroup) -> None:
        """Free ``group`` and reduce its gradients."""
        group.post_backward(self.launch)

    @staticmethod
    def _group_of(collective: Collective) -> FSDPParamGroup | None:
        group = collective.group
        assert group is None or isinstance(group, FSDPParamGroup)
        return group

    # ---- groups that several units share, because they tie a parameter ----

    def enter_shared(self, group: FSDPParamGroup, unit: object) -> bool:
        """Note that ``unit`` uses a shared group, and return whether it is the only one now."""
        users = self._users.setdefault(group, set())
        users.add(unit)
        return len(users) == 1

    def leave_shared(self, group: FSDPParamGroup, unit: object) -> bool:
        """Note that ``unit`` uses a shared group no more, and return whether nobody does."""
        users = self._users.get(group, set())
        users.discard(unit)
        return not users
