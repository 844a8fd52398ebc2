"""``FSDPModule``: the methods of a module after ``fully_shard``, and functions that act on such modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle
from typing_extensions import deprecated

from fsdp2._naming import class_name, original_class
from fsdp2._torch.hooks import outside_dynamo
from fsdp2.comm.collectives import in_memory_of_groups, in_symmetric_memory
from fsdp2.comm.streams import Lane
from fsdp2.compression.collectives import compress
from fsdp2.compression.policy import CompressionPolicy
from fsdp2.engine.by_hand import gather_before_backward, gather_by_hand
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import units_below
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.root import GradientReduction, RootContext
from fsdp2.engine.unit import FSDPState, get_state
from fsdp2.engine.unreduced import UnreducedGradient
from fsdp2.policies import AllGather, GradientReductionHandle, ReduceScatter
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import TransferSizes

__all__ = ["MADE_BY_FULLY_SHARD", "FSDPModule", "ZeroesHidden", "share_comm_ctx"]

MADE_BY_FULLY_SHARD = "_fsdp2_made_by_fully_shard"
"""An attribute of the classes that ``fully_shard`` gives to modules."""


class FSDPModule(TorchFSDPModule):
    """A module with sharded parameters. ``fully_shard`` makes its modules instances of this class.

    It is a subclass of ``torch.distributed.fsdp.FSDPModule``, so ``isinstance`` tests in libraries work.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Call the ``__init_subclass__`` of other base classes, but not for a class that ``fully_shard`` makes.

        That is no new kind of module: a user's class may require keyword arguments of its subclasses, record them, or
        allow none.
        """
        if MADE_BY_FULLY_SHARD not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the original class: ``sequential[:2]`` makes a plain Sequential."""
        original = original_class(cls)
        self = original.__new__(original, *args, **kwargs)
        original.__init__(self, *args, **kwargs)
        return self

    # ---- gather and free ----

    @outside_dynamo
    def unshard(self, async_op: bool = False, *, recurse: bool = False) -> UnshardHandle | None:
        """Gather this module's own parameters, and with ``recurse`` those of all units below it.

        Between passes the full parameters stay until ``reshard()``, and are gathered again if their shards change. On a
        GPU, call ``reshard()`` after a write through ``.data`` or by ``torch._foreach_`` functions, which is not
        noticed. Every rank must call it.

        Args:
            async_op: Return a handle immediately. Forward waits by itself, so call ``wait()`` only if you use the
                parameters outside of forward.
            recurse: Gather all units below, too. All of them are in memory at once until ``reshard(recurse=True)``.

        Returns:
            A handle with a method ``wait()`` if ``async_op``, else None.

        Raises:
            RuntimeError: ``summon_full_params`` shows parameters of the module.
        """
        units = self._units(recurse)
        for unit in units:
            unit.reconcile()  # which may make groups, of parameters that were added
        used = {group: unit for unit in units for group in unit.groups}
        for group in used:
            group.residency.refuse_summoned("unshard")
        gather_by_hand(used, "unshard()")
        handle = _Unsharding(list(used))
        if async_op:
            return handle
        handle.wait()
        return None

    @outside_dynamo
    def reshard(self, *, recurse: bool = False) -> None:
        """Free this module's own full parameters, with ``recurse`` those of all units below too, and show the shards.

        Values that you wrote to the full parameters since ``unshard()`` are lost, and a warning names these parameters
        (not those that were written through ``.data``). Call it also in a forward that has written to shards in a way
        that no version counter shows: the unit is then gathered anew.

        Raises:
            RuntimeError: ``summon_full_params`` shows parameters of the module.
        """
        groups = [group for unit in self._units(recurse) for group in unit.groups]
        for group in groups:  # all of them first, so that an error frees none
            group.residency.refuse_summoned("reshard")
        for group in groups:
            group.reshard()
            # Who calls it in a forward may have written to the shards, in a way that nothing shows.
            group.residency.forget_portions()
            group.comm.lanes.gather_after_compute()

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the memory of full parameters after they are freed (True).

        The next gather then uses the same addresses, as CUDA graphs need. All units with this setting then keep the
        memory of their full parameters at the same time.
        """
        self._set("set_keep_unsharded_storage", recurse, keep_full_storage=_bool("keep", keep))

    def reset_iter_state(self) -> None:
        """Recover after a backward that raised an error, or after an interrupt; then start a new iteration.

        Call it on the root. After a forward that raised an error, no call is needed.

        It waits for collectives in flight and drops their results, reshards all parameters, and discards all
        gradients. This includes gradients already in ``.grad``, because some may belong to the failed iteration (torch
        before 2.15 keeps them).

        Raises:
            RuntimeError: The module is not the root.
        """
        self._root_unit("reset_iter_state").root.reset()

    def set_modules_to_forward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Start gathering ``modules`` when this module's forward starts, instead of the unit that ran next before.

        Modules under another root are not gathered ahead.
        """
        unit, prefetch = self._get_fsdp_state(), _units(modules)
        if prefetch != unit.forward_prefetch:
            unit.forward_prefetch = prefetch
            unit.root.options_changed("set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[TorchFSDPModule]) -> None:
        """Start gathering ``modules`` when this module's backward starts, instead of the unit before it in forward.

        Modules under another root are not gathered ahead.
        """
        unit, prefetch = self._get_fsdp_state(), _units(modules)
        if prefetch != unit.backward_prefetch:
            unit.backward_prefetch = prefetch
            unit.root.options_changed("set_modules_to_backward_prefetch")

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free full parameters after forward (True) or keep them for backward (False), starting with the next forward.

        Raises:
            ValueError: ``reshard_after_forward`` is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}; to change the number of "
                "ranks parameters stay on after forward, pass an int to fully_shard"
            )
        self._set("set_reshard_after_forward", recurse, reshard_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free full parameters after backward (True) or keep them for the next forward (False).

        Call it on every rank: unlike other setters, it may start a collective. With False, between a forward and a
        backward that is not the last (``set_is_last_backward(False)``, or manual finalization), it gathers the
        parameters immediately. Pipelines that split backward (zero bubble) read weights from the module before
        autograd runs.
        """
        self._set(
            "set_reshard_after_backward",
            recurse,
            reshard_after_backward=_bool("reshard_after_backward", reshard_after_backward),
        )
        if not reshard_after_backward:
            gather_before_backward(self._units(recurse), "set_reshard_after_backward(False)")

    def set_unshard_in_backward(self, unshard_in_backward: bool, *, recurse: bool = False) -> None:
        """Gather this module's parameters for backward (True) or not (False); an embedding's backward needs none."""
        self._set(
            "set_unshard_in_backward", recurse, unshard_in_backward=_bool("unshard_in_backward", unshard_in_backward)
        )

    # ---- gradients ----

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one through the forwards so far.

        False keeps the state of these forwards, for more backwards through them.
        """
        self._get_fsdp_state().root.is_last_backward = _bool("is_last_backward", is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """End backwards with a call of ``finalize_backward`` (True) or with autograd's backward (False).

        Call it on the root.

        Raises:
            RuntimeError: The module is not the root, or a backward has begun and was neither finalized nor reset.
        """
        self._root_unit("set_manual_backward_finalization").root.set_manual(_bool("enabled", enabled))

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce the gradients of the backwards since the last call, and free full parameters as the settings say.

        Call it on the root, with ``set_manual_backward_finalization(True)``. Call it after one backward, or after
        several if gradient reduction was off in all but the last. Before the first forward it does nothing.

        Args:
            async_op: Return a handle immediately. Call its ``wait()`` before you use the gradients, before the next
                forward, and before the next call.

        Returns:
            A handle with a method ``wait()`` if ``async_op``, else None.

        Raises:
            RuntimeError: The module is not the root, manual finalization is off, a forward or backward is running, a
                backward has raised, you did not wait for an earlier call, or all-reduce is off for a unit.
        """
        unit = self._root_unit("finalize_backward")
        reduction = GradientReduction(None) if unit.is_root is None else unit.root.finalize()
        if async_op:
            return reduction
        reduction.wait()
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in backward (True), or accumulate full gradients without communication (False).

        ``.grad`` of shards does not show unreduced gradients. The next backward that reduces, or
        ``synchronize_gradients``, adds them to it, and ``zero_grad`` of the module or the optimizer drops them. Until
        then a step, ``fsdp2.clip_grad_norm_`` and ``ShardedGradScaler`` raise RuntimeError on every rank.
        """
        value = _bool("requires_gradient_sync", requires_gradient_sync)
        values = {"reduce_gradients": value, "all_reduce_gradients": value, "may_accumulate": True}
        self._set("set_requires_gradient_sync", recurse, **values)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """All-reduce gradients over the replicate dimension (True), or accumulate sums of the shard dimension (False).

        With ``shard_over_replicas``, a backward that reduces gradients over the replicate dimension ends the iteration:
        until then, forwards gather only over the shard dimension.
        """
        self._set(
            "set_requires_all_reduce", recurse, all_reduce_gradients=_bool("requires_all_reduce", requires_all_reduce)
        )

    def synchronize_gradients(self, *, recurse: bool = True) -> None:
        """Reduce the gradients that backwards left unreduced, without another backward; wait until they are there.

        Backwards after ``set_requires_gradient_sync(False)`` leave unsharded gradients, and on a mesh with a replicate
        dimension those after ``set_requires_all_reduce(False)`` leave sums over only the shard dimension. Both are
        added to the shards' ``.grad``, whatever these settings are now, as by the last backward of an accumulation.
        Call it if no such backward follows: the last micro-batch is empty, or all micro-batches are alike. Every rank
        must call it. If nothing was left, it does nothing.

        Args:
            recurse: Also do this for all units below this module.

        Raises:
            RuntimeError: A forward or backward is running, a backward with manual finalization was not finalized, or
                ``summon_full_params`` shows parameters. On every rank: only some ranks call it, or ranks have gradients
                of different parameters (mark their units with ``set_reduce_scatter_unused_params(True)``).
        """
        by_root: dict[RootContext[FSDPState], dict[FSDPParamGroup, None]] = {}
        for unit in self._units(recurse):
            unit.reconcile()
            by_root.setdefault(unit.root, {}).update(dict.fromkeys(unit.groups))
        for root, groups in by_root.items():
            root.synchronize(list(groups))

    def get_pending_gradients(self, *, recurse: bool = True) -> dict[nn.Parameter, UnreducedGradient]:
        """Return the gradients that backwards left unreduced, by sharded parameter. It does not communicate.

        Each value is ``(unreduced, partial)``, either of which may be None: the gradient of the full parameter, and on
        a mesh with a replicate dimension this rank's piece of the sum over only the shard dimension. The tensors are
        those that the next reduction uses, so you can scale or inspect them. Call it again after a backward, a
        reduction or ``zero_grad``.

        Args:
            recurse: Also return those of all units below this module.
        """
        for unit in self._units(recurse):
            unit.reconcile()
        groups = [group for unit in self._units(recurse) for group in unit.groups]
        pending = [item for group in groups for item in group.gradients.unreduced.by_param().items()]
        return {param.sharded: gradients for param, gradients in pending if param.sharded is not None}

    def set_gradient_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Divide this module's summed gradients by ``factor`` instead of the number of data-parallel ranks.

        With ``recurse``, divide those of all units below it, too. Without it, units below keep their divisor, as with
        torch: where all parameters belong to blocks, a call on the model alone changes nothing.

        Raises:
            ValueError: ``factor`` is not a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ValueError(f"factor must be a positive number, got {factor!r}")
        self._set("set_gradient_divide_factor", recurse, divide_factor=float(factor))

    def set_force_sum_reduction_for_comms(self, enable: bool, *, recurse: bool = False) -> None:
        """Sum in collectives and divide in a separate kernel (True); with ``recurse``, also for all units below."""
        self._set("set_force_sum_reduction_for_comms", recurse, force_sum=_bool("enable", enable))

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True, any_order: bool = False
    ) -> None:
        """Let ranks use different parameters (True): a rank sends zeros for parameters without a gradient.

        A rank that skips such a unit gathers it when the others do, frees it, and takes part in its reductions.

        Args:
            reduce_scatter_unused_params: Whether ranks may skip the unit.
            recurse: Also set it for all units below this module.
            any_order: Whether ranks may use these units in orders that differ, call them several times in a forward, or
                a different number of times. Such a unit stays in memory until the forward ends, and its gradients are
                sent later. Without it, ranks that once used the units alike must go on to do so: loop over experts by
                index, for example, not by score, and call each once in a forward.

        Raises:
            ValueError: ``any_order`` without ``reduce_scatter_unused_params``.
        """
        marked = _bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        any_order = _bool("any_order", any_order)
        if any_order and not marked:
            raise ValueError(
                "set_reduce_scatter_unused_params: any_order=True is for units that ranks may skip; got False for "
                "reduce_scatter_unused_params, expected True. Pass True, or leave any_order out"
            )
        self._set("set_reduce_scatter_unused_params", recurse, reduce_unused=marked, any_order=any_order)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set the number of gradient chunks that may be in flight. More chunks overlap better and take more memory.

        On an accelerator, it is a number of units, each with all its gradients.

        Raises:
            TypeError: ``max_input_buffers`` is not an int.
            ValueError: ``max_input_buffers`` is less than 1, or more than 1 with symmetric memory.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._set("set_reduce_scatter_max_input_buffers", recurse, reduce_inputs=max_input_buffers)
        for root in dict.fromkeys(unit.root for unit in self._units(recurse)):
            root.limit_communication()

    @deprecated("Use `set_gradient_divide_factor` instead")
    def set_reduce_scatter_divide_factor(self, factor: float, *, recurse: bool = False) -> None:
        """Set the divide factor: the old name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor, recurse=recurse)

    # ---- communication ----

    def set_custom_all_gather(self, comm: AllGather, *, recurse: bool = False) -> None:
        """Gather this module's parameters with ``comm``, in memory that ``comm`` allocates.

        With ``recurse``, do so for all units below, too. If ``comm`` has a method ``format_of``, that chooses in which
        format each parameter is sent; then ``comm`` need not gather itself.

        Raises:
            RuntimeError: A forward or backward of the module is running; or ``comm`` changes formats, and a backward is
                expected.
            ValueError: The parameters of a unit are on several meshes, or only some of them are on the CPU; or ``comm``
                chooses formats, and so does ``compression``.
        """
        self._one_group("set_custom_all_gather", recurse, over_shards=True)
        self._set("set_custom_all_gather", recurse, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: ReduceScatter, *, recurse: bool = False) -> None:
        """Reduce-scatter this module's gradients with ``comm``, in memory that ``comm`` allocates.

        With ``recurse``, do so for all units below, too. If ``comm`` has a method ``format_of``, that chooses in which
        format each gradient is sent and summed, and ``replica_format_of`` the same on the replicate dimension. ``comm``
        then reduces the others, or leaves them to fsdp2 if it is not callable.

        ``comm`` may allocate the same memory every time if it serves one unit with one reduction in flight; for that,
        call ``set_reduce_scatter_max_input_buffers(1)``. Results are copied out of that memory.

        Raises:
            RuntimeError: ``comm`` changes formats, and a forward or backward is running, or a backward is expected.
            ValueError: The parameters of a unit are on several meshes, or only some of them are on the CPU; or
                ``compression`` compresses gradients.
        """
        self._one_group("set_custom_reduce_scatter", recurse, over_shards=True)
        self._set("set_custom_reduce_scatter", recurse, reduce_scatter=comm)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None, recurse: bool = False
    ) -> None:
        """Call ``hook(reduced)`` on the module's reduced gradients, before division, cast and accumulation.

        The hook runs once per backward, or once for each pair of dtypes among the parameters. The gradients are
        reduced together for it.

        Args:
            hook: A function that changes its argument in place, for example by an all-reduce. The argument is a 1D
                tensor with the summed shards of all gradients.
            stream: The stream to run ``hook`` on. It is not allowed with a replicate dimension, whose all-reduce stream
                then runs the hook.
            recurse: Also set the hook on all units below this module.

        Raises:
            ValueError: ``stream`` is given with a replicate dimension, or the parameters of a unit are on several
                meshes, or only some of them are sharded (a scalar is not).
        """
        self._one_group("set_all_reduce_hook", recurse, over_shards=False)
        if stream is not None:
            for group in [group for unit in self._units(recurse) for group in unit.groups]:
                if group.mesh.replicate.size > 1:
                    raise ValueError("stream cannot be set when using native HSDP")
        lane = None if stream is None else Lane(self._get_fsdp_state().device, stream=stream)
        self._set("set_all_reduce_hook", recurse, all_reduce_hook=hook, all_reduce_lane=lane)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the gathers of the next forward wait for ``event`` instead of all work before the forward.

        The event is used once. With None, which is the event of a CPU stream, the gathers wait for all work.

        Raises:
            TypeError: ``event`` is neither an event nor None.
        """
        if event is not None and not hasattr(event, "record"):
            raise TypeError(f"event must be a torch.Event, got {event!r}; record one after the optimizer's step")
        self._get_fsdp_state().root.post_optim_event = event

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Reduce gradients on a process group of their own, so that reductions do not queue behind gathers.

        All ranks of a shard dimension must call it. It makes one process group for each shard dimension.
        """
        _bool("enable", enable)
        made: dict[object, Axis] = {}
        for unit in self._units(recurse):
            for group in unit.groups:
                axis = group.mesh.shard
                if enable and axis.group is not None:
                    if axis.group not in made:
                        own = group.gradients.axis.group is not axis.group
                        made[axis.group] = group.gradients.axis if own else axis.with_own_group()
                    axis = made[axis.group]
                group.gradients.use_axis(axis)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Allocate communication buffers with the process group's own allocator, if it has one.

        Raises:
            RuntimeError: A forward or backward of the module is running.
            AssertionError: A custom all-gather or reduce-scatter is set (torch's contract).
        """
        _bool("enable", enable)

        def change(group: FSDPParamGroup) -> GroupOptions:
            shard, reduce = group.mesh.shard.group, group.gradients.axis.group
            comms = in_memory_of_groups(shard, reduce) if enable else (None, None)
            return group.store.options.with_comms("set_allocate_memory_from_process_group", *comms)

        self._change("set_allocate_memory_from_process_group_for_comm", False, change)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Allocate communication buffers in symmetric memory.

        Raises:
            RuntimeError: A forward or backward of the module is running.
            NotImplementedError: The backend of the mesh is not NCCL.
            AssertionError: A custom all-gather or reduce-scatter is set (torch's contract).
        """

        def change(group: FSDPParamGroup) -> GroupOptions:
            shard, reduce = group.mesh.shard, group.gradients.axis.group
            if not shard.is_nccl or backend != "NCCL" or shard.group is None or reduce is None:
                raise NotImplementedError(
                    f"{group.name or 'the root'}: set_symm_mem_for_comm needs NCCL, got the backend {shard.backend!r} "
                    f"and {backend!r}; leave it out, or use set_custom_all_gather"
                )
            comms = in_symmetric_memory(shard.group, reduce if group.store.options.force_sum else None, backend)
            return group.store.options.with_comms("set_symm_mem", *comms)

        self._change("set_symm_mem_for_comm", False, change)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Do nothing: gathers never block the host, and take no memory from the compute stream."""
        _bool("async_op", async_op)

    def set_transfer_sizes(
        self,
        *,
        direct_param_bytes: int | None = None,
        direct_group_bytes: int | None = None,
        chunk_bytes: int | None = None,
        exchange_bytes: int | None = None,
        recurse: bool = True,
    ) -> None:
        """Set the sizes in bytes that decide how tensors are sent. Call it before training: the first two move shards.

        None leaves a size unchanged.

        Args:
            direct_param_bytes: Full parameters of at least this size are gathered into their place without a copy, each
                by a collective of its own (default 1 MiB; if the backend coalesces collectives, at least 32 KiB per
                rank). A huge value packs all parameters. With NCCL only the sixteen largest of a unit are gathered
                like this.
            direct_group_bytes: The smallest size of a unit with such gathers (default 8 MiB).
            chunk_bytes: The smallest size of a chunk of gradients (default 1 MiB). Gradients are reduced in up to eight
                chunks per unit, fewer on many ranks and on accelerators.
            exchange_bytes: Chunks of at least this size, in the reduce dtype, are sent in the dtype of computation by
                an all-to-all and summed in float32 (default: 256 KiB on gloo, whose reduce-scatter is slow; never on
                other backends).
            recurse: Also set the sizes for all units below this module.

        Raises:
            RuntimeError: A size changes that is about gathers, and a forward or backward of the module is running.
            ValueError: A size is not a number of bytes.
        """
        values = {"direct_param_bytes": direct_param_bytes, "direct_group_bytes": direct_group_bytes}
        given = TransferSizes.given(values | {"chunk_bytes": chunk_bytes, "exchange_bytes": exchange_bytes})

        def change(options: GroupOptions) -> GroupOptions:
            return replace(options, sizes=replace(options.sizes, **given))

        self._change_options("set_transfer_sizes", recurse, change)

    def set_deterministic_reduction(self, enable: bool, *, recurse: bool = True) -> None:
        """Sum the gradients of this module in one order of ranks (True), with ``recurse`` of all units below, too.

        Ranks exchange gradients and add them up in pairs of neighbours, in float32 at least. The sums then depend
        neither on the backend, nor on timing, nor on the sizes of chunks. ``n`` ranks that accumulate two micro-batches
        each get the same bits as ``2 * n`` ranks with one each, if they divide by powers of two and accumulate in the
        same dtype. Without it, a backend sums in an order of its own.

        Each rank receives as many bytes as with a reduce-scatter and needs memory for the received rows. Over a
        replicate axis, gradients are exchanged and gathered, instead of all-reduced.

        Raises:
            ValueError: A unit has a custom reduce-scatter, or compresses gradients.
        """
        self._set("set_deterministic_reduction", recurse, in_pairs=_bool("enable", enable))

    def set_compression(self, compression: CompressionPolicy | None, *, recurse: bool = True) -> None:
        """Send the parameters and gradients of this module, with ``recurse`` of all units below, in fewer bytes.

        None sends them uncompressed. Call it between two steps, on every rank, because it moves shards.

        Raises:
            TypeError: ``compression`` is neither a CompressionPolicy nor None.
            RuntimeError: A forward or backward is running, or the backward of an earlier forward is still expected.
            ValueError: A unit has a custom reduce-scatter, and the policy compresses ``reduce``.
        """
        if compression is not None and not isinstance(compression, CompressionPolicy):
            raise TypeError(f"compression must be a CompressionPolicy or None, got {compression!r}")
        for unit in self._units(recurse):
            for group in unit.groups:
                _check_between_steps("set_compression", unit, group)
        self._set("set_compression", recurse, compression=compress(compression))

    # ---- internal ----

    def _get_fsdp_state(self) -> FSDPState:  # type: ignore[override]  # not torch's class
        unit = get_state(cast(nn.Module, self))
        if unit is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return unit

    def _root_unit(self, method: str) -> FSDPState:
        unit = self._get_fsdp_state()
        if unit.is_root is False:
            raise RuntimeError(f"{method} must be called on the root FSDP module; {unit.name!r} lies below the root")
        return unit

    def _one_group(self, method: str, recurse: bool, *, over_shards: bool) -> None:
        """Raise ValueError if a unit has several groups that ``method`` is about.

        With ``over_shards`` these are the groups that have a shard axis: the others are not gathered.
        """
        for unit in self._units(recurse):
            groups = [group for group in unit.groups if group.mesh.shard.group is not None or not over_shards]
            if len(groups) > 1:
                raise ValueError(
                    f"{unit.name or 'the module'}: {method} is not supported with multiple param groups (from "
                    "per-param mesh via shard_placement_fn, per-param offload_policy, replicated_params, or scalars): "
                    "what to do would be ambiguous across groups"
                )

    def _units(self, recurse: bool) -> list[FSDPState]:
        module = cast(nn.Module, self)
        return units_below(module) if _bool("recurse", recurse) else [self._get_fsdp_state()]

    def _set(self, setter: str, recurse: bool, **changes: Any) -> None:
        self._change_options(setter, recurse, lambda options: replace(options, **changes))

    def _change_options(self, setter: str, recurse: bool, change: Callable[[GroupOptions], GroupOptions]) -> None:
        units = self._units(recurse)
        # A unit without a group uses these when parameters are added. They too are checked before anything changes.
        made_by = [unit.made_by.with_options(change(unit.made_by.options)) for unit in units]
        self._change(setter, recurse, lambda group: change(group.store.options))
        for unit, made in zip(units, made_by):
            unit.made_by = made

    def _change(self, setter: str, recurse: bool, change: Callable[[FSDPParamGroup], GroupOptions]) -> None:
        """Change the options of groups for ``setter``; ranks then compare options that must be the same on all."""
        changes = [(unit, group, change(group)) for unit in self._units(recurse) for group in unit.groups]
        # All are made and checked before the first one takes effect.
        for unit, group, options in changes:
            group.check_options(options)
            if options.layout_settings != group.store.options.layout_settings:
                _check_not_entered(setter, group)
            if options.formats_of != group.store.options.formats_of:
                _check_between_steps(setter, unit, group)
        for unit, group, options in changes:
            alike = group.store.options.compared == options.compared
            group.set_options(options)
            if not alike:
                unit.root.options_changed(setter)

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Clear gradients like ``nn.Module``, and also those that modules do not show: of shards, or unreduced.

        A class may have a ``zero_grad`` of its own, with other arguments: that is called, and ``nn.Module``'s in it
        does the same. Called inside a backward, it leaves the gradients of units that this backward is computing. In a
        unit of several modules it leaves those of the other modules.
        """
        zero = super(TorchFSDPModule, self).zero_grad  # type: ignore[misc]  # nn.Module's, or its class's own
        result = zero(*args, **kwargs)
        if getattr(zero, "__func__", None) is nn.Module.zero_grad:
            _zero_hidden(self, *args, **kwargs)
        return result

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict as ``nn.Module`` does, also inside ``torch.inference_mode()``.

        There DTensors cannot be detached, so the mode is left for it.
        """
        save = super(TorchFSDPModule, self).state_dict  # type: ignore[misc]  # nn.Module's
        if not torch.is_inference_mode_enabled():
            return save(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return save(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Apply ``to``, ``half``, ``to_empty`` and similar methods to the shards.

        Raises:
            RuntimeError: ``share_memory`` was called, on this module or on one around it.
        """
        unit = self._get_fsdp_state()
        if args and getattr(args[0], "__qualname__", "").startswith("Module.share_memory."):  # torch's own function
            raise RuntimeError(
                f"{unit.name or class_name(self)}: share_memory() was called on sharded parameters, which have no "
                "memory of their own that processes could share; expected plain ones. Use copies: "
                "parameter.to_local().detach().clone().share_memory_()"
            )
        unit.reconcile()
        self.reshard()
        groups = unit.groups
        # A gradient with a dtype of its own (Tensor.grad_dtype) must not be cast with its shard.
        withheld = [(param, param.withhold_gradient()) for group in groups for param in group.params]
        try:
            result = super(TorchFSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]  # nn.Module's
            for group in groups:
                group.residency.adopt(lasting=True)
                group.forget_shards()
        finally:
            for param, grad in withheld:
                if grad is not None:
                    param.return_gradient(grad)
        return result


def _check_not_entered(setter: str, group: FSDPParamGroup) -> None:
    """Raise RuntimeError if a pass computes with ``group``: the setter moves its shards, and frees what is gathered."""
    if group.is_entered:
        phase = group.phases.phase.name.lower()
        raise RuntimeError(
            f"{group.name or 'the root'}: {setter} was called while its {phase} runs; expected a call between two "
            "steps. Call it after backward, after reset_iter_state() on the root if that raised"
        )


class ZeroesHidden(nn.Module):
    """The last base before ``nn.Module`` of a unit whose class has a ``zero_grad`` of its own, which may call it."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients like ``nn.Module``, and those that modules do not show."""
        super().zero_grad(set_to_none)
        _zero_hidden(cast(FSDPModule, self), set_to_none)


def _zero_hidden(module: FSDPModule, set_to_none: bool = True) -> None:
    """Clear the gradients below ``module`` that modules do not show, unless a backward is computing them."""
    modules = set(cast(nn.Module, module).modules())
    for group in [group for unit in module._units(recurse=True) for group in unit.groups]:
        if not group.phases.in_backward:
            params = [param for param in group.params if any(site.module in modules for site in param.sites)]
            group.gradients.zero(params, set_to_none=set_to_none)


def _check_between_steps(setter: str, unit: FSDPState, group: FSDPParamGroup) -> None:
    """Raise RuntimeError if a pass computes with ``group``, or a backward still expects its present formats."""
    _check_not_entered(setter, group)
    if unit.root.pending.expects(group):  # backward needs the buffers that the forward used
        raise RuntimeError(
            f"{group.name or 'the root'}: {setter} was called between a forward and its backward; expected a call "
            "between two steps. Call it after the last backward, or after reset_iter_state() on the root, which drops "
            "gradients, if no backward follows"
        )


def _bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return value


def _units(modules: Sequence[TorchFSDPModule]) -> list[FSDPState]:
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"modules must be a list of FSDPModules, got {type(modules).__name__}; pass [module] for one")
    units = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}; call fully_shard on it first")
        units.append(module._get_fsdp_state())
    return units


class _Unsharding(UnshardHandle):
    """The handle of ``unshard(async_op=True)``."""

    def __init__(self, groups: list[FSDPParamGroup]) -> None:
        self._groups = groups

    @outside_dynamo
    def wait(self) -> None:
        """Wait for the gathers, and show the full parameters on their modules."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.wait_for_unshard()


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots (the stages of a pipeline) share communication streams, so that they reuse each other's memory.

    Raises:
        TypeError: ``modules`` is not a list.
        ValueError: A module is not an FSDPModule.
        RuntimeError: What ``finalize_backward(async_op=True)`` returned was not waited for.
    """
    units = _units(modules)
    for unit in units:
        unit.root.refuse_unfinished("share_comm_ctx")
    for unit in units[1:]:
        unit.root.use_comm(units[0].root.comm)
