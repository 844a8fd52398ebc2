"""What the states under one root share: lanes, chunks in flight, recorded orders, and the end of a backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fsdp2._torch.autograd import queue_end_of_backward
from fsdp2._torch.modes import dispatch_modes
from fsdp2._trace import emit, refresh, span
from fsdp2.comm.collectives import chunks_in_flight
from fsdp2.comm.streams import Lanes, Retained
from fsdp2.engine.evaluation import Evaluation
from fsdp2.engine.finalization import Finalization
from fsdp2.engine.handles import GradientReduction
from fsdp2.engine.lifecycle import Phase, Residency
from fsdp2.engine.observer import Observer, Step, make_observer
from fsdp2.engine.order import BackwardOrder, ForwardOrder

if TYPE_CHECKING:
    from fsdp2.engine.group import FSDPParamGroup
    from fsdp2.engine.unit import FSDPState

__all__ = ["CommContext", "RootContext"]


class CommContext:
    """What communicates: the lanes, and the gradient chunks in flight. Several roots may share one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lanes = Lanes(device)
        self.reductions = Retained(self.lanes)
        self.finalizing: GradientReduction | None = None  # started by finalize_backward and not waited for

    @property
    def reduce_scatter_max_input_buffers(self) -> int:
        """How many chunks of gradients may be in flight, by the name other libraries read."""
        return self.reductions.limit

    @property
    def _last_post_reduce_events(self) -> dict[torch.Stream, torch.Event]:
        """Reductions that the next forward has to wait for, by torch's name: none, the end of a backward does that."""
        return {}


class RootContext:
    """One per root module. ``all_states`` are the states under it in ``named_modules`` order, the root's first."""

    def __init__(self, comm: CommContext, state: FSDPState) -> None:
        self.comm = comm
        self.all_states: list[FSDPState] = [state]
        self._order: ForwardOrder[FSDPParamGroup] = ForwardOrder()
        self.forward_order = self._order  # that the running forward follows and records
        self.backward_order: BackwardOrder[FSDPParamGroup] = BackwardOrder()
        self.forward_root: FSDPState | None = None
        self.outer_modes = 0  # dispatch modes around the pass that runs; others may belong to a checkpoint inside it
        self.is_last_backward = True
        self.finalization = Finalization()
        # The running backward is differentiable: what it saves are views of full parameters, which a later one reads.
        self.creates_graph = False
        self.post_optim_event: torch.Event | None = None
        self.observer: Observer | None = None  # of the passes under this root
        self._participated: dict[FSDPParamGroup, None] = {}  # that a step was taken with and that were not used
        self.evaluation: Evaluation | None = None  # since the last step that all ranks took
        self._shown = True  # to the observer, or there is nothing to show yet
        self._end_queued = False
        self._partial_end_queued = False

    @property
    def groups(self) -> list[FSDPParamGroup]:
        """Every group under the root, each once."""
        return list(dict.fromkeys(group for state in self.all_states for group in state.groups))

    @property
    def reducing(self) -> str:
        """How many groups send their gradients, for ranks to compare."""
        reduce = sum(group.options.reduce_gradients for group in self.groups)
        all_reduce = sum(group.options.all_reduce_gradients for group in self.groups)
        return f"{reduce} reduce, {all_reduce} all-reduce"

    @property
    def goes_on(self) -> bool:
        """Whether more backwards on the recorded forwards may follow the one that runs or comes next."""
        return self.finalization.active or not self.is_last_backward

    @property
    def runs_alone(self) -> bool:
        """Whether a forward that starts now may be run by one replica while the others do something else."""
        return not torch.is_grad_enabled() and any(group.mesh.replicate.size > 1 for group in self.groups)

    def observe(self, error: RuntimeError | None) -> None:
        """Show the units to an observer, as soon as all ranks come here.

        Raises:
            RuntimeError: the observer refuses them, or passes ``error`` on.
        """
        self._shown = False
        if not self.runs_alone:
            self.observer = make_observer(self, error)
            self._shown = True

    def goes_on_with(self, group: FSDPParamGroup) -> bool:
        """Whether the gather of ``group`` in flight is for a backward yet to come.

        Where ranks may skip the group, all drop the gather after each backward: some have freed the parameters by then.
        """
        more = not self.finalization.active and not self.is_last_backward
        return more and group.gathering is not None and not group.options.reduce_unused

    def participate(self, step: Step) -> bool:
        """Take a step with a group that only other ranks use; whether that is possible now."""
        group = step.group
        if group is None or not group.options.reduce_unused:
            return False
        if step.kind == "gather":
            if group.lifecycle.residency in (Residency.GATHERING, Residency.UNSHARDED):
                return False
            self._participated[group] = None
            group.unshard()
        elif group.lifecycle.phase in (Phase.IDLE, Phase.REDUCED):
            group.post_backward()
        else:
            return False
        return True

    def forget_steps(self) -> None:
        """Somebody asked for another order of gathers: the ranks agree anew on what follows what.

        A prefetch that comes earlier than it did would be left for later otherwise, as one that other ranks may not do.
        """
        if self.observer is not None:
            self.observer.forget()

    def limit_reductions(self) -> None:
        """Let as many chunks be in flight as the group that asked for most; they share one window."""
        groups = self.groups
        asked = [group.options.reduce_inputs for group in groups if group.options.reduce_inputs is not None]
        if not asked:
            sizes = [group.store.full_bytes // max(group.options.sizes.chunk_bytes, 1) for group in groups]
            asked = [chunks_in_flight(group.mesh.first, chunks) for group, chunks in zip(groups, sizes)]
        self.comm.reductions.limit = max(asked, default=1)

    def begin_forward(self, state: FSDPState) -> bool:
        """Start a forward in which ``state`` is the outermost; whether one had not started already.

        Raises:
            RuntimeError: an earlier backward raised and was not followed by ``reset_iter_state``, or gradients that
                ``finalize_backward`` started to reduce were not waited for.
        """
        if self.comm.finalizing is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before forward: call wait() on what "
                "finalize_backward(async_op=True) returned"
            )
        if self.forward_root is not None and self.forward_root is not state and not state.is_root:
            return False
        if not self._shown:
            self.observe(None)
        alone, broke_off = self.runs_alone, self.forward_root is not None
        self._leave_evaluation(alone=alone)
        for group in self.groups:
            if group.lifecycle.phase is Phase.BACKWARD:
                raise RuntimeError(
                    f"{group.name or 'the root'}: forward starts, but its last backward did not end (it raised?); "
                    "call reset_iter_state() on the root module first; that backward's gradients are discarded"
                )
            group.begin_iteration(broke_off=broke_off)
        refresh()
        emit("root_pre_forward", "")
        self.forward_root, self.outer_modes = state, dispatch_modes()
        self._end_queued = self._partial_end_queued = False
        self.forward_order = self._order if self.evaluation is None else self.evaluation.order
        self.forward_order.begin()
        if self.observer is not None and alone:
            self.observer.suspend()
        elif self.observer is not None:
            self.observer.begin("forward" if torch.is_grad_enabled() else "evaluation", outermost=True)
        event, self.post_optim_event = self.post_optim_event, None
        self.comm.lanes.gather.wait(event or self.comm.lanes.compute.event())
        return True

    def _leave_evaluation(self, *, alone: bool) -> None:
        if alone and self.evaluation is None:
            self.evaluation = Evaluation(self.groups)
        elif not alone and self.evaluation is not None:
            self.evaluation.leave(self.groups)
            self.evaluation = None

    def end_forward(self) -> None:
        """The outermost forward is over: gathers that nobody came to use are dropped."""
        self._end_observed(release=True)
        self.forward_root = None
        for group in self.groups:
            group.abandon_gather()

    def _end_observed(self, *, release: bool) -> None:
        if self.observer is not None:
            self.observer.end()
        for group in self._participated if release else ():
            group.release()
        self._participated.clear()

    def queue_end(self) -> None:
        """Have ``end_backward`` run when the running backward is done, once."""
        if not self._end_queued:
            self._end_queued, self.outer_modes = True, dispatch_modes()
            self._leave_evaluation(alone=False)
            self.finalization.begin_backward()
            if self.observer is not None:
                more = "" if self.is_last_backward else ", more to come"
                self.observer.begin(f"backward ({self.reducing}{more})", outermost=False)
            queue_end_of_backward(self.end_backward)

    def queue_partial_end(self) -> None:
        """Have the gradients of a backward through a lone member of a grouped call be there when it is done."""
        if not self._end_queued and not self._partial_end_queued:
            self._partial_end_queued = True
            queue_end_of_backward(self._end_partial_backward)

    def _end_partial_backward(self) -> None:
        self._partial_end_queued = False
        self.comm.reductions.finish()
        for group in self.groups:
            if group.lifecycle.phase is Phase.REDUCED:
                group.lifecycle.enter("end_backward")

    def end_backward(self) -> None:
        """Reduce what is left (groups whose inputs needed no gradient, groups not used) and wait for all of it.

        Where the caller ends backwards, both are left to ``finalize_backward``.
        """
        self._end_queued = False
        deferred = self.finalization.active
        with span("root_post_backward", ""):
            if self.observer is not None:
                self.observer.ending()
            for state in self.all_states:
                for group in reversed(state.groups):
                    done = group.lifecycle.phase is Phase.REDUCED and not group.gradients.left_over()
                    if not self.finalization.defer(group, done=done) and not done and not group.lifecycle.lent:
                        group.post_backward()
            self._end_observed(release=False)
            for group in self.groups if deferred else ():
                group.lifecycle.enter("defer_backward")
            if not deferred:
                self.finish_backward()
            self.comm.lanes.compute.leave_backward()
            self.forward_root = None
            for state in self.all_states:
                state.members_to_run.clear()
        emit("root_post_backward", "")

    def finish_backward(self) -> None:
        """Wait for what was reduced; after the last backward on the recorded forwards, forget these."""
        last = self.finalization.active or self.is_last_backward
        for group in self.groups:
            group.end_backward(drop_gather=last)
        self.comm.reductions.finish()
        if last:
            self.backward_order.clear()
            self.finalization.end()

    def reset(self) -> None:
        """Forget the iteration: gathers and reductions in flight, orders, phases, gradients.

        Raises:
            RuntimeError: another root that communicates on the same lanes waits for its gradients.
        """
        if self.comm.finalizing is not None and not self.comm.finalizing.belongs_to(self):
            raise RuntimeError(
                "reset_iter_state while a gradient reduction of another root on the same lanes is in flight; wait for "
                "it, or reset that root first"
            )
        self.comm.finalizing = None
        self.finalization.end()
        self.comm.reductions.abandon()
        self.comm.lanes.compute.leave_backward()
        if self.observer is not None:
            self.observer.abandon()
        self._participated.clear()
        for group in self.groups:
            group.reset()
        for state in self.all_states:
            state.members_to_run.clear()
        self._order.forget()
        self.evaluation = None
        self.backward_order.clear()
        self.forward_root = None
        self._end_queued = self._partial_end_queued = False
