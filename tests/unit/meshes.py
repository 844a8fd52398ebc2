"""Meshes for tests in one process: of any shape over a fake process group, or over one rank of gloo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2.sharding.mesh import DataParallelMesh


@contextmanager
def fake_mesh(shape: Sequence[int], names: Sequence[str] | None = None, rank: int = 0) -> Iterator[DeviceMesh]:
    """Yield a mesh over a fake default process group as ``rank`` sees it; its collectives move nothing."""
    world = 1
    for size in shape:
        world *= size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", tuple(shape), mesh_dim_names=None if names is None else tuple(names))
    finally:
        dist.destroy_process_group()


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
