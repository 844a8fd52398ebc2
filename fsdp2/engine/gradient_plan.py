"""The plan of one group's gradients: which are reduced together, in which dtypes and layout, and with which divisor.

A plan follows from parameters and options that are equal on all ranks, so every rank makes the same plan.
``GroupGradients`` makes a new one when these change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp2.comm.collectives import prefers_all_to_all
from fsdp2.comm.context import CommContext
from fsdp2.comm.reduce import ReducePlan
from fsdp2.comm.scaling import choose_scaling
from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.formats import ENCODED, Formats
from fsdp2.engine.param import FSDPParam, have_gradients
from fsdp2.policies import WireFormat
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import NO_LIMIT, ChunkPlan, RowPlan, plan_chunks, reduced_in_place

__all__ = ["GradientDtypes", "GradientPlan"]


@dataclass(frozen=True)
class GradientDtypes:
    """The dtypes of a gradient: as sent (``wire``, if each rank sums what it receives), as summed, and as delivered.

    ``computed`` is the dtype of computation. ``out=None`` is the dtype of the sum. With ``follows``, the sum widens to
    the dtypes that the gradients have, which are equal on all ranks because the computation is. ``formats`` are those
    of the shard and the replicate axis; gradients that are encoded on the shard axis are summed in float32.
    """

    wire: torch.dtype
    reduce: torch.dtype
    out: torch.dtype | None
    computed: torch.dtype
    follows: bool
    formats: tuple[WireFormat | None, WireFormat | None] = (None, None)

    def encoded(self, formats: Formats, copies: int) -> GradientDtypes:
        """Return the same with ``formats``; there are ``copies`` on the replicate axis.

        Gradients of dtypes that no format encodes are sent as they are.
        """
        reduce, replicate = formats.reduce, formats.replicate if copies > 1 else None
        if (reduce or replicate) is None or not {self.reduce, self.computed} <= set(ENCODED):
            return self
        summed = self if reduce is None else replace(self, wire=torch.float32, reduce=torch.float32)
        return replace(summed, follows=False, formats=(reduce, replicate))


class GradientPlan:
    """The chunks of one group's gradients, and how each is reduced."""

    def __init__(self, store: ShardStore, axis: Axis, comm: CommContext, waiting: Collection[FSDPParam]) -> None:
        """Plan to reduce over ``axis``. Parameters in ``waiting`` have sums that are still to be all-reduced.

        Such a sum is reduced with the next one, even if its parameter was frozen meanwhile.
        """
        self.revision = store.revision
        self._store = store
        self._axis = axis
        self._comm = comm
        self.is_rounded = self._find_rounded()
        there = have_gradients(store.params)
        reduced = [i for i, p in enumerate(store.params) if p.requires_grad or there[i] or p in waiting]
        self.dtypes = self._find_dtypes(reduced)
        self.chunks = self._cut(reduced)
        self.reduced = frozenset(reduced)
        self.nbytes = sum([store.params[i].spec.layout.numel * key.computed.itemsize for i, key in self.dtypes.items()])
        self.streamed_in = {i: c for c, chunk in enumerate(self.chunks.streamed) for i in chunk}
        self._rows: dict[tuple[int, ...], RowPlan] = {}
        self._reductions: dict[tuple[int, torch.dtype, bool], ReducePlan] = {}

    def row(self, indices: tuple[int, ...]) -> RowPlan:
        """Return the layout for sending the gradients of these parameters."""
        if indices not in self._rows:
            self._rows[indices] = self._make_row([self._store.params[i] for i in indices], self.dtypes[indices[0]])
        return self._rows[indices]

    def reduction(
        self, indices: Sequence[int], values: Iterable[torch.Tensor] = (), *, accumulated: bool = False
    ) -> ReducePlan:
        """Return how the gradients of the parameters ``indices``, one chunk or a part of one, are reduced.

        ``values`` are these gradients and earlier sums of them. If they were ``accumulated`` in the dtype of their sum,
        they are also sent in it.
        """
        dtypes = self.dtypes[indices[0]]
        if dtypes.follows:
            for tensor in values:
                widest = torch.promote_types(dtypes.reduce, tensor.dtype)
                dtypes = replace(dtypes, wire=widest, reduce=widest)
        key = (indices[0], dtypes.reduce, accumulated)
        if key not in self._reductions:
            self._reductions[key] = self._make_reduction(dtypes, accumulated)
        return self._reductions[key]

    # ---- dtypes ----

    def _find_rounded(self) -> bool:
        """Return whether gradients are sent as computed, so that all ranks need them in the dtype of computation."""
        options = self._store.options
        exchanges = prefers_all_to_all(self._axis, NO_LIMIT, options.exchange_bytes)
        # A rank whose gradients have accumulated sends them in a wider dtype, and others cannot know that it does.
        return exchanges and options.custom_scatter is None and not options.may_accumulate

    def _find_dtypes(self, reduced: list[int]) -> dict[int, GradientDtypes]:
        """Return the dtypes of the gradients of these parameters, which are equal on every rank.

        If ``grad_dtype`` was set for any parameter, and the policy has no ``reduce_dtype``, the gradients of all
        weights of one dtype are summed in the widest dtype in which any of them accumulates, as in torch.
        """
        params = [self._store.params[i] for i in reduced]
        chosen = any(param.grad_dtype for param in params)
        found = {}
        for i, param in zip(reduced, params):
            total, computed = param.reduce_dtype, param.compute_dtype
            widest = total or computed
            if chosen and param.policy.reduce_dtype is None:
                for other in params:
                    if other.dtype == param.dtype and other.reduce_dtype is not None:
                        widest = torch.promote_types(widest, other.reduce_dtype)
            wire = computed if self.is_rounded and param.widens and not param.grad_dtype else widest
            found[i] = GradientDtypes(wire, widest, param.out_dtype, computed, follows=total is None)
            if any(param.formats):
                found[i] = found[i].encoded(param.formats, self._store.mesh.replicate.size)
        return found

    # ---- chunks and their rows ----

    def _cut(self, reduced: list[int]) -> ChunkPlan:
        """Return which gradients are reduced together."""
        store, mesh, keys = self._store, self._store.mesh, list(self.dtypes.values())
        ranks = max(mesh.shard.size, mesh.replicate.size)
        # NCCL always has streams. Other backends use the device's, except for gloo, which uses none.
        streams = mesh.first_axis.is_nccl or (self._comm.lanes.on_streams and mesh.first_axis.coalesces)
        # On streams chunks bound the bytes packed, in the dtype of the sum; on a CPU the bytes sent, as computed.
        dtypes = [key.reduce if streams else key.computed for key in keys]
        nbytes = [store.params[i].spec.layout.numel * dtype.itemsize for i, dtype in zip(reduced, dtypes)]
        # A unit smaller than others need not be cut as finely: the largest one determines the peak of memory.
        largest = self._comm.largest_bytes * store.reduce_bytes // max(store.full_bytes, 1) if streams else 0
        sizes = store.options.chunk_sizes
        if streams and self._reduces_in_place and all([key.reduce == key.computed for key in keys]):
            # Chunks bound the memory that gradients are packed into, but these are sent in place.
            sizes = replace(sizes, chunk_bytes=NO_LIMIT)
        plan = plan_chunks(keys, nbytes, sizes, ranks, largest, streams=streams)
        return ChunkPlan(
            tuple(tuple(reduced[j] for j in chunk) for chunk in plan.streamed),
            tuple(tuple(reduced[j] for j in chunk) for chunk in plan.at_end),
        )

    def _make_row(self, params: list[FSDPParam], dtypes: GradientDtypes) -> RowPlan:
        """Lay out a chunk. If several reductions are one launch, large gradients are reduced in place.

        An all-reduce hook or a custom collective gets one buffer with all gradients in order, which is torch's
        contract.
        """
        layouts = [param.spec.layout for param in params]
        in_place: tuple[int, ...] = ()
        if self._reduces_in_place and dtypes.formats == (None, None):
            in_place = reduced_in_place(layouts, dtypes.reduce.itemsize, self._store.options.sizes)
        return RowPlan(layouts, self._row_padding(dtypes), in_place, self._row_over_replicas(params, dtypes))

    def _row_over_replicas(self, params: list[FSDPParam], dtypes: GradientDtypes) -> RowPlan | None:
        """Lay out this rank's sums over the shard axis for the replicate axis, if this shards them too."""
        layouts = [layout for param in params if (layout := param.spec.over_replicas) is not None]
        if not layouts:
            return None
        form = dtypes.formats[1]
        return RowPlan(layouts, self._aligned(self._store.mesh.replicate, dtypes) if form is None else form.block)

    @property
    def _reduces_in_place(self) -> bool:
        options = self._store.options
        custom = options.custom_scatter is not None or options.all_reduce_hook is not None
        return self._store.mesh.shard.is_nccl and not custom and options.exchange_bytes is None

    def _row_padding(self, dtypes: GradientDtypes) -> int:
        """Return the number of elements that the length of a row must be a multiple of.

        NCCL is many times slower on sizes that are not multiples of 16 bytes. What is encoded has whole blocks, in the
        part of each rank of the replicate axis too.
        """
        reduce, replicate = dtypes.formats
        mesh = self._store.mesh
        if replicate is not None and not mesh.has_portions:
            return replicate.block * mesh.replicate.size
        return self._aligned(mesh.shard, dtypes) if reduce is None else reduce.block

    @staticmethod
    def _aligned(axis: Axis, dtypes: GradientDtypes) -> int:
        return max(16 // dtypes.reduce.itemsize, 1) if axis.is_nccl else 1

    # ---- reductions ----

    def _make_reduction(self, dtypes: GradientDtypes, accumulated: bool) -> ReducePlan:
        store = self._store
        options, mesh, reduce = store.options, store.mesh, dtypes.reduce
        scaling = choose_scaling(
            reduce, mesh.shard.size, mesh.replicate.size, factor=options.divide_factor, force_sum=options.force_sum
        )
        return ReducePlan(
            shard=self._axis,
            replicate=mesh.replicate,
            reduce_dtype=reduce,
            wire_dtype=reduce if accumulated else dtypes.wire,
            exchange_bytes=options.exchange_bytes,
            out_dtype=dtypes.out or reduce,
            scaling=scaling,
            custom=options.custom_scatter,
            hook=options.all_reduce_hook,
            hook_lane=options.all_reduce_lane,
            offload=store.offloads,
            pin_memory=store.pins,
            in_pairs=options.in_pairs,
            encodings=(self._comm.encoding(dtypes.formats[0], 0), self._comm.encoding(dtypes.formats[1], 1)),
        )
