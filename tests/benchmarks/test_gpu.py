"""The benchmark for GPUs runs, as far as a machine without one can tell; nothing here is about its figures."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import torch

from tests.support import ROOT

SETTINGS = ["gloo, 1 rank, bf16", "fake, 8 ranks, bf16", "fake, 64 ranks, bf16", "fake, 8 ranks, mixed"]
ON_A_CPU = 6
"""Figures of the eight that a CPU has: neither reserved memory nor idle time."""


def gpu_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a user does."""
    command = [sys.executable, "benchmarks/gpu.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_gpu_benchmark_on_a_cpu():
    """One table with every setting and figure, `n/a` exactly where a CPU has none."""
    done = gpu_benchmark("--device", "cpu", "--tiny", "--turns", "2")
    assert done.returncode == 0, done.stderr
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if line[:1] == "|"]
    head, body = lines[0], lines[2:]
    assert head == ["setting", "figure", "ours", "torch's", "not sharded", "ours / torch's", "ours / not sharded"]
    assert [line[0] for line in body] == [setting for setting in SETTINGS for _ in range(8)]
    for line in body:
        measured = not line[1].startswith(("peak reserved", "GPU idle"))
        plain = measured and "mixed" not in line[0]
        for cell, there in zip(line[2:], (measured, measured, plain, measured, plain), strict=True):
            assert (cell != "n/a") is there, line
            assert not there or float(cell) > 0, line
    assert sum(line[2] != "n/a" for line in body) == ON_A_CPU * len(SETTINGS)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_gpu_benchmark_without_a_gpu():
    """It says so in one line and exits with 2."""
    done = gpu_benchmark()
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no CUDA device" in done.stderr


@pytest.mark.slow
def test_a_cpu_writes_no_gpu_report():
    """Figures of a CPU or of the tiny model are refused as a report."""
    done = gpu_benchmark("--device", "cpu", "--tiny", "--write")
    assert done.returncode == 2 and "--write" in done.stderr


def test_time_that_intervals_cover(monkeypatch):
    """Intervals that overlap, repeat or lie inside one another count once."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    covered = importlib.import_module("_traces").covered
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3)]) == 5
    assert covered([(0, 10), (2, 3), (0, 10), (9, 11)]) == 11
