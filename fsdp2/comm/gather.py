"""Gathering a group: from this rank's wire shards to full parameters, large ones without any copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp2._torch import foreach_copy
from fsdp2.comm.collectives import all_gather, wire_view
from fsdp2.comm.streams import ComputeLane, InFlight, Lane
from fsdp2.policies import AllGather
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.mesh import Axis
from fsdp2.sharding.packing import FlatPlan, Item

__all__ = ["Buffer", "GatherBuffers", "finish_gather", "start_gather"]


class Buffer:
    """Memory that comes and goes while the tensors that view it stay: the storage is resized, never replaced.

    Autograd saves views of full parameters, so a parameter must keep its tensor object and its storage object for its
    whole life.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._storage = self.bytes.untyped_storage()

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements of ``dtype`` from byte ``offset`` on, 1D, with a version counter of their own.

        A version counter shared with the parameters would make autograd believe that a gather changes them.
        """
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype).data

    def allocate(self) -> None:
        """Make the memory exist (its content is undefined)."""
        if self._storage.size() != self.nbytes:
            self._storage.resize_(self.nbytes)

    def free(self) -> None:
        """Give the memory back."""
        if self._storage.size() != 0:
            self._storage.resize_(0)


class GatherBuffers:
    """Everything one group's gather reads and writes, made once: views of the wire, full and staging buffers."""

    def __init__(self, items: Sequence[Item], plan: FlatPlan, shards: torch.Tensor, ranks: int, full: Buffer) -> None:
        """``shards`` is the group's shard buffer as bytes; ``full`` must be allocated while the views are made."""
        self.full = full
        device = full.bytes.device
        self.wire: Buffer | None = None
        wire_bytes = shards
        self.casts: list[tuple[torch.Tensor, torch.Tensor]] = []
        if plan.casts or shards.device != device:
            self.wire = Buffer(plan.wire_bytes, device)
            wire_bytes = self.wire.bytes
            for run in plan.runs:
                src = shards[run.shard_offset : run.shard_offset + run.numel * run.dtype.itemsize].view(run.dtype)
                self.casts.append((self.wire.view(run.wire_offset, run.numel, run.wire_dtype), src))
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        for i in plan.direct:
            item, numel = items[i], items[i].layout.slot_numel
            start = plan.wire_offset[i]
            piece = wire_bytes[start : start + numel * item.wire_dtype.itemsize].view(item.wire_dtype)
            self.inputs.append(wire_view(piece))
            self.outputs.append(wire_view(full.view(plan.full_offset[i], ranks * numel, item.wire_dtype)))
        self.staging: Buffer | None = None
        self.copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        if plan.packed:
            self._stage(items, plan, wire_bytes, ranks)
        self.free_temporaries()

    def _stage(self, items: Sequence[Item], plan: FlatPlan, wire_bytes: torch.Tensor, ranks: int) -> None:
        """The packed run: one more collective into a staging buffer, and the copies from there to the full places."""
        start, row_bytes = plan.packed_start, plan.wire_bytes - plan.packed_start
        self.staging = Buffer(ranks * row_bytes, self.full.bytes.device)
        dtypes = {items[i].wire_dtype for i in plan.packed}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        self.inputs.append(wire_view(wire_bytes[start:].view(dtype)))
        self.outputs.append(wire_view(self.staging.bytes.view(dtype)))
        rows = self.staging.bytes.view(ranks, row_bytes)
        for i in plan.packed:
            item = items[i]
            offset = plan.wire_offset[i] - start
            sent = rows[:, offset : offset + item.layout.slot_numel * item.wire_dtype.itemsize].view(item.wire_dtype)
            flat = self.full.view(plan.full_offset[i], item.layout.full_storage_numel, item.wire_dtype)
            for dst, src in _unpack_copies(flat, sent, item.layout):
                self.copies[0].append(dst)
                self.copies[1].append(src)

    def allocate(self) -> None:
        """Make the full, wire and staging memory exist."""
        self.full.allocate()
        if self.wire is not None:
            self.wire.allocate()
        if self.staging is not None:
            self.staging.allocate()

    def free_temporaries(self) -> None:
        """Give back what only the gather itself needs."""
        if self.wire is not None:
            self.wire.free()
        if self.staging is not None:
            self.staging.free()


def _unpack_copies(
    flat: torch.Tensor, rows: torch.Tensor, layout: ShardLayout
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The (destination, source) pairs that turn ``rows`` (ranks, slot) into the full tensor in ``flat``."""
    if layout.rank_major:
        return [(flat.view(layout.ranks, layout.slot_numel), rows)]
    full, dim = flat.as_strided(layout.shape, layout.stride), layout.dim
    assert dim is not None
    return [
        (full.narrow(dim, *layout.bounds(r)), rows[r].as_strided(layout.shard_shape(r), layout.shard_stride(r)))
        for r in range(layout.ranks)
        if layout.shard_numel(r)
    ]


def start_gather(
    buffers: GatherBuffers, axis: Axis, lane: Lane, *, custom: AllGather | None = None
) -> InFlight[GatherBuffers]:
    """Cast and send this rank's shards; the full parameters are there after ``finish_gather``."""
    with torch.no_grad(), lane.after() as done:
        buffers.allocate()
        for wire, shard in buffers.casts:
            wire.copy_(shard)
        works = all_gather(buffers.outputs, buffers.inputs, axis, async_op=lane.async_op, custom=custom)
    return InFlight(buffers, works, done.event)


def finish_gather(gathering: InFlight[GatherBuffers], lane: Lane, compute: ComputeLane) -> None:
    """Wait for the collectives and put packed parameters in their places, so that compute may read them."""
    buffers = gathering.wait(compute)
    if not buffers.copies[0] and buffers.wire is None:
        return
    with torch.no_grad(), lane.after() as done:
        if buffers.copies[0]:
            foreach_copy(*buffers.copies)
        buffers.free_temporaries()
    compute.wait(done.event)
