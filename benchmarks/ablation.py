"""What each idea is worth: everything on, and then one idea at a time switched off.

Peaks are those of `memory.py` in fp32, exact (B is one unsharded layer, 24 MiB). Calls and host time are what one more
unit adds to a step, as in `host.py`; a small unit is packed, the parameters of a large one travel on their own. `step`
is a training step of a 13M-parameter GPT on two real gloo processes, clipping and optimizer included; its processor
time is that of all threads. Times are divided by those with everything on in the same turn; shown are the median and,
of `step`, the middle half of the turns. Above 1: leaving the idea out costs time. The second line is everything on
beside itself and says which differences mean nothing. A dash: the idea cannot have an effect there.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import host
import memory
import torch
from _common import arguments, collect_garbage, fake_mesh, markdown, median, number, publish, quiet_profiler, spread
from _ideas import IDEAS, WHOLE, Idea, as_candidate
from _models import GPT, SideBySide
from _processes import LENGTH, WORLD, Step, Times, Training, on_two_processes, take_turns, turn_arguments
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fsdp2

WIDTH, LAYERS = 512, 4
COLUMNS = {
    "forward": "forward peak (B)",
    "backward": "backward peak (B)",
    "python small": "Python calls, small unit",
    "python large": "Python calls, large unit",
    "operators large": "dispatcher calls, large unit",
    "host": "host time, small unit / with everything on",
    "step": "step / with everything on",
    "middle": "middle half",
    "processor": "processor time of a step / with everything on",
}
Line = dict[str, Any]


def peaks(idea: Idea) -> Line:
    """Forward and backward peak in layers."""
    layers = (lambda: SideBySide(*memory.layers())) if idea.side_by_side else memory.layers
    with idea.off():
        return {**memory.measure(as_candidate(idea), memory.FP32, fake_mesh(memory.WORLD), layers)}


def calls(ideas: Sequence[Idea]) -> list[Line]:
    """Calls that one more unit adds to a step."""
    mesh, widths = fake_mesh(host.WORLD), {"small": host.WIDTH, "large": host.LARGE_WIDTH}
    plain = {size: host.counts_per_unit(None, mesh, width, False) for size, width in widths.items()}
    found = []
    for idea in ideas:
        line: Line = {}
        for size, width in widths.items():
            with idea.off():
                counted = host.counts_per_unit(as_candidate(idea), mesh, width, False)
            line |= {f"{kind} {size}": counted[kind] - plain[size][kind] for kind in ("python", "operators")}
        found.append(line)
    return found


def host_times(ideas: Sequence[Idea], rounds: int) -> list[Line]:
    """What one more small unit adds to a step, in times of what it adds with everything on in the same turn."""
    mesh, depths = fake_mesh(host.WORLD), (host.SHALLOW, host.DEEP)
    steps = {(None, units): host.Case(units).step_of(None, mesh) for units in depths}
    for i, idea in enumerate(ideas):
        for units in depths:
            with idea.off():
                steps[i, units] = under(idea, host.Case(units).step_of(as_candidate(idea), mesh))
    seconds = host.in_turns(steps, rounds)
    slopes = {
        i: [b - a for a, b in zip(seconds[i, depths[0]], seconds[i, depths[1]])] for i in (None, *range(len(ideas)))
    }
    added = [[own - plain for own, plain in zip(slopes[i], slopes[None])] for i in range(len(ideas))]
    lines = [{"host": median([a / b for a, b in zip(own, added[0])])} for own in added]
    lines[0]["host"] = f"{1e6 * median(added[0]) / (depths[1] - depths[0]):.0f} us"
    return lines


def under(idea: Idea, step: host.Step) -> host.Step:
    """The step, run without the idea. Entering that is not timed apart; it replaces attributes, some microseconds."""

    def run() -> object:
        with idea.off():
            return step()

    run.clear = step.clear
    return run


def build(idea: Idea) -> Training:
    """A model for training on gloo, equal to the others at the start; to be called inside `idea.off`."""
    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", (WORLD,)), GPT(WIDTH, LAYERS, LENGTH)
    for module in (*model.layers, model):
        idea.fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if idea.local_step:
        fsdp2.use_local_shards(optimizer)
    clip = fsdp2.clip_grad_norm_ if idea.local_clip else torch.nn.utils.clip_grad_norm_
    return Training(model, optimizer, lambda parameters: clip(parameters, 1.0))


def training_step(idea: Idea) -> Step:
    with idea.off():
        training = build(idea)

    def step(data: Tensor) -> Times:
        with idea.off():
            return training.step(data)

    return step


def worker(options: argparse.Namespace) -> dict[str, list[Times]]:
    """One of the two processes: the times of every step of every candidate."""
    return take_turns({idea.title: training_step(idea) for idea in chosen(options) if "gloo" in idea.where}, options)


def ratios(times: dict[str, list[Times]]) -> dict[str, Line]:
    """A step's time and its processor time divided by those of the same turn with everything on, by title."""
    whole = times[WHOLE.title]

    def of_whole(steps: list[Times], key: str) -> list[float]:
        return [own[key] / reference[key] for own, reference in zip(steps, whole)]

    lines: dict[str, Line] = {}
    for title, steps in times.items():
        found = of_whole(steps, "step")
        lines[title] = {
            "step": median(found),
            "middle": spread(found),
            "processor": median(of_whole(steps, "processor")),
        }
    seconds = {key: [step[key] for step in whole] for key in ("step", "processor")}
    lines[WHOLE.title] = {key: f"{median(values):.3f} s" for key, values in seconds.items()}
    lines[WHOLE.title]["middle"] = spread(seconds["step"])
    return lines


def chosen(options: argparse.Namespace) -> list[Idea]:
    """The whole, and the ideas that were asked for."""
    words = options.only or [""]
    return [WHOLE, *(idea for idea in IDEAS if any(word in idea.title for word in words))]


def fake_lines(ideas: Sequence[Idea], rounds: int) -> dict[str, Line]:
    """What can be seen in one process that pretends, by title; a second whole for the units that lie side by side."""
    ideas = [idea for idea in ideas if "fake" in idea.where]
    found: dict[str, Line] = {}
    in_a_chain = [idea for idea in ideas if not idea.side_by_side]
    for idea, counted, timed in zip(in_a_chain, calls(in_a_chain), host_times(in_a_chain, rounds)):
        found[idea.title] = {**peaks(idea), **counted, **timed}
        collect_garbage()
    for idea in ideas:
        if idea.side_by_side:
            found[SIDE_BY_SIDE.title] = peaks(SIDE_BY_SIDE)
            found[idea.title] = peaks(idea)
    return found


SIDE_BY_SIDE = Idea("(nothing; eight layers side by side)", "each layer sees the data itself", side_by_side=True)


def table(ideas: Sequence[Idea], lines: dict[str, Line]) -> str:
    """One line for each idea."""
    shown = []
    for idea in ideas:
        if idea.side_by_side:
            shown.append(SIDE_BY_SIDE)
        shown.append(idea)
    body = []
    for idea in shown:
        line = lines.get(idea.title, {})
        values = [line.get(key) for key in COLUMNS]
        body.append([idea.title, idea.how, *(v if isinstance(v, str) else number(v) for v in values)])
    return markdown(["switched off", "instead", *COLUMNS.values()], body)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="steps of every candidate for host times (default 60)")
    parser.add_argument("--only", nargs="+", help="only ideas whose title contains one of these words")
    parser.add_argument("--no-gloo", action="store_true", help="leave out the training steps on two processes")
    turn_arguments(parser, turns=15)
    options = parser.parse_args()
    quiet_profiler()
    times = {} if options.no_gloo else on_two_processes(worker, options)
    torch.set_num_threads(1)
    ideas = chosen(options)
    lines = fake_lines(ideas, options.rounds)
    for title, line in (ratios(times) if times else {}).items():
        lines.setdefault(title, {}).update(line)
    publish("ablation", table(ideas, lines), lines, __doc__ or "", options)


if __name__ == "__main__":
    main()
