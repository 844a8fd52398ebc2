"""Translate torch's ``ShardingStrategy`` to the mesh of a unit and its ``reshard_after_forward``."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.utils import get_env_variable_or_raise
from torch.distributed.fsdp import ShardingStrategy

from fsdp2.policies import DataParallelMeshDims
from fsdp2.sharding.mesh import DataParallelMesh, default_mesh

__all__ = ["follow_strategy", "mesh_of_nodes"]

Reshard = bool | int | None

_HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_RESHARDS = {"FULL_SHARD": True, "HYBRID_SHARD": True, "SHARD_GRAD_OP": False, "_HYBRID_SHARD_ZERO2": False}


def follow_strategy(
    strategy: ShardingStrategy | None, mesh: DeviceMesh | None, dims: DataParallelMeshDims | None, reshard: Reshard
) -> tuple[DataParallelMesh, Reshard]:
    """Return the mesh of a unit's parameters, and the unit's ``reshard_after_forward``.

    FULL_SHARD and SHARD_GRAD_OP shard over all ranks of a 1D mesh. The hybrid strategies shard over the second
    dimension of a 2D mesh. NO_SHARD keeps parameters whole on every rank of either. Without a mesh all ranks take part,
    and the hybrid strategies shard within a node.

    Raises:
        TypeError: ``strategy`` is not a ShardingStrategy.
        ValueError: ``mesh``, ``dims`` or ``reshard`` contradict the strategy.
    """
    if strategy is None:
        return DataParallelMesh.from_mesh(default_mesh() if mesh is None else mesh, dims), reshard
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(
            f"fully_shard: strategy must be a torch.distributed.fsdp.ShardingStrategy, got {strategy!r}; for example "
            "ShardingStrategy.FULL_SHARD"
        )
    name = strategy.name
    reshard = _check_reshard(name, reshard)
    if mesh is None:
        mesh = mesh_of_nodes() if name in _HYBRID and dims is None else default_mesh()
    asked = DataParallelMesh.from_mesh(_check_groups(mesh), dims)
    if name == "NO_SHARD":
        return asked.replicated(), reshard
    hybrid, wanted = asked.roles == ("replicate", "shard"), name in _HYBRID
    if "shard" not in asked.roles or hybrid != wanted:
        expected = "a replicate and a shard dimension" if wanted else "one shard dimension"
        raise ValueError(
            f"fully_shard: strategy {name} needs a mesh with {expected}; got dimensions for {', '.join(asked.roles)} "
            f"in {mesh}; " + (f"pass {_MESH_2D}, or no mesh to shard within each node" if wanted else _MESH_1D)
        )
    return asked, reshard


_MESH_2D = 'init_device_mesh(device_type, (nodes, ranks_per_node), mesh_dim_names=("replicate", "shard"))'
_MESH_1D = (
    "pass a 1D mesh over all ranks or none, use HYBRID_SHARD or _HYBRID_SHARD_ZERO2 with a 2D mesh, or NO_SHARD "
    "without a shard dimension"
)


def _check_reshard(name: str, reshard: Reshard) -> Reshard:
    """Return the ``reshard_after_forward`` of the strategy ``name``; raise ValueError if ``reshard`` contradicts it."""
    keeps = reshard is False or (reshard is not True and reshard == 1)
    if name == "NO_SHARD":
        if reshard is None or isinstance(reshard, bool):
            return reshard
        remedy = "leave it out, or pass a bool: True frees the copy used for computation after forward, False keeps it"
    elif reshard is None or (_RESHARDS[name] and not keeps) or (not _RESHARDS[name] and reshard is False):
        return _RESHARDS[name] if reshard is None else reshard
    elif _RESHARDS[name]:
        remedy = "leave it out, or use SHARD_GRAD_OP or _HYBRID_SHARD_ZERO2 to keep parameters for backward"
    else:
        remedy = "leave it out, or use FULL_SHARD or HYBRID_SHARD to free parameters after forward"
    raise ValueError(f"fully_shard: reshard_after_forward={reshard!r} contradicts strategy {name}; {remedy}")


def _check_groups(mesh: Any) -> Any:
    """Return ``mesh``; raise TypeError for process groups, which FSDP1 accepts instead of a mesh."""
    groups = mesh if isinstance(mesh, (tuple, list)) else [mesh]
    if any(isinstance(group, dist.ProcessGroup) for group in groups):
        raise TypeError(
            "fully_shard: mesh must be a DeviceMesh, got process groups; make one of them with "
            "DeviceMesh.from_group(shard_group, device_type), or DeviceMesh.from_group([replicate_group, shard_group], "
            'device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))'
        )
    return mesh


_node_meshes: weakref.WeakKeyDictionary[Any, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


def mesh_of_nodes() -> DeviceMesh:
    """Return a mesh ("replicate", "shard") of (nodes, ranks per node), the same for each default process group.

    The number of ranks per node comes from LOCAL_WORLD_SIZE, which torchrun sets, or is the number of accelerators.
    All nodes must have the same size, and a node's ranks must be consecutive.

    Raises:
        ValueError: Neither number is known, or nodes differ in size.
    """
    device_type = default_mesh().device_type
    world, size = dist.group.WORLD, dist.get_world_size()
    local = 1 if size == 1 else min(_ranks_per_node(), size)
    if size % local:
        raise ValueError(
            f"fully_shard: a hybrid strategy without a mesh needs nodes of one size; got {size} ranks, {local} of them "
            f"on this node; pass {_MESH_2D}"
        )
    made = _node_meshes.setdefault(world, {})
    if local not in made:
        made[local] = init_device_mesh(device_type, (size // local, local), mesh_dim_names=("replicate", "shard"))
    return made[local]


def _ranks_per_node() -> int:
    try:
        ranks = get_env_variable_or_raise("LOCAL_WORLD_SIZE")
    except ValueError:
        count = torch.accelerator.device_count()
        if count > 0:
            return count
        raise ValueError(
            "fully_shard: a hybrid strategy without a mesh shards within a node, and the number of ranks in a node is "
            f"not known: LOCAL_WORLD_SIZE is not set and there is no accelerator; start with torchrun, or pass "
            f"mesh={_MESH_2D}"
        ) from None
    if not ranks.isdecimal() or int(ranks) < 1:
        raise ValueError(f"fully_shard: LOCAL_WORLD_SIZE is {ranks!r}, expected a number of ranks of at least 1")
    return int(ranks)
