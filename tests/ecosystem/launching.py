"""Client programs, each run in processes of its own as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support import ROOT
from tests.support.processes import loopback

SETTINGS = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def launch(program: str, *arguments: str, alone: bool = False, **settings: str) -> Any:
    """Run a module of this folder on two processes, or ``alone``, and return what it printed as JSON."""
    command = [sys.executable, "-m", f"tests.ecosystem.{program}", *arguments]
    if not alone:
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    environment = {**os.environ, **SETTINGS, "GLOO_SOCKET_IFNAME": loopback(), **settings}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    # Not the exit status: gloo's threads now and then abort a process that has done all its work, with torch's as well.
    found = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    assert found, done.stdout + done.stderr
    return json.loads(found[-1])
