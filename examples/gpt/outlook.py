"""Compare the recorded last step of a job with its forecast, which needs a single process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fsdp2
from fsdp2.forecasting.cost import Hardware, Link
from fsdp2.forecasting.timeline import Timeline
from gpt import checkpoint
from gpt.processes import Place
from gpt.record import Run
from gpt.screen import heading
from gpt.train import build, update

RECORDED, PAGE = "step.json", "step.html"


def beside(out: Path) -> str:
    """Return a table of forecast and record, and write a page that shows both to `out`."""
    progress = checkpoint.verify(checkpoint.find(out))
    settings, run = progress.settings, progress.runs[-1]
    recorded = Timeline.from_json((out / RECORDED).read_text())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens = torch.randint(256, (settings.batch // run.ranks, settings.context))
        update(model, optimizer, (tokens, tokens))  # type: ignore[arg-type]  # build's own model

    def forecast_on(hardware: Hardware) -> Any:
        return fsdp2.forecast(
            lambda mesh: build(settings, Place(0, run.ranks, torch.device("cpu")), run.compute),
            step,
            mesh={"ranks": run.ranks},
            hardware=hardware,
            backend=run.backend,
        )

    hardware = _this_machine(run, recorded)
    # One large product and one large copy say little about the rates of a step: fit both to the recorded compute.
    share = forecast_on(hardware).compute_seconds / max(recorded.seconds - recorded.exposed_seconds, 1e-9)
    flops, traffic = hardware.flops_per_second * share, hardware.memory_bytes_per_second * share
    result = forecast_on(replace(hardware, flops_per_second=flops, memory_bytes_per_second=traffic))
    result.save(out / PAGE, recorded)
    forecast = result.timeline
    rows = [
        (
            "peak memory of a step, one rank",
            f"{result.peak_bytes / 1e6:.1f} MB",
            f"{run.peak_bytes / 1e6:.1f} MB" if run.peak_bytes else "-",
        ),
        ("sent and received", _sent(forecast), _sent(recorded)),
        ("time", f"{forecast.seconds * 1e3:.0f} ms", f"{recorded.seconds * 1e3:.0f} ms"),
        ("  waiting for others", *(f"{t.exposed_seconds * 1e3:.0f} ms" for t in (forecast, recorded))),
    ]
    lines = [f"  {name:<34}{first:>12}{second:>12}" for name, first, second in [("", "forecast", "recorded"), *rows]]
    note = (
        "The forecast's compute is fitted to the recorded step; what it waits for others is an estimate. The record's\n"
        "picture of memory has shards and gathered parameters alone. A zoomable page with both steps:"
    )
    return "\n".join([heading("the last step and its forecast"), *lines, "", note, str(out / PAGE)])


def _sent(timeline: Timeline) -> str:
    return f"{sum(span.nbytes for span in timeline.spans) / 1e6:.1f} MB"


def _this_machine(run: Run, recorded: Timeline) -> Hardware:
    """Return a cost model of this machine, from products and copies measured now and the recorded collectives."""
    matrix, target = torch.ones(1024, 1024), torch.ones(1 << 22)
    source = torch.ones_like(target)
    flops = 2 * 1024**3 / _seconds(lambda: matrix @ matrix)
    traffic = 2 * source.nbytes / _seconds(lambda: target.copy_(source))
    sent = sum(span.nbytes for span in recorded.spans)
    seconds = sum(span.seconds for span in recorded.spans if span.nbytes)
    speed = max(sent * (run.ranks - 1) / run.ranks / seconds, 1.0) if seconds else 1e9
    # The ranks share the machine. The constant is for elements of two bytes, and the measured ones have four.
    name, share = "this machine", 1 / run.ranks
    return Hardware(name, 2 * flops * share, traffic * share, run.ranks, speed, (Link(run.ranks, 0.0, speed),))


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
