"""A backward pass: from the first hook that runs in a backward of autograd to its end.

A finalization is the part of a backward that the caller ends with ``finalize_backward``.
"""

from __future__ import annotations

from fsdp2._torch.hooks import dispatch_modes
from fsdp2.autograd.hooks import Inputs
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.order import BackwardOrder
from fsdp2.engine.passes import Pass
from fsdp2.engine.steps import Observer

__all__ = ["BackwardPass", "Pending"]


class Pending:
    """What forwards leave for backwards still to come; dropped after the last backward on them."""

    def __init__(self) -> None:
        self.calls: BackwardOrder[FSDPParamGroup] = BackwardOrder()
        # How each of a group's calls will know that backward needs the group no more.
        self.inputs: dict[FSDPParamGroup, set[Inputs]] = {}
        self.used: dict[FSDPParamGroup, None] = {}  # that some ranks may skip, and some rank has used
        self.kept: dict[FSDPParamGroup, None] = {}  # that stayed in memory because backward needs them first
        self.manual: bool | None = None  # whether the caller ends these backwards; settled when the first begins
        self.deferred: dict[FSDPParamGroup, None] = {}  # left to ``finalize_backward``


class BackwardPass(Pass):
    """One backward, or the finalization of several."""

    in_backward = True

    def __init__(self, groups: list[FSDPParamGroup], observer: Observer) -> None:
        super().__init__(groups, observer)
        self.creates_graph = False  # the backward is differentiable: what it saves are views of full parameters
        self.started = False  # and will end with autograd's backward
        self.over = False  # autograd's backward has ended, so no group waits for a gradient any more
        self._more_follow = False

    def start(self, *, more_follow: bool) -> None:
        """Autograd's backward runs; with ``more_follow`` others on the same forwards may need what it gathers ahead."""
        self.started, self.modes, self._more_follow = True, dispatch_modes(), more_follow

    def is_done_with(self, group: FSDPParamGroup) -> bool:
        """Return whether this pass will not use ``group`` any more."""
        return group.is_idle or self.over

    def can_reduce_unused(self, group: FSDPParamGroup) -> bool:
        """Return whether the gradients of ``group``, or zeros, may leave although this rank's backward is not there."""
        return group.is_idle or (self.over and not group.is_reduced)

    def join_before_end(self) -> None:
        """Take the steps that other ranks are known to take before a backward ends, as far as this rank can."""
        while (step := self.observer.joins_before_end(self.can_join)) is not None:
            self.join(step)

    def post_backward(self, group: FSDPParamGroup) -> None:
        """Backward needs ``group`` no more: free it, unless more backwards need it, and reduce its gradients."""
        # Where ranks may skip the group, all drop the gather after each backward: some have freed the parameters by
        # then.
        ahead = self._more_follow and group.residency.is_gathering and not group.options.reduce_unused
        group.post_backward(self.take, keep=self.creates_graph or ahead)
