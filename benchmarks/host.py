"""Python calls, dispatcher calls and microseconds that sharding adds per unit and training step.

A unit is a llama-shaped block of 9 parameters; the process group is `fake`, so nothing is sent and what remains is host
work. First come calls on the way that a GPU takes: 8 ranks, lanes are streams, the group counts as NCCL. Tensors are a
CPU's there, streams are simulated, and a call of a stream counts as one. Then come calls and times on the way that a
CPU takes, where the host waits for collectives.

Every figure is a slope between two depths, minus the same slope of the model that is not sharded: what one more unit
costs, with the root and other constants cancelled. Times are processor time of the one thread that works, medians of
many steps in which the candidates take turns; calls are exact counts of a step after the third one (forward and
backward, no optimizer).

The fake group copies its input once per pretended rank. Those operators are not counted, the CPU's figures are taken on
2 ranks where they weigh least, and the rows over ranks have the growth of that copying subtracted.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from _calls import calls_of
from _common import (
    FullyShard,
    Row,
    arguments,
    collect_garbage,
    fake_mesh,
    fake_sides,
    finish,
    median,
    shard_units,
)
from _models import Block, Columns
from _simulated import lanes_on_streams
from _traces import in_collective
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

WORLD, STREAMS_WORLD, WIDTH, LARGE_WIDTH, WARM_STEPS = 2, 8, 64, 1024, 3
SHALLOW, DEEP = 4, 16
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Step = Callable[[], object]
KINDS = {  # what is counted: (its title, what is asked of ours / torch's on streams, and on a CPU)
    "python": ("Python calls (of Python and of C functions)", 0.5, 0.33),
    "functions": ("of these, Python functions", None, None),
    "operators": ("dispatcher calls (nested ones included)", None, 0.5),
    "dispatched": ("of these, seen by a dispatch mode", None, None),
}


class Dispatches(TorchDispatchMode):
    """Counts every operator that reaches the dispatcher below autograd, collectives included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to step: how many units of which width, and in which precision."""

    units: int
    width: int = WIDTH
    mixed: bool = False

    def step_of(self, fully_shard: FullyShard | None, mesh: DeviceMesh) -> Step:
        """A warmed-up function that runs one forward and backward; gradients are dropped outside of it."""
        model: nn.Module = nn.Sequential(*(Block(self.width) for _ in range(self.units)))
        data = torch.randn(1, self.width)
        if fully_shard is None and self.mixed:
            model, data = model.bfloat16(), data.bfloat16()
        shard_units(model, model.children(), fully_shard, mesh, MIXED if self.mixed else None)
        return warm(model, data)


def warm(model: nn.Module, data: Tensor) -> Step:
    """One training step of the model as a function, after the steps in which it learns its order."""
    parameters = list(model.parameters())

    def step() -> None:
        model(data).sum().backward()

    for _ in range(WARM_STEPS):
        step()
        clear(parameters)
    step.clear = lambda: clear(parameters)
    return step


def clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def count(step: Step) -> dict[str, int]:
    """Calls in one step, by the keys of `KINDS`."""
    events = calls_of(step)
    step.clear()
    with Dispatches() as dispatches:
        step()
    step.clear()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    step.clear()
    operators = sum(_is_operator(event) for event in profiler.events())
    python = sum(events.values())
    return {
        "python": python,
        "functions": events["call"],
        "operators": operators,
        "dispatched": dispatches.count,
    }


def _is_operator(event: Any) -> bool:
    """Whether a profiler event is a dispatched operator that does not run inside a collective of the fake group."""
    return event.name.startswith(("aten::", "c10d::", "fsdp::", "fsdp2::")) and not in_collective(event.cpu_parent)


def counts(sides: dict[str, FullyShard], mesh: DeviceMesh, width: int, mixed: bool) -> dict[str, dict[str, float]]:
    """Added calls per unit of every side: {side: {kind: calls}}."""
    everyone = {"plain": None, **sides}
    found = {side: counts_per_unit(fully_shard, mesh, width, mixed) for side, fully_shard in everyone.items()}
    return {side: {kind: found[side][kind] - found["plain"][kind] for kind in KINDS} for side in sides}


def counts_per_unit(fully_shard: FullyShard | None, mesh: DeviceMesh, width: int, mixed: bool) -> dict[str, float]:
    """Calls that one more unit makes in a step, its own computation included: {kind: calls}."""
    few, many = (count(Case(units, width, mixed).step_of(fully_shard, mesh)) for units in (2, 6))
    collect_garbage()
    return {kind: (many[kind] - few[kind]) / 4 for kind in KINDS}


def alternate(steps: dict[Any, Step], rounds: int) -> dict[Any, float]:
    """Median processor seconds of every step."""
    return {key: median(times) for key, times in in_turns(steps, rounds).items()}


def in_turns(steps: dict[Any, Step], rounds: int) -> dict[Any, list[float]]:
    """Processor seconds of every step; they take turns, so that a slow moment of the machine meets them all."""
    times: dict[Any, list[float]] = {key: [] for key in steps}
    for turn in range(rounds):
        keys = list(steps) if turn % 2 else list(reversed(steps))
        for key in keys:
            start = time.thread_time()
            steps[key]()
            times[key].append(time.thread_time() - start)
            steps[key].clear()
    return times


def microseconds(sides: dict[str, FullyShard], mesh: DeviceMesh, mixed: bool, rounds: int) -> dict[str, float]:
    """Added microseconds per unit and step of every side."""
    everyone = {"plain": None, **sides}
    steps = {
        (side, units): Case(units, mixed=mixed).step_of(fully_shard, mesh)
        for side, fully_shard in everyone.items()
        for units in (SHALLOW, DEEP)
    }
    seconds = alternate(steps, rounds)
    slope = {side: (seconds[side, DEEP] - seconds[side, SHALLOW]) / (DEEP - SHALLOW) for side in everyone}
    return {side: 1e6 * (slope[side] - slope["plain"]) for side in sides}


def wrap_seconds(fully_shard: FullyShard, mesh: DeviceMesh, units: int) -> float:
    """Seconds from a built model of `units` units to the end of its first forward."""
    collect_garbage()
    model = nn.Sequential(*(Block(8) for _ in range(units)))
    start = time.thread_time()
    shard_units(model, model.children(), fully_shard, mesh)
    model(torch.randn(1, 8))
    return time.thread_time() - start


def _wrapping(sides: dict[str, FullyShard], mesh: DeviceMesh, units: int, rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, fully_shard in sides.items():
            seconds[side].append(wrap_seconds(fully_shard, mesh, units))
    return {side: median(values) for side, values in seconds.items()}


def over_depth(sides: dict[str, FullyShard], mesh: DeviceMesh, depths: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Added microseconds per unit at each depth, constants included."""
    found: dict[str, dict[int, float]] = {side: {} for side in sides}
    for units in depths:
        steps = {side: Case(units).step_of(function, mesh) for side, function in {"plain": None, **sides}.items()}
        seconds = alternate(steps, max(5, 400 // units))
        for side in sides:
            found[side][units] = 1e6 * (seconds[side] - seconds["plain"]) / units
        del steps
        collect_garbage()
    return found


def fake_seconds(world: int, rows: int) -> float:
    """Seconds that the fake group itself spends on a unit's two gathers and one reduce-scatter."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    full = torch.empty(9 * max(rows, world))
    piece = full[: full.numel() // world]
    times = []
    for _ in range(100):
        start = time.thread_time()
        gather(full, piece)
        gather(full, piece)
        scatter(piece, full)
        times.append(time.thread_time() - start)
    return median(times)


def over_worlds(sides: dict[str, FullyShard], worlds: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Added microseconds per unit at each world size, on units whose work and size do not depend on it."""
    found: dict[str, dict[int, float]] = {side: {} for side in sides}
    rows = max(worlds)
    alone: dict[int, float] = {}
    for world in worlds:
        mesh, steps = fake_mesh(world), {}
        alone[world] = fake_seconds(world, rows)
        for side, fully_shard in {"plain": None, **sides}.items():
            model = nn.Sequential(*(Columns(rows) for _ in range(SHALLOW)))
            shard_units(model, model.children(), fully_shard, mesh)
            steps[side] = warm(model, torch.randn(rows, 1))
        seconds = alternate(steps, 60)
        for side in sides:
            added = (seconds[side] - seconds["plain"]) / SHALLOW
            found[side][world] = 1e6 * (added - alone[world] + alone[worlds[0]])
        del steps, model
        collect_garbage()
    return found


def count_rows(sides: dict[str, FullyShard], mesh: DeviceMesh, way: str) -> list[Row]:
    """The exact figures on one way, "streams" or "CPU"."""
    rows = []
    for width in (WIDTH, LARGE_WIDTH):
        for name, mixed in (("fp32", False), ("mixed", True)):
            found = counts(sides, mesh, width, mixed)
            for kind, (title, on_streams, on_a_cpu) in KINDS.items():
                limit = on_streams if way == "streams" else on_a_cpu
                figure = f"{way}, matrices of {width}, {name}: {title}"
                rows.append(Row(figure, found["ours"][kind], found["theirs"][kind], "", limit))
    return rows


def stream_rows(sides: dict[str, FullyShard]) -> list[Row]:
    """The exact figures on the way that a GPU takes."""
    with lanes_on_streams():
        return count_rows(sides, fake_mesh(STREAMS_WORLD), "streams")


def time_rows(sides: dict[str, FullyShard], mesh: DeviceMesh, options: argparse.Namespace) -> list[Row]:
    """The measured figures."""
    rows = []
    for name, mixed in (("fp32", False), ("mixed", True)):
        found = microseconds(sides, mesh, mixed, options.rounds)
        rows.append(Row(f"host time per unit and step, {name}", found["ours"], found["theirs"], "us", 0.4))
        collect_garbage()
    wrapping = _wrapping(sides, mesh, options.units, 2)
    title = f"wrapping {options.units} units, first forward included"
    rows.append(Row(title, wrapping["ours"], wrapping["theirs"], "s", 1.0))
    depths, worlds = (4, 16, 64, 256), (2, 64, 1024, 4096)
    for word, found_over in (("units", over_depth(sides, mesh, depths)), ("ranks", over_worlds(sides, worlds))):
        for size in found_over["ours"]:
            title = f"added per unit, {size} {word}"
            ours, theirs = found_over["ours"][size], found_over["theirs"][size]
            lost = "lost in noise: less than the fake group's own work, which is subtracted"
            rows.append(Row(title, ours, theirs, "us", note="" if min(ours, theirs) > 0 else lost))
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="steps of every candidate and depth (default 60)")
    parser.add_argument("--units", type=int, default=1000, help="units of the wrapping figure (default 1000)")
    parser.add_argument("--counts", action="store_true", help="only the exact call counts")
    parser.add_argument("--profile", action="store_true", help="print where our host time of a step goes")
    options = parser.parse_args()
    sides, mesh = fake_sides(options, WORLD)
    if options.profile:
        show_profile(Case(DEEP).step_of(sides["ours"], mesh))
        return
    rows = stream_rows(sides)
    mesh = fake_mesh(WORLD)  # the last one that was made is the one that works
    rows += count_rows(sides, mesh, "CPU")
    if not options.counts:
        rows += time_rows(sides, mesh, options)
    finish("host", rows, __doc__ or "", options)


def show_profile(step: Step) -> None:
    """Print functions by own time over 30 steps of the deep model."""
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    for _ in range(30):
        profiler.enable()
        step()
        profiler.disable()
        step.clear()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
