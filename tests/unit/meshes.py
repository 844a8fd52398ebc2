"""Meshes for tests in one process whose collectives are real: over one rank of gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2.sharding.mesh import DataParallelMesh


@contextmanager
def gloo_mesh(backend: str = "gloo") -> Iterator[DeviceMesh]:
    """Yield a mesh over a default process group of one rank whose collectives are real."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def as_rank(mesh: DataParallelMesh, rank: int) -> DataParallelMesh:
    """Return ``mesh`` as if this process were ``rank`` of its shard axis."""
    return replace(mesh, shard=replace(mesh.shard, rank=rank))
