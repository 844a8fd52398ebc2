"""A forecast of the measured step, with the constants of the cost model fitted to this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

import fsdp2
from fsdp2.tools.check.measure import Size, decoder, size_of
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.forecast.cost import Hardware, Link

__all__ = ["assumed", "fitted_link", "forecast_step", "hardware_of"]


def forecast_step(place: Place) -> Outcome:
    """a forecast of the same step, with constants fitted to this machine"""
    rates, steps = place.earlier.get("rates"), place.earlier.get("step time")
    if not rates or not steps:
        return Outcome("skipped", "needs the rates and the step time of this machine")
    hardware, size = hardware_of(place.world, place.hosts, rates), size_of(place)
    first = _forecast(place, size, hardware)
    # A real step does not reach the rates of one large product and one large copy: reduce both by the same factor.
    share = min(first.compute_seconds / steps["step"]["plain"], 1.0)
    hardware = replace(
        hardware,
        flops_per_second=hardware.flops_per_second * share,
        memory_bytes_per_second=hardware.memory_bytes_per_second * share,
    )
    found = _forecast(place, size, hardware)
    figures = {
        "peak memory allocated": {"forecast": found.peak_bytes},
        "step": {"forecast": found.step_seconds},
        "exposed communication": {"forecast": found.exposed_seconds},
        "hardware": asdict(hardware),
    }
    return Outcome("seen", figures=figures)


def _forecast(place: Place, size: Size, hardware: Hardware) -> Any:
    place.doing("forecasting the step")

    def build(mesh: Any) -> Any:
        with torch.device(mesh.device_type):
            return decoder(size, mesh, fsdp2.fully_shard, mixed=place.cuda)

    def step(model: Any, optimizer: Any) -> None:
        model(torch.randn(1, size.tokens, size.width)).backward()
        model.zero_grad()

    backend = "nccl" if place.cuda else "gloo"
    return fsdp2.forecast(build, step, mesh={"shard": place.world}, hardware=hardware, backend=backend)


def assumed(hosts: int, rates: dict[str, Any]) -> list[str]:
    """Return the names of the constants that were not measured: they are those of an H100."""
    network, host = hosts > 1, "host_bytes_per_second" in rates
    known = {"links": rates.get("gathers"), "network_bytes_per_second": network, "host_bytes_per_second": host}
    return [name for name, measured in known.items() if not measured]


def hardware_of(world: int, hosts: int, rates: dict[str, Any]) -> Hardware:
    """Return the hardware with the measured rates."""
    ranks_here = max(world // hosts, 1)
    values: dict[str, Any] = {"name": "measured", "ranks_per_node": ranks_here}
    measured = ("flops_per_second", "memory_bytes_per_second", "host_bytes_per_second")
    values |= {name: rates[name] for name in measured if name in rates}
    if rates.get("gathers"):
        link = fitted_link(world, rates["gathers"])
        values["links"] = (link,)
        if hosts > 1:  # the gathers crossed the network, whose bandwidth the ranks of a host share
            values["network_bytes_per_second"] = link.bytes_per_second * hosts / world
    return Hardware(**values)


def fitted_link(ranks: int, gathers: Sequence[tuple[int, float]]) -> Link:
    """Return latency and bandwidth from (bytes, seconds) of gathers: from the smallest and the largest of them."""
    (few, fast), (many, slow) = min(gathers), max(gathers)
    crossing = (ranks - 1) / ranks
    if many == few or slow <= fast:
        return Link(ranks, fast, max(many * crossing / slow, 1.0))
    speed = (many - few) * crossing / (slow - fast)
    return Link(ranks, max(fast - few * crossing / speed, 1e-7), speed)
