"""The programs of ``tests/support/scenarios.py`` on the null device, as one rank of eight or any other number."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2

__all__ = ["Cuda", "ranks"]


class Cuda:
    """What the programs need of a device with streams."""

    Stream = torch.cuda.Stream
    stream = staticmethod(torch.cuda.stream)
    current_stream = staticmethod(torch.cuda.current_stream)

    @contextmanager
    def capturing(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Capture what the block puts on streams, as torch's own helper does."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            yield graph


@contextmanager
def ranks(world: int = 8, *names: str, shape: tuple[int, ...] = ()) -> Iterator[DeviceMesh]:
    """Be rank 0 of ``world`` ranks, which NCCL pretends, and make new tensors on the device.

    Ranks are not compared: the others would have to answer.
    """
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl", rank=0, world_size=world, store=dist.HashStore())
    was = torch.get_default_device()
    fsdp2.set_rank_checks(False)
    torch.set_default_device("cuda")
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is a library of its own, and is not simulated
    try:
        yield init_device_mesh("cuda", shape or (world,), mesh_dim_names=names or None)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.set_default_device(was)
        fsdp2.set_rank_checks(True)
        dist.destroy_process_group()
        gc.collect()
