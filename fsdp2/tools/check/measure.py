"""Measure a step on this machine, beside torch's own: memory, time, host work and exposed communication."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp2
from fsdp2.tools.check.models import Decoder, Small
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.check.strict import LiveBytes
from fsdp2.tools.check.trial import MIXED, FullyShard, loss_of, shard

__all__ = [
    "MEASURES",
    "Size",
    "Training",
    "collect_garbage",
    "decoder",
    "host",
    "memory",
    "one_thread",
    "peak_bytes",
    "python_calls",
    "rates",
    "size_of",
    "timed",
    "times",
    "turns",
]

OURS, TORCH, PLAIN = "fsdp2", "torch", "plain"
GIB = 1 << 30
WARM_STEPS = 3
SHALLOW, DEEP = 4, 12
"""Numbers of units of two models. The difference of their host work has no part of work that is done once a step."""
Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """A model of a real size for a machine."""

    width: int
    blocks: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.blocks} decoder blocks of width {self.width}, {self.tokens} tokens"


def size_of(place: Place) -> Size:
    """Return the size of the model to measure; the same on all ranks of a job on equal devices."""
    if not place.cuda:
        return Size(512, 3, 128)
    memory = torch.cuda.get_device_properties(place.device).total_memory
    return Size(4096 if memory > 32 * GIB else 2048 if memory > 10 * GIB else 1024, 3, 2048)


def decoder(size: Size, mesh: DeviceMesh | None, fully_shard: FullyShard | None, *, mixed: bool) -> Any:
    """Return the model on the mesh's device, not sharded where ``fully_shard`` is None."""
    model: Any = Decoder(size.width, size.blocks)
    if fully_shard is not None:
        shard(model, fully_shard, mesh=mesh, **({"mp_policy": MIXED} if mixed else {}))
    elif mixed:
        model = model.bfloat16()
    return model


class Training:
    """The model of one candidate and its step: forward and backward. An optimizer would cost the same for all."""

    def __init__(self, place: Place, name: str) -> None:
        size, device = size_of(place), place.device
        mesh = init_device_mesh(device.type, (place.world,), mesh_dim_names=("shard",))
        with device:
            torch.manual_seed(0)
            self.model = decoder(size, mesh, _candidates(place)[name], mixed=place.cuda)
            self.rows = torch.randn(1, size.tokens, size.width)
        if name == PLAIN and place.cuda:
            self.rows = self.rows.bfloat16()
        for number in range(WARM_STEPS):
            place.doing(f"{name}: step {number + 1} of {WARM_STEPS} before measuring")
            self.step()
            place.wait()

    def step(self) -> None:
        """Launch one step without waiting for it."""
        self.model(self.rows).backward()
        self.model.zero_grad()


def _candidates(place: Place) -> dict[str, FullyShard | None]:
    theirs = {TORCH: torch_fsdp.fully_shard} if place.against_torch else {}
    return {OURS: fsdp2.fully_shard, **theirs, PLAIN: None}


def collect_garbage() -> None:
    """Free objects in reference cycles."""
    gc.collect()
    gc.collect()


# ---- memory ----


def peak_bytes(step: Step, known: Iterable[Tensor], *, cuda: bool) -> dict[str, int]:
    """Return the peak of "allocated" bytes during a step, and on a GPU also of bytes "reserved" from the driver.

    On a CPU the allocated bytes are those of live tensors, including tensors in ``known``.
    """
    collect_garbage()
    if not cuda:
        with LiveBytes(known) as live:
            step()
        return {"allocated": live.peak}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def memory(place: Place) -> Outcome:
    """the peak memory of a step, each candidate alone"""
    figures: dict[str, dict[str, float]] = {}
    for name in _candidates(place):
        if name == PLAIN:
            continue
        collect_garbage()
        before = _occupied(place)
        training = Training(place, name)
        place.doing(f"{name}: measuring memory")
        found = peak_bytes(training.step, [*training.model.parameters(), training.rows], cuda=place.cuda)
        for kind, nbytes in found.items():
            figures.setdefault(f"peak memory {kind}", {})[name] = nbytes - before[kind]
        del training
        collect_garbage()
    return Outcome("seen", figures={**figures, "model": str(size_of(place))})


def _occupied(place: Place) -> dict[str, int]:
    """Return the bytes that earlier checks left allocated and reserved on a GPU, such as libraries' workspaces."""
    if not place.cuda:
        return {"allocated": 0}
    torch.cuda.empty_cache()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


# ---- time ----


def timed(step: Step, wait: Step) -> float:
    """Return the seconds of a step until the device has finished."""
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def turns(names: Sequence[str], count: int) -> Iterator[str]:
    """Yield every name ``count`` times, starting with another name in each turn."""
    for turn in range(count):
        start = turn % len(names)
        yield from (*names[start:], *names[:start])


def times(place: Place) -> Outcome:
    """forward and backward, alternating between the candidates"""
    everyone = {name: Training(place, name) for name in _candidates(place)}
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    for name in turns(list(everyone), 12 if place.cuda else 6):
        place.doing(f"{name}: measuring a step")
        seconds[name].append(timed(everyone[name].step, place.wait))
    steps = {name: statistics.median(values) for name, values in seconds.items()}
    above = {name: steps[name] - steps[PLAIN] for name in steps if name != PLAIN}
    place.doing("recording steps")
    with fsdp2.record_steps(everyone[OURS].model) as record:
        for _ in range(5):
            everyone[OURS].step()
    figures: dict[str, Any] = {
        "step": steps,
        "step above one that is not sharded": above,
        "exposed communication": {OURS: statistics.median(step.exposed_seconds for step in record.steps)},
        "model": str(size_of(place)),
    }
    return Outcome("seen", figures=figures)


# ---- host ----


@contextmanager
def one_thread() -> Iterator[None]:
    """Run backward in the calling thread, whose time and calls are counted."""
    with torch.autograd.set_multithreading_enabled(False):
        yield


def python_calls(step: Step) -> int:
    """Return the number of calls of Python and C functions from Python in a step."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def host(place: Place) -> Outcome:
    """the host work of one more unit, above that of an unsharded model"""
    mesh = init_device_mesh(place.device.type, (place.world,), mesh_dim_names=("shard",))
    steps: dict[tuple[str, int], Step] = {}
    for name, fully_shard in _candidates(place).items():
        for blocks in (SHALLOW, DEEP):
            steps[name, blocks] = _small_step(place, blocks, fully_shard, mesh)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    with one_thread():
        calls = {key: python_calls(step) for key, step in steps.items()}
        for turn in range(15):
            place.doing(f"turn {turn + 1}")
            for key, step in steps.items():
                place.wait()
                start = time.thread_time()
                step()
                seconds[key].append(time.thread_time() - start)

    def slope(name: str, values: dict[tuple[str, int], float]) -> float:
        return (values[name, DEEP] - values[name, SHALLOW]) / (DEEP - SHALLOW)

    medians = {key: statistics.median(values) for key, values in seconds.items()}
    counts = {key: float(count) for key, count in calls.items()}
    names = [name for name in _candidates(place) if name != PLAIN]
    figures = {
        "host time for a unit": {name: slope(name, medians) - slope(PLAIN, medians) for name in names},
        "Python calls for a unit": {name: slope(name, counts) - slope(PLAIN, counts) for name in names},
    }
    return Outcome("seen", figures=figures)


def _small_step(place: Place, blocks: int, fully_shard: FullyShard | None, mesh: DeviceMesh) -> Step:
    torch.manual_seed(0)
    with place.device:
        model = Small(blocks=blocks)
        rows = torch.randn(4, model.width)
    if fully_shard is not None:
        shard(model, fully_shard, mesh=mesh)

    def step() -> None:
        loss_of(model(rows)).backward()
        model.zero_grad()

    with one_thread():
        for _ in range(WARM_STEPS):
            place.doing("steps of many small units")
            step()
    return step


# ---- the rates of the machine ----


def rates(place: Place) -> Outcome:
    """arithmetic, memory and communication of this machine"""
    place.doing("matrix products and copies")
    dtype, side, bytes_copied = (torch.bfloat16, 8192, GIB) if place.cuda else (torch.float32, 768, GIB // 16)
    with place.device:
        first, second = (torch.randn(side, side, dtype=dtype) for _ in range(2))
        source = torch.ones(bytes_copied, dtype=torch.uint8)
        target = torch.empty_like(source)
    product = _fastest(lambda: first @ second, place)
    copy = _fastest(lambda: target.copy_(source), place)
    figures: dict[str, Any] = {
        "flops_per_second": 2 * side**3 / product * first.itemsize / 2,  # as for elements of two bytes
        "memory_bytes_per_second": 2 * bytes_copied / copy,
    }
    if place.cuda:
        host = torch.empty(bytes_copied // 4, dtype=torch.uint8, device="cpu", pin_memory=True)
        copied = target[: host.numel()]
        figures["host_bytes_per_second"] = host.numel() / _fastest(lambda: copied.copy_(host, non_blocking=True), place)
    if place.world > 1:
        figures["gathers"] = _gathers(place)
    return Outcome("seen", figures=figures)


def _fastest(step: Step, place: Place) -> float:
    step()
    return min(timed(step, place.wait) for _ in range(5))


def _gathers(place: Place) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of gathers of several sizes, with the fastest time of each: one unit for each size."""
    widths = (32, 256, 1024, 4096) if place.cuda else (32, 256, 1024)
    torch.manual_seed(0)
    with place.device:
        model: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))
    mesh = init_device_mesh(place.device.type, (place.world,), mesh_dim_names=("shard",))
    for unit in model:
        fsdp2.fully_shard(unit, mesh=mesh)
    fastest: dict[int, float] = {}
    for number in range(4):
        place.doing(f"gathers, round {number + 1}")
        for unit, width in zip(model, widths):
            rows = torch.ones(1, width, device=place.device)
            with torch.no_grad(), fsdp2.record_steps(unit) as record:
                unit(rows)
                unit.reshard()
            spans = [span for span in record.timeline.spans if span.lane == "gather"]
            if spans:  # a gather of two ranks has several, because they exchange their pieces
                nbytes = unit.weight.numel() * unit.weight.element_size()
                seconds = max(span.end for span in spans) - min(span.begin for span in spans)
                fastest[nbytes] = min(seconds, fastest.get(nbytes, seconds))
    return sorted(fastest.items())


MEASURES: dict[str, Callable[[Place], Outcome]] = {
    "rates": rates,
    "memory": memory,
    "step time": times,
    "host work": host,
}
