"""A group: parameters that communicate together, and the steps that drive their gathers and reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdp2._trace import emit, span
from fsdp2.comm.gather import GatherBuffers, finish_gather, start_gather
from fsdp2.comm.streams import InFlight
from fsdp2.runtime.gradients import GroupGradients
from fsdp2.runtime.lifecycle import Lifecycle, Phase, Residency
from fsdp2.runtime.options import GroupOptions
from fsdp2.runtime.param import FSDPParam
from fsdp2.runtime.shards import ShardStore
from fsdp2.sharding.mesh import DataParallelMesh

if TYPE_CHECKING:
    from fsdp2.runtime.root import RootContext

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
        self.in_root = False
        self.store = ShardStore(params, mesh, pieces, options)
        self.gradients = GroupGradients(self)
        # Whether post-backward must count gradients, because no input of the forward needed one.
        self.counts_parameters = False
        self._gathering: InFlight[GatherBuffers] | None = None
        # What the shards looked like when the full parameters were kept beyond their use; None if they were not.
        self._kept_stamp: object = None
        for param in params:
            param.show_shard()

    def __repr__(self) -> str:
        sizes = f"{len(self.params)} parameters, {self.store.shard_bytes} B per rank, {self.store.full_bytes} B full"
        state = f"{self.lifecycle.residency.value}, {self.lifecycle.phase.value}"
        return f"FSDPParamGroup({self.name or 'root'}: {state}, {sizes}, {self.mesh.shard.size} ranks)"

    @property
    def name(self) -> str:
        """The module's fully qualified name in the root; "" for the root and before the first forward."""
        return self.lifecycle.name

    @property
    def in_backward(self) -> bool:
        """Whether autograd is inside the group's backward."""
        return self.lifecycle.phase is Phase.BACKWARD

    def set_names(self, name: str, param_names: dict[nn.Parameter, str]) -> None:
        """Use names relative to the root from now on."""
        self.lifecycle.name = name
        for param in self.params:
            param.name = next((param_names[p] for p in (param.sharded, param.full) if p in param_names), param.name)

    def lazy_init(self, *, in_root: bool) -> None:
        """Take in what happened to the parameters since ``fully_shard``; the first forward calls this.

        Raises:
            RuntimeError: parameters are still on the meta device.
        """
        self.in_root = in_root
        if self.lifecycle.residency is Residency.SHARDED:
            self.adopt_shards()
        self.store.check_materialized()

    def adopt_shards(self) -> None:
        """Take in parameters that were replaced on the module, moved, cast or loaded."""
        if self.store.adopt():
            self.gradients.forget_plan()

    @property
    def reshards_after_forward(self) -> bool:
        """What ``reshard_after_forward`` means for this group; None keeps the root, which backward needs at once."""
        asked = self.options.reshard_after_forward
        return (not self.in_root) if asked is None else bool(asked)

    # ---- gather and free ----

    def start_unshard(self) -> None:
        """Start gathering unless the full parameters are there or on their way."""
        residency = self.lifecycle.residency
        if residency is Residency.GATHERING:
            return
        if residency is Residency.UNSHARDED:
            if self._kept_stamp is None or self.lifecycle.phase is not Phase.IDLE:
                return
            if self._kept_stamp == self.store.stamp():
                return
            self.reshard()  # the shards changed behind a group that was kept
        self.adopt_shards()
        buffers = self.store.gather_buffers()
        self.lifecycle.move("start_gather")
        emit("unshard", self.name)
        with span("all_gather", self.name):
            lane = self.root.comm.lanes.gather
            self._gathering = start_gather(buffers, self.mesh.shard, lane, custom=self.options.all_gather)

    def finish_unshard(self) -> None:
        """Wait for the gather and show the full parameters."""
        if self._gathering is None:
            return
        gathering, self._gathering = self._gathering, None
        lanes = self.root.comm.lanes
        with span("all_gather_copy_out", self.name):
            finish_gather(gathering, lanes.gather, lanes.compute)
        self.lifecycle.move("finish_gather")
        self._show_full()

    def _show_full(self) -> None:
        changed = False
        for param in self.params:
            changed |= param.show_full()
        if changed:
            self.gradients.forget_plan()

    def unshard(self) -> None:
        """Full parameters on the modules, ready for compute."""
        self.start_unshard()
        self.finish_unshard()

    def note_kept(self) -> None:
        """The full parameters outlive their use; a forward that finds the shards changed since will gather anew."""
        if self.lifecycle.residency is Residency.UNSHARDED:
            self._kept_stamp = self.store.stamp()

    def reshard(self) -> None:
        """Shards on the modules, the full memory freed."""
        self.abandon_gather()
        if self.lifecycle.residency is not Residency.UNSHARDED:
            return
        for param in self.params:
            param.show_shard()
        lanes = self.root.comm.lanes
        with lanes.gather.after(lanes.compute.event()):
            self.store.free_full()
        self._kept_stamp = None
        self.lifecycle.move("reshard")
        emit("reshard", self.name)

    def abandon_gather(self) -> None:
        """Drop a gather that nobody waited for."""
        if self._gathering is None:
            return
        gathering, self._gathering = self._gathering, None
        lanes = self.root.comm.lanes
        finish_gather(gathering, lanes.gather, lanes.compute)
        with lanes.gather.after(lanes.compute.event()):
            self.store.free_full()
        self.lifecycle.move("abandon")

    # ---- state dicts ----

    def before_save(self, *unused: object) -> None:
        """Let the modules show shards; inside forward or backward the full parameters stay in memory."""
        if self.lifecycle.residency is not Residency.UNSHARDED:
            return
        if self.lifecycle.phase in (Phase.FORWARD, Phase.BACKWARD):
            for param in self.params:
                param.show_shard()
        else:
            self.reshard()

    def after_save(self, *unused: object) -> None:
        """Undo ``before_save`` where the full parameters are still in use."""
        if self.lifecycle.residency is Residency.UNSHARDED:
            self._show_full()

    def before_load(self, *unused: object) -> None:
        """Let the modules show shards, so that values are loaded into them."""
        self.reshard()

    def after_load(self, *unused: object) -> None:
        """Take in shards that loading replaced."""
        self.adopt_shards()

    def set_options(self, options: GroupOptions) -> None:
        """Follow ``options`` from now on."""
        if options.sizes != self.options.sizes:
            self.reshard()
            self.gradients.forget_plan()
        self.options = options
        self.store.set_options(options)

    # ---- forward and backward ----

    def pre_forward(self) -> bool:
        """Gather; whether this forward pass starts here (a grouped call enters once per member)."""
        entering = len(self.modules) == 1 or self.lifecycle.phase is not Phase.FORWARD
        kept = self.lifecycle.residency is Residency.UNSHARDED
        self.unshard()
        self.lifecycle.enter("pre_forward")
        if kept:
            for param in self.params:
                if param.sync_requires_grad():
                    self.gradients.forget_plan()
        emit("pre_forward", self.name)
        return entering

    def post_forward(self, *, reshard: bool) -> None:
        """The forward is over; free the parameters if asked to, here and by the options."""
        self.lifecycle.enter("post_forward")
        emit("post_forward", self.name)
        if reshard and self.reshards_after_forward:
            self.reshard()
        else:
            self.note_kept()

    def pre_backward(self) -> bool:
        """Gather for backward; whether this call was the one that started it."""
        if self.lifecycle.phase is Phase.BACKWARD:
            return False
        self.lifecycle.enter("pre_backward")
        emit("pre_backward", self.name)
        if self.options.unshard_in_backward:
            self.unshard()
        self.gradients.begin_backward(count=self.counts_parameters)
        return True

    def post_backward(self) -> None:
        """Free the parameters and reduce the gradients that are there; safe to call for a group that was not used."""
        lone_member = self.lifecycle.phase is Phase.FORWARD
        self.lifecycle.enter("post_backward")
        emit("post_backward", self.name)
        with span("post_backward", self.name):
            if not self.options.reduce_gradients:
                self.gradients.keep()
            if self.options.reshard_after_backward:
                self.reshard()
            else:
                self.note_kept()
            if self.options.reduce_gradients:
                self.gradients.reduce_rest()
        if lone_member:
            self.root.queue_partial_end()

    def end_backward(self, *, drop_gather: bool) -> None:
        """The whole backward is over."""
        if drop_gather:
            self.abandon_gather()
        self.lifecycle.enter("end_backward")

    def reset(self) -> None:
        """Recovery: shards on the modules, nothing in flight, unreduced gradients dropped."""
        self.abandon_gather()
        self.reshard()
        self.gradients.reset()
        self.lifecycle.reset()
