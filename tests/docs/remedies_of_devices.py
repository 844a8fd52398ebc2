"""Remedies of errors that need a device, each tried as it is written: on the null device (``tests/nullgpu``).

``remedies.py`` says what a case is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp2 import CPUOffloadPolicy, fully_shard
from tests.docs.remedies import Call, layers, remedy


def mesh() -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh("cuda", (torch.distributed.get_world_size(),))


def trains(module: nn.Module) -> None:
    """Run a step; there are no values to compare."""
    module(torch.ones(2, 8, device="cuda")).sum().backward()
    assert all(param.grad is not None for param in module.parameters())


@remedy("; its pool has one buffer. Keep 1, or leave set_symm_mem_for_comm out", ranks=None)
def two_buffers_of_symmetric_memory(rank: int) -> Iterator[Call]:
    """Keep 1, and then symmetric memory is left out."""
    module: Any = fully_shard(layers().cuda(), mesh=mesh())
    module.set_force_sum_reduction_for_comms(True)  # otherwise gradients are reduced in other memory
    module.set_symm_mem_for_comm()
    yield lambda: module.set_reduce_scatter_max_input_buffers(2)
    module.set_reduce_scatter_max_input_buffers(1)
    trains(module)
    module = fully_shard(layers().cuda(), mesh=mesh())
    module.set_reduce_scatter_max_input_buffers(2)
    trains(module)


@remedy('module.cpu(), or module.to_empty(device="cpu") and load values. Found following', ranks=None)
def offloaded_shards_on_the_device(rank: int) -> Iterator[Call]:
    """Both that are named, before a first forward and later. The shards went back to the host, and the DTensors around
    them did not, so the first backward ended in autograd's error about the devices of gradients."""
    module: Any = fully_shard(layers().cuda(), mesh=mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    module.cuda()
    yield lambda: trains(module)
    for back in (module.cpu, lambda: module.to_empty(device="cpu")):
        module.cuda()
        with pytest.raises(RuntimeError, match="should be materialized on CPU"):
            trains(module)
        back()
        trains(module)
        module.zero_grad()
        assert all(isinstance(param, DTensor) and not param.is_cuda for param in module.parameters())


@remedy("or keep shards on the CPU by offload_policy=CPUOffloadPolicy()", ranks=None)
def shards_on_the_host_without_offloading(rank: int) -> Iterator[Call]:
    """Both that are named, before a first forward and later; without gradients the forward computes. Autograd said in
    backward that it cannot assign a gradient of another device, as it does with torch's fully_shard."""
    module: Any = fully_shard(layers().cuda(), mesh=mesh())
    module.cpu()
    yield lambda: trains(module)
    for _ in range(2):
        with torch.no_grad():
            module(torch.ones(2, 8, device="cuda"))
        module.to("cuda")
        trains(module)
        module.zero_grad()
        module.cpu()
        with pytest.raises(RuntimeError, match=r"0\.weight.*shards on cpu, whose gradients will be on cuda:0"):
            trains(module)
    trains(fully_shard(layers().cuda(), mesh=mesh(), offload_policy=CPUOffloadPolicy()))


@remedy("which waits for copies of them. Shard without offload_policy, or do not capture", ranks=None)
def offloaded_shards_in_a_graph(rank: int) -> Iterator[Call]:
    """Both that are named. The model trains on after the refused capture."""
    module: Any = fully_shard(layers().cuda(), mesh=mesh(), offload_policy=CPUOffloadPolicy())
    trains(module)

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            trains(module)

    yield capture
    trains(module)
    module = fully_shard(layers().cuda(), mesh=mesh())
    module.set_keep_unsharded_storage(True)
    for _ in range(3):
        trains(module)
    capture()
