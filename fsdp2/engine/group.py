"""A group: parameters that communicate together, and what happens to them around each forward and backward.

It looks down only: it acts when it is called, on the communication context that it was given. Where its parameters are
is the business of its ``Residency``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import _trace
from fsdp2._torch.tensors import set_local_tensor
from fsdp2.comm.context import CommContext
from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.collective import Collective, Launch, launch_unobserved
from fsdp2.engine.gradients import GroupGradients
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import FSDPParam, Site
from fsdp2.engine.phase import Phase, PhaseTracker
from fsdp2.engine.residency import Level, Residency
from fsdp2.engine.stamp import Stamp

__all__ = ["ComputedWith", "FSDPParamGroup", "UsingPass"]


class UsingPass(Protocol):
    """A pass, as far as a group has to know one (``passes.Pass``, whose file imports this)."""

    is_running: bool
    in_backward: bool
    is_compared: bool

    def launch(self, collective: Collective, start: Callable[[], None], *, optional: bool = False) -> bool:
        """Show ``collective`` to the observer and call ``start``, or leave an ``optional`` one for later."""


class ComputedWith:
    """The parameters of a group that one forward with gradients computed with. Its backward needs the same ones.

    Each forward has one of its own: between it and its backward, another forward may have computed with others.
    """

    def __init__(self, group: FSDPParamGroup) -> None:
        self.generation = group.store.generation
        self.shards = [(param, param.sharded, param.values_taken) for param in group.params]

    def refuse_others(self, group: FSDPParamGroup) -> None:
        """Raise RuntimeError unless the ``group``, which has gathered for that backward, has the same parameters."""
        for param, shard, taken in self.shards:
            if param.sharded is not shard or param.values_taken != taken or param not in group.params:
                raise RuntimeError(
                    f"{param.name}: replaced on its module between forward and backward, which would compute the "
                    "gradient of other weights; expected the parameter that forward used. Call reset_iter_state() on "
                    "the root module, start the iteration anew, and replace or tie parameters before its forward or "
                    "after its backward"
                )
        if self.generation != group.store.generation:
            raise RuntimeError(
                f"{group.name or 'the root'}: its parameters were cast, moved or laid out anew between forward and "
                "backward (model.double(), model.to(), set_transfer_sizes(), set_custom_all_gather()), so what the "
                "forward saved is gone; do so before the forward, and call reset_iter_state() on the root module to go "
                "on"
            )

    def forget_shards(self) -> None:
        """Keep no shard alive that is no longer a parameter's."""
        self.shards = []


class FSDPParamGroup:
    """Parameters of one call on one mesh: gathered before use, freed after, their gradients reduced."""

    def __init__(
        self,
        store: ShardStore,
        modules: tuple[nn.Module, ...],
        comm: CommContext,
        notice_backward: Callable[[], None],
        *,
        shared: bool = False,
        initial: tuple[list[float], Stamp] | None = None,
    ) -> None:
        """Make a group of the parameters in ``store``, whose shards ``modules`` or modules below them show.

        Args:
            notice_backward: Is called when autograd finishes a gradient although no backward entered the group.
            shared: Several units use it, because they tie its parameter.
            initial: First values, and a stamp of the shards then. Ranks compare these before the first forward, if the
                shards have not been written; only ``fully_shard`` has whole values to take them from.
        """
        self.store = store
        self.params = params = store.params
        self.modules = modules
        self.mesh = store.mesh
        self.comm = comm
        self.notice_backward = notice_backward
        self.name = ""  # the module's fully qualified name in the root, known from the first forward on
        self.gathered_with = [self]  # the groups of its unit, which are gathered and used together
        self.in_root = False  # it is the root's, which by default stays after forward; known from the first forward on
        self.shared = shared
        self.initial = initial
        self.has_others_below = False  # parameters of other groups, or ignored ones; known from the first forward on
        self.phases = PhaseTracker()
        self.residency = Residency(self, store, comm)
        self.gradients = GroupGradients(self, self.phases, self.mesh.shard, comm, notice_backward)
        self._norms = [param for param in params if param.has_statistics]
        self._used_by: UsingPass | None = None  # the last forward that computed with it
        self.computed_with: ComputedWith | None = None  # that of the last forward with gradients
        for param in params:
            param.group = self

    def __repr__(self) -> str:
        sizes = f"{len(self.params)} parameters, {self.store.shard_bytes} B per rank, {self.store.full_bytes} B full"
        state = f"{self.residency}, {self.phases.phase.name.lower()}"
        return f"FSDPParamGroup({self.name or 'root'}: {state}, {sizes}, {self.mesh.shard.size} ranks)"

    # ---- configuration ----

    def set_names(self, name: str, names: dict[Site, tuple[int, str]]) -> None:
        """Use names relative to the root from now on; ``names`` say how each is called there, and in which order."""
        self.name = self.phases.name = name
        prefix = f"{name}." if name and len(self.modules) == 1 else ""
        for param in self.params:
            own = param.name if param.name.startswith(prefix) else prefix + param.name  # where somebody removed it
            param.name = min((names[site] for site in param.sites if site in names), default=(0, own))[1]

    def use_comm(self, comm: CommContext) -> None:
        """Communicate on ``comm`` from now on."""
        self.comm = self.gradients.comm = comm
        self.residency.use(self.store, comm)
        self.store.note_change()  # chunks depend on the largest unit of the context

    def check_options(self, options: GroupOptions) -> None:
        """Raise RuntimeError if ``options`` move shards while ``summon_full_params`` shows parameters of the group."""
        if options.layout_settings != self.store.options.layout_settings:
            self.residency.refuse_summoned("a change of how parameters are gathered")

    def set_options(self, options: GroupOptions) -> None:
        """Follow ``options``, which ``check_options`` accepts, from now on."""
        if options.layout_settings != self.store.options.layout_settings:
            self.reshard()  # shards move to a new buffer, and with them all that is made of them
        self.store.set_options(options)
        self.residency.follow_options()

    def lazy_init(self) -> None:
        """Take in what happened to the parameters; the first forward calls this, and each gather by hand.

        Raises:
            RuntimeError: parameters are still on the meta device or, when offloading, not on the CPU.
        """
        self.store.check_ties()
        self.residency.adopt()
        if self.residency.needs_gather and any([param.follow_grad_dtype() for param in self.params]):
            self.store.note_change()
        self.store.check_ready()

    def split_off(self, param: FSDPParam) -> FSDPParamGroup:
        """Return a new group of ``param`` alone, which several units share; this group must be sharded."""
        store = self.store.for_params([param])
        alone = FSDPParamGroup(store, self.modules, self.comm, self.notice_backward, shared=True)
        alone.gradients.use_axis(self.gradients.axis)
        alone.gradients.unreduced.take_over(self.gradients.unreduced)
        self.drop(param)
        return alone

    def drop(self, param: FSDPParam) -> None:
        """Give up ``param``, which is another group's from now on; must be sharded."""
        assert not self.residency.in_memory
        self.params, self._norms = ([p for p in some if p is not param] for some in (self.params, self._norms))
        self.initial = None  # they may be of this parameter
        self.store = self.store.for_params(self.params)
        self.residency.use(self.store, self.comm)
        earlier = self.gradients
        self.gradients = GroupGradients(self, self.phases, earlier.axis, self.comm, self.notice_backward)
        self.gradients.unreduced.take_over(earlier.unreduced)

    @property
    def after_forward(self) -> bool | int:
        """True if forward frees full parameters, False if it keeps them, or on how many ranks pieces stay.

        Compare with ``is``: 1 is a number of ranks, and equal to True.
        """
        asked = self.store.options.reshard_after_forward
        return not self.in_root if asked is None else asked

    # ---- gather and free, by torch's names: memory trackers and torch's own test helpers patch these ----

    @property
    def is_unsharded(self) -> bool:
        """True if the full parameters are in memory."""
        return self.residency.is_full

    def unshard(
        self,
        async_op: bool = False,
        launch: Launch = launch_unobserved,
        in_backward: bool = False,
        optional: bool = False,
    ) -> None:
        """Start gathering unless the full parameters are there or on their way; ``async_op`` is torch's and ignored.

        An ``optional`` gather may be left for later by ``launch``.
        """
        self.residency.start(launch, optional=optional, in_backward=in_backward)

    def wait_for_unshard(self) -> None:
        """Wait for the gather and show the full parameters."""
        self.residency.ready()

    def reshard(self) -> None:
        """Free the full memory, and show the shards."""
        self.residency.free()

    def start_unshard(self, launch: Launch, *, in_backward: bool = False, optional: bool = False) -> None:
        """Call ``unshard``, by position: what is patched in for torch's method need not take arguments by name."""
        self.unshard(False, launch, in_backward, optional)

    def unshard_now(self, launch: Launch = launch_unobserved, *, in_backward: bool = False) -> None:
        """Show full parameters, ready for compute."""
        self.start_unshard(launch, in_backward=in_backward)
        self.wait_for_unshard()

    def reshard_outdated(self) -> None:
        """Free what was made of shards that have changed since, ahead of its next use.

        Raises:
            RuntimeError: Full parameters that a pass has left in memory were written since, which would be lost.
        """
        self.residency.refuse_written()
        self.reshard()

    def _unshard_for_compute(self, launch: Launch, *, in_backward: bool) -> None:
        """Show full parameters, and follow changes of requires_grad that somebody made on those that were shown."""
        already = self.residency.is_full
        self.unshard_now(launch, in_backward=in_backward)
        if already:  # else showing them has done it
            self.store.follow_requires_grad()

    # ---- state dicts ----

    def before_save(self, *unused: object) -> None:
        """Let the modules show shards, which are what is saved."""
        self.residency.show_shards()

    def after_save(self, module: nn.Module, saved: dict[str, Any], prefix: str, *unused: object) -> None:
        """Show what the pass computes with. Between passes shards stay shown, since optimizers hold these.

        What is written to ``saved`` tensors later (by ``torch.distributed.checkpoint.load``) is written to the shards.
        Their local tensors share the version counters of ours, so that a write through one of them shows.
        """
        for param in self.params:
            for site in param.sites:
                value = saved.get(prefix + site.name) if site.module is module else None
                if isinstance(value, DTensor) and param.is_stored_as(value):
                    set_local_tensor(value, param.local.detach())
        if self.is_entered:
            self.residency.show_full()

    def before_load(self, *unused: object) -> None:
        """Show the shards, so that values are loaded into them, and free what was made of the old ones.

        All ranks do so, even those that have no elements of the parameter, since no version counter shows it there.
        """
        if not self.residency.summoned:
            self.reshard()
            self.residency.forget_portions()
            self.residency.before_write()

    # ---- forward ----

    def is_used_in_another(self, run: UsingPass) -> bool:
        """Return whether a forward of another root is under way that computes with the group; ``run`` leaves it alone.

        Two models around one trunk are such roots.
        """
        return self._used_by is not None and self._used_by is not run and self._used_by.is_running

    def begin_forward_pass(self, run: UsingPass, *, aborted: bool) -> None:
        """Free what is in memory and not kept, as the forward ``run`` starts under the root.

        If the forward before was ``aborted``, free what is kept too: ranks may have stopped at different units, so they
        may have kept different groups.
        """
        if self.residency.summoned or self.is_used_in_another(run):
            return  # nothing of it is gathered or freed until that block, or that forward, ends
        self.residency.drop_passing_portions()
        if self._norms and any([param.follow_statistics() for param in self._norms]):
            self.reshard()
            self.store.move_shards()
        if aborted:
            self.reshard()
        else:
            self.residency.lower()

    def pre_forward(self, run: UsingPass, *, first: bool, quiet: bool = False) -> bool:
        """Show full parameters for a forward; stages 3 to 5 of the life of a parameter.

        ``first``: no other forward of the group is under way, so that what is in memory may be replaced. ``quiet``: as
        ``itinerary.Stop`` says. Returns whether a gather ahead came too early: the shards were written after it.
        """
        late = False
        if first:
            self.residency.refuse_written()
            gathered_ahead = self.residency.is_gathering
            if self.residency.is_outdated(quiet=quiet):
                late = gathered_ahead
                self.reshard()
            elif not run.in_backward and self.residency.free_rewritten(compared=run.is_compared):
                late = gathered_ahead
        if quiet and self.residency.needs_gather:
            self.residency.forget_portions()  # they may be of the shards before an update that no counter shows
        self.phases.enter("pre_forward")
        if not run.in_backward and (self._used_by is None or not self._used_by.is_running):
            self._used_by = run
        self._unshard_for_compute(run.launch, in_backward=False)
        if self.after_forward is False:
            self.residency.note_gathered()  # not when it is left: units below may have written to its shards by then
        if first and not run.in_backward:
            self.residency.compare_on_device()
        self.residency.note_forward(first=first)
        if torch.is_grad_enabled():
            self.computed_with = ComputedWith(self)
            self.gradients.watch_all()  # backward may enter by a tensor that left the forward another way
        if _trace.recording:
            _trace.emit("pre_forward", self)
        return late

    def post_forward(self) -> None:
        """Note that no forward is inside any more; ``release`` follows, unless a backward computes with the group.

        Raises:
            RuntimeError: a forward with gradients has changed full parameters in place.
        """
        self.residency.refuse_written_in_forward()
        self.phases.enter("post_forward")
        if _trace.recording:
            _trace.emit("post_forward", self)

    def release(self, after: bool | int) -> None:
        """Free the parameters after a forward (True), keep them (False), or keep pieces on ``after`` ranks.

        Stage 6 of the life of a parameter. Ranks that skipped the unit do the same.
        """
        trains, residency = torch.is_grad_enabled(), self.residency
        level = Level.FULL if after is False else Level.PIECES
        if after is True or residency.adopted:
            level = Level.SHARDS
            if trains or not residency.kept:
                self.reshard()
                return
        if trains and residency.kept > level:
            residency.unkeep()  # this use decides what stays
        residency.lower(level, ranks=after)  # an evaluation leaves what a backward, or the caller, has kept
        if trains:
            residency.keep()  # for backward
        else:
            residency.note_left()  # the pass, which frees it at its end, may come again, behind a write

    def end_forward_pass(self, run: UsingPass, *, trains: bool) -> None:
        """Free what the forward ``run`` under the root gathered and what is not kept; ``trains``: with gradients."""
        if self.is_used_in_another(run):
            return
        self._used_by = None
        self.residency.end_portions(keep=trains)
        self.residency.lower()

    def break_off_forward(self, run: UsingPass, *, trains: bool) -> None:
        """End a forward that an exception has left, and free what it gathered, unless that is still in flight.

        If it ``trains``, nothing is kept any more: ranks may have stopped at different units, so they may have kept
        different groups.
        A backward on an earlier forward may still use what is in memory, and the next forward frees it.
        """
        if self.is_used_in_another(run):
            return
        self._used_by = None
        if self.phases.in_forward:
            self.phases.enter("post_forward")
        if not self.residency.is_gathering:  # to wait for a gather may take other ranks
            self.residency.lower()
        if trains:
            self.residency.unkeep()

    # ---- backward ----

    def pre_backward(self, launch: Launch, computed_with: ComputedWith | None) -> bool:
        """Gather for the backward of a forward that ``computed_with`` these parameters; None if that is not known.

        Return whether this call is the one that entered backward.

        Raises:
            RuntimeError: the parameters are others now.
        """
        entered = self.phases.enter("pre_backward")
        if entered:
            self.comm.lanes.compute.enter_backward()
            if _trace.recording:
                _trace.emit("pre_backward", self)
            if self.store.options.unshard_in_backward:
                self._unshard_for_compute(launch, in_backward=True)
            if not self.frees_after_backward:
                self.residency.note_left()  # before gradients arrive: hooks on them may step an optimizer
        if computed_with is not None:
            computed_with.refuse_others(self)
        return entered

    def ends_with_its_gradients(self) -> bool:
        """Return whether backward is done with the group once it has the gradients of all its parameters.

        It is not with others' parameters below, or with frozen ones: backward may still need a weight of this group,
        for their gradients or for that of its input, after the weight's own gradient is finished.
        """
        return not self.has_others_below and not self.shared and all([param.requires_grad for param in self.params])

    @property
    def frees_after_backward(self) -> bool:
        """True if backward frees the full parameters.

        It always frees those of a unit that some ranks skip: that a forward gathers it tells all ranks that it is used.
        """
        options = self.store.options
        return options.reshard_after_backward or options.reduce_unused

    @_trace.profiled("post_backward")
    def post_backward(self, launch: Launch = launch_unobserved, *, stays: bool = False) -> None:
        """Free the parameters, unless the group ``stays`` in memory, and reduce the gradients there are, if any.

        The parameters go first: their memory is free when gradients are packed and summed. torch's pipelines call this
        themselves, for backwards that autograd did not end.
        """
        self.phases.enter("post_backward")
        if _trace.recording:
            _trace.emit("post_backward", self)
        if not self.store.options.reduce_gradients:
            self.gradients.leave_unreduced()
        if self.frees_after_backward and not stays:
            self.reshard()
        else:
            self.residency.keep()
            if self.frees_after_backward:
                self.residency.show_shards()  # it stays for later backwards alone: gradients are on the shards
        self.comm.start_postponed()  # into the memory that the group has just left, and before its gradients are packed
        if self.store.options.reduce_gradients:
            self.gradients.reduce_rest(launch)

    @property
    def is_entered(self) -> bool:
        """True if a forward or a backward is inside."""
        return self.phases.in_forward or self.phases.in_backward

    @property
    def is_reduced(self) -> bool:
        """True if post-backward ran, and autograd finished no gradient since."""
        return self.phases.phase is Phase.REDUCED and not self.gradients.left_over()

    def end_backward_pass(self, *, last: bool) -> None:
        """End the backward for the group; after the ``last`` one, free what was gathered for no use that came."""
        if last and self.residency.in_memory:  # a prefetch, or what a hook asked for when gradients had left
            self.residency.lower()
        options = self.store.options
        if options.reduce_gradients and options.all_reduce_gradients:
            self.residency.forget_portions()
        self.phases.enter("end_backward")
        if last:
            self.forget_shards()

    def forget_shards(self) -> None:
        """Keep no shard alive that is no longer a parameter's: the backwards are over, or shards have moved."""
        if self.computed_with is not None:
            self.computed_with.forget_shards()

    def reset(self) -> None:
        """Show shards, drop gradients, and wait for what is in flight (recovery)."""
        self._used_by = None
        self.forget_shards()
        self.residency.reset()
        self.gradients.reset()
        self.phases.reset()
