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


def run(program: str, *arguments: str, ranks: int = 2, **settings: str) -> str:
    """Run a module of this folder on so many processes, or without a launcher on none, and return what they wrote.

    The exit status says nothing: gloo's threads now and then abort a process that has done all its work, with torch's
    as well. So a program prints or saves what it found.
    """
    command = [sys.executable, "-m", f"tests.ecosystem.{program}", *arguments]
    if ranks:
        command[1:2] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    environment = {**os.environ, **SETTINGS, "GLOO_SOCKET_IFNAME": loopback(), **settings}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return f"{done.stdout}\n{done.stderr}"


def launch(program: str, *arguments: str, alone: bool = False, **settings: str) -> Any:
    """Run a module of this folder on two processes, or ``alone``, and return what it printed as JSON."""
    text = run(program, *arguments, ranks=0 if alone else 2, **settings)
    found = [line for line in text.splitlines() if line.startswith('{"')]
    assert found, text
    return json.loads(found[-1])
