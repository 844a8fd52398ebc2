"""``examples/float8_linear.py``: weights that travel in one byte per element, in the pool and under ``torchrun``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import ROOT, api
from tests.support.parity import assert_parity, mesh_1d, on_one_axis
from tests.support.pool import on_ranks
from tests.support.processes import loopback

if str(ROOT / "examples") not in sys.path:
    sys.path.append(str(ROOT / "examples"))  # in the processes of the pool, too


def float8_layers() -> nn.Sequential:
    """Return layers whose weights travel as float8."""
    from float8_linear import use_float8

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    use_float8(model)
    return model


@on_ranks(2, 4)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_training_equals_torchs(rank, world, compute):
    """The same tensor subclass under torch's fully_shard gives the same losses, gradients and weights."""
    policy = MixedPrecisionPolicy(compute, torch.float32, torch.float32)
    run = assert_parity(
        partial(on_one_axis, mp_policy=policy),
        build=float8_layers,
        against=("torch",),
        tolerance=2e-5 if compute == torch.float32 else 0.01,
    )
    assert run.module[0].weight.dtype == torch.float32


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_full_weight_is_the_rounded_one(rank, world, rows):
    """What forward computes with is the weight rounded to float8 with one scale per rank; also of uneven shards."""
    from float8_linear import to_float8, use_float8

    model = nn.Sequential(nn.Linear(8, rows, bias=False))
    original = model[0].weight.detach().clone()
    use_float8(model)
    api.ours.fully_shard(model, mesh=mesh_1d())
    for _ in range(3):
        model.unshard()
        pieces = []
        for piece in original.chunk(world):
            values, scale = to_float8(piece, piece.abs().max())
            pieces.append(values.float() * scale)
        assert torch.equal(model[0].weight, torch.cat(pieces))
        model.reshard()
        assert model[0].weight.to_local()._tensor.dtype == torch.float32


@pytest.mark.slow
def test_example():
    """It runs under torchrun; float8 sends half of what bfloat16 does, and the loss falls as far."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["examples/float8_linear.py", "--steps", "12", "--width", "128", "--layers", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    # Not the exit status: gloo's threads now and then abort a process that has done all its work, with torch's as well.
    found = re.findall(r"(\w+): +(\d+) bytes sent per step, loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert len(found) == 2, done.stdout + done.stderr
    (first, wide, *losses_wide), (second, narrow, *losses_narrow) = found
    assert (first, second) == ("bfloat16", "float8")
    assert 0.5 <= int(narrow) / int(wide) < 0.53  # one byte instead of two; biases and scales take the rest
    for start, end in (losses_wide, losses_narrow):
        assert float(end) < float(start)
    assert abs(float(losses_wide[1]) - float(losses_narrow[1])) < 0.02
