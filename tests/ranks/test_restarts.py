"""Under torchrun, which keeps its store when it restarts the processes: a new attempt is not the last one's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.ranks.restarting import SAVED, STEPS, launch
from tests.support import ROOT
from tests.support.parity import losses_of_one_process
from tests.support.processes import loopback, start


def alone() -> list[float]:
    """The losses of one process that is never interrupted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    rows = lambda step: torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
    return losses_of_one_process(model, lambda step: model(rows(step)).square().mean(), STEPS, lr=0.1)


def torchrun(end: str, folder: Path) -> str:
    """Run the real program; what it printed."""
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.ranks.restarting"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": loopback(), "CUDA_VISIBLE_DEVICES": ""}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [*command, end, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    return done.stdout + done.stderr


def its_agent(end: str, folder: Path) -> str:
    """Run what torchrun runs in a process that has imported everything."""
    log = folder / "log"
    process = start(launch, end, folder, log=str(log), daemon=False)
    process.join(300)
    process.terminate()  # where it hangs it ends its ranks
    process.join(10)
    process.kill()
    return log.read_text()


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("run", "end"),
    [
        (its_agent, "raise"),
        *(pytest.param(torchrun, end, marks=slow) for end in ("raise", "kill", "delay")),
    ],
)
def test_an_attempt_knows_nothing_of_the_one_before(tmp_path: Path, run: Callable[[str, Path], str], end: str) -> None:
    """One rank raises, is killed, or comes late; the next attempt goes on from the checkpoint of both, with a rank that
    is late there as well. The one that waits found the note of the rank that had ended in the store, and ended, too."""
    printed = run(end, tmp_path)
    attempt, first = (0, 0) if end == "delay" else (1, SAVED)
    results = list(tmp_path.glob("attempt-*.json"))
    assert [file.name for file in results] == [f"attempt-{attempt}.json"], printed
    assert json.loads(results[0].read_text()) == pytest.approx(alone()[first:], rel=1e-6)
    if end == "raise":
        assert "ValueError: a broken sample" in printed
