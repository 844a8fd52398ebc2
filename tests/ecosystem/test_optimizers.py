"""Optimizers of other packages step on whole parameters as in one process, bit for bit."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from tests.optim.stepping import host_apart, on_host
from tests.optim.test_full_params import THIRD_PARTY, on_mesh, pair, resume, save, train
from tests.support.packages import needs
from tests.support.parity import mesh_1d
from tests.support.pool import POOL, on_ranks

pytestmark = [pytest.mark.slow, needs("pytorch_optimizer")]


@on_ranks(4)
@pytest.mark.parametrize("name", THIRD_PARTY)
@pytest.mark.parametrize("kind", ["one dimension", "hybrid", "tensor parallel"])
def test_steps_are_those_of_one_process(rank, world, name, kind):
    """Uneven matrices, of which some ranks hold nothing, pieces of pieces and copies."""
    train(*pair(name, on_mesh(kind)))


@pytest.mark.parametrize("name", ["pytorch_optimizer.SOAP", "pytorch_optimizer.Muon"])
def test_resume_on_fewer_ranks(tmp_path: Path, name: str) -> None:
    """A checkpoint of four ranks goes on on two."""
    POOL.run(4, save, {"path": str(tmp_path), "name": name}, 120.0)
    POOL.run(2, resume, {"path": str(tmp_path), "name": name, "with_torch": False}, 120.0)


@needs("torchao")
@on_ranks(2)
@pytest.mark.parametrize("host", [False, True])
def test_states_of_few_bits_at_owners(rank, world, host):
    """torchao's moments are codes and scales in a tensor of a class of its own, whole at the owner, on the device or on
    the host. Such states cannot be saved in pieces, which every rank says; steps on shards can."""
    kind = importlib.import_module("torchao.optim").AdamW8bit
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 4))
    module: Any = copy.deepcopy(reference)
    for unit in (*module, module):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    optimizer, plain = (kind(model.parameters(), lr=0.01) for model in (module, reference))
    with host_apart():
        fsdp2.use_full_params(optimizer)
        if host:
            fsdp2.offload_optimizer_state(optimizer, bucket_mb=0.01)
        for step in range(3):
            inputs = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
            module(inputs).square().mean().backward()
            for sharded, whole in zip(module.parameters(), reference.parameters(), strict=True):
                whole.grad = sharded.grad.full_tensor()
            for one in (optimizer, plain):
                one.step()
                one.zero_grad()
            for sharded, whole in zip(module.parameters(), reference.parameters(), strict=True):
                assert torch.equal(sharded.full_tensor(), whole)
        assert any(
            type(value).__name__ == "OptimState8bit" for state in plain.state.values() for value in state.values()
        )
        assert not host or on_host(optimizer)
        with pytest.raises(NotImplementedError, match="is of the class OptimState8bit.*call use_local_shards"):
            optimizer.state_dict()
