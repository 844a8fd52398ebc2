"""The two-dimensional example as a person runs it: saved by four processes, gone on from by two, and bad input."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

SCRIPT = ROOT / "examples" / "train_llama_2d.py"
LIMIT = 300  # seconds until a hanging run is killed; the longest takes about fifteen on two idle cores


def run(*arguments: object, torchrun: int = 0) -> tuple[int, str, str]:
    """Return status, stdout and stderr of the script, started by itself or by torchrun on so many processes."""
    engine = f"--nproc-per-node {torchrun} --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
    command = [sys.executable, *(["-m", "torch.distributed.run", *engine.split()] if torchrun else []), SCRIPT]
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [str(word) for word in (*command, *arguments)],
        env={**clean, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, out, error


def losses(out: str) -> dict[int, float]:
    """Return the losses of the table by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^ *(\d+) +(\d+\.\d{4})$", out, re.MULTILINE)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Return a folder with a checkpoint of step 3 by two times two ranks, and the losses of six steps."""
    folder = tmp_path_factory.mktemp("llama")
    status, out, error = run("--tp", 2, "--steps", 3, "--out", folder, torchrun=4)
    assert status == 0, error
    assert "2 data-parallel x 2 tensor-parallel" in out and f"saved {folder / 'step-000003'}" in out
    status, whole, error = run("--tp", 2, "--steps", 6, "--checkpointing", torchrun=4)
    assert status == 0, error
    expected = losses(whole)
    assert list(expected) == [1, 2, 3, 4, 5, 6] and expected[6] < expected[1]
    assert losses(out) == pytest.approx({step: expected[step] for step in (1, 2, 3)}, abs=1e-3)
    return folder, expected


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "options"), [(1, []), (2, ["--checkpointing", "--compile"])])
def test_two_processes_go_on_from_what_four_saved(saved, tp, options):
    """The losses are those of the run that did not stop, on another mesh, recomputed and compiled."""
    folder, expected = saved
    status, out, error = run("--tp", tp, "--steps", 6, "--resume", folder, *options, torchrun=2)
    assert status == 0, error
    assert f"{2 // tp} data-parallel x {tp} tensor-parallel" in out
    assert losses(out) == pytest.approx({step: expected[step] for step in (4, 5, 6)}, abs=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", 3, "--tp", 2], "--tp 2 does not divide the 3 processes"),
        (["--ranks", 1, "--resume", "nowhere"], "no checkpoint in nowhere"),
        (["--tp", "0"], "0 is less than 1"),
        (["--size", "7"], "unrecognized arguments: --size 7"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    """No traceback, and the status says that it was the input."""
    status, out, error = run(*arguments)
    assert status == 2 and out == ""
    (line,) = error.splitlines()
    assert line.startswith("train_llama_2d.py: error: ") and message in line


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_line(saved, tmp_path):
    """What is missing is said; nothing is overwritten."""
    folder, _ = saved
    for name, message in (("run.json", "run.json cannot be read"), ("__0_0.distcp", "damaged checkpoint")):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / "step-000003" / name).write_text("")
        status, _, error = run("--ranks", 1, "--tp", 1, "--steps", 4, "--resume", copy, "--out", copy)
        assert status == 2 and message in error and "Traceback" not in error
        assert [entry.name for entry in copy.iterdir()] == ["step-000003"]
