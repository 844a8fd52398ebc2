"""One training step of the user's own code on a pretended rank, and what came of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._trace import listening, recording_with
from fsdp2.build.modules import fsdp_modules
from fsdp2.forecasting.clock import Clock
from fsdp2.forecasting.cost import H100, Hardware, tensors_in
from fsdp2.forecasting.memory import Memory, Peak
from fsdp2.forecasting.rank import built_model, check_mesh, explained, simulated_rank
from fsdp2.forecasting.saving import save
from fsdp2.forecasting.timeline import COMPUTE, Mark, Timeline, lane_names, unit_spans

__all__ = ["Collectives", "Forecast", "forecast"]

_WHILE = {"pre_forward": "forward", "pre_backward": "backward", "post_forward": "after forward", "reduce": "backward"}


@dataclass(frozen=True)
class Collectives:
    """What one kind of collective sends along one mesh axis in a step: launches, and bytes of the whole tensors."""

    axis: str
    kind: str
    launches: int
    nbytes: int


@dataclass(frozen=True)
class Forecast:
    """What a training step needs on one rank. ``padding_bytes`` is what a gather of everything carries for nothing."""

    mesh: dict[str, int]
    device: str
    peak: Peak
    collectives: tuple[Collectives, ...]
    padding_bytes: int
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    exposed_by_unit: dict[str, float]
    timeline: Timeline = field(repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that are alive at once."""
        return self.peak.nbytes

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """What these bytes are."""
        return self.peak.by_kind

    def to_json(self) -> str:
        """All figures, without the lanes."""
        values = {name: value for name, value in asdict(self).items() if name != "timeline"}
        return json.dumps(values, indent=2)

    def table(self) -> str:
        """The figures for people."""
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [
            f"one rank of {mesh}, {self.device}",
            "",
            f"peak memory     {_size(self.peak_bytes)}, {self.peak.running}",
        ]
        lines += [f"  {kind:<16}{_size(nbytes)}" for kind, nbytes in self.bytes_by_kind.items()]
        lines += ["", "sent in a step  launches       bytes"]
        lines += [f"  {c.axis + ' ' + c.kind:<22}{c.launches:>4}  {_size(c.nbytes)}" for c in self.collectives]
        lines += [f"  padding of a gather       {_size(self.padding_bytes)}", ""]
        lines += [f"step            {self.step_seconds * 1e3:10.2f} ms (a model's estimate)"]
        lines += [f"  compute       {self.compute_seconds * 1e3:10.2f} ms"]
        lines += [f"  exposed       {self.exposed_seconds * 1e3:10.2f} ms of communication"]
        most = sorted(self.exposed_by_unit.items(), key=lambda item: -item[1])[:5]
        lines += [f"    {unit or 'the root':<20}{seconds * 1e3:8.2f} ms" for unit, seconds in most]
        return "\n".join(lines)

    def save(self, path: str | Path, *others: Timeline) -> None:
        """Write the step as a page (.html), a picture (.png, .svg, .pdf) or a Chrome trace (.json).

        ``others``, such as ``record.timeline``, are shown below it, on the same scale.

        Raises:
            ValueError: the name ends in something else.
        """
        save(path, [self.timeline, *others])

    def __str__(self) -> str:
        return self.table()


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):10.1f} MiB"


def forecast(
    build: Callable[[DeviceMesh], Any],
    step: Callable[[Any, Any], object],
    *,
    mesh: Mapping[str, int],
    hardware: Hardware = H100,
    backend: str = "nccl",
    rank: int = 0,
    steps: int = 3,
    progress: Callable[[str], object] | None = None,
) -> Forecast:
    """Forecast memory, collectives and time of a training step on one ``rank`` of a mesh of these dimensions.

    ``build(mesh)`` calls ``fully_shard`` and returns the model, or the model and its optimizer; ``step(model,
    optimizer)`` runs a training step. Both run as they are, with tensors that have no memory and collectives that send
    nothing: no weights, no device, no other process. There are no values, so code must not read any (``loss.item()``).

    Args:
        build: Makes the model on a mesh.
        step: Runs a training step.
        mesh: The number of ranks along each dimension, such as ``{"replicate": 4, "shard": 16}``.
        hardware: The constants of the cost model, which estimates times.
        backend: "nccl", or "gloo" for CPUs, which have no streams.
        rank: The rank to forecast; only uneven shards differ between ranks.
        steps: How many steps to run; the last one is measured, since optimizers make their state in the first.
        progress: Called often, with a text that describes the current phase.

    Raises:
        RuntimeError: this process has a process group already, or the code looks at a value, needs a device, makes a
            mesh of more ranks, or calls an operator that says nothing of the shape of its result.
        TypeError: ``build`` returned no module.
        ValueError: ``mesh`` is none, or does not have the ``rank``.
    """
    clock = Clock(hardware)
    phase = ["building"]
    memory = Memory(
        lambda: f"{phase[0]} of {clock.unit}" if clock.unit else phase[0],
        lambda: clock.compute.time,
        clock.lane,
    )
    marks: list[Mark] = []
    stage, report = "building", progress or (lambda doing: None)
    report(stage)

    def heard(event: str, name: str) -> None:
        marks.append(Mark(clock.compute.time, event, name))
        if event in _WHILE:
            clock.unit, phase[0] = name, _WHILE[event]
            report(f"{stage}: {phase[0]} of {name or 'the root'}")
        elif event == "root_post_backward":
            clock.unit, phase[0] = "", "after backward"

    simulated = simulated_rank(mesh, clock, backend=backend, rank=rank)
    recorded = recording_with(clock)
    with explained(check_mesh(mesh, rank)), listening(heard), recorded, simulated as made, memory:
        clock.axes = {str(made.get_group(name).group_name): name for name in mesh}
        model, optimizer = built_model(build(made))
        begin = 0.0
        for number in range(1, steps + 1):
            stage = f"step {number} of {steps}"
            report(stage)
            _know(memory, model, optimizer)
            clock.unit, phase[0] = "", "forward"
            begin = clock.begin()
            memory.begin()
            marks.clear()
            step(model, optimizer)
        _know(memory, model, optimizer)
        return _result(dict(mesh), clock, memory, _timeline(clock, memory, marks, begin, rank), _padding(model))


def _know(memory: Memory, model: nn.Module, optimizer: Any) -> None:
    parameters = list(model.parameters())
    memory.know(parameters, "shards")
    memory.know([parameter.grad for parameter in parameters if parameter.grad is not None], "gradients")
    memory.know(model.buffers(), "other")
    if optimizer is not None:
        memory.know(tensors_in([*optimizer.state.values()]), "optimizer state")


def _padding(model: nn.Module) -> int:
    total = 0
    for module in fsdp_modules(model):
        for group in module._get_fsdp_state().groups:
            for param in group.params:
                layout = param.spec.layout
                total += (layout.slot_numel * layout.ranks - layout.numel) * param.compute_dtype.itemsize
    return total


def _timeline(clock: Clock, memory: Memory, marks: list[Mark], begin: float, rank: int) -> Timeline:
    names = lane_names(clock.spans)
    spans = [replace(span, lane=names[span.lane]) for span in clock.spans]
    title = f"forecast, {clock.hardware.name}"
    return Timeline.of(title, rank, [*spans, *unit_spans(marks)], clock.exposed, memory.points(), (begin, clock.now))


def _result(mesh: dict[str, int], clock: Clock, memory: Memory, timeline: Timeline, padding: int) -> Forecast:
    launches, sent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for span in clock.spans:
        if span.group:
            key = (span.group, span.kind)
            launches[key] += 1
            sent[key] += span.nbytes
    exposed = Counter[str]()
    for wait in clock.exposed:
        exposed[wait.unit] += wait.end - wait.begin  # type: ignore[assignment]  # seconds
    compute = sum(span.seconds for span in clock.spans if span.lane == COMPUTE and not span.group)
    total = timeline.seconds
    return Forecast(
        mesh=mesh,
        device=clock.hardware.name,
        peak=memory.peak(),
        collectives=tuple(Collectives(*key, launches[key], sent[key]) for key in sorted(launches)),
        padding_bytes=padding,
        step_seconds=total,
        compute_seconds=compute,
        exposed_seconds=total - compute,
        exposed_by_unit=dict(exposed),
        timeline=timeline,
    )
