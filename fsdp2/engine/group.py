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
from fsdp2.engine.lifecycle import Lifecycle, Phase, Residency
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import FSDPParam, Slot, show
from fsdp2.engine.reducer import GroupGradients
from fsdp2.engine.subgroup import SubgroupShards
from fsdp2.sharding.mesh import Axis, DataParallelMesh

if TYPE_CHECKING:
    from fsdp2.engine.root import RootContext

__all__ = ["FSDPParamGroup"]


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
        self.in_root = False
        self.shared = False  # several calls drive it, because they tie its parameter
        self._users: set[object] = set()
        # Gradients travel on the shard axis, or on one of the same ranks with a communicator of its own.
        self.reduce_axis = mesh.shard
        self.store = ShardStore(params, mesh, pieces, options)
        self.gradients = GroupGradients(self)
        # Whether forwards yet to be gone back through tell when backward is through with their inputs, by note_inputs.
        self._told: set[bool | None] = set()
        self.has_units_below = False
        self.nodes = 0  # how many autograd nodes its latest forward made
        self.gathering: InFlight[Gathering] | None = None
        self.subgroup: SubgroupShards | None = None
        self.initial: tuple[list[float], object] = ([], None)  # first values, and the shards' stamp then
        # What the shards looked like when the full parameters were kept beyond their use; None if they were not.
        self._kept_stamp: object = None
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
            buffers, axis, custom = store.gather_buffers(), self.mesh.shard, options.all_gather
        else:
            buffers, axis, custom = self.subgroup.gather, self.subgroup.axis, None
        extras = store.extensions.encode(axis.size, lanes.gather) if store.extensions else []
        agreement, droppable = self.root.agreement, self.acting_for is not None
        sizes = tuple(map(torch.numel, extras))  # an extension may send another size on one rank
        if agreement is not None and not agreement.about_to("gather", self, sizes, droppable=droppable):
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
        gathering, self.gathering = self.gathering, None
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
        if self.root.gathers_others_before(self):
            return
        self.acting_for = phase
        try:
            self.unshard()
        finally:
            self.acting_for = None

    def note_kept(self) -> None:
        """What is in memory, or soon is, outlives its use; a forward that finds the shards changed will gather anew."""
        if self.lifecycle.residency is not Residency.SHARDED:
            self._kept_stamp = self.store.stamp()

    @property
    def kept_fresh(self) -> bool:
        """Whether what is in memory was kept beyond its use and the shards are still what they were then."""
        return self._kept_stamp is not None and self._kept_stamp == self.store.stamp()

    def drop_stale(self) -> None:
        """Free what was kept for a forward while an optimizer, or anything else, changed the shards."""
        for_forward = self.lifecycle.phase is Phase.IDLE and self.acting_for is not Phase.BACKWARD
        if for_forward and self._kept_stamp is not None and not self.kept_fresh and not self.lifecycle.lent:
            self.reshard()

    @outside_functorch
    def reshard(self) -> None:
        """Shards on the modules, the full memory freed."""
        if self.lifecycle.lent:
            self.lifecycle.refuse_lent("reshard")
        self.abandon_gather()
        if self.lifecycle.residency is Residency.SHARDED:
            return
        self._keep_shards_alone()
        self.lifecycle.move("reshard")
        emit("reshard", self.name)

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
        self._kept_stamp = None

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

    def before_save(self, *unused: object) -> None:
        """Let the modules show shards; inside forward or backward the full parameters stay in memory."""
        in_use = self.lifecycle.phase in (Phase.FORWARD, Phase.BACKWARD)
        if in_use and self.lifecycle.residency is Residency.UNSHARDED:
            self.show("sharded")
        elif self.lifecycle.residency in (Residency.UNSHARDED, Residency.SUBGROUP) and not self.lifecycle.lent:
            self.reshard()

    def after_save(self, *unused: object) -> None:
        """Undo ``before_save`` where the full parameters are still in use."""
        if self.lifecycle.residency is Residency.UNSHARDED and not self.lifecycle.lent:
            self.show("full")

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

    def begin_iteration(self) -> None:
        """The outermost forward starts: nobody is inside, whatever became of the last one."""
        self._users.clear()
        if self.lifecycle.residency is not Residency.SHARDED and self._kept_stamp is None and not self.lifecycle.lent:
            self.reshard()  # a forward that raised left it here, and nobody knows how the shards changed since

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
                self.note_kept()
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
        self.note_kept()

    def pre_backward(self, default_prefetch: bool = True) -> bool:
        """Gather for backward; whether this call was the one that started it."""
        if self.lifecycle.phase is Phase.BACKWARD:
            return False
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
