"""The ranks a parameter is spread over: one shard axis, one replicate axis, each of size 1 where it is absent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["Axis", "DataParallelMesh", "default_mesh"]


@dataclass(frozen=True)
class Axis:
    """One mesh dimension as communication sees it: process group, size, this process's rank in it, backend name."""

    group: dist.ProcessGroup | None
    size: int
    rank: int
    backend: str

    @classmethod
    def of(cls, mesh: DeviceMesh, dim: int) -> Axis:
        """The axis of dimension ``dim`` of ``mesh``."""
        group = mesh.get_group(dim)
        return cls(group, group.size(), group.rank(), _backend(group, mesh.device_type))


def _backend(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that serves ``device_type``: the configuration reads "gloo" or "cpu:gloo,cuda:nccl"."""
    config = dist.get_backend_config(group)
    by_device = dict(part.split(":") for part in config.split(",") if ":" in part)
    return by_device.get(device_type, config)


_ABSENT = Axis(None, 1, 0, "none")


@dataclass(frozen=True)
class DataParallelMesh:
    """The mesh of one call: parameters are cut over ``shard``, gradients summed over ``shard`` and ``replicate``."""

    mesh: DeviceMesh
    shard: Axis
    replicate: Axis
    device: torch.device

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> DataParallelMesh:
        """Read ``mesh``: 1D shards; 2D replicates over its first dimension and shards over its second.

        Raises:
            ValueError: ``mesh`` has more than two dimensions, or this rank is not in it.
            AssertionError: ``mesh`` is 2D without dimension names (torch's contract).
        """
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"fully_shard: rank {dist.get_rank()} is not part of the mesh {mesh}; call fully_shard only on the "
                "ranks of the mesh"
            )
        replicate = Axis.of(mesh, 0) if mesh.ndim == 2 else _ABSENT
        return cls(mesh, Axis.of(mesh, mesh.ndim - 1), replicate, _device_of(mesh))

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1D mesh that parameters are cut over (what all-gather extensions receive)."""
        if self.mesh.ndim == 1:
            return self.mesh
        assert self.mesh.mesh_dim_names is not None
        return self.mesh[self.mesh.mesh_dim_names[-1]]


def default_mesh() -> DeviceMesh:
    """A 1D mesh over all ranks; initialises the default process group where there is none, as torch does."""
    if not dist.is_initialized():
        dist.init_process_group()
    accelerator = torch.accelerator.current_accelerator() or torch.device("cpu")
    return init_device_mesh(accelerator.type, mesh_shape=(dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
