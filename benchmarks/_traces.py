"""What torch's profiler sees of a step: kernels that copy, the time in which the GPU is busy, bytes that are alive."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Event = dict[str, Any]
COPY = re.compile(r"memcpy|copy|chunk_cat|CatArray|aten::cat\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Seen:
    """Copies of one step outside of collectives, and for how long the GPU did anything (NaN on a CPU)."""

    copies: int
    copy_seconds: float
    busy_seconds: float


def in_collective(event: Any) -> bool:
    """Whether an operator runs inside a collective: the fake group does its part with operators of its own."""
    outer = event
    while outer is not None and not outer.name.startswith("c10d::"):
        outer = outer.cpu_parent
    return outer is not None


def observe(step: Callable[[], object], *, cuda: bool) -> Seen:
    """What one step does on the GPU: kernels, by the operators that launched them. On a CPU: innermost operators."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    events = list(profiler.events())
    # Ranges that somebody named are shown on the GPU as well, and some are named after copies.
    ranges = {event.name for event in events if event.is_user_annotation}
    operators = [e for e in events if e.device_type == DeviceType.CPU and e.name not in ranges and not in_collective(e)]
    if not cuda:
        copies = [e.time_range.elapsed_us() for e in operators if not e.cpu_children and COPY.search(e.name)]
        return Seen(len(copies), sum(copies) / 1e6, math.nan)
    launched = [kernel for operator in operators for kernel in operator.kernels]
    copies = [k.duration for k in launched if k.name not in ranges and COPY.search(k.name)]
    running = [e.time_range for e in events if e.device_type == DeviceType.CUDA and e.name not in ranges]
    return Seen(len(copies), sum(copies) / 1e6, covered([(r.start, r.end) for r in running]) / 1e6)


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of what at least one of the intervals covers."""
    total, end = 0.0, -math.inf
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def events_of(profiler: profile) -> list[Event]:
    """The events as they are written for a viewer, which has more of them than the profiler's own list."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def allocations(events: Sequence[Event]) -> list[tuple[float, int, int]]:
    """(time, bytes allocated in all afterwards, bytes of the block) of every allocation and release, in order."""
    return sorted(
        (e["ts"], e["args"]["Total Allocated"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"
    )


def peak_of_cpu(step: Callable[[], object]) -> float:
    """The most bytes that torch's CPU allocator had out during the step, above what it had out before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    blocks = allocations(events_of(profiler))
    return max(total for _, total, _ in blocks) - (blocks[0][1] - blocks[0][2])
