"""A backward pass: from the first hook that runs in a backward of autograd to its end.

A finalization is the part of a backward that the caller ends with ``finalize_backward``. A synchronization reduces
what backwards left unreduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fsdp2._torch.autograd import queue_end_of_backward
from fsdp2._torch.hooks import dispatch_modes
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.joining import JoiningInBackward, JoiningInSynchronization
from fsdp2.engine.observer import Observer
from fsdp2.engine.passes import Pass

__all__ = ["BackwardPass", "Synchronization"]


class BackwardPass(Pass):
    """One backward, or the finalization of several.

    The first hook that runs in a backward makes it, perhaps in a recomputation (``RootContext.enter_backward``). It is
    ``started`` when a gradient arrives or a unit is entered (``start_backward``), and ``over`` when autograd's backward
    has ended (``end_backward``). A finalization is started at once and never over.
    """

    in_backward = True
    joins = JoiningInBackward

    def __init__(self, groups: list[FSDPParamGroup], observer: Observer) -> None:
        super().__init__(groups, observer)
        self.creates_graph = False  # the backward is differentiable: what it saves are views of full parameters
        self.started = False
        self.recomputed: dict[Any, None] = {}  # units; a checkpoint may stop in the middle of their calls
        self._more_follow = False  # later backwards may use what this one gathers ahead
        self._end: weakref.ref[Callable[[], None]] | None = None  # what autograd calls at the end of its backward

    def start(self, *, more_follow: bool) -> None:
        """Note that autograd's backward runs; with ``more_follow``, later ones may use what it prefetches."""
        self.started, self._more_follow = True, more_follow
        # When a recomputation made the pass, modes that are around the backward alone could not be told from those of
        # its checkpoint.
        self.outer_modes = dispatch_modes()

    def end_with_autograd(self, end: Callable[[], None]) -> None:
        """Call ``end`` when the backward that autograd runs has ended, unless it raises."""
        queue_end_of_backward(end)
        self._end = weakref.ref(end)

    @property
    def broke_off(self) -> bool:
        """True if it started and will not end, because it raised: autograd has dropped the function to call then."""
        return self.started and (self._end is None or self._end() is None)

    @property
    def shows_end(self) -> bool:
        """False if it was to reduce nothing and found in memory what it used, as a forward that shows no end.

        One that was to reduce has sent no gradient where others may send theirs.
        """
        return self.is_remembered or any(group.store.options.reduce_gradients for group in self.groups)

    def post_backward(self, group: FSDPParamGroup) -> None:
        """Reduce the gradients of ``group``, which backward is done with, and free it unless more backwards need it."""
        # If ranks may skip the group, all drop the gather after each backward, because some have freed it already.
        ahead = self._more_follow and group.residency.is_gathering and not group.store.options.reduce_unused
        group.post_backward(self.launch, stays=self.creates_graph or ahead)


class Synchronization(Pass):
    """The reductions that backwards have not made, which the caller asks for between passes."""

    in_backward = True
    joins = JoiningInSynchronization

    def post_backward(self, group: FSDPParamGroup) -> None:
        """Reduce the gradients that backwards have left in ``group``."""
        group.gradients.complete(self.launch)
