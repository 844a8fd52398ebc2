"""torch is the only dependency: whole weights move in processes where ``import numpy`` fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
sys.modules["numpy"] = None  # as where it is not installed
import torch, torch.distributed as dist
from torch import nn
import fsdp2
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))

def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    return fsdp2.fully_shard(model, mesh=mesh)

def full(model):
    return {name: value.clone() for name, value in fsdp2.iter_full_params(model)}

torch.manual_seed(3)
values = {name: value.clone() for name, value in build(0).named_buffers()}
values |= {name: torch.randn_like(value) for name, value in full(build(0)).items()}
model = build(rank)
fsdp2.broadcast_from_rank0(model, values if rank == 0 else None)
assert all(torch.equal(value, values[name]) for name, value in full(model).items())
fsdp2.save_safetensors(model, f"{folder}/saved")
fsdp2.sync_module_states(model)
other = build(rank + 5)
try:
    fsdp2.load_safetensors(other, f"{folder}/saved")
    assert all(torch.equal(value, values[name]) for name, value in full(other).items())
except ImportError as error:  # the package that reads them is optional
    assert "safetensors" in str(error), error
with fsdp2.summon_full_params(model, with_grads=True):
    model[0].weight.data.mul_(2)
for expected, call in (
    ("on rank 0: ", lambda: fsdp2.broadcast_from_rank0(model, 3)),
    ("on rank 1: ", lambda: fsdp2.load_safetensors(model, f"{folder}/saved" if rank == 0 else f"{folder}/none")),
):
    try:
        call()
    except Exception as error:
        assert expected in str(error), error
    else:
        raise AssertionError(expected)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(4, 5)).sum().backward()
optimizer.step()
settings = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT, *settings):
    assert bool(model.state_dict()) == (rank == 0)
    state = fsdp2.optim_state_dict(model, optimizer)
    fsdp2.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
print("numpy was not needed", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_without_numpy(tmp_path):
    """Every function that exchanges objects between ranks works, and raises what is wrong on every rank.

    torch's own collectives for objects turn tensors into bytes by numpy: without it one rank raises and the others
    wait for ever."""
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=alone,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0 and "numpy was not needed" in output, output
