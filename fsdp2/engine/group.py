"""A group: parameters that communicate together, and the steps that drive their gathers and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from fsdp2._torch.autograd import outside_functorch
from fsdp2._trace import emit, span
from fsdp2.comm.gather import Gathering, finish_gather, start_gather
from fsdp2.comm.streams import InFlight
from fsdp2.engine import names
from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.casts import statistics_dtype
from fsdp2.engine.kept import Kept
from fsdp2.engine.lifecycle import Lifecycle, Phase, Residency
from fsdp2.engine.observer import Answer, Step
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import FSDPParam, Slot, show
from fsdp2.engine.reducer import GroupGradients
from fsdp2.engine.subgroup import SubgroupShards
from fsdp2.sharding.mesh import Axis, DataParallelMesh

if TYPE_CHECKING:
    from fsdp2.engine.root import RootContext

__all__ = ["SHOWN", "FSDPParamGroup"]

SHOWN: dict[Residency, Literal["full", "subgroup"]] = {Residency.UNSHARDED: "full", Residency.SUBGROUP: "subgroup"}


class FSDPParamGroup:
    """Parameters of one call on one mesh: gathered before use, freed after, their gradients reduced."""

    def __init__(
        self,
        params: list[FSDPParam],
        pieces: list[torch.Tensor],
        modules: tuple[nn.Module, ...],
        mesh: DataParallelMesh,
        options: GroupOptions,
        root: RootContext,
    ) -> None:
        """``pieces`` are this rank's parts of the original parameters; they are copied."""
        self.params = params
        self.modules = modules
        self.mesh = mesh
        self.options = options
        self.root = root
        self.lifecycle = Lifecycle()
        self.name = ""  # the module's fully qualified name in the root, known from the first forward on
        self.of_unit = [self]  # the groups that are gathered and used with it
        self.in_root = False
        self.shared = False  # several calls drive it, because they tie its parameter
        self._users: set[object] = set()
        # Gradients travel on the shard axis, or on one of the same ranks with a communicator of its own.
        self.reduce_axis = mesh.shard
        self.store = ShardStore(params, mesh, pieces, options)
        self.gradients = GroupGradients(self)
        self._norms = [param for param in params if statistics_dtype(param.module) is not None]
        # Whether forwards yet to be gone back through tell when backward is through with their inputs, by note_inputs.
        self._told: set[bool | None] = set()
        self.has_units_below = False
        self.nodes = 0  # how many autograd nodes its latest forward made
        self.gathering: InFlight[Gathering] | None = None
        self.subgroup: SubgroupShards | None = None
        self.initial: tuple[list[float], object] = ([], None)  # first values, and the shards' stamp then
        self._generation = 0  # of the full parameters that the last forward to train with computed with
        self.kept: Kept | None = None  # what is in memory outlives its use
        self.rewritten = ""  # a parameter for whose sake this rank is about to gather anew; others may not
        self.acting_for: Phase | None = None  # told to others while a step belongs to a phase before or ahead
        for param in params:
            param.group = self
        show(params, "sharded")

    def __repr__(self) -> str:
        sizes = f"{len(self.params)} parameters, {self.store.shard_bytes} B per rank, {self.store.full_bytes} B full"
        state = f"{self.lifecycle.residency.name.lower()}, {self.lifecycle.phase.name.lower()}"
        return f"FSDPParamGroup({self.name or 'root'}: {state}, {sizes}, {self.mesh.shard.size} ranks)"

    def set_names(self, name: str, places: dict[Slot, tuple[int, str]]) -> None:
        """Use names relative to the root from now on; ``places`` say how each is called there, and in which order."""
        self.name = self.lifecycle.name = name
        prefix = f"{name}." if name and len(self.modules) == 1 else ""
        for param in self.params:
            own = param.name if param.name.startswith(prefix) else prefix + param.name  # where somebody removed it
            param.name = min((places[slot] for slot in param.slots if slot in places), default=(0, own))[1]

    def lazy_init(self, *, in_root: bool) -> None:
        """Take in what happened to the parameters since ``fully_shard``; the first forward calls this.

        Raises:
            RuntimeError: parameters are still on the meta device or, when offloading, not on the CPU.
        """
        self.in_root = in_root
        if self.lifecycle.residency is Residency.SHARDED and not self.lifecycle.lent:
            self.adopt_shards()
            if any([param.follow_grad_dtype() for param in self.params]):
                self.gradients.forget_plan()
        self.store.check_ready()

    def adopt_shards(self) -> None:
        """Take in parameters that were replaced on the module, moved, cast or loaded."""
        if self.store.adopt():
            self.gradients.forget_plan()

    @property
    def after_forward(self) -> bool | int:
        """Whether forward frees full parameters (True), keeps them (False; so the root), or on so many ranks (int)."""
        if self.root.evaluation is not None and self.root.evaluation.keeps(self):
            return False
        asked = self.options.reshard_after_forward
        return not self.in_root if asked is None else asked

    # ---- gather and free ----

    @outside_functorch
    def unshard(self, async_op: bool = False) -> None:
        """Start gathering unless the full parameters are there or on their way; ``async_op`` is torch's, all are."""
        if self.lifecycle.residency in (Residency.GATHERING, Residency.UNSHARDED) or self.lifecycle.lent:
            return
        self.drop_stale()
        store, options, lanes = self.store, self.options, self.root.comm.lanes
        if self.subgroup is None:
            if store.replaced(in_backward=Phase.BACKWARD in (self.lifecycle.phase, self.acting_for)):
                self.adopt_shards()
                lanes.gather.wait(lanes.compute.event())
            buffers, axis, custom = store.gather_buffers(lanes.gather), self.mesh.shard, options.all_gather
        else:
            buffers, axis, custom = self.subgroup.gather, self.subgroup.axis, None
        extras = store.extensions.encode(axis.size, lanes.gather) if store.extensions else []
        observer = self.root.observer
        if observer is not None:
            # What an extension sends may differ in size between ranks.
            step = Step("gather", self, tuple(map(torch.numel, extras)))
            if observer.before(step, optional=self.acting_for is not None) is Answer.LATER:
                return
        emit("unshard", self.name)
        with span("all_gather", self.name):
            self.gathering = start_gather(buffers, axis, lanes.gather, custom=custom, extras=extras)
        self.lifecycle.move("start_gather")

    @outside_functorch
    def wait_for_unshard(self) -> None:
        """Wait for the gather and show the full parameters."""
        if self.gathering is None:
            return
        gathering, self.gathering, self.rewritten = self.gathering, None, ""
        lanes = self.root.comm.lanes
        with span("all_gather_copy_out", self.name):
            rows = finish_gather(gathering, lanes.compute)
            if self.store.extensions:
                self.store.extensions.decode(rows, gathering.value.lane, lanes.compute)
        self._free_subgroup()
        self.lifecycle.move("finish_gather")
        self.show("full")

    def show(self, which: Literal["sharded", "full", "subgroup"]) -> None:
        """Make the modules show these tensors of all parameters."""
        if show(self.params, which):
            self.gradients.forget_plan()

    def unshard_now(self) -> None:
        """Full parameters on the modules, ready for compute."""
        self.unshard()
        self.wait_for_unshard()

    def prefetch(self, phase: Phase) -> None:
        """Start gathering for a ``phase`` that is still to come, unless the ranks gather something else before."""
        observer = self.root.observer
        if observer is not None and observer.postpones(Step("gather", self)):
            return
        self.acting_for = phase
        try:
            self.unshard()
        finally:
            self.acting_for = None

    def note_kept(self, *, by_evaluation: bool = False) -> None:
        """What is in memory, or soon is, outlives its use; a forward that finds the shards changed will gather anew."""
        if self.lifecycle.residency is not Residency.SHARDED:
            self.kept = Kept(self.params, by_evaluation=by_evaluation, before=self.kept)

    def drop_stale(self) -> None:
        """Free what was kept for a forward while an optimizer, or anything else, changed the shards.

        Raises:
            RuntimeError: only this rank is known to have changed them, and no other would notice that it gathers anew.
        """
        kept, for_forward = self.kept, self.lifecycle.phase is Phase.IDLE and self.acting_for is not Phase.BACKWARD
        if kept is None or not for_forward or self.lifecycle.lent:
            return
        if kept.outdated:
            self.reshard()
        elif written := kept.written_here():
            if self.root.observer is not None and not self.root.observer.observes:
                raise RuntimeError(
                    f"{written[0].name}: this rank wrote to its shard, perhaps alone, while {self.name or 'the root'} "
                    "was kept in memory; expected a write that all ranks see. Call reshard() on the module on every "
                    "rank first"
                )
            self.reshard()
            self.rewritten = written[0].name
        else:
            self.settle_writes()

    def drop_evaluated(self) -> None:
        """Free what an evaluation kept: since then ranks may have written to shards each for itself."""
        idle = self.lifecycle.phase is Phase.IDLE and not self.lifecycle.lent
        if self.kept is not None and self.kept.by_evaluation and idle:
            self.reshard()

    @outside_functorch
    def reshard(self) -> None:
        """Shards on the modules, the full memory freed."""
        if self.lifecycle.lent:
            self.lifecycle.refuse_lent("reshard")
        self.abandon_gather()
        if self.lifecycle.residency is Residency.SHARDED:
            return
        refused = self._take_writes()
        self._keep_shards_alone()
        self.lifecycle.move("reshard")
        emit("reshard", self.name)
        if refused:
            raise RuntimeError(refused)

    def settle_writes(self) -> None:
        """Let the shards have what somebody wrote to full parameters that were kept and shown.

        Raises:
            RuntimeError: they cannot; the full parameters are freed then.
        """
        if self.kept is None or self.lifecycle.residency is not Residency.UNSHARDED or self.lifecycle.lent:
            return
        if self.kept.written_full():
            refused = self._take_writes()
            self.note_kept(by_evaluation=self.kept.by_evaluation)
            if refused:
                self.kept = None
                self.reshard()
                raise RuntimeError(refused)

    def _take_writes(self) -> str:
        """Why the shards cannot have what was written to kept full parameters; empty if they have it now."""
        if self.kept is None or self.lifecycle.residency is not Residency.UNSHARDED:
            return ""
        extensions = self.store.extensions.params if self.store.extensions else ()
        written = [param for param in self.kept.written_full() if param not in extensions]
        for param in written:
            if self.kept.outdated or param in self.kept.written_here():
                why = "and so was its shard since, and which came first is not known"
            elif not param.follow_full():
                why = f"in {param.compute_dtype}, which would round its shard, in {param.dtype}"
            else:
                continue
            return (
                f"{param.name}: the full parameter that an evaluation or unshard() left on the module was changed in "
                f"place, {why}. Call reshard() on the module first, then change its parameters"
            )
        return ""

    def _reshard_to_subgroup(self, size: int) -> None:
        """Pieces shared by ``size`` ranks on the modules, the full memory freed."""
        if self.lifecycle.residency is not Residency.UNSHARDED:
            return
        self.subgroup = self.store.subgroup(size)
        self.subgroup.keep()
        self._free_full()
        self.lifecycle.move("reshard_to_subgroup")

    def _keep_shards_alone(self) -> None:
        self.show("sharded")
        self._free_full()
        self._free_subgroup()
        self.kept = None

    def _free_full(self) -> None:
        lanes = self.root.comm.lanes
        with lanes.gather.after(lanes.compute.event()):
            self.store.free_full()

    def _free_subgroup(self) -> None:
        if self.subgroup is not None:
            self.subgroup.free()
            self.subgroup = None

    def abandon_gather(self) -> None:
        """Drop a gather that nobody waited for."""
        if self.gathering is None:
            return
        gathering, self.gathering = self.gathering, None
        finish_gather(gathering, self.root.comm.lanes.compute)
        self._keep_shards_alone()
        self.lifecycle.move("abandon")

    def use_reduce_axis(self, axis: Axis) -> None:
        """Send gradients over ``axis`` from now on, the same ranks as the shard axis."""
        self.reduce_axis = axis
        self.gradients.forget_plan()

    def drop(self, param: FSDPParam) -> None:
        """Give ``param`` up to a group of its own; the group must be sharded."""
        self.params = [p for p in self.params if p is not param]
        self.store = ShardStore(self.params, self.mesh, [p.local for p in self.params], self.options)
        self.gradients = GroupGradients(self)

    # ---- state dicts ----

    def show_shards(self, *unused: object) -> None:
        """Let the modules show shards for a while; what is in memory stays, since perhaps one rank alone does this."""
        if self.lifecycle.residency in SHOWN and not self.lifecycle.lent:
            self.settle_writes()
            self.show("sharded")

    def show_resident(self, *unused: object) -> None:
        """Undo ``show_shards``."""
        if self.lifecycle.residency in SHOWN and not self.lifecycle.lent:
            self.show(SHOWN[self.lifecycle.residency])

    def before_load(self, *unused: object) -> None:
        """Let the modules show shards, so that values are loaded into them."""
        if not self.lifecycle.lent:
            self.reshard()

    def after_load(self, *unused: object) -> None:
        """Take in shards that loading replaced."""
        if not self.lifecycle.lent:
            self.adopt_shards()

    def set_options(self, options: GroupOptions) -> None:
        """Follow ``options`` from now on."""
        if options.sizes != self.options.sizes or options.all_gather is not self.options.all_gather:
            self.reshard()
        self.options = options
        self.store.set_options(options)
        self.gradients.forget_plan()

    # ---- forward and backward ----

    def begin_iteration(self, *, broke_off: bool) -> None:
        """The outermost forward starts: nobody is inside, whatever became of the last one, which may have broken off.

        What that one kept is freed: it came further on some ranks than on others, and nobody knows how the shards
        changed since. So is what an evaluation kept, where the forward is one to train with.
        """
        self._users.clear()
        if self.lifecycle.lent:
            return
        if self._norms and any([param.follow_statistics() for param in self._norms]):
            self.reshard()
            self.store.place_anew()
            self.gradients.forget_plan()
        if self.lifecycle.residency is Residency.SHARDED:
            return
        if self.kept is None or broke_off:
            self.reshard()
        elif torch.is_grad_enabled():
            self.drop_evaluated()

    def pre_forward(self, user: object) -> bool:
        """Gather for ``user``; whether a forward pass starts here: not inside another user's, nor with each member."""
        self._users.add(user)
        entering = self._users == {user} and (len(self.modules) == 1 or self.lifecycle.phase is not Phase.FORWARD)
        self.drop_stale()
        kept = self.lifecycle.residency is Residency.UNSHARDED
        self.lifecycle.enter("pre_forward")
        self.unshard_now()
        if kept:
            for param in self.params:
                if param.sync_requires_grad():
                    self.gradients.forget_plan()
        emit("pre_forward", self.name)
        return entering

    @property
    def awaits_backward(self) -> bool:
        """Whether there are forwards that backward has yet to go back through."""
        return bool(self._told)

    def note_inputs(self, *, tell: bool | None) -> None:
        """Whether the forward just entered tells when backward is through with its inputs; None if it cannot."""
        self._told.add(tell)
        self._generation = self.store.generation

    def post_forward(self, user: object, *, reshard: bool) -> None:
        """The forward of ``user`` is over; after the last one's, free the parameters as asked, here and by options."""
        self._users.discard(user)
        if self._users:
            return
        ended = self.lifecycle.phase is Phase.IDLE  # by a forward inside a registered method, whose end this one is
        self.lifecycle.enter("post_forward")
        emit("post_forward", self.name)
        self.acting_for = Phase.FORWARD
        try:
            if reshard and ended:
                self.reshard()
            elif reshard:
                self.release()
            else:
                self.note_kept(by_evaluation=not torch.is_grad_enabled())
        finally:
            self.acting_for = None

    def release(self) -> None:
        """What becomes of full parameters after forward; also where other ranks used them and this one did not."""
        after = self.store.gave_way() or self.after_forward
        if after is True:
            self.reshard()
            return
        self.wait_for_unshard()
        if after is not False:
            self._reshard_to_subgroup(after)
        self.note_kept(by_evaluation=not torch.is_grad_enabled())

    def pre_backward(self, default_prefetch: bool = True) -> bool:
        """Gather for backward; whether this call was the one that started it."""
        if self.lifecycle.phase is Phase.BACKWARD:
            return False
        if self._told and self._generation != self.store.generation:
            raise RuntimeError(
                f"{self.name or 'the root'}: its parameters were cast, moved or laid out anew between forward and "
                "backward (model.double(), model.to(), set_transfer_sizes()), so what the forward saved is gone; do so "
                "before the forward, and call reset_iter_state() on the root module to go on"
            )
        self.lifecycle.enter("pre_backward")
        self.root.comm.lanes.compute.enter_backward()
        emit("pre_backward", self.name)
        if self.options.unshard_in_backward:
            self.unshard_now()
        # Below may be gradients that come through weights of this group after its own are finished: for units, or for
        # tensors that are no inputs (kept on the module, say), through frozen weights.
        count = self._told == {False} and not self.has_units_below and not self.shared
        count = count and all(param.requires_grad for param in self.params)
        self.gradients.begin_backward(count=count, watch_all=self.root.creates_graph, nodes=self.nodes)
        return True

    def post_backward(self) -> None:
        """Free the parameters and reduce the gradients that are there; safe to call for a group that was not used."""
        lone_member = self.lifecycle.phase is Phase.FORWARD
        self.lifecycle.enter("post_backward")
        emit("post_backward", self.name)
        with span("post_backward", self.name):
            if not self.options.reduce_gradients:
                self.gradients.keep()
            if self.options.reshard_after_backward and not self.root.creates_graph and not self.root.goes_on_with(self):
                self.reshard()
            else:
                self.note_kept()
            if self.options.reduce_gradients:
                self.gradients.reduce_rest()
        if lone_member:
            self.root.queue_partial_end()

    def inputs_done(self) -> None:
        """Backward is through with the group's inputs; under torch.func nothing before told that one runs."""
        self.root.queue_end()
        self.post_backward()

    def end_backward(self, *, drop_gather: bool) -> None:
        """The whole backward is over."""
        if drop_gather:
            self.abandon_gather()
            self._told.clear()
        self.lifecycle.enter("end_backward")

    def reset(self) -> None:
        """Recovery: shards on the modules, nothing in flight, unreduced gradients dropped."""
        self.abandon_gather()
        if self.lifecycle.residency is Residency.GATHERING:  # the gather itself raised
            self._keep_shards_alone()
        else:
            self.reshard()
        self.gradients.reset()
        self._told.clear()
        self._users.clear()
        self.lifecycle.reset()

    # ---- names that other libraries read ----

    fsdp_params, mesh_info = property(names.fsdp_params), property(names.mesh_info)
    is_sharded, is_unsharded = property(names.is_sharded), property(names.is_unsharded)
    reduce_scatter_max_input_buffers = property(names.reduce_scatter_max_input_buffers)
    _module_fqn = property(names.module_fqn)
    _training_state = property(names.training_state)
    _sharded_state = property(names.sharded_state)
    _all_gather_result = property(names.all_gather_result)
    _reshard_after_forward = property(names.reshard_after_forward)
    _orig_dtype, _reduce_dtype = property(names.orig_dtype), property(names.reduce_dtype)
