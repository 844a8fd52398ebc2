"""Between a shard and the whole tensor: gathered by communication, cut without any."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp2._torch.tensors import dtensor_from_local, dtensor_spec, local_tensor
from fsdp2.comm.collectives import all_gather, wire_view
from fsdp2.engine.unit import FSDPState
from fsdp2.sharding.mesh import DataParallelMesh
from fsdp2.sharding.spec import ShardedSpec

__all__ = ["cut_full", "distribute_locally", "full_of", "gather_full", "is_first_rank", "lies_like", "widest_mesh"]


@torch.no_grad()
def gather_full(local: torch.Tensor, spec: ShardedSpec, mesh: DataParallelMesh, *, keep: bool) -> torch.Tensor | None:
    """The whole tensor, in memory of its own, of which ``local`` is this rank's piece; every rank must call it.

    The dtype is that of ``local``, the device the mesh's. Where it is not to be kept it is None; every rank holds the
    gathered pieces for a moment all the same.
    """
    if type(local) is not torch.Tensor:  # a subclass knows best what travels
        full = full_of(spec.shard_as(local))
    elif local.is_meta:
        shape = spec.layout.shape if spec.dtensor.tensor_meta is None else spec.dtensor.tensor_meta.shape
        full = torch.empty(shape, dtype=local.dtype, device="meta")
    else:
        full = _gather_layout(local, spec, mesh)
        if spec.full is not None:
            full = spec.wrap_full(full).full_tensor()  # type: ignore[attr-defined]  # a DTensor
    return _own(full, local) if keep else None


def _gather_layout(local: torch.Tensor, spec: ShardedSpec, mesh: DataParallelMesh) -> torch.Tensor:
    layout, ranks = spec.layout, mesh.shard.size
    if layout.dim is None or ranks == 1 or not layout.numel:
        return local.to(mesh.device)
    slot = layout.slot_numel
    row = _row(local, spec, slot, mesh.device)
    rows = torch.empty(ranks * slot, dtype=local.dtype, device=mesh.device)
    all_gather([wire_view(rows)], [wire_view(row)], mesh.shard, async_op=False)
    if layout.rank_major:
        return rows.as_strided(layout.shape, layout.stride)
    full = torch.empty_strided(layout.shape, layout.stride, dtype=local.dtype, device=mesh.device)
    for rank in range(ranks):
        piece = rows.as_strided(layout.shard_shape(rank), layout.shard_stride(rank), rank * slot)
        full.narrow(layout.dim, *layout.bounds(rank)).copy_(piece)
    return full


def _row(local: torch.Tensor, spec: ShardedSpec, slot: int, device: torch.device) -> torch.Tensor:
    """``local`` as this rank sends it: 1D, in the full tensor's memory order, padded to ``slot`` elements."""
    dense = local.stride() == tuple(spec.shard_stride) and local.device == device
    if dense and spec.shard_numel == slot:
        return local.as_strided((slot,), (1,))
    row = torch.empty(slot, dtype=local.dtype, device=device)
    row[spec.shard_numel :].zero_()
    row[: spec.shard_numel].as_strided(spec.shard_shape, spec.shard_stride).copy_(local)
    return row


@torch.no_grad()
def full_of(value: DTensor) -> torch.Tensor:
    """The whole tensor of any DTensor, in memory of its own; every rank of its mesh must call it."""
    device, local = value.device_mesh.device_type, local_tensor(value)
    if local.device.type not in (device, "meta"):  # what was offloaded cannot be sent
        local = local.to(device)
    sent = dtensor_from_local(local.detach(), dtensor_spec(value))
    return _own(sent.full_tensor(), local)


def _own(full: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """``full``, copied if it shares memory with the shard ``local`` or drags padding along."""
    if full.is_meta or not full.numel():
        return full
    exact = full.untyped_storage().nbytes() == full.nbytes
    return full if exact and full.data_ptr() != local.data_ptr() else full.clone()


def cut_full(full: torch.Tensor, spec: ShardedSpec) -> torch.Tensor:
    """This rank's piece of the whole tensor ``full``, without communication: a view where no dimension is cut twice."""
    full = full.detach()
    if spec.full is not None:
        full = local_tensor(distribute_locally(full, spec.full.mesh, spec.full.placements))
    return spec.cut(full)


def distribute_locally(full: torch.Tensor, mesh: DeviceMesh, placements: tuple) -> DTensor:
    """A DTensor of ``full``, which every rank has: each keeps its own piece, nothing is sent."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def lies_like(value: DTensor, param: DTensor) -> bool:
    """Whether the pieces of ``value`` are those of ``param``."""
    mine, other = dtensor_spec(param), dtensor_spec(value)
    same = mine.mesh is other.mesh or mine.mesh == other.mesh
    return same and mine.placements == other.placements and value.shape == param.shape


def widest_mesh(states: list[FSDPState]) -> DeviceMesh | None:
    """The mesh with the most ranks that a parameter lies on, tensor parallelism included; the first of several."""
    meshes = {
        id(param.spec.dtensor.mesh): param.spec.dtensor.mesh
        for state in states
        for group in state.groups
        for param in group.params
    }
    return max(meshes.values(), key=lambda mesh: math.prod(mesh.shape), default=None)


def is_first_rank(states: list[FSDPState]) -> bool:
    """Whether this process is the "rank 0" of ``rank0_only``: the first of the model's widest mesh."""
    mesh = widest_mesh(states)
    if mesh is None:
        return not dist.is_initialized() or dist.get_rank() == 0
    return not any(mesh.get_coordinate() or ())
