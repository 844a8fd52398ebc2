"""One rank of a job that is not there: code inside runs as it is, without memory, without other ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._torch.forecast import FakeStore, fake_tensors
from fsdp2.comm.streams import simulated_streams
from fsdp2.forecasting.clock import Clock
from fsdp2.sharding.mesh import simulated_backend

__all__ = ["simulated_rank"]


@contextmanager
def simulated_rank(
    mesh: Mapping[str, int], clock: Clock, *, backend: str = "nccl", rank: int = 0
) -> Iterator[DeviceMesh]:
    """Be one ``rank`` of a mesh of those dimensions, whose devices have the clock's streams.

    Tensors made in the block have no memory, and collectives send nothing. With the backend "gloo" there are no
    streams, as on a CPU.

    Raises:
        RuntimeError: this process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "a forecast makes a simulated process group, but this process already has a process group; run the "
            "forecast in a process of its own, or after destroy_process_group()"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh.values()))
    try:
        made = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        with simulated_backend(backend), simulated_streams(clock if backend != "gloo" else None):
            with fake_tensors(), clock:
                yield made
    finally:
        dist.destroy_process_group()
