"""What `set_deterministic_reduction` costs: a training step with it beside the same step without, on gloo.

A GPT (width 512, 4 layers, 128 bytes per sequence, fp32, AdamW) on two, then on four processes, one thread each. The
candidates live in the same processes and take turns; `ratio` is the median of the ratios within a turn. `processor` is
the time of all threads in a step, which other programs affect less. `hybrid` is a mesh of two replicas. The second part
is arithmetic: the bytes that a rank sends for one backward.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from _common import arguments, markdown, median, publish, shard_units, spread
from _models import GPT
from _processes import LENGTH, Step, Training, on_processes, take_turns, turn_arguments
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import fully_shard

WIDTH, LAYERS, WORLDS = 512, 4, (2, 4)


def build(mesh: DeviceMesh, *, fixed: bool, small: bool) -> Training:
    """A model that reduces its gradients in a fixed order, or as the backend does; `small`: units of small matrices."""
    torch.manual_seed(0)
    model = GPT(96, LAYERS, LENGTH) if small else GPT(WIDTH, LAYERS, LENGTH)
    sharded: nn.Module = shard_units(model, model.layers, fully_shard, mesh)
    if fixed:
        sharded.set_deterministic_reduction(True)
    return Training(sharded, torch.optim.AdamW(sharded.parameters(), lr=3e-4, foreach=False))


def worker(options: argparse.Namespace) -> dict[str, Any]:
    """One of the processes: {case: {candidate: [seconds of a backward and of a step]}}."""
    meshes = {"one axis": init_device_mesh("cpu", (options.world,))}
    if options.world == 4:
        meshes["hybrid"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}
    for name, mesh in meshes.items():
        for small in (False, True):
            both = {way: build(mesh, fixed=way == "fixed", small=small) for way in ("plain", "fixed")}
            steps: dict[str, Step] = {way: training.step for way, training in both.items()}
            found[f"{name}, {'small units' if small else 'units of 12 MiB'}"] = take_turns(steps, options)
    return found


def measured(found: list[dict[str, Any]]) -> str:
    """The table of times."""
    lines = []
    for world, cases in zip(WORLDS, found):
        for case, times in cases.items():
            for part in ("backward", "step", "processor"):
                plain, fixed = ([one[part] for one in times[way]] for way in ("plain", "fixed"))
                ratios = [a / b for a, b in zip(fixed, plain)]
                cells = [f"{1e3 * median(some):.1f}" for some in (plain, fixed)]
                lines.append([str(world), case, part, *cells, f"{median(ratios):.3f}", spread(ratios)])
    head = ["processes", "case", "part", "without, ms", "with, ms", "ratio", "middle half"]
    return markdown(head, lines)


def sent(elements: int, wire: int, shard: int, replicate: int = 1) -> tuple[float, float]:
    """Bytes that a rank sends for so many gradients of `wire` bytes each, summed in float32: without it, and with it.

    Without it, rings: a reduce-scatter of float32, then an all-reduce of the sums. With it, gradients are sent in their
    own dtype, and the sums of replicas are exchanged and gathered in float32.
    """
    part = 4 * elements / shard * 2 * (replicate - 1) / replicate
    return 4 * elements * (shard - 1) / shard + part, wire * elements * (shard - 1) / shard + part


def arithmetic() -> str:
    """The table of bytes, of a model of a billion parameters."""
    lines = []
    for shard, replicate in ((2, 1), (8, 1), (64, 1), (8, 8)):
        for name, wire in (("float32", 4), ("bfloat16", 2)):
            without, fixed = sent(10**9, wire, shard, replicate)
            ranks = f"{shard} x {replicate}" if replicate > 1 else f"{shard}"
            lines.append([ranks, name, *(f"{some / 1e9:.2f}" for some in (without, fixed))])
    head = ["ranks", "gradients", "without, GB", "with, GB"]
    return markdown(head, lines)


def main() -> None:
    """Measure and print both tables."""
    parser = arguments(__doc__)
    turn_arguments(parser, turns=15)
    options = parser.parse_args()
    found = on_processes(worker, options, WORLDS)
    tables = f"{measured(found)}\n\nBytes of one backward of a billion gradients:\n\n{arithmetic()}"
    publish("deterministic", tables, dict(zip(map(str, WORLDS), found)), __doc__ or "", options)


if __name__ == "__main__":
    main()
