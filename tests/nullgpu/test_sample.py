"""A sample of these tests, where the installed torch is built for CUDA and no GPU is there.

``make test-cuda`` runs all of them.

Everything else in this folder needs a process that was started on the null device, as this one was not.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.nullgpu.device import environment, missing
from tests.support import ROOT, api

pytestmark = api.fsdp2_only
SAMPLE = "(test_training and mixed-direct) or (test_no_wait and finish_gather) or sampled"


@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/gpu runs on it")
def test_sample():
    """A step is ordered, a wait that is left out is noticed, ranks that differ are named, bytes are as forecast."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/nullgpu",
        "--all",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-k",
        SAMPLE,
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment(devices=8, log=1_000_000),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr
