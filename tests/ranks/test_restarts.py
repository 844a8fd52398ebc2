"""Under a real torchrun, which keeps its store when it restarts the processes: a new attempt is not the last one's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks.restarting import SAVED, STEPS
from tests.support import ROOT
from tests.support.processes import loopback


def alone() -> list[float]:
    """The losses of one process that is never interrupted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(2, 4, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "end", ["raise", pytest.param("kill", marks=pytest.mark.slow), pytest.param("delay", marks=pytest.mark.slow)]
)
def test_an_attempt_knows_nothing_of_the_one_before(tmp_path: Path, end: str) -> None:
    """One rank raises, is killed, or comes late; the next attempt goes on from the checkpoint of both, with a rank that
    is late there as well. The one that waits found the note of the rank that had ended in the store, and ended, too."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", *torchrun, "--monitor-interval", "0.1", "-m", "tests.ranks.restarting"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": loopback(), "CUDA_VISIBLE_DEVICES": ""}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [*command, end, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert len(found) == 1, done.stdout + done.stderr
    first = 0 if end == "delay" else SAVED
    assert found[0]["attempt"] == (0 if end == "delay" else 1)
    assert found[0]["losses"] == pytest.approx(alone()[first:], rel=1e-6)
    if end == "raise":
        assert "ValueError: a broken sample" in done.stderr
