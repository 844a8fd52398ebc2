"""Backwards that end when the caller says so: what autograd left undone is kept in mind until ``finalize_backward``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from fsdp2._torch.autograd import graph_task_id
from fsdp2._torch.dynamo import outside_dynamo
from fsdp2._trace import span
from fsdp2.engine.handles import GradientReduction

if TYPE_CHECKING:
    from fsdp2.engine.group import FSDPParamGroup
    from fsdp2.engine.root import RootContext
    from fsdp2.engine.unit import FSDPState

__all__ = ["Finalization"]


class Finalization:
    """Whether the caller ends the backwards of one root, and which groups have something left to do then."""

    def __init__(self) -> None:
        self.manual = False
        self._running: bool | None = None  # ``manual`` as it was when the backwards not ended yet began
        self._deferred: dict[FSDPParamGroup, None] = {}

    @property
    def active(self) -> bool:
        """Whether the caller ends the backward that runs, or that comes next."""
        return self.manual if self._running is None else self._running

    def set_manual(self, manual: bool) -> None:
        """Let the caller end backwards (True) or the end of autograd's.

        Raises:
            RuntimeError: a backward began, and was neither ended nor reset.
        """
        if manual != self.manual and graph_task_id() != -1:
            raise RuntimeError(
                "set_manual_backward_finalization cannot change mode during backward, where it was called; call it "
                "before the forward"
            )
        if self._running is not None and manual != self._running:
            raise RuntimeError(
                f"set_manual_backward_finalization({manual}) cannot change mode after backward starts, and one that "
                "started has not been ended; call finalize_backward() or reset_iter_state() on the root module first"
            )
        self.manual = manual

    def begin_backward(self) -> None:
        """A backward starts; who ends it is settled."""
        self._running = self.active

    def defer(self, group: FSDPParamGroup, *, done: bool) -> bool:
        """Whether what autograd left to do for ``group`` waits for the caller; ``done`` if that was nothing."""
        if not self.active:
            return False
        if done and group.options.reduce_gradients:
            self._deferred.pop(group, None)
        elif not group.lifecycle.lent:
            self._deferred[group] = None
        return group.options.reduce_gradients

    def end(self) -> None:
        """All is done, or dropped."""
        self._running = None
        self._deferred.clear()

    @outside_dynamo
    def run(self, root: RootContext) -> GradientReduction:
        """Start what was left to do."""
        self._check(root)
        reduction = root.comm.finalizing = GradientReduction(root)
        observer = root.observer
        with torch.no_grad(), span("finalize_backward", ""):
            if observer is not None:
                observer.begin(f"finalization ({root.reducing})", outermost=False)
                observer.ending()
            for group in [group for state in reversed(root.all_states) for group in reversed(state.groups)]:
                if group in self._deferred:
                    del self._deferred[group]
                    group.post_backward()
                elif group.options.reshard_after_backward and not group.lifecycle.lent:
                    group.reshard()
            if observer is not None:
                observer.end()
        return reduction

    def _check(self, root: RootContext) -> None:
        if root.comm.finalizing is not None:
            raise RuntimeError(
                "finalize_backward: the previous gradient reduction must be waited on before finalizing backward "
                "again: call wait() on what finalize_backward(async_op=True) returned"
            )
        if not self.active:
            raise RuntimeError(
                "finalize_backward requires manual backward finalization; call set_manual_backward_finalization(True) "
                "on the root before forward"
            )
        if graph_task_id() != -1:
            raise RuntimeError(
                "finalize_backward must be called after backward completes, and was called inside of it, from a hook "
                "or an autograd function; call it after loss.backward() returned"
            )
        for group in self._deferred:
            options = group.options
            if group.mesh.replicate.size > 1 and options.reduce_gradients and not options.all_reduce_gradients:
                raise RuntimeError(
                    f"{group.name or 'the root'}: finalize_backward requires all-reduce; call "
                    "set_requires_all_reduce(True) before it"
                )

    @staticmethod
    def refuse_below(root: FSDPState, states: Iterable[FSDPState]) -> None:
        """Raise RuntimeError where somebody asked to end the backwards of a unit below ``root``."""
        for state in states:
            if state is not root and state.root is not root.root and state.root.finalization.manual:
                raise RuntimeError(
                    "set_manual_backward_finalization must be called on the root FSDP module; it was called on one "
                    f"below {type(root.modules[0]).__name__}, whose forward began here. Call it on that one instead"
                )
