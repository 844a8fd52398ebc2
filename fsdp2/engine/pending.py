"""What forwards leave for the backwards on them: which groups these need, in which order, and what they find."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.itinerary import BackwardRoute

__all__ = ["Pending"]


class Pending:
    """The record that forwards leave for backwards still to come; dropped after the last backward on them.

    An evaluation has one of its own, for backwards inside it (gradients of its input), which ends with it. ``around``
    is then that of the forwards before, with which it shares what outlives it.
    """

    def __init__(self, around: Pending | None = None) -> None:
        self.calls: BackwardRoute[FSDPParamGroup] = BackwardRoute()
        # The groups that backwards will need, and whether no input of their calls requires a gradient.
        self._expected: dict[FSDPParamGroup, bool] = {}
        self._calls_left: dict[FSDPParamGroup, int] = {}  # whose inputs no backward has reached
        self.opaque: set[FSDPParamGroup] = set()  # that have returned what computes with them later
        self.used: dict[FSDPParamGroup, None] = {}  # that some ranks may skip, and some rank has used
        # That stayed in memory because backward needs them first.
        self.stayed: dict[FSDPParamGroup, None] = {} if around is None else around.stayed
        self.forwards = 0  # that have ended
        self.manual: bool | None = None  # whether the caller ends these backwards; settled when the first begins
        # Left to ``finalize_backward``.
        self.deferred: dict[FSDPParamGroup, None] = {} if around is None else around.deferred

    def expect(self, group: FSDPParamGroup, *, inputs_need_none: bool) -> None:
        """Expect a backward through ``group``; ``inputs_need_none`` if no input of the call requires a gradient."""
        self._expected[group] = inputs_need_none and self._expected.get(group, True)
        self._calls_left[group] = self._calls_left.get(group, 0) + 1

    def leave_call(self, group: FSDPParamGroup) -> bool:
        """Note that a backward has reached the inputs of one call of ``group``, and return whether to reduce now.

        Some units send their gradients after the last call. Ranks may call a unit that some skip a different number of
        times. And if a call has returned something opaque, backward comes to what that has computed by no hook: it may
        still do so when it has reached the inputs of a later call. Without a gradient of its inputs, a call counts
        until the end of the backward.
        """
        left = self._calls_left.get(group, 0)
        if left:  # a retained graph reaches a call once more
            self._calls_left[group] = left = left - 1
        return not left or not (group.store.options.reduce_unused or group in self.opaque)

    def expects(self, group: FSDPParamGroup) -> bool:
        """Return whether a backward through ``group`` is still to come."""
        return group in self._expected

    def ends_by_gradients(self, group: FSDPParamGroup) -> bool:
        """Return whether a backward is done with ``group`` when its parameters have their gradients.

        That counts if inputs cannot tell it, because none of them requires a gradient.
        """
        return self._expected.get(group, False) and group.ends_with_its_gradients()

    def record(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Note that a forward has computed with ``groups``, so that backward gathers them ahead."""
        for group in groups:
            self.calls.record(group, self.forwards)

    def forget_route(self) -> None:
        """Forget the order of calls: with it, nothing but gathers ahead is lost."""
        self.calls = BackwardRoute()

    def end_forward(self, used: Iterable[FSDPParamGroup], stayed: Iterable[FSDPParamGroup]) -> None:
        """Note what backward has to know of a forward with gradients."""
        self.used.update(dict.fromkeys(used))
        self.stayed.update(dict.fromkeys(stayed))
        self.forwards += 1
