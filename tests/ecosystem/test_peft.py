"""PEFT adapters that are added to a sharded model train as they do in one process.

Optional: ``pip install peft transformers``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT, api
from tests.support.processes import loopback

MISSING = [name for name in ("peft", "transformers") if importlib.util.find_spec(name) is None]


def run(which: str) -> dict[str, list[torch.Tensor]]:
    """Values and gradients of the second adapter, by name, on the first rank."""
    command = [sys.executable, "-m", "tests.ecosystem.peft_adapter", which]
    if which != "alone":
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    settings = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": loopback(), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **settings, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stdout + done.stderr
    return {name: [torch.tensor(values) for values in both] for name, both in json.loads(found[0]).items()}


@api.fsdp2_only
@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_second_adapter_added_after_sharding():
    """Its gradients were found to differ from torch's. They are those of one process: torch manages no parameter that
    is added later, so each rank goes on with the gradient of its own data."""
    alone, ours, theirs = map(run, ("alone", "fsdp2", "torch"))
    assert len(alone) == 8 and all(".second." in name for name in alone)
    assert alone.keys() == ours.keys() == theirs.keys()
    for name, (value, gradient) in alone.items():
        torch.testing.assert_close(ours[name][0], value, rtol=0, atol=0)
        torch.testing.assert_close(ours[name][1], gradient)
    assert any(not torch.allclose(theirs[name][1], gradient) for name, (_, gradient) in alone.items())
