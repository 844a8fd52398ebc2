"""The root of a tree of units: what they share, and what outlives a pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from fsdp2 import _trace
from fsdp2._torch.hooks import clones_before_writes, fakes_results, outside_dynamo, skipped_by_dynamo
from fsdp2._torch.tensors import FakeTensor
from fsdp2.autograd.hooks import ChildList
from fsdp2.comm.collectives import chunks_in_flight
from fsdp2.comm.context import CommContext
from fsdp2.engine.apart import share_again
from fsdp2.engine.backward import BackwardPass, Synchronization
from fsdp2.engine.collective import PassKind
from fsdp2.engine.forward import ForwardPass
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.itinerary import Itinerary
from fsdp2.engine.joining import ranks_may_skip
from fsdp2.engine.observer import Observer, Unobserved, make_observer
from fsdp2.engine.param import Site
from fsdp2.engine.passes import Pass, Unit, backward_runs
from fsdp2.engine.pending import Pending
from fsdp2.engine.phase import Phase
from fsdp2.engine.registry import Registry
from fsdp2.engine.stamp import UNSEEN
from fsdp2.policies import GradientReductionHandle

__all__ = [
    "GradientReduction",
    "RootContext",
    "are_copied",
    "kind_of_forward",
    "running_roots",
    "with_outdated_portions",
]

U = TypeVar("U", bound=Unit)

_running: Registry[RootContext[Any]] = Registry()  # roots whose forward may be under way

_WIDE = 4
"""A last matrix with at least this many outputs per input makes a model "wide": its loss takes more memory than a unit,
and enough time to gather one."""


class RootContext(Generic[U]):
    """One per root. ``all_states`` (torch's name) are the units under it in ``named_modules`` order, its own first."""

    name = ""  # in events

    def __init__(self, device: torch.device, unit: U) -> None:
        self.comm = CommContext(device)
        self.all_states: list[U] = [unit]
        self.itinerary: Itinerary[FSDPParamGroup] = Itinerary()
        self._pending = Pending()
        self.forward: ForwardPass | None = None  # the pass that runs
        self.backward: BackwardPass | None = None
        self.outer_modes = 0  # the number of dispatch modes around the latest forward
        # Gradients that backwards left are being reduced. After an interrupt some are missing, so the next pass raises.
        self.synchronizes = False
        self.is_last_backward = True
        self.manual = False  # the caller ends backwards
        self.post_optim_event: torch.Event | None = None
        self.observer: Observer = Unobserved()  # of the passes under this root
        self.observer_within_replica: Observer = Unobserved()  # of those that one replica may run alone
        self._ends_wide = False  # with a projection to a vocabulary, say; known from the first forward on
        self._compared = False  # whether the ranks have compared their units
        self._children: ChildList | None = None  # below the root's module, known from the first forward on

    @property
    def groups(self) -> list[FSDPParamGroup]:
        """Every group under the root, each once."""
        return list(dict.fromkeys([group for unit in self.all_states for group in unit.groups]))

    @property
    def groups_backward(self) -> list[FSDPParamGroup]:
        """Every group under the root, each once, in about the order in which a backward meets them."""
        return list(dict.fromkeys([group for unit in reversed(self.all_states) for group in reversed(unit.groups)]))

    @property
    def pending(self) -> Pending:
        """The record for the backwards on the forward that runs, or on those before."""
        return self._pending if self.forward is None else self.forward.pending

    @property
    def running(self) -> Pass | None:
        """The innermost pass that runs."""
        return self.backward or self.forward

    def take_over(self, units: list[U]) -> None:
        """Be the root of ``units`` from now on, whose parameters are named as in the module of the first of them."""
        self.all_states, module = units, units[0].modules[0]
        self._name_groups(module)
        self._children = ChildList(module)
        for group in self.groups:
            group.use_comm(self.comm)

    def _name_groups(self, module: nn.Module) -> None:
        """Name groups and their parameters as ``module``, the root's, names them."""
        # By place, not by parameter: somebody may have put others there (functional_call does).
        modules = module.named_modules()
        sites = [(Site(inner, name), prefix) for prefix, inner in modules for name, _ in inner._parameters.items()]
        names = {site: (i, f"{prefix}.{site.name}".lstrip(".")) for i, (site, prefix) in enumerate(sites)}
        self._ends_wide = self._last_matrix_widens([site for site, _ in sites])
        for unit in self.all_states:
            for group in unit.groups:
                group.set_names(unit.name, names)

    def _last_matrix_widens(self, sites: list[Site]) -> bool:
        """Return whether the last matrix at ``sites`` has far more outputs than inputs, like that of a vocabulary."""
        params = {site: param for group in self.groups for param in group.params for site in param.sites}
        shapes = [params[site].spec.dtensor.shape for site in reversed(sites) if site in params]
        rows, columns = next((shape for shape in shapes if len(shape) == 2), (0, 1))
        return rows >= _WIDE * columns

    def notice_inserted(self) -> None:
        """Count a registration if modules were inserted below the root since it was last asked."""
        if self._children is not None:
            self._children.look()

    def forget_units(self, removed: Iterable[U]) -> None:
        """Forget the routes of passes, on which groups may be that are no longer below the root.

        Those of ``removed`` units give back what they keep for a backward, which may never come: no pass of this root
        frees them any more. If one comes, it gathers them again.
        """
        self.itinerary = Itinerary()
        self.pending.forget_route()
        self.observer.forget_units()
        self.observer_within_replica.forget_units()
        below = set(self.groups)
        for group in [group for unit in removed for group in unit.groups]:
            if group not in below and group.store.options.unshard_in_backward:
                group.residency.unkeep()
                group.residency.lower()

    def use_comm(self, comm: CommContext) -> None:
        """Let all groups communicate on ``comm`` from now on, after what they have in flight."""
        if comm is not self.comm:
            self.comm.reductions.finish()  # later waits for gradients look at the new lanes alone
        self.comm = comm
        self.limit_communication()
        for group in self.groups:
            group.use_comm(comm)

    def refuse_unfinished(self, function: str) -> None:
        """Refuse ``function`` while a reduction that ``finalize_backward`` started is not waited for.

        Raises:
            RuntimeError: one is not.
        """
        if self.comm.finalizing is not None:
            raise RuntimeError(
                f"{function}: a gradient reduction is under way on the present streams; expected a call between steps. "
                "Call wait() on what finalize_backward(async_op=True) returned first"
            )

    def limit_communication(self) -> None:
        """Let as many chunks of gradients be in flight as any group asked for.

        By default the backend decides, within the bytes of one group's gradients: those of a compiled block
        leave at once, and if communication is slow, compute goes on to the next unit meanwhile. If several roots share
        ``comm``, the largest limits hold.
        """
        groups = self.groups
        asked = [group.store.options.reduce_inputs for group in groups if group.store.options.reduce_inputs is not None]
        units = max(asked, default=1)
        chunks = asked or [chunks_in_flight(group.mesh.first_axis) for group in groups]
        largest = max((group.store.full_bytes for group in groups), default=0)
        self.comm.set_limits(self, max(chunks, default=1), units, largest)

    # ---- the observer ----

    @property
    def runs_alone(self) -> bool:
        """True if a forward that starts now may be run by one replica while the others do something else.

        Not with units that some ranks skip: the ranks of a replica have to choose together what they gather, and they
        do so with all others.
        """
        if torch.is_grad_enabled() or ranks_may_skip(self.groups):
            return False
        return are_copied(self.groups)

    def observe(self, error: Exception | None, kind: PassKind) -> None:
        """Make the observers, which compare the units of the ranks; the first pass is of ``kind``.

        If one replica may run that pass alone, its ranks are compared now, and those of all replicas later.

        Raises:
            RuntimeError: an observer refuses them.
            Exception: the ``error`` of this rank, which the observers have passed on.
        """
        self._compared = False
        alone = self.runs_alone
        # Before that of all ranks, so that a rank which evaluates here meets the others of its replica.
        told = error if alone else None
        self.observer_within_replica = make_observer(self, kind, told, within_replica=True)
        if not alone:
            self._observe_all(error, kind)

    def _observe_all(self, error: Exception | None, kind: PassKind) -> None:
        self.observer = make_observer(self, kind, error)
        self._compared = True
        for group in self.groups:
            group.initial = None  # it would keep shards in memory that are replaced later

    def observer_by_hand(self, units: list[U], kind: PassKind, *, alone: bool) -> Observer:
        """Return the observer of gathers between passes; before the first forward, of what the caller gathers first.

        ``alone``: one replica may gather while the others do something else.
        """
        if alone:
            return self.observer_within_replica
        # Before the first forward nobody has listed the units below; it will list all of them anew.
        self.all_states += [unit for unit in units if unit not in self.all_states]
        if not self._compared:
            self.observe(None, kind)
        return self.observer

    def compares(self, *, alone: bool) -> bool:
        """Return whether ranks that do not do the same raise in a pass that one replica may run ``alone``, or not."""
        return not isinstance(self.observer_within_replica if alone else self.observer, Unobserved)

    def options_changed(self, setter: str) -> None:
        """Note that ``setter`` has changed an option that must be equal on all ranks.

        They compare it before the next pass, and learn its collectives anew.
        """
        self.observer.forget(setter)
        self.observer_within_replica.forget(setter)

    # ---- forward ----

    def begin_forward(self, unit: U) -> ForwardPass:
        """Return the forward pass that ``unit`` enters: the one that runs, or a new one in which it is the outermost.

        Raises:
            RuntimeError: an earlier backward raised and was not followed by ``reset_iter_state``, gradients that
                ``finalize_backward`` started to reduce were not waited for, or a dispatch mode does not go with it.
        """
        earlier = self.forward
        # The unit that began the pass, or the root, called again: an interrupt has left that pass. (A call of a module
        # inside its own call does not come here.)
        if earlier is not None and earlier.outermost is not unit and self.all_states[0] is not unit:
            return earlier
        share_again()
        self._check_last_iteration_ended()
        self._refuse_old_values()
        self._check_modes()
        alone, kind = self.runs_alone, kind_of_forward()
        if not self._compared and not alone:
            self._observe_all(None, kind)
        # A forward that is still there was interrupted (KeyboardInterrupt), which no hook reports.
        if earlier is not None:
            self._leave(earlier)
            for group in earlier.groups:
                group.residency.leave_to_caller(kept=earlier.trains)
            if not earlier.alone:
                self.itinerary.break_off()
        aborted = earlier is not None and earlier.trains  # without gradients it has kept nothing
        observer = self.observer_within_replica if alone else self.observer
        pending = self._pending if torch.is_grad_enabled() else Pending(self._pending)
        # By unit, because a forward of another one goes another way.
        route = self.itinerary.begin(f"{kind.name} of {unit.name}", alone=alone)
        # Not if the program named an event behind which it writes to no shard.
        follows = self.comm.lanes.on_streams and self.post_optim_event is None
        run = ForwardPass(self.groups, observer, unit, route, pending, alone=alone, follows_compute=follows)
        self.outer_modes = run.outer_modes
        for group in run.groups:
            group.begin_forward_pass(run, aborted=aborted)
        # Not yet those of groups that may be updated first.
        outdated = [group for group in with_outdated_portions(run.groups) if not route.comes_late(group)]
        kind = kind.with_portions(self.numbers_of(outdated))
        self.forward, self.backward = run, None
        _running.add(self)
        _trace.refresh()
        if _trace.recording:
            _trace.emit("root_pre_forward", self)
        if earlier is not None:
            earlier.observer.abandon()
        run.begin(kind)
        event, self.post_optim_event = self.post_optim_event, None
        self.comm.lanes.gather_after_compute(event)  # gathers read the shards that compute, or an optimizer, wrote
        for group in outdated:  # all of them at once: the replicate axis may be slow, and portions stay anyway
            group.residency.gather_portions(run.launch)
        if route.known is None:  # nobody knows yet which of them the forward updates first, as a teacher is
            for group in outdated:
                group.residency.before_write()
        return run

    def begin_forward_in_method(self) -> None:
        """Record and compare what follows as a separate pass: a registered method (``generate``) calls forward again.

        As one pass it would have as many collectives as there are tokens, in which ranks recognize nothing. What is in
        memory stays, because the method's own parameters are in use. A forward with gradients remains one pass, as
        backward will come on all of it. ``generate`` of transformers switches gradients off itself, so only now it is
        known whether this is one.
        """
        run = self.forward
        assert run is not None
        run.trains = torch.is_grad_enabled() and run.pending is self._pending
        if not run.trains:
            if run.route.in_method:
                self.itinerary.end(run.route, remembered=run.is_remembered)
            kind = PassKind("evaluation in a method")
            run.end_part(self.itinerary.begin(kind.name, alone=run.alone, in_method=True))
            run.begin(kind)

    def numbers_of(self, groups: Iterable[FSDPParamGroup]) -> tuple[int, ...]:
        """Return the numbers by which all ranks know ``groups``, in ascending order."""
        wanted = set(groups)
        return tuple(number for number, group in enumerate(self.groups) if group in wanted) if wanted else ()

    def _check_last_iteration_ended(self) -> None:
        self._check_last_backward_ended("forward starts")
        if self.comm.finalizing is not None:
            raise RuntimeError(
                "The previous gradient reduction must be waited on before forward: call wait() on what "
                "finalize_backward(async_op=True) returned; after an interrupt, call reset_iter_state() on the root "
                "module"
            )

    def _refuse_old_values(self) -> None:
        """Raise RuntimeError if an earlier forward computed with old values, as the device has told by now."""
        if names := self.comm.checks.failed():
            raise RuntimeError(
                f"{', '.join(names[:8])}: an earlier forward computed with old values; expected those of the sharded "
                f"parameter, which the program wrote between its gather and its use, {UNSEEN}. Call reshard() on the "
                "unit of the parameter after such a write, or write with in-place methods under torch.no_grad(), and "
                "resume from a checkpoint that was saved before the first such step"
            )

    def _check_modes(self) -> None:
        """Raise RuntimeError inside a dispatch mode that would leave wrong values in memory, or read what was freed."""
        if clones_before_writes() and torch.is_grad_enabled():
            freed = next((group for group in self.groups if group.after_forward is not False), None)
            if freed is not None:
                raise RuntimeError(
                    f"{freed.name or 'the root'}: forward inside torch.autograd.graph.allow_mutation_on_saved_tensors, "
                    "which may copy saved full parameters when forward has freed them; expected units that stay in "
                    "memory until backward. Call set_reshard_after_forward(False) on the root module before the "
                    "forward, or clone what you change in place and leave that block"
                )
        if fakes_results():
            params = [param for group in self.groups for param in group.params]
            real = next((param for param in params if not isinstance(param.local, FakeTensor)), None)
            if real is not None:
                raise RuntimeError(
                    f"{real.name}: forward inside FakeTensorMode, which gathers nothing, so that later forwards would "
                    "compute with memory that nobody wrote; expected fake parameters. Leave the mode, or call "
                    "fsdp2.forecast in a process of its own, which builds the model with fake tensors"
                )

    def _check_last_backward_ended(self, starts: str) -> None:
        inside = next((group for group in self.groups if group.phases.in_backward), None)
        if inside is not None or self.synchronizes or (self.backward is not None and self.backward.started):
            raise RuntimeError(
                f"{inside.name if inside is not None and inside.name else 'the root'}: {starts}, but its last backward "
                "did not end (it raised?), so units hold gradients of that iteration; call reset_iter_state() on the "
                "root module first; that backward's gradients are discarded"
            )

    def end_forward(self) -> None:
        """End the forward pass: the outermost forward is over."""
        run = self.forward
        assert run is not None
        run.end()
        self.forward = None
        self.comm.checks.end_forward()
        if not run.trains:  # the host may write to shards from here on; else it may from the end of backward on
            self.comm.copies.end()
        self.itinerary.end(run.route, remembered=run.is_remembered, trains=run.trains, ended_with=run.ended_with)
        if run.trains:
            self.pending.end_forward(run.used_by_some, run.stayed)

    def break_off_forward(self) -> None:
        """End the forward that runs, because an exception has left it; the caller may handle that and go on.

        Gathers in flight stay until the next forward starts. To wait for them here would keep the exception from its
        handler until other ranks have started them too.
        """
        run = self.forward
        assert run is not None
        self.forward = None
        self._leave(run)
        for group in run.groups:
            group.break_off_forward(run, trains=run.trains)
        run.observer.abandon()
        if not run.alone:
            self.itinerary.break_off()

    # ---- backward ----

    def enter_backward(self) -> BackwardPass:
        """Return the backward pass that runs; a recomputation may be the first that is heard of it."""
        if self.backward is None:
            # Inside an evaluation that one replica runs alone, its backward is its own business as well.
            observer = self.observer if self.forward is None else self.forward.observer
            self.backward = BackwardPass(self.groups, observer)
            self.backward.in_forward = self.forward is not None
        return self.backward

    def start_backward(self) -> BackwardPass:
        """Return the backward pass that runs, which ends when autograd's backward does."""
        run = self.enter_backward()
        if run.started:
            if run.broke_off:
                self._check_last_backward_ended("a backward starts")
            return run
        for group in run.groups:
            if group.store.borrows:  # an evaluation may have computed with other weights since the forward
                group.residency.reconcile(lasting=False)
        # With manual finalization the caller frees what was gathered ahead.
        run.start(more_follow=not self.is_last_backward and not self.finalizes_manually)
        _trace.refresh()
        if self.forward is None:  # another backward will come on a forward that still runs
            self.pending.manual = self.finalizes_manually
        more = "" if self.is_last_backward else ", more to come"
        run.begin(self._backward_kind("backward", more))
        run.end_with_autograd(partial(self.end_backward, run))
        return run

    def _backward_kind(self, name: str, more: str = "") -> PassKind:
        """Return what ranks compare of a backward, and what decides which collectives it launches.

        That is which groups send gradients, which units it meets that some ranks skip, and which are in memory.
        """
        groups = self.groups
        reduce = _how_many([group.store.options.reduce_gradients for group in groups])
        all_reduce = _how_many([group.store.options.all_reduce_gradients for group in groups])
        gathered = [group for group in self.pending.stayed if group.mesh.shard.size > 1]  # by a collective
        text = f"{reduce} reduce, {all_reduce} all-reduce{more}"
        # Without units that ranks may skip, forwards that launch no collective need not be as many on all ranks.
        forwards = self.pending.forwards if ranks_may_skip(groups) else 0
        return PassKind(name, text, self.numbers_of(self.pending.used), self.numbers_of(gathered), forwards)

    def leave_unstarted_backward(self, run: BackwardPass) -> None:
        """End ``run`` if no backward of this root has started in it, and none will.

        A forward without gradients, inside the backward of another root, is no recomputation: a checkpointed loss may
        ask a teacher.
        """
        if self.backward is run and not run.started and not run.entered:
            self.backward = None

    @skipped_by_dynamo
    def end_backward(self, run: BackwardPass) -> None:
        """Reduce what is left (groups whose inputs needed no gradient, groups not used) and wait for all of it.

        Where the caller ends backwards, both are left to ``finalize``.
        """
        manual = self.finalizes_manually
        groups = run.groups
        if self.forward is not None:
            groups = [group for group in groups if not self._forward_uses(group)]
        ended = set(groups)
        run.over = True
        self.comm.drop_all_postponed()  # backward never needed them
        with _trace.span("root_post_backward", self):
            # In the order of forward: a rank that has skipped units may be here while others are still in their
            # backward. It asks first for what they launch last, and joins what they need before that.
            in_order = [group for unit in self.all_states for group in reversed(unit.groups) if group in ended]
            self._settle(run, self._left_by_backward(in_order, manual=manual))
            for unit in (*run.recomputed, *run.entered):
                unit.forget_calls(run)
            run.recomputed.clear()  # what is left to ``finalize_backward`` refers to the pass
            run.entered.clear()
            if manual:
                for group in groups:
                    group.phases.enter("defer_backward")
                    group.gradients.unreduced.await_finalization()
            else:
                self.await_backward(groups)
            if self.forward is None:
                self.itinerary.end_backward(first_stays=not self._ends_wide, remembered=run.is_remembered)
            # Not earlier: after an interrupt of that wait gradients are missing, and the next forward must find this
            # pass and raise.
            self.backward = None
            self.comm.lanes.compute.leave_backward()
        if _trace.recording:
            _trace.emit("root_post_backward", self)

    def _forward_uses(self, group: FSDPParamGroup) -> bool:
        """Return whether a backward inside a forward leaves ``group`` to that forward.

        The forward computes with it, or has gathered it ahead, and the backward has no gradient of it.
        """
        # Ranks end a backward alike, whichever of them use a unit that may be skipped.
        if group.store.options.reduce_unused or group.gradients.left_over():
            return False
        return group.phases.phase in (Phase.FORWARD, Phase.IDLE)

    @staticmethod
    def _settle(run: Pass, left: Iterable[FSDPParamGroup]) -> None:
        """Launch the reductions that are ``left``, and end ``run``.

        Every pass that reduces ends here: a backward, its finalization, a synchronization. ``_await_reductions`` waits
        for what was launched. Each group is taken from ``left`` in its turn, because before that the rank may join
        what other ranks launch.
        """
        run.join_before_end()
        for group in left:
            run.post_backward(group)
        # Before waiting: an unscheduled pass is compared here, and ranks that differ must not wait for reductions.
        run.end()

    def _left_by_backward(self, groups: Iterable[FSDPParamGroup], *, manual: bool) -> Iterator[FSDPParamGroup]:
        """Yield those of ``groups`` that the end of a backward ends; if ``manual``, note what is left to the caller."""
        for group in groups:
            if group.residency.summoned:
                continue
            reduced, reduces = group.is_reduced, group.store.options.reduce_gradients
            if manual and reduced and reduces:
                self.pending.deferred.pop(group, None)
            elif manual:
                self.pending.deferred[group] = None
            if not reduced and not (manual and reduces):
                yield group

    def _left_to_finalization(self) -> Iterator[FSDPParamGroup]:
        """Yield the groups that backwards have left to the caller; free the others, which they gathered ahead."""
        for group in self.groups_backward:
            if group in self.pending.deferred:
                del self.pending.deferred[group]
                yield group
            elif group.frees_after_backward and not group.residency.summoned:
                group.reshard()  # kept until now because more micro-batches might use it

    def await_backward(self, groups: list[FSDPParamGroup]) -> None:
        """End a backward for ``groups``, and wait for it; after the last one on the recorded forwards, forget these.

        A backward inside a forward is not the last: another will come on that forward.
        """
        last = self.forward is None and (self.is_last_backward or self.finalizes_manually)
        for group in groups:
            group.end_backward_pass(last=last)
        self._await_reductions(groups)
        if last:
            self._pending = Pending()

    def _await_reductions(self, groups: Iterable[FSDPParamGroup]) -> None:
        """Wait for what ``_settle`` launched: then gradients are on the shards of ``groups``."""
        self.comm.reductions.finish()
        self.comm.copies.end()  # the host may write to shards from here on, also if no reduction has made it wait
        for group in groups:
            group.gradients.unreduced.end_finalization()

    # ---- recovery ----

    def reset(self) -> None:
        """Drop the passes: gathers and reductions in flight, orders, phases, unreduced gradients.

        Raises:
            RuntimeError: another root that communicates on the same lanes waits for its gradients, or
                ``summon_full_params`` shows parameters.
        """
        for group in self.groups:
            group.residency.refuse_unended("reset_iter_state")
        for unit in self.all_states:
            unit.reconcile()
            unit.why_no_forward = None  # of a block whose end was interrupted
        finalizing = self.comm.finalizing
        if isinstance(finalizing, GradientReduction) and finalizing.root is not self:
            raise RuntimeError(
                "reset_iter_state while a gradient reduction of another root on the same lanes is in flight; wait for "
                "it, or reset that root first"
            )
        self.comm.finalizing = None
        self.comm.drop_all_postponed()
        self.comm.reductions.abandon(self.groups)
        self.comm.lanes.compute.leave_backward()
        self.observer.abandon()
        self.observer_within_replica.abandon()
        # Before groups: one of these may raise, since what it waits for has failed.
        for run in (self.forward, self.backward):
            if run is not None:
                self._leave(run)
        self.forward = self.backward = None
        self.synchronizes = False
        self._pending = Pending()
        self.itinerary = Itinerary()  # ranks may have stopped at different places
        for group in self.groups:
            group.reset()

    def _leave(self, run: Pass) -> None:
        """Leave a pass that broke off, and forget its calls: they refer to tensors, whose graph refers to units."""
        run.is_running = False
        for unit in self.all_states:
            unit.forget_calls(run)
        run.entered.clear()

    # ---- backwards that the caller ends ----

    @property
    def finalizes_manually(self) -> bool:
        """True if the caller ends the backward that runs, or that comes next."""
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
        self.backward = run = BackwardPass(self.groups, self.observer)
        run.start(more_follow=False)  # so that the next forward finds it if it raises
        with torch.no_grad(), _trace.span("finalize_backward", self):
            run.begin(self._backward_kind("finalization"))
            self._settle(run, self._left_to_finalization())
        # In this order: after an interrupt between the two, the next forward must find one of them and raise.
        reduction = self.comm.finalizing = GradientReduction(self, run)
        self.backward = None
        return reduction

    # ---- backwards that left gradients unreduced ----

    @outside_dynamo
    def synchronize(self, groups: list[FSDPParamGroup]) -> None:
        """Reduce the gradients that backwards left unreduced in ``groups``, as a separate pass."""
        self._check_synchronization(groups)
        left = [group for group in self.groups_backward if group in groups and group.gradients.unreduced]
        if not left:
            return
        run = Synchronization(self.groups, self.observer)
        try:
            with torch.no_grad(), _trace.span("synchronize_gradients", self):
                run.begin(PassKind("synchronization"))
                self.synchronizes = True
                self._settle(run, left)
                self._await_reductions(left)
            self.synchronizes = False
            for group in groups:
                group.residency.forget_portions()
        except BaseException:
            self.observer.abandon()  # the next pass is not a part of this one
            raise

    def _check_synchronization(self, groups: list[FSDPParamGroup]) -> None:
        inside = self.running is not None or self.synchronizes or backward_runs()
        inside |= any(group.is_entered for group in groups)
        if inside:
            raise RuntimeError(
                "synchronize_gradients was called while a forward or backward runs; expected a call between them. Call "
                "it after loss.backward(), or after reset_iter_state() on the root module if that raised"
            )
        if self.comm.finalizing is not None or any(group in self.pending.deferred for group in groups):
            raise RuntimeError(
                "synchronize_gradients: a backward with manual finalization was not ended; call finalize_backward() on "
                "the root module first, and wait() on what it returned"
            )
        for group in groups:
            group.residency.refuse_summoned("synchronize_gradients")

    # ---- checks of finalization ----

    def _check_finalization(self) -> None:
        if self.comm.finalizing is not None:
            raise RuntimeError(
                "finalize_backward: the previous gradient reduction must be waited on before finalizing backward "
                "again: call wait() on what finalize_backward(async_op=True) returned; after an interrupt, call "
                "reset_iter_state() on the root module"
            )
        if not self.finalizes_manually:
            raise RuntimeError(
                "finalize_backward requires manual backward finalization; call set_manual_backward_finalization(True) "
                "on the root before forward"
            )
        if backward_runs() or self.forward is not None:
            # Inside a forward it would free what that forward computes with.
            inside = "it" if backward_runs() else "a forward"
            raise RuntimeError(
                f"finalize_backward must be called after backward completes, and was called inside of {inside}, from a "
                "hook or an autograd function; call it after loss.backward() returned. If a forward was interrupted, "
                "call reset_iter_state() on the root module first"
            )
        self._check_last_backward_ended("finalize_backward was called")
        for group in self.pending.deferred:
            options = group.store.options
            if group.mesh.replicate.size > 1 and options.reduce_gradients and not options.all_reduce_gradients:
                raise RuntimeError(
                    f"{group.name or 'the root'}: finalize_backward requires all-reduce; call "
                    "set_requires_all_reduce(True) before it"
                )


def kind_of_forward() -> PassKind:
    """Return the kind of a forward that starts now."""
    return PassKind("forward" if torch.is_grad_enabled() else "evaluation")


def _how_many(flags: list[bool]) -> str:
    """Return how many of ``flags`` are True, and the numbers of these if not all are."""
    numbers = [str(number) for number, flag in enumerate(flags) if flag]
    return str(len(numbers)) if len(numbers) in (0, len(flags)) else f"{len(numbers)} ({', '.join(numbers)})"


def are_copied(groups: Iterable[FSDPParamGroup]) -> bool:
    """Return whether each replica can gather ``groups`` alone, while the others do something else."""
    meshes = [group.mesh for group in groups]
    # Parameters that are whole on every rank need no gather, and so no other rank.
    need_others = any(mesh.has_portions or (mesh.copies == 1 and mesh.shard.size > 1) for mesh in meshes)
    return not need_others and any(mesh.copies > 1 for mesh in meshes)


def with_outdated_portions(groups: Iterable[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """Return those of ``groups`` that a pass which starts now gathers over the replicate axis."""
    return [group for group in groups if group.residency.portions_outdated]


def running_roots() -> list[RootContext[Any]]:
    """Return the roots whose forward is under way; an interrupt may have left some of these."""
    for root in _running:
        if root.forward is None:
            _running.discard(root)
    return list(_running)


class GradientReduction(GradientReductionHandle):
    """The reductions that one ``finalize_backward`` started."""

    def __init__(self, root: RootContext[Any] | None, run: BackwardPass | None = None) -> None:
        self.root = root
        self._run = run

    def wait(self) -> None:
        """Wait until the gradients are there; once is enough.

        Raises:
            RuntimeError: ``reset_iter_state`` dropped them.
        """
        if self.root is None:
            return
        if self.root.comm.finalizing is not self:
            raise RuntimeError("This gradient reduction was dropped by reset_iter_state; start the iteration anew")
        root = self.root
        # Before anything else: if the wait raises, gradients are missing, and the next forward must find the pass.
        root.backward = self._run
        root.comm.finalizing = None
        self.root = self._run = None
        root.await_backward(root.groups)
        root.backward = None
