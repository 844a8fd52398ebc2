"""A forward pass: from the entry of the outermost unit to its end."""

from __future__ import annotations

from typing import Any

import torch

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.itinerary import ForwardRoute
from fsdp2.engine.joining import JoiningInForward
from fsdp2.engine.observer import Observer
from fsdp2.engine.passes import Pass
from fsdp2.engine.pending import Pending

__all__ = ["ForwardPass"]


class ForwardPass(Pass):
    """One forward. One that runs ``alone`` is an evaluation that one replica may run while others do something else."""

    in_forward = True
    joins = JoiningInForward

    def __init__(
        self,
        groups: list[FSDPParamGroup],
        observer: Observer,
        outermost: Any,
        route: ForwardRoute[FSDPParamGroup],
        pending: Pending,
        *,
        alone: bool,
        follows_compute: bool,
    ) -> None:
        """``route`` is what the itinerary expects of a forward like this one, and records.

        ``pending`` is the record for backwards on this forward. ``follows_compute``: at each unit, gathers wait for
        what compute has done, because the program may have written to shards until then.
        """
        super().__init__(groups, observer)
        self.outermost = outermost
        self.alone = alone
        self.trains = torch.is_grad_enabled()  # a method that calls forward may switch them off
        self.pending = pending
        self.route = route
        self.ended_with: FSDPParamGroup | None = None  # the last group whose forward ended and freed it, or would have
        self.stayed: dict[FSDPParamGroup, None] = {}  # for backward, although it is asked to be freed
        self.follows_compute = follows_compute

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Gather ahead as any pass does, after freeing pieces that were made of other shards."""
        if group.residency.is_outdated():
            group.reshard_outdated()
        super().prefetch(group)

    def is_quiet(self, group: FSDPParamGroup) -> bool:
        """Return whether a use of ``group`` here and now is quiet, as ``itinerary.Stop`` says."""
        return self.route.is_quiet(group, trains=self.trains, with_gradients=torch.is_grad_enabled())

    def visit(self, group: FSDPParamGroup, *, quiet: bool, late: bool) -> FSDPParamGroup | None:
        """Note that ``group`` is used, and return the group to gather ahead, if one is known."""
        self.quietly = quiet
        return self.route.visit(group, quiet=quiet, late=late)

    def decide_after(self, group: FSDPParamGroup) -> bool | int:
        """Decide what becomes of ``group`` when its forward ends: freed (True), kept (False), or on so many ranks.

        The unit that forward ends with is the one that backward needs first. Freed and gathered again at once, into the
        memory it has just left, its gather would wait for compute, so it stays from the second iteration on; backward
        would gather it before anything else, so the peak is the same. All ranks must decide alike: units that some
        ranks skip are left out.
        """
        after, options = group.after_forward, group.store.options
        if self.is_quiet(group):
            return True  # before the next use the forward may update it, in ways that no version counter shows
        if self.route.in_method and not self.trains and group in self.outermost.groups:
            return True  # the method ends, and no backward follows, although gradients may be enabled around it
        if not self.trains or group.in_root or options.reduce_unused:
            return after
        freed = after is True and options.unshard_in_backward
        self.ended_with = group if freed else None  # backward begins with one that stays anyway
        if freed and group is self.route.needed_first:
            self.stayed[group] = None
            return False
        return after

    def keeps(self, group: FSDPParamGroup) -> bool:
        """Return whether ``group`` stays until the pass ends, because this rank may use it again, and others not."""
        return group.store.options.any_order and not self.is_quiet(group)

    @property
    def shows_end(self) -> bool:
        """False if it found all that it used in memory: other ranks may run another number of such forwards.

        One that used nothing shows its end: where others gather, no backward follows here that would tell.
        """
        return self.is_remembered or not self.route.stops

    def end_part(self, route: ForwardRoute[FSDPParamGroup]) -> None:
        """End what the observer and the itinerary see as one pass; another part follows, on ``route``."""
        super().end()
        self._begin_part()
        self.route = route

    def end(self) -> None:
        """Free what the pass gathered and nothing holds."""
        super().end()
        for group in self.groups:
            group.end_forward_pass(self, trains=self.trains)
        self.is_running = False
