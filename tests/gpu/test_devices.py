"""The processes that GPU tests run in do their work, also where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.gpu import devices
from tests.gpu.devices import on_devices
from tests.support.pool import RankError


@on_devices(2, 4)
def test_they_communicate(rank, world, device):
    """Each rank is a process of one group; tensors of a GPU and of the host are exchanged."""
    for place in {device, "cpu"}:
        value = torch.full((3,), float(rank + 1), device=place)
        dist.all_reduce(value)
        assert value.tolist() == [world * (world + 1) / 2] * 3


def trouble(rank, world, why):
    """Fail on one rank."""
    assert rank != world - 1, why


@pytest.mark.slow
def test_processes_of_their_own(monkeypatch):
    """They pass, or every rank's traceback comes back."""
    monkeypatch.setattr(devices, "BACKENDS", "gloo")
    monkeypatch.setattr(devices, "visible", lambda: [""])
    devices.on_gpus(2, test_they_communicate, {"device": "cpu"})
    with pytest.raises(RankError, match="trouble on purpose"):
        devices.on_gpus(1, trouble, {"why": "trouble on purpose"})
    with pytest.raises(RankError, match="Duplicate GPU detected"):
        devices.on_gpus(1, trouble, {"why": "Duplicate GPU detected"})
    with pytest.raises(pytest.skip.Exception, match="needs 2 CUDA devices"):
        devices.on_gpus(2, trouble, {"why": "Duplicate GPU detected"})


HOSTS_AND_GPUS = {
    "0": [("host0", "0"), ("host1", "0"), ("host2", "0")],
    "2,5": [("host0", "2"), ("host0", "5"), ("host1", "2")],
}


@pytest.mark.parametrize("visible", HOSTS_AND_GPUS)
def test_ranks_share_gpus(monkeypatch, visible):
    """No two ranks that NCCL takes to be on one host are given one GPU."""
    monkeypatch.setattr(devices, "visible", lambda: visible.split(","))
    found = [devices.environment(rank) for rank in range(3)]
    assert [(one["NCCL_HOSTID"], one["CUDA_VISIBLE_DEVICES"]) for one in found] == HOSTS_AND_GPUS[visible]
