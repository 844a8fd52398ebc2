"""Reducing gradients: from full gradients to this rank's shards of their mean, one chunk at a time.

A chunk is one operation with at most two waits in it, written as a generator: start, yield while gradients travel,
finish. It takes tensors and gives tensors; which parameters they belong to is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from fsdp2._torch import foreach_copy
from fsdp2.comm.collectives import all_reduce, all_to_all, prefers_all_to_all, reduce_scatter
from fsdp2.comm.scaling import Scaling
from fsdp2.comm.streams import InFlight, Lane, Lanes
from fsdp2.policies import ReduceScatter
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.mesh import Axis

__all__ = ["PackedGradients", "ReducePlan", "pack_gradients", "reduce_chunk"]

_ALIGN_BYTES = 16


@dataclass(frozen=True)
class ReducePlan:
    """What is the same for every chunk of a group and dtype.

    ``hook`` sees the reduced chunk before the final division and cast, on ``hook_lane`` if there is one. With
    ``offload`` the shards are delivered on the CPU.
    """

    shard: Axis
    replicate: Axis
    reduce_dtype: torch.dtype
    out_dtype: torch.dtype
    scaling: Scaling
    custom: ReduceScatter | None = None
    hook: Callable[[torch.Tensor], None] | None = None
    hook_lane: Lane | None = None
    offload: bool = False
    pin_memory: bool = False


@dataclass
class PackedGradients:
    """A chunk ready to send: ``rows`` (1D, one row per rank) and where each gradient starts in a row (elements)."""

    rows: torch.Tensor
    offsets: tuple[int, ...]


def pack_gradients(
    grads: Sequence[torch.Tensor],
    layouts: Sequence[ShardLayout],
    dtype: torch.dtype,
    allocate: Callable[[int], torch.Tensor],
) -> PackedGradients:
    """Gradients as one row per rank in ``dtype``: a single even rank-major one as it is, everything else copied."""
    if len(grads) == 1 and _sends_as_it_is(grads[0], layouts[0], dtype):
        return PackedGradients(grads[0].as_strided((grads[0].numel(),), (1,)), (0,))
    ranks = layouts[0].ranks
    offsets, row = [], 0
    align = max(_ALIGN_BYTES // dtype.itemsize, 1)
    for layout in layouts:
        offsets.append(row)
        row += -(-layout.slot_numel // align) * align
    rows = allocate(ranks * row)
    if row != sum(layout.slot_numel for layout in layouts):
        rows.zero_()  # an all-reduce hook may look at the gaps
    table = rows.view(ranks, row)
    copies: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for grad, layout, offset in zip(grads, layouts, offsets):
        for dst, src in _pack_copies(table[:, offset : offset + layout.slot_numel], grad, layout):
            copies[0].append(dst)
            copies[1].append(src)
    foreach_copy(*copies)
    return PackedGradients(rows, tuple(offsets))


def _sends_as_it_is(grad: torch.Tensor, layout: ShardLayout, dtype: torch.dtype) -> bool:
    return grad.dtype == dtype and layout.rank_major and layout.even and grad.stride() == layout.stride


def _pack_copies(
    rows: torch.Tensor, grad: torch.Tensor, layout: ShardLayout
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The (destination, source) pairs that write ``grad`` into ``rows`` (ranks, slot); padding becomes zero."""
    if layout.dim is None:  # every rank holds it whole, so every rank needs the whole sum
        return [(rows, grad.reshape(1, -1).expand(layout.ranks, -1))]
    if layout.rank_major and grad.stride() == layout.stride:
        flat = grad.as_strided((grad.numel(),), (1,))
        whole = grad.numel() // layout.slot_numel if layout.slot_numel else 0
        split = whole * layout.slot_numel
        pairs = [(rows[:whole], flat[:split].view(whole, layout.slot_numel))] if whole else []
        if whole < layout.ranks and layout.slot_numel:
            rest = flat.numel() - split
            rows[whole:].zero_()
            if rest:
                pairs.append((rows[whole, :rest], flat[split:]))
        return pairs
    pairs = []
    for r in range(layout.ranks):
        numel = layout.shard_numel(r)
        if numel < layout.slot_numel:
            rows[r, numel:].zero_()
        if numel:
            piece = rows[r, :numel].as_strided(layout.shard_shape(r), layout.shard_stride(r))
            pairs.append((piece, grad.narrow(layout.dim, *layout.bounds(r))))
    return pairs


def reduce_chunk(
    grads: list[torch.Tensor],
    layouts: Sequence[ShardLayout],
    plan: ReducePlan,
    lanes: Lanes,
    deliver: Callable[[list[torch.Tensor]], None],
    settle: Callable[[list[torch.Tensor]], bool],
) -> Generator[None, None, None]:
    """Reduce ``grads`` (emptied) and ``deliver`` this rank's shards of them, in order, in ``plan.out_dtype``.

    ``settle`` sees the sums over the shard axis, one slot per gradient: it adds what earlier backwards left there, and
    says whether to go on to the replicate axis (True) or has kept them for a later backward.
    """
    packed, exchanged = _start_scatter(grads, layouts, plan, lanes)
    yield
    row = _finish_scatter(exchanged, packed, plan, lanes)
    offsets = packed.offsets
    packed.rows = row  # drops the sent gradients: compute has waited for the reduce lane
    with torch.no_grad(), lanes.reduce.after() as done:
        slots = [row[offset : offset + layout.slot_numel] for offset, layout in zip(offsets, layouts)]
        if not settle(slots):
            return
    lane, event = lanes.reduce, done.event
    if plan.replicate.size > 1:
        lane = lanes.replicate
        with torch.no_grad(), lane.after(event) as done:
            works = all_reduce(row, plan.replicate, average=plan.scaling.average, async_op=lane.async_op)
        yield
        for work in works:
            work.wait()
        event = done.event
    if plan.hook is not None:
        lane = plan.hook_lane or lanes.replicate
        with torch.no_grad(), lane.after(event) as done:
            plan.hook(row)
        event = done.event
    with torch.no_grad(), lane.after(event) as done:
        row = _finish_row(row, plan)
    if plan.offload:
        yield
        if done.event is not None:
            done.event.synchronize()  # the host reads what the copy engine writes
    with torch.no_grad(), lane.after() as done:
        deliver(_cut_row(row, offsets, layouts, plan.shard.rank))
    lanes.compute.wait(done.event)


def _start_scatter(
    grads: list[torch.Tensor], layouts: Sequence[ShardLayout], plan: ReducePlan, lanes: Lanes
) -> tuple[PackedGradients, InFlight[torch.Tensor]]:
    device = grads[0].device
    custom = plan.custom

    def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
        if custom is not None:
            return custom.allocate((numel,), dtype=dtype, device=device)
        return torch.empty(numel, dtype=dtype, device=device)

    # What each rank sums itself may travel as it is: widening commutes with sending.
    padded = sum(layout.slot_numel for layout in layouts) * plan.shard.size
    exchange = custom is None and prefers_all_to_all(plan.shard, padded * plan.reduce_dtype.itemsize)
    narrow = exchange and plan.scaling.pre == 1.0 and len({grad.dtype for grad in grads}) == 1
    wire_dtype = grads[0].dtype if narrow else plan.reduce_dtype
    with torch.no_grad():
        if plan.scaling.pre != 1.0 and len(grads) == 1:
            grads[0] = grads[0].to(plan.reduce_dtype, copy=True)  # the user may hold the gradient itself
        packed = pack_gradients(grads, layouts, wire_dtype, lambda numel: allocate(numel, wire_dtype))
        grads.clear()
        with lanes.reduce.after(lanes.compute.event()) as done:
            if plan.scaling.pre != 1.0:
                packed.rows.div_(plan.scaling.pre)
            async_op = lanes.reduce.async_op
            if exchange:
                out = torch.empty_like(packed.rows)
                works = all_to_all(out, packed.rows, plan.shard, async_op=async_op)
            else:
                out = allocate(packed.rows.numel() // plan.shard.size, plan.reduce_dtype)
                average = plan.scaling.average
                works = reduce_scatter(out, packed.rows, plan.shard, average=average, async_op=async_op, custom=custom)
    return packed, InFlight(out, works, done.event)


def _finish_scatter(
    exchanged: InFlight[torch.Tensor], packed: PackedGradients, plan: ReducePlan, lanes: Lanes
) -> torch.Tensor:
    """This rank's row, summed over the shard axis."""
    out = exchanged.wait(lanes.compute)
    if out.numel() != packed.rows.numel() or plan.shard.size == 1:
        return out
    with torch.no_grad(), lanes.reduce.after():
        wide = torch.float32 if out.dtype.itemsize < 4 else out.dtype
        row = out.view(plan.shard.size, -1).sum(0, dtype=wide)
        if plan.scaling.average:
            row /= plan.shard.size
        return row


def _finish_row(row: torch.Tensor, plan: ReducePlan) -> torch.Tensor:
    """Divided, cast, and on its way to the CPU where gradients live there."""
    if plan.scaling.post != 1.0:
        row.div_(plan.scaling.post)
    if row.dtype != plan.out_dtype:
        row = row.to(plan.out_dtype)
    if not plan.offload or row.device.type == "cpu":
        return row
    host = torch.empty(row.shape, dtype=row.dtype, pin_memory=plan.pin_memory)
    return host.copy_(row, non_blocking=True)


def _cut_row(
    row: torch.Tensor, offsets: Sequence[int], layouts: Sequence[ShardLayout], rank: int
) -> list[torch.Tensor]:
    return [
        row[offset : offset + layout.shard_numel(rank)].as_strided(layout.shard_shape(rank), layout.shard_stride(rank))
        for offset, layout in zip(offsets, layouts)
    ]
