"""A Muon step over 24 matrices on two gloo processes: whole at their owners, on DTensors, and in one process."""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from _common import FullyShard, Row, candidates, median, shard_units, spread
from _processes import WORLD
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, LAYERS = 384, 8


class Matrices(nn.Module):
    """Three matrices whose gradients are random, the same for every candidate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        shapes = ((width, width), (2 * width, width), (width, 2 * width))
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(shape) / width**0.5) for shape in shapes)

    def forward(self) -> torch.Tensor:
        """Return a scalar."""
        return sum((m.tanh().sum() for m in self.matrices), torch.zeros(()))


class Layers(nn.Module):
    """All 24 matrices."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Matrices(width) for _ in range(LAYERS))

    def forward(self) -> torch.Tensor:
        """Return a scalar."""
        return sum((layer() for layer in self.layers), torch.zeros(()))


def build(name: str, options: argparse.Namespace) -> torch.optim.Optimizer:
    """The optimizer of a candidate, whose parameters have gradients that stay."""
    torch.manual_seed(0)
    model = Layers()
    if name != "plain":
        shard_units(model, model.layers, candidates(options.ours)[name], init_device_mesh("cpu", (WORLD,)))
    model().backward()
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)
    if name == "ours" and options.ours != "torch":
        importlib.import_module("fsdp2").use_full_params(optimizer)
    return optimizer


def worker(options: argparse.Namespace) -> dict[str, Any]:
    """One of the two processes: {candidate: [seconds of a step]}; one process alone does the plain step."""
    optimizers = {name: build(name, options) for name in ("ours", "theirs", "plain")}
    times: dict[str, list[float]] = {name: [] for name in optimizers}
    names = list(optimizers)
    for turn in range(options.warm + options.turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            start = time.perf_counter()
            if name != "plain" or options.rank == 0:
                optimizers[name].step()
            dist.barrier()
            if turn >= options.warm:
                times[name].append(time.perf_counter() - start)
    params = {name: optimizer.param_groups[0]["params"] for name, optimizer in optimizers.items()}
    whole = {name: [getattr(p, "full_tensor", lambda p=p: p)() for p in params[name]] for name in ("ours", "theirs")}
    plain = params["plain"]
    return {
        "times": times,
        "equal": all(torch.equal(a, b) for a, b in zip(whole["ours"], plain)) if options.rank == 0 else None,
        "theirs equal": all(torch.equal(a, b) for a, b in zip(whole["theirs"], plain)) if options.rank == 0 else None,
    }


def modelled(fully_shard: FullyShard, *, whole: bool, ranks: int = 64, width: int = 2048) -> float:
    """Seconds of a step on a pretended cluster by the forecast's cost model, for the rank that has most."""
    from fsdp2.tools.forecast.clock import Clock
    from fsdp2.tools.forecast.rank import simulated_rank

    clock = Clock()
    streams = {name: getattr(clock, name) for name in ("Stream", "Event", "current_stream", "stream")}
    with mock.patch.multiple(torch.cpu, **streams), simulated_rank({"shard": ranks}, clock) as mesh:
        model = Layers(width)
        fully_shard(model, mesh=mesh)
        model().backward()
        optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)
        if whole:
            importlib.import_module("fsdp2").use_full_params(optimizer)
        for _ in range(2):
            begin = clock.begin()
            optimizer.step()
        return clock.now - begin


def modelled_row(options: argparse.Namespace) -> Row:
    """The same step on 64 pretended ranks."""
    both = candidates(options.ours)
    ours = 1e3 * modelled(both["ours"], whole=options.ours != "torch")
    theirs = 1e3 * modelled(both["theirs"], whole=False)
    return Row("Muon step, 64 ranks, modelled", ours, theirs, "ms", 0.2, True, "H100s by the cost model of a forecast")


def rows(found: dict[str, Any]) -> list[Row]:
    """The figures of the table."""
    times = found["times"]
    ours, theirs = median(times["ours"]), median(times["theirs"])
    of_plain = [a / b for a, b in zip(times["ours"], times["plain"])]
    their_plain = [a / b for a, b in zip(times["theirs"], times["plain"])]
    words = {True: "equal to one process bit for bit", False: "not bit for bit as in one process"}
    note = f"ours {words[found['equal']]}, torch's {words[found['theirs equal']]}"
    return [
        Row("Muon step, 2 processes", ours, theirs, "s", 0.9, True, note),
        Row("Muon step / one process", median(of_plain), median(their_plain), "", 0.65, False, spread(of_plain)),
    ]
