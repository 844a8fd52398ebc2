"""Run a training step of the user's own code on a simulated rank."""

from __future__ import annotations

import gc
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._naming import class_name
from fsdp2._trace import Source, recording_with
from fsdp2.engine.index import groups_below
from fsdp2.engine.param import FSDPParam
from fsdp2.optim.whole.full_params import kept_params
from fsdp2.sharding.layout import ShardLayout
from fsdp2.tools.forecast.clock import Clock
from fsdp2.tools.forecast.cost import H100, Hardware, tensors_in
from fsdp2.tools.forecast.libraries import TorchEvents, check_units, using
from fsdp2.tools.forecast.memory import Memory
from fsdp2.tools.forecast.others import others_use_everything
from fsdp2.tools.forecast.rank import built_model, check_mesh, explained, line_of, simulated_rank
from fsdp2.tools.forecast.result import Collectives, Forecast
from fsdp2.tools.forecast.timeline import COMPUTE, Mark, Timeline, lane_names, unit_spans

__all__ = ["forecast"]

_WHILE = {"pre_forward": "forward", "pre_backward": "backward", "post_forward": "after forward", "reduce": "backward"}


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
    beside: str | None = None,
) -> Forecast:
    """Forecast the memory, collectives and time of a training step on one ``rank`` of a mesh of these dimensions.

    Your own functions run, with tensors without memory and collectives that send nothing. They need no weights, no
    device and no other process. Tensors have no values, so code must not read any (``loss.item()``).

    Args:
        build: A function of the mesh that calls ``fully_shard`` and returns the model, or the model and its optimizer.
        step: A function of the model and the optimizer that runs a training step.
        mesh: The number of ranks along each dimension, such as ``{"replicate": 4, "shard": 16}``.
        hardware: The constants of the cost model, which estimates times.
        backend: "nccl", or "gloo" for CPUs, which have no streams.
        rank: The rank to forecast. Ranks differ only in uneven shards, and in the whole parameters that they own.
        steps: The number of steps to run. The last one is measured, because optimizers make their state in the first.
        progress: A function that is called often, with a text that describes the current phase.
        beside: "torch" runs the same functions again with torch's own ``fully_shard``, and tables show both; the
            result's ``beside`` is torch's forecast. The script may import either ``fully_shard``: the names in its
            modules are replaced for each run.

    Returns:
        The forecast; ``print`` shows it as a table.

    Raises:
        RuntimeError: This process already has a process group; the code reads a value, needs a device, makes a mesh of
            more ranks, or calls an operator without a fake kernel; or, with ``beside``, the code uses a feature that
            torch's own lacks, or fails with torch's own.
        TypeError: ``build`` or ``step`` is no function, ``build`` did not return a module, or ``hardware`` is no
            ``Hardware``.
        ValueError: ``mesh`` is not a mesh, the mesh does not have the ``rank``, or ``backend``, ``steps`` or ``beside``
            is invalid.

    Example:
        ```python
        def build(mesh):
            with torch.device(mesh.device_type):
                model = Transformer(config)
            return fsdp2.fully_shard(model, mesh=mesh, policy="auto")

        def step(model, optimizer):
            model(torch.zeros(1, 2048, dtype=torch.long)).sum().backward()

        print(fsdp2.forecast(build, step, mesh={"shard": 64}))
        ```
    """
    if type(steps) is not int or steps < 1 or beside not in (None, "torch"):
        raise ValueError(f'forecast: steps={steps}, beside={beside!r}; expected at least one step, and None or "torch"')
    if backend not in ("nccl", "gloo"):
        raise ValueError(f'forecast: backend={backend!r}; expected "nccl", or "gloo" for CPUs')
    for name, function in (("build", build), ("step", step)):
        if not callable(function) or isinstance(function, nn.Module):
            raise TypeError(f"forecast: {name} is a {class_name(function)}; expected a function, as in the example")
    if not isinstance(hardware, Hardware):
        raise TypeError(f"forecast: hardware={hardware!r}; expected a Hardware, as fsdp2.forecasting.cost has it")
    check_mesh(mesh, rank)
    job = _Job(build, step, dict(mesh), hardware, backend, rank, steps, progress or (lambda doing: None))
    ours = _measured(job, "fsdp2")
    if beside is None:
        return ours
    gc.collect()  # objects of the first run in reference cycles would count as live in the second
    try:
        return replace(ours, beside=_measured(job, "torch"))
    except Exception as error:
        line = line_of(error.__cause__ or error)
        raise RuntimeError(
            f"forecast: beside=\"torch\": the script runs with fsdp2's fully_shard, but not with torch's own: {error}"
            + (f", in {line}" if line and line not in str(error) else "")
        ) from error


@dataclass(frozen=True)
class _Job:
    build: Callable[[DeviceMesh], Any]
    step: Callable[[Any, Any], object]
    mesh: dict[str, int]
    hardware: Hardware
    backend: str
    rank: int
    steps: int
    progress: Callable[[str], object]


class _Following:
    """Records the running unit, for the clock, the memory and the timeline."""

    def __init__(self, clock: Clock, progress: Callable[[str], object]) -> None:
        self.stage, self.marks = "building", list[Mark]()
        self.after_backward: Callable[[], object] = lambda: None
        self._clock, self._progress, self._phase = clock, progress, "building"

    def begin(self, stage: str, phase: str) -> None:
        """Note that a step begins."""
        self.stage, self._phase, self._clock.unit = stage, phase, ""
        self.marks.clear()
        self._progress(stage)

    def heard(self, event: str, name: str) -> None:
        """Handle an event of the unit ``name``."""
        self.marks.append(Mark(self._clock.compute.time, event, name))
        if event in _WHILE:
            self._clock.unit, self._phase = name, _WHILE[event]
            self._progress(f"{self.stage}: {self._phase} of {name or 'the root'}")
        elif event == "root_post_backward":
            self._clock.unit, self._phase = "", "after backward"
            self.after_backward()

    def running(self) -> str:
        """Return a description of the running unit."""
        if self._phase in _WHILE.values():
            return f"{self._phase} of {self._clock.unit or 'the root'}"
        return self._phase


class _Recorder:
    """Passes events on, collectives to the clock, and the purposes of their tensors to the memory."""

    def __init__(self, following: _Following, clock: Clock, memory: Memory) -> None:
        self._following, self._clock, self._memory = following, clock, memory

    def heard(self, event: str, source: Source) -> None:
        """Handle an event of the unit ``source``."""
        self._following.heard(event, source.name)

    def enter(self, source: Source) -> None:
        """Attribute communication and waits from now on to the unit ``source``."""
        self._clock.enter(source.name)

    def moment(self) -> float:
        """Return the current moment. Tensors of earlier collectives belong to no unit; their purpose is unknown."""
        self._memory.claim()
        return self._clock.moment()

    def launched(self, what: tuple[str, str], axis: Any, nbytes: int, began: Any, work: Any) -> None:
        """Record the start of a collective."""
        self._memory.claim("gathered" if what[0] == "gather" else "gradients")
        self._clock.launched(what, axis, nbytes, began, work)

    def waited(self, began: Any, work: Any = None) -> None:
        """Record a wait of compute."""
        self._clock.waited(began, work)


def _measured(job: _Job, library: str) -> Forecast:
    """Run the steps with the ``fully_shard`` of that library, and measure the last one."""
    clock = Clock(job.hardware)
    following = _Following(clock, job.progress if library == "fsdp2" else lambda doing: job.progress(f"torch, {doing}"))
    memory = Memory(following.running, lambda: clock.compute.time, clock.lane)
    clock.ranges = TorchEvents(following.heard, clock.enter, memory.claim) if library == "torch" else None
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(explained(math.prod(job.mesh.values())))
        enter(using(library))
        enter(others_use_everything())
        enter(recording_with(_Recorder(following, clock, memory)))
        if library == "torch" and job.backend != "gloo":
            enter(clock.in_place_of(torch.cpu))
        mesh = enter(simulated_rank(job.mesh, clock, backend=job.backend, rank=job.rank))
        enter(memory)
        clock.axes = {str(mesh.get_group(name).group_name): name for name in job.mesh}
        following.begin("building", "building")
        model, optimizer = built_model(job.build(mesh))
        check_units(model, library)
        # A program may drop its gradients before the step ends, so we look at them when its backward does.
        following.after_backward = lambda: memory.set_kind(_gradients(model), "gradients")
        begin = 0.0
        for number in range(1, job.steps + 1):
            _set_kinds(memory, model, optimizer)
            following.begin(f"step {number} of {job.steps}", "before forward")
            begin = clock.begin()
            memory.begin()
            job.step(model, optimizer)
        _set_kinds(memory, model, optimizer)
        timeline = _timeline(clock, memory, following.marks, (begin, job.rank, library))
        return _result(job.mesh, clock, memory, timeline, model)


def _set_kinds(memory: Memory, model: nn.Module, optimizer: Any) -> None:
    parameters = list(model.parameters())
    memory.set_kind(parameters, "shards")
    memory.set_kind(_gradients(model), "gradients")
    memory.set_kind(model.buffers(), "other")
    if optimizer is not None:
        memory.set_kind(tensors_in([*optimizer.state.values()]), "optimizer state")
        memory.set_kind(kept_params(optimizer), "other")


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _padding(model: nn.Module) -> tuple[int, tuple[str, ...]]:
    """Return the bytes of padding in a gather of all parameters, and remedies for the parameters with most of them."""
    total, shares = 0, dict[str, tuple[int, FSDPParam]]()
    names: dict[object, str] = {parameter: name for name, parameter in model.named_parameters()}
    for param in (param for group in groups_below(model) for param in group.params):
        layout = param.spec.over_all
        padding = layout.padding_numel * param.compute_dtype.itemsize
        total += padding
        if layout.padding_numel > _NOTABLE * layout.numel:
            name = re.sub(r"\b\d+\b", "*", names.get(param.sharded, param.name))  # one line for all layers
            shares[name] = (shares.get(name, (0, param))[0] + padding, param)
    most = sorted(shares.items(), key=lambda item: -item[1][0])[:3]
    return total, tuple(_remedy(name, nbytes, param) for name, (nbytes, param) in most if nbytes > _NOTABLE * total)


_NOTABLE = 0.05  # a parameter is named if it is padded by more than this share


def _remedy(name: str, nbytes: int, param: FSDPParam) -> str:
    layout = param.spec.over_all
    best = ShardLayout.least_padded(layout.shape, layout.stride, layout.ranks)
    assert layout.dim is not None  # a scalar has no padding
    size, padded = layout.shape[layout.dim], layout.chunk * layout.ranks
    text = (
        f"{name}: {nbytes / 2**20:,.1f} MiB; dimension {layout.dim}, {size} over {layout.ranks} ranks, is padded to "
        f"{padded}, {padded / size:.3g} times as much; "
    )
    if best.padding_numel <= min(layout.padding_numel, layout.numel) / 2:
        left = best.padding_numel / layout.numel
        return text + f'shard_placement_fn="auto" shards dimension {best.dim} instead ({left:.1%} padding)'
    return text + (
        "no dimension divides better: shard it over fewer ranks, with another mesh or a ShardPlacementResult of "
        "shard_placement_fn"
    )


def _timeline(clock: Clock, memory: Memory, marks: list[Mark], run: tuple[float, int, str]) -> Timeline:
    begin, rank, library = run
    names = lane_names(clock.spans)
    spans = [replace(span, lane=names[span.lane]) for span in clock.spans]
    title = f"forecast, {clock.hardware.name}" + (", torch's own" if library == "torch" else "")
    return Timeline.of(title, rank, [*spans, *unit_spans(marks)], clock.exposed, memory.points(), (begin, clock.now))


def _result(mesh: dict[str, int], clock: Clock, memory: Memory, timeline: Timeline, model: nn.Module) -> Forecast:
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
    padding, padded = _padding(model)
    return Forecast(
        mesh=mesh,
        device=clock.hardware.name,
        peak=memory.peak(),
        pools=_pools(clock, memory),
        collectives=tuple(Collectives(*key, launches[key], sent[key]) for key in sorted(launches)),
        padding_bytes=padding,
        padded=padded,
        step_seconds=timeline.seconds,
        compute_seconds=compute,
        exposed_seconds=timeline.seconds - compute,
        exposed_by_unit=dict(exposed),
        timeline=timeline,
    )


def _pools(clock: Clock, memory: Memory) -> dict[str, int]:
    """Return the largest number of live bytes of each stream's pool, by the purpose of the stream."""
    names, pools = lane_names(clock.spans), Counter[str]()
    for lane, nbytes in memory.pools.items():
        pools[names.get(lane, lane if lane == COMPUTE else "copies")] += nbytes
    return {lane: nbytes for lane, nbytes in pools.items() if nbytes}
