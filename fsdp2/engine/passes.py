"""A pass is one forward, one backward or one finalization under one root; what outlives it stays with the root.

A pass is made when the outermost unit enters and holds everything that is true only while it runs. It dies with its
end; recovery drops it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from fsdp2 import _trace
from fsdp2._torch.autograd import graph_task_id, queue_end_of_backward
from fsdp2._torch.hooks import dispatch_modes, outside_dynamo
from fsdp2.autograd.hooks import Inputs
from fsdp2.comm.collectives import chunks_in_flight
from fsdp2.comm.context import CommContext
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.observer import Admit, Observer, Step, make_observer
from fsdp2.engine.order import BackwardOrder, ForwardOrder
from fsdp2.engine.param import Slot
from fsdp2.policies import GradientReductionHandle

__all__ = ["Call", "GradientReduction", "Mode", "Pass", "Pending", "RootContext", "Unit", "backward_runs"]


def backward_runs() -> bool:
    """Whether this is called from inside a backward of autograd, on its thread."""
    return graph_task_id() != -1


class Unit(Protocol):
    """What a root knows of a unit: its name, and the groups it drives."""

    name: str
    groups: list[FSDPParamGroup]


U = TypeVar("U", bound=Unit)


class Mode(Enum):
    """What a forward call of a unit is; settled at its entry."""

    NORMAL = 0
    RECOMPUTED = 1  # inside the unit's own backward: parameters are there or gathered, nothing else happens
    RECURSIVE = 2  # inside a call of the same module, part of which it is


@dataclass
class Call:
    """One forward call of a unit, or of all members of a grouped one, from its entry to its end."""

    mode: Mode
    run: Pass
    depth: int = 0  # of a recursive one: how many calls of the module are on the stack
    members: set[nn.Module] = field(default_factory=set)  # that have not run yet
    first_node: int = 0  # autograd nodes made in it have this number or a higher one


class Pending:
    """What forwards leave for backwards still to come; dropped after the last backward on them."""

    def __init__(self) -> None:
        self.calls: BackwardOrder[FSDPParamGroup] = BackwardOrder()
        # How each of a group's calls will know that backward is through with its inputs.
        self.inputs: dict[FSDPParamGroup, set[Inputs]] = {}
        self.manual: bool | None = None  # whether the caller ends these backwards; settled when the first begins
        self.deferred: dict[FSDPParamGroup, None] = {}  # left to ``finalize_backward``


class Pass:
    """One forward, backward or finalization; an unobserved one is run by one replica alone and leaves no trace."""

    def __init__(self, root: RootContext[Any], kind: str, outermost: Any = None, *, observed: bool = True) -> None:
        self.root = root
        self.kind = kind
        self.outermost = outermost
        self.observed = observed
        self.groups: list[FSDPParamGroup] = root.groups
        self.entered: dict[Any, Call] = {}  # units whose forward is under way
        self.users: dict[FSDPParamGroup, set[Any]] = {}  # of a group that several units share, those that use it now
        self.order: ForwardOrder[FSDPParamGroup] = ForwardOrder(root.known)
        # Under hybrid sharding the replicas train in step: what was in memory before an unobserved pass stays there.
        known = () if observed else [(g, g.kept) for g in self.groups if g.lifecycle.changes("reshard")]
        self.kept = {group: kept for group, kept in known if kept is not None}
        self.modes = dispatch_modes()  # around the pass; others may belong to a checkpoint inside it
        self.creates_graph = False  # the backward is differentiable: what it saves are views of full parameters
        self.is_backward = kind != "forward"
        self.ends = False  # the end of autograd's backward ends it
        self.over = False  # autograd's backward has ended, so no group waits for a gradient any more
        self.observer: Observer | None = root.observer if observed else None
        self.admit: Admit | None = None if self.observer is None else self.observer.before
        self.unseen = not observed and root.observer is not None  # although other passes are observed
        self._participated: dict[FSDPParamGroup, None] = {}  # gathered because other ranks use them

    # ---- steps ----

    def prefetch(self, group: FSDPParamGroup) -> None:
        """Start gathering what is needed later in the pass, unless the observer postpones that."""
        observer, admit = self.observer, None
        if observer is not None:
            if observer.postpones(Step("gather", group)):
                return
            admit = partial(observer.before, optional=True)
        if group.subgroup is not None and not self.is_backward:
            group.drop_stale(unseen=self.unseen)
        group.unshard(False, admit, self.is_backward)

    def participate(self, step: Step) -> bool:
        """Take a step with a group that only other ranks use; whether that is possible now."""
        group = step.group
        if group is None or not group.options.reduce_unused:
            return False
        if step.kind == "gather":
            if group.gathering is not None:  # the others are through with it and need it again
                if self.is_backward:
                    group.abandon_gather()
                else:
                    group.release()
            elif (group.is_idle or self.over) and not group.lifecycle.changes("start_gather"):
                group.reshard()
            if not group.lifecycle.changes("start_gather"):
                return False
            self._participated[group] = None
            group.unshard(False, self.admit, self.is_backward)
        elif group.is_idle or (self.over and not group.is_through):
            self.post_backward(group)
        else:
            return False
        return True

    def enter_shared(self, group: FSDPParamGroup, unit: object) -> bool:
        """Note that ``unit`` uses a group that others drive, too; whether it is the only one now."""
        users = self.users.setdefault(group, set())
        users.add(unit)
        return len(users) == 1

    def leave_shared(self, group: FSDPParamGroup, unit: object) -> bool:
        """Whether nobody uses the group any more, now that ``unit`` does not."""
        users = self.users.get(group, set())
        users.discard(unit)
        return not users

    # ---- forward ----

    def end_forward(self) -> None:
        """The outermost forward is over: gathers that nobody came to use are dropped."""
        root = self.root
        if self.observer is not None:
            self.observer.end()
        for group in self._participated:
            group.release()
        root.forward = None
        for group in self.groups:
            if group.gathering is not None:
                group.abandon_gather()
        if not self.observed:
            self.leave()
        elif self.order.calls:
            root.known = self.order.calls

    def leave(self) -> None:
        """Free what an unobserved pass gathered; what was there before is as before."""
        for group in self.groups:
            if group in self.kept:
                group.kept = self.kept[group]
            elif not group.lifecycle.summoned:
                group.reshard()

    # ---- backward ----

    def queue_end(self) -> None:
        """Have ``finish`` run when the running backward is done, once."""
        if self.ends:
            return
        self.ends, self.modes = True, dispatch_modes()
        _trace.refresh()
        root = self.root
        root.pending.manual = root.finalizes_manually
        if self.observer is not None:
            more = "" if root.is_last_backward else ", more to come"
            self.observer.begin(f"backward ({root.reducing}{more})", outermost=False)
        queue_end_of_backward(self.finish)

    def post_backward(self, group: FSDPParamGroup) -> None:
        """Backward is through with ``group``: free it, unless more backwards need it, and reduce its gradients."""
        root = self.root
        # Where ranks may skip the group, all drop the gather after each backward: some have freed the parameters by
        # then.
        more = not root.is_last_backward and not root.finalizes_manually
        kept = more and group.gathering is not None and not group.options.reduce_unused
        group.post_backward(keep=self.creates_graph or kept, admit=self.admit)

    def finish(self) -> None:
        """Reduce what is left (groups whose inputs needed no gradient, groups not used) and wait for all of it.

        Where the caller ends backwards, both are left to ``RootContext.finalize``.
        """
        root, manual = self.root, self.root.finalizes_manually
        self.over = True
        with _trace.span("root_post_backward", ""):
            if self.observer is not None:
                self.observer.ending()
            for state in root.all_states:
                for group in reversed(state.groups):
                    self._finish_group(group, manual)
            if self.observer is not None:
                self.observer.end()
            root.backward = root.forward = None
            for group in self.groups if manual else ():
                group.lifecycle.enter("defer_backward")
            if not manual:
                root.finish_backward(self.groups)
            root.comm.lanes.compute.leave_backward()
        if _trace.recording:
            _trace.emit("root_post_backward", "")

    def _finish_group(self, group: FSDPParamGroup, manual: bool) -> None:
        through = group.is_through
        if manual and through and group.options.reduce_gradients:
            self.root.pending.deferred.pop(group, None)
        elif manual and not group.lifecycle.summoned:
            self.root.pending.deferred[group] = None
        if not (manual and group.options.reduce_gradients) and not through and not group.lifecycle.summoned:
            self.post_backward(group)


class RootContext(Generic[U]):
    """One per root. ``all_states`` are the units under it in ``named_modules`` order, the root's first."""

    def __init__(self, device: torch.device, unit: U) -> None:
        self.comm = CommContext(device)
        self.all_states: list[U] = [unit]
        self.known: list[FSDPParamGroup] = []  # the order in which the last forward met the groups
        self.pending = Pending()
        self.forward: Pass | None = None  # the pass that runs
        self.backward: Pass | None = None
        self.is_last_backward = True
        self.manual = False  # the caller ends backwards
        self.post_optim_event: torch.Event | None = None
        self.observer: Observer | None = None  # of the passes under this root
        self._shown = False  # to the observer

    @property
    def groups(self) -> list[FSDPParamGroup]:
        """Every group under the root, each once."""
        return list(dict.fromkeys([group for state in self.all_states for group in state.groups]))

    @property
    def running(self) -> Pass | None:
        """The innermost pass that runs."""
        return self.backward or self.forward

    def name_groups(self, module: nn.Module) -> None:
        """Name groups and their parameters as ``module``, the root's, names them."""
        # By place, not by parameter: somebody may have put others there (functional_call does).
        slots = [(Slot(inner, name), prefix) for prefix, inner in module.named_modules() for name in inner._parameters]
        names = {slot: (i, f"{prefix}.{slot.name}".lstrip(".")) for i, (slot, prefix) in enumerate(slots)}
        for unit, group in [(owner, driven) for owner in self.all_states for driven in owner.groups]:
            group.set_names(unit.name, names)

    def use_comm(self, comm: CommContext) -> None:
        """Let all groups communicate on ``comm`` from now on, with as many chunks in flight as any of them asked for.

        Without such a wish it is what suits the backend and the group with the most chunks. On streams these are the
        gradients of the largest group: a compiled block's leave at once, and where communication is what takes long,
        compute goes on to the next unit meanwhile.
        """
        self.comm = comm
        groups = self.groups
        asked = [group.options.reduce_inputs for group in groups if group.options.reduce_inputs is not None]
        if not asked:
            sizes = [group.store.full_bytes // max(group.options.sizes.chunk_bytes, 1) for group in groups]
            asked = [chunks_in_flight(group.mesh.first, chunks) for group, chunks in zip(groups, sizes)]
        comm.reductions.limit = limit = max(asked, default=1)
        comm.reductions.limit_bytes = limit * max((group.store.reduce_bytes for group in groups), default=0)
        comm.largest_bytes = max((group.store.full_bytes for group in groups), default=0)
        for group in groups:
            group.use_comm(comm)

    # ---- the observer ----

    @property
    def reducing(self) -> str:
        """How many groups send their gradients, for ranks to compare."""
        groups = self.groups
        reduce = sum(group.options.reduce_gradients for group in groups)
        all_reduce = sum(group.options.all_reduce_gradients for group in groups)
        return f"{reduce} reduce, {all_reduce} all-reduce"

    @property
    def runs_alone(self) -> bool:
        """Whether a forward that starts now may be run by one replica while the others do something else."""
        return not torch.is_grad_enabled() and any(group.mesh.replicate.size > 1 for group in self.groups)

    def observe(self, error: RuntimeError | None, kind: str = "forward") -> None:
        """Show the units to an observer, as soon as all ranks come here, where a pass of ``kind`` is the first.

        Raises:
            RuntimeError: the observer refuses them, or passes ``error`` on.
        """
        self._shown = False
        if not self.runs_alone:
            self.observer = make_observer(self, kind, error)
            self._shown = True

    def observer_by_hand(self, states: list[U], kind: str) -> Observer | None:
        """The observer of gathers between passes; before the first forward, of what the caller gathers first."""
        self.all_states += [state for state in states if state not in self.all_states]
        if not self._shown:
            self.observe(None, kind)
        return self.observer

    def participate(self, step: Step) -> bool:
        """Take a step with a group that only other ranks use; whether that is possible now."""
        return self.running is not None and self.running.participate(step)

    def options_changed(self, setter: str) -> None:
        """``setter`` has changed what all ranks must be asked for alike: they compare it, and agree anew on the steps.

        A prefetch that comes earlier than it did would be left for later otherwise, as one that other ranks may not do.
        """
        if self.observer is not None:
            self.observer.forget(setter)

    # ---- passes ----

    def begin_forward(self, unit: U) -> Pass:
        """The forward pass that ``unit`` enters: the one that runs, or a new one in which it is the outermost.

        Raises:
            RuntimeError: an earlier backward raised and was not followed by ``reset_iter_state``, or gradients that
                ``finalize_backward`` started to reduce were not waited for.
        """
        running = self.forward
        if running is not None and running.outermost is not unit and self.all_states[0] is not unit:
            return running
        if self.comm.finalizing is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before forward: call wait() on what "
                "finalize_backward(async_op=True) returned"
            )
        if not self._shown:
            self.observe(None)
        if running is not None and not running.observed:
            running.leave()  # it raised
        alone = self.runs_alone
        run = Pass(self, "forward", unit, observed=not alone)
        for group in run.groups:
            group.begin_iteration(aborted=running is not None)
        self.forward, self.backward = run, None
        _trace.refresh()
        if _trace.recording:
            _trace.emit("root_pre_forward", "")
        if self.observer is not None and alone:
            self.observer.suspend()
        elif self.observer is not None:
            self.observer.begin("forward" if torch.is_grad_enabled() else "evaluation", outermost=True)
        event, self.post_optim_event = self.post_optim_event, None
        self.comm.lanes.gather_after_compute(event)
        return run

    def enter_backward(self) -> Pass:
        """The backward pass that runs; a recomputation may be the first that is heard of it."""
        if self.backward is None:
            self.backward = Pass(self, "backward")
        return self.backward

    def finish_backward(self, groups: list[FSDPParamGroup]) -> None:
        """Wait for what was reduced; after the last backward on the recorded forwards, forget these."""
        last = self.is_last_backward or self.finalizes_manually
        for group in groups:
            group.end_backward(drop_gather=last)
        self.comm.reductions.finish()
        if last:
            self.pending = Pending()

    def reset(self) -> None:
        """Drop the passes: gathers and reductions in flight, orders, phases, unreduced gradients.

        Raises:
            RuntimeError: another root that communicates on the same lanes waits for its gradients.
        """
        finalizing = self.comm.finalizing
        if isinstance(finalizing, GradientReduction) and finalizing.root is not self:
            raise RuntimeError(
                "reset_iter_state while a gradient reduction of another root on the same lanes is in flight; wait for "
                "it, or reset that root first"
            )
        self.comm.finalizing = None
        self.comm.reductions.abandon()
        self.comm.lanes.compute.leave_backward()
        if self.observer is not None:
            self.observer.abandon()
        for group in self.groups:
            group.reset()
        self.forward = self.backward = None
        self.pending, self.known = Pending(), []

    # ---- backwards that the caller ends ----

    @property
    def finalizes_manually(self) -> bool:
        """Whether the caller ends the backward that runs, or that comes next."""
        return self.manual if self.pending.manual is None else self.pending.manual

    def set_manual(self, manual: bool) -> None:
        """Let the caller end backwards (True) or the end of autograd's.

        Raises:
            RuntimeError: a backward began, and was neither ended nor reset.
        """
        if manual != self.manual and backward_runs():
            raise RuntimeError(
                "set_manual_backward_finalization cannot change mode during backward, where it was called; call it "
                "before the forward"
            )
        if self.pending.manual is not None and manual != self.pending.manual:
            raise RuntimeError(
                f"set_manual_backward_finalization({manual}) cannot change mode after backward starts, and one that "
                "started has not been ended; call finalize_backward() or reset_iter_state() on the root module first"
            )
        self.manual = manual

    @outside_dynamo
    def finalize(self) -> GradientReduction:
        """Start what the backwards since the last call left to do."""
        self._check_finalization()
        reduction = GradientReduction(self)
        self.comm.finalizing = reduction
        observer, deferred = self.observer, self.pending.deferred
        self.backward = run = Pass(self, "finalization")
        with torch.no_grad(), _trace.span("finalize_backward", ""):
            if observer is not None:
                observer.begin(f"finalization ({self.reducing})", outermost=False)
                observer.ending()
            for group in [group for state in reversed(self.all_states) for group in reversed(state.groups)]:
                if group in deferred:
                    del deferred[group]
                    run.post_backward(group)
                elif group.options.reshard_after_backward and not group.lifecycle.summoned:
                    group.reshard()
            if observer is not None:
                observer.end()
        self.backward = None
        return reduction

    def _check_finalization(self) -> None:
        if self.comm.finalizing is not None:
            raise RuntimeError(
                "finalize_backward: the previous gradient reduction must be waited on before finalizing backward "
                "again: call wait() on what finalize_backward(async_op=True) returned"
            )
        if not self.finalizes_manually:
            raise RuntimeError(
                "finalize_backward requires manual backward finalization; call set_manual_backward_finalization(True) "
                "on the root before forward"
            )
        if backward_runs():
            raise RuntimeError(
                "finalize_backward must be called after backward completes, and was called inside of it, from a hook "
                "or an autograd function; call it after loss.backward() returned"
            )
        for group in self.pending.deferred:
            options = group.options
            if group.mesh.replicate.size > 1 and options.reduce_gradients and not options.all_reduce_gradients:
                raise RuntimeError(
                    f"{group.name or 'the root'}: finalize_backward requires all-reduce; call "
                    "set_requires_all_reduce(True) before it"
                )


class GradientReduction(GradientReductionHandle):
    """The reductions that one ``finalize_backward`` started."""

    def __init__(self, root: RootContext[Any] | None) -> None:
        self.root = root

    def wait(self) -> None:
        """Wait until the gradients are there; once is enough.

        Raises:
            RuntimeError: ``reset_iter_state`` dropped them.
        """
        if self.root is None:
            return
        if self.root.comm.finalizing is not self:
            raise RuntimeError("This gradient reduction was dropped by reset_iter_state; start the iteration anew")
        root, self.root = self.root, None
        root.comm.finalizing = None
        root.finish_backward(root.groups)
