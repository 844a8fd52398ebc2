"""A group: parameters that communicate together, and the steps that drive their gathers and reductions.

It looks down only: it acts when it is called, on the communication context that it was given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from fsdp2 import _trace
from fsdp2._torch.autograd import functorch_active, without_functorch
from fsdp2.comm.context import CommContext
from fsdp2.comm.gather import Gathering, finish_gather, start_gather
from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.kept import Kept
from fsdp2.engine.lifecycle import Lifecycle, Phase, Residency
from fsdp2.engine.observer import Admit, Answer, Step
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import FSDPParam, Slot, show
from fsdp2.engine.reducer import GroupGradients
from fsdp2.engine.subgroup import SubgroupShards

__all__ = ["FSDPParamGroup"]

Which = Literal["sharded", "full", "subgroup"]
_RESIDENT: dict[Residency, Which] = {Residency.UNSHARDED: "full", Residency.SUBGROUP: "subgroup"}

_M = TypeVar("_M", bound=Callable[..., Any])


def _profiled(event: str) -> Callable[[_M], _M]:
    """Run a method as a profiler range, with functorch transforms off: they would wrap tensors that it resizes."""

    def decorate(method: _M) -> _M:
        @functools.wraps(method)
        def run(group: FSDPParamGroup, *args: Any, **kwargs: Any) -> Any:
            if not (_trace.recording or functorch_active()):
                return method(group, *args, **kwargs)
            with without_functorch(), _trace.span(event, group.name):
                return method(group, *args, **kwargs)

        return run  # type: ignore[return-value]  # wraps() hides that the signature is method's

    return decorate


class FSDPParamGroup:
    """Parameters of one call on one mesh: gathered before use, freed after, their gradients reduced."""

    def __init__(self, store: ShardStore, modules: tuple[nn.Module, ...], comm: CommContext) -> None:
        self.store = store
        self.params = params = store.params
        self.modules = modules
        self.mesh = store.mesh
        self.options = store.options
        self.comm = comm
        self.lifecycle = Lifecycle()
        self.name = ""  # the module's fully qualified name in the root, known from the first forward on
        self.of_unit = [self]  # the groups that are gathered and used with it
        self.in_root = False
        self.shared = False  # several calls drive it, because they tie its parameter
        self.has_units_below = False
        self.gradients = GroupGradients(store, self.mesh.shard, comm)
        self._norms = [param for param in params if param.has_statistics]
        self.gathering: Gathering | None = None
        self.subgroup: SubgroupShards | None = None
        self.summoned: dict[FSDPParam, None] = {}
        self.initial: tuple[list[float], object] = ([], None)  # first values, and the shards' version then
        self._generation = 0  # of the full parameters that the last forward to train with computed with
        self.kept: Kept | None = None  # what is in memory outlives its use
        self._hidden = False  # a state dict shows shards although the full parameters are in memory
        self.rewritten = ""  # a parameter for whose sake this rank is about to gather anew; others may not
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

    def use_comm(self, comm: CommContext) -> None:
        """Communicate on ``comm`` from now on."""
        self.comm = self.gradients.comm = comm

    def lazy_init(self, *, in_root: bool) -> None:
        """Take in what happened to the parameters since ``fully_shard``; the first forward calls this.

        Raises:
            RuntimeError: parameters are still on the meta device or, when offloading, not on the CPU.
        """
        self.in_root = in_root
        self.adopt_shards()
        if self.lifecycle.changes("start_gather") and any([param.follow_grad_dtype() for param in self.params]):
            self.gradients.forget_plan()
        self.store.check_ready()

    def adopt_shards(self, *unused: object) -> None:
        """Take in parameters that were replaced on the module, moved, cast or loaded, while it shows the shards."""
        if self.lifecycle.residency is Residency.SHARDED and self.store.adopt():
            self.gradients.forget_plan()

    @property
    def after_forward(self) -> bool | int:
        """Whether forward frees full parameters (True), keeps them (False; so the root), or on so many ranks (int)."""
        asked = self.options.reshard_after_forward
        return not self.in_root if asked is None else asked

    @property
    def is_unsharded(self) -> bool:
        """Whether the modules show full parameters."""
        return self.lifecycle.residency is Residency.UNSHARDED

    # ---- gather and free ----

    def unshard(self, async_op: bool = False, admit: Admit | None = None, in_backward: bool = False) -> None:
        """Start gathering unless the full parameters are there or on their way; ``async_op`` is torch's, all are.

        A gather that ``admit`` does not want now is left for later.
        """
        if self.gathering is not None:
            return
        if self.lifecycle.changes("start_gather"):
            self._start_gather(admit, in_backward)
        elif self._hidden:
            self.show_resident()

    @_profiled("all_gather")
    def _start_gather(self, admit: Admit | None, in_backward: bool) -> None:
        store, options, lanes = self.store, self.options, self.comm.lanes
        if self.subgroup is None:
            if store.replaced(in_backward=in_backward):
                self.adopt_shards()
                lanes.gather_after_compute()
            buffers = store.gather_buffers or store.make_gather_buffers(lanes.gather)
            axis, custom = self.mesh.shard, options.all_gather
        else:
            buffers, axis, custom = self.subgroup.gather, self.subgroup.axis, None
        extras = [] if store.extensions is None else store.extensions.encode(axis.size, lanes.gather)
        # What an extension sends may differ in size between ranks.
        part = (*store.agreed, *map(torch.numel, extras))
        if admit is not None and admit(Step("gather", self, part)) is Answer.LATER:
            return
        if _trace.recording:
            _trace.emit("unshard", self.name, sum(item.full_bytes for item in buffers.items))
        self.gathering = start_gather(buffers, axis, self.comm.copies, custom=custom, extras=extras)
        self.lifecycle.move("start_gather")

    @_profiled("all_gather_copy_out")
    def wait_for_unshard(self) -> None:
        """Wait for the gather and show the full parameters."""
        if self.gathering is None:
            return
        gathering, self.gathering = self.gathering, None
        lanes = self.comm.lanes
        rows = finish_gather(gathering, lanes.compute)
        if self.store.extensions is not None:
            self.store.extensions.decode(rows, gathering.lane, lanes.compute)
        if self.subgroup is not None:
            self._free_subgroup()
        self.lifecycle.move("finish_gather")
        self.show("full")

    def show(self, which: Which) -> None:
        """Make the modules show these tensors."""
        self._hidden = False
        if show(self.params, which):
            self.gradients.forget_plan()

    def unshard_now(self, *, admit: Admit | None = None, in_backward: bool = False) -> None:
        """Show full parameters, ready for compute."""
        self.unshard(False, admit, in_backward)
        self.wait_for_unshard()

    def note_kept(self, *, by_evaluation: bool = False) -> None:
        """What is in memory, or soon is, outlives its use; a forward that finds the shards changed will gather anew."""
        if self.lifecycle.changes("reshard") or self.gathering is not None:
            self.kept = Kept(self.params, by_evaluation=by_evaluation, before=self.kept)

    def drop_stale(self, *, unseen: bool = False) -> None:
        """Free what was kept for a forward while an optimizer, or anything else, changed the shards.

        Raises:
            RuntimeError: only this rank is known to have changed them, and what comes is ``unseen`` by others, so that
                none would notice that this one gathers anew.
        """
        kept = self.kept
        if kept is None or self.lifecycle.summoned:
            return
        if kept.outdated:
            self.reshard()
        elif written := kept.written_here():
            if unseen:
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
        if self.kept is not None and self.kept.by_evaluation and not self.lifecycle.summoned:
            self.reshard()

    @_profiled("reshard")
    def reshard(self) -> None:
        """Shards on the modules, the full memory freed."""
        if self.gathering is not None:
            self.abandon_gather()
        refused = "" if self.kept is None or not self.is_unsharded else self.kept.take_writes(self.store.extended)
        if not self.lifecycle.move("reshard"):
            return
        self._keep_shards_alone()
        if _trace.recording:
            _trace.emit("reshard", self.name, self.store.full_bytes)
        if refused:
            raise RuntimeError(refused)

    def settle_writes(self) -> None:
        """Let the shards have what somebody wrote to full parameters that were kept and shown.

        Raises:
            RuntimeError: they cannot; the full parameters are freed then.
        """
        if self.kept is not None and self.is_unsharded and self.kept.written_full():
            refused = self.kept.take_writes(self.store.extended)
            self.note_kept(by_evaluation=self.kept.by_evaluation)
            if refused:
                self.kept = None
                self.reshard()
                raise RuntimeError(refused)

    def _reshard_to_subgroup(self, size: int) -> None:
        """Pieces shared by ``size`` ranks on the modules, the full memory freed."""
        if self.lifecycle.changes("reshard_to_subgroup"):
            self.subgroup = self.store.subgroup(size)
            self.subgroup.keep()
            self._free_full()
            self.lifecycle.move("reshard_to_subgroup")

    def _keep_shards_alone(self) -> None:
        self.show("sharded")
        self._free_full()
        if self.subgroup is not None:
            self._free_subgroup()
        self.kept = None

    def _free_full(self) -> None:
        self.comm.lanes.gather.wait(self.comm.lanes.compute)  # memory goes back to the lane it came from
        self.store.free_full()

    def _free_subgroup(self) -> None:
        assert self.subgroup is not None
        self.subgroup.free()
        self.subgroup = None

    def abandon_gather(self) -> None:
        """Drop a gather that nobody waited for."""
        if self.gathering is None:
            return
        gathering, self.gathering = self.gathering, None
        finish_gather(gathering, self.comm.lanes.compute)
        self._keep_shards_alone()
        self.lifecycle.move("abandon")

    def drop(self, param: FSDPParam) -> None:
        """Give ``param`` up to a group of its own; the group must be sharded."""
        self.params = [p for p in self.params if p is not param]
        self.store = self.store.of(self.params)
        before, self.gradients = self.gradients, GroupGradients(self.store, self.gradients.axis, self.comm)
        self.gradients.noticed = before.noticed

    # ---- summoned: for a while somebody else decides what the modules show ----

    def summon(self, params: Collection[FSDPParam]) -> None:
        """Leave it to the caller what the modules show of ``params`` until ``dismiss``.

        Now they show the shards of the whole group. Meanwhile it neither gathers nor frees, so what was kept after a
        forward is there afterwards, and graphs recorded before can be gone back through.
        """
        self.wait_for_unshard()
        self.settle_writes()
        if not self.summoned:
            self.show("sharded")
        self.lifecycle.summon()
        self.summoned.update(dict.fromkeys(params))

    def dismiss(self, params: Collection[FSDPParam], values: Mapping[FSDPParam, torch.Tensor]) -> None:
        """Show ``params`` as before; ``values``, new full ones, go to the shards and to whatever is kept in memory.

        Full parameters that were current, or stale because of an optimizer step since, stay so.
        """
        extensions, beneath, kept = self.store.extended, self.lifecycle.beneath, self.kept
        current = kept is not None and not kept.outdated and not kept.written_here()
        try:
            for param, value in values.items():
                param.write(value, full=beneath is Residency.UNSHARDED and param not in extensions)
            if self.subgroup is not None:
                self.subgroup.write(values)
            if kept is not None and current:
                self.kept = Kept(self.params, by_evaluation=kept.by_evaluation, before=kept)
        finally:
            for param in params:
                self.summoned.pop(param, None)
            if show(list(params), "sharded"):
                self.gradients.forget_plan()
            if not self.summoned:
                self.lifecycle.dismiss()
                self.show_resident()
        if not self.summoned and not extensions.isdisjoint(values):  # only a gather makes their full parameters
            self.reshard()

    # ---- state dicts ----

    def show_shards(self, *unused: object) -> None:
        """Let the modules show shards for a while; what is in memory stays, since perhaps one rank alone does this."""
        if self._resident is not None:
            self.settle_writes()
            self.show("sharded")

    def after_save(self, *unused: object) -> None:
        """Undo ``show_shards`` inside a pass. Outside, shards stay shown until the next one: optimizers hold these."""
        if self.is_idle:
            self._hidden = self._resident is not None
        else:
            self.show_resident()

    def show_resident(self, *unused: object) -> None:
        """Undo ``show_shards``."""
        if self._resident is not None:
            self.show(self._resident)

    @property
    def _resident(self) -> Which | None:
        """What is in memory beside the shards and can be shown."""
        return _RESIDENT.get(self.lifecycle.residency)

    def before_load(self, *unused: object) -> None:
        """Let the modules show shards, so that values are loaded into them."""
        if not self.lifecycle.summoned:
            self.reshard()

    def set_options(self, options: GroupOptions) -> None:
        """Follow ``options`` from now on."""
        if options.gathering != self.options.gathering:
            self.reshard()
        self.options = options
        self.store.set_options(options)
        self.gradients.forget_plan()

    # ---- forward and backward ----

    def begin_iteration(self, *, aborted: bool) -> None:
        """The outermost forward starts: nobody is inside, whatever became of the last one, which may be ``aborted``.

        What that one kept is freed: it came further on some ranks than on others. So is what an evaluation kept, where
        the forward is one to train with.

        Raises:
            RuntimeError: an earlier backward raised and was not followed by ``reset_iter_state``.
        """
        if self.lifecycle.in_backward:
            raise RuntimeError(
                f"{self.name or 'the root'}: forward starts, but its last backward did not end (it raised?); "
                "call reset_iter_state() on the root module first; that backward's gradients are discarded"
            )
        self.rewritten = ""
        if self._norms and not self.lifecycle.summoned and any([p.follow_statistics() for p in self._norms]):
            self.reshard()
            self.store.place_anew()
            self.gradients.forget_plan()
        if self.gathering is not None or self.lifecycle.changes("reshard"):
            if self.kept is None or aborted:
                self.reshard()
            elif torch.is_grad_enabled():
                self.drop_evaluated()

    def pre_forward(self, *, first: bool, admit: Admit | None, unseen: bool) -> None:
        """Show full parameters for a forward, the ``first`` that runs now; steps 3 to 5 of the life of a parameter."""
        if first and self.kept is not None:
            self.drop_stale(unseen=unseen)
        kept = self.is_unsharded
        self.lifecycle.enter("pre_forward")
        self.unshard_now(admit=admit)
        if kept and any([param.sync_requires_grad() for param in self.params]):
            self.gradients.forget_plan()
        if torch.is_grad_enabled():
            self._generation = self.store.generation
            if self.gradients.watched != self._generation:
                self.gradients.watch_all()  # backward may enter by a tensor that left the forward another way
        if _trace.recording:
            _trace.emit("pre_forward", self.name)

    def post_forward(self, after: bool | int | None) -> None:
        """The forward is over: free the parameters (True), keep them (False), or on so many ranks (int).

        None keeps them for the backward that runs. Step 6 of the life of a parameter.
        """
        self.lifecycle.enter("post_forward")
        if _trace.recording:
            _trace.emit("post_forward", self.name)
        if after is None:
            self.note_kept(by_evaluation=not torch.is_grad_enabled())
        else:
            self.release(after)

    def release(self, after: bool | int | None = None) -> None:
        """What becomes of full parameters after forward; also where other ranks used them and this one did not."""
        swapped, self.store.swapped = self.store.swapped, False
        after = swapped or (self.after_forward if after is None else after)
        if after is True:
            self.reshard()
            return
        self.wait_for_unshard()
        if after is not False:
            self._reshard_to_subgroup(after)
        self.note_kept(by_evaluation=not torch.is_grad_enabled())

    def pre_backward(self, admit: Admit | None, *, recorded: bool) -> bool:
        """Gather for backward; whether this call was the one that started it.

        Raises:
            RuntimeError: the full parameters of the forwards that were ``recorded`` are gone.
        """
        if recorded and self._generation != self.store.generation:
            raise RuntimeError(
                f"{self.name or 'the root'}: its parameters were cast, moved or laid out anew between forward and "
                "backward (model.double(), model.to(), set_compression()), so what the forward saved is gone; do so "
                "before the forward, and call reset_iter_state() on the root module to go on"
            )
        if not self.lifecycle.enter("pre_backward"):
            return False
        self.comm.lanes.compute.enter_backward()
        if _trace.recording:
            _trace.emit("pre_backward", self.name)
        if self.options.unshard_in_backward:
            self.unshard_now(admit=admit, in_backward=True)
        return True

    def knows_when_through(self) -> bool:
        """Whether backward is through with the group when it has the gradients of all its parameters."""
        # Below may be gradients that come through weights of this group after its own are finished: for units, or for
        # tensors that are no inputs (kept on the module, say), through frozen weights.
        return not self.has_units_below and not self.shared and all([param.requires_grad for param in self.params])

    @_profiled("post_backward")
    def post_backward(self, *, keep: bool = False, admit: Admit | None = None) -> None:
        """Free the parameters, unless they are to ``keep``, and reduce the gradients there are, if any."""
        self.lifecycle.enter("post_backward")
        if _trace.recording:
            _trace.emit("post_backward", self.name)
        if not self.options.reduce_gradients:
            self.gradients.keep()
        if self.options.reshard_after_backward and not keep:
            self.reshard()
        else:
            self.note_kept()
        if self.options.reduce_gradients:
            self.gradients.reduce_rest(admit)

    @property
    def is_idle(self) -> bool:
        """Whether neither a forward nor a backward is inside."""
        return not self.lifecycle.in_forward and not self.lifecycle.in_backward

    @property
    def is_through(self) -> bool:
        """Whether post-backward ran, and autograd finished no gradient since."""
        return self.lifecycle.phase is Phase.REDUCED and not self.gradients.left_over()

    def end_backward(self, *, drop_gather: bool) -> None:
        """The whole backward is over."""
        if drop_gather:
            self.abandon_gather()
        self.lifecycle.enter("end_backward")

    def reset(self) -> None:
        """Recovery: shards on the modules, nothing in flight, gradients dropped."""
        self.lifecycle.refuse_summoned("reset_iter_state")
        self.abandon_gather()
        self._keep_shards_alone()
        self.gradients.reset()
        self.lifecycle.reset()
