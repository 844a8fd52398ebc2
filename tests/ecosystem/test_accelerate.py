"""HuggingFace accelerate, which imports torch's ``fully_shard`` itself, trains the same with fsdp2 installed.

Optional: ``pip install accelerate transformers``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support import ROOT, api
from tests.support.processes import loopback

MISSING = [name for name in ("accelerate", "transformers") if importlib.util.find_spec(name) is None]


def run(*options: str) -> dict[str, Any]:
    """Run the loop on two processes and return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.ecosystem.accelerate_loop", *options]
    environment = {
        **os.environ,
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": loopback(),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    # Not the exit status: gloo's threads now and then abort a process that has done all its work, with torch's as well.
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stdout + done.stderr
    return json.loads(found[0])


@api.fsdp2_only
@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_training_loop():
    """Losses equal those with torch's own, and ours was at work."""
    theirs, ours = run(), run("--fsdp2")
    for result, home in ((ours, "fsdp2."), (theirs, "torch.")):
        assert len(result["units"]) >= 3 and all(name.startswith(home) for name in result["units"]), result
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert len(set(ours["losses"])) == 4
