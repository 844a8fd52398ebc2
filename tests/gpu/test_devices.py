"""The processes that GPU tests run in do their work, also where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from tests.gpu.devices import on_devices, run_processes


@on_devices(2)
def test_they_communicate(rank, world, device):
    """Each rank is a process of one group on its own device."""
    value = torch.full((3,), float(rank + 1), device=device)
    dist.all_reduce(value)
    assert value.tolist() == [world * (world + 1) / 2] * 3
    assert device == "cpu" or value.get_device() == rank


@on_devices(1)
def trouble(rank, world, device):
    """Fail on one rank (it is no test: its name does not start with one)."""
    assert rank != world - 1, "trouble on purpose"


@pytest.mark.slow
def test_processes_of_their_own():
    """What runs in them passes, or its traceback comes back."""
    run_processes(2, test_they_communicate, {"device": "cpu"})
    with pytest.raises(processes.ProcessRaisedException, match="trouble on purpose"):
        run_processes(1, trouble, {"device": "cpu"})
