"""Measure the peak memory of live tensors in one training step."""

from __future__ import annotations

import gc
import json
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    """Run `step`, and return the largest number of bytes of live tensors on `device`, earlier ones included.

    On a GPU the caching allocator counts them. On the CPU the profiler reports each allocation and release during the
    step; their running sum starts from the storages that were alive before. The resident set of the process would be
    the wrong measure: it includes the interpreter, libraries, and freed memory that the C allocator keeps.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    before = live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    return before + _highest_rise(record)


def live_bytes() -> int:
    """Return the bytes of all CPU storages of Python's tensors, each byte once, since storages may overlap."""
    gc.collect()
    storages: set[tuple[int, int]] = set()
    for thing in gc.get_objects():
        # A DTensor has no memory of its own; its local tensor is found separately.
        if issubclass(type(thing), torch.Tensor) and not issubclass(type(thing), DTensor) and thing.is_cpu:
            storage = thing.untyped_storage()
            storages.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    total = reached = 0
    for start, end in sorted(storages):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def process_memory(device: torch.device) -> str:
    """Return the peak memory of this process so far, as a short text for a progress bar."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.max_memory_allocated(device) / 1e9:.2f} GB"
    unit = 1 if sys.platform == "darwin" else 1024
    return f"RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.2f} GB"


def _highest_rise(record: profile) -> int:
    """Return the highest running sum of the CPU allocations (positive) and releases (negative) in `record`."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        record.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(errors="replace"))["traceEvents"]
    changes = [e for e in events if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    level = highest = 0
    for change in sorted(changes, key=lambda e: e["ts"]):
        level += change["args"]["Bytes"]
        highest = max(highest, level)
    return highest
