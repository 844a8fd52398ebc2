"""Record steps of a real run as timelines: collectives, waits for them, and forwards and backwards of units."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2._naming import check_module, class_name
from fsdp2._trace import Source, recording_with
from fsdp2.comm.collectives import exchange_objects
from fsdp2.comm.streams import Moments
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import units_below
from fsdp2.sharding.mesh import Axis
from fsdp2.tools.forecast.saving import save
from fsdp2.tools.forecast.timeline import Exposed, Mark, Span, Timeline, axis_name, on_one_clock, unit_spans

__all__ = ["Record", "record_steps"]


@dataclass
class _Launch:
    lane: str
    kind: str
    source: Source | None
    axis: str
    ranks: int
    nbytes: int
    began: Any
    ended: Any


class _Recorder:
    """Records moments while code runs. They are converted to times afterwards."""

    def __init__(self, moments: Moments) -> None:
        self.moments = moments
        self.events: list[tuple[Any, str, Source]] = []
        self.launches: list[_Launch] = []
        self.waits: list[tuple[Any, Any, Source | None]] = []
        self._source: Source | None = None
        self._running: dict[int, _Launch] = {}

    def of(self, sources: Collection[Source]) -> None:
        """Drop what belongs to other models: they may run in the same block."""
        self.events = [event for event in self.events if event[2] in sources]
        self.launches = [launch for launch in self.launches if launch.source in sources]
        self.waits = [wait for wait in self.waits if wait[2] in sources]

    def heard(self, event: str, source: Source) -> None:
        self.events.append((self.moments.now(), event, source))

    def enter(self, source: Source) -> None:
        self._source = source

    def moment(self) -> Any:
        return self.moments.now()

    def launched(self, what: tuple[str, str], axis: Axis, nbytes: int, began: Any, work: Any) -> None:
        assert axis.group is not None
        launch = _Launch(*what, self._source, axis_name(axis.group), axis.size, nbytes, began, None)
        self.launches.append(launch)
        if isinstance(began, float) and work is not None:  # the host waits for it, and it runs in parallel
            self._running[id(work)] = launch

            def ended(_: Any) -> None:
                launch.ended = time.perf_counter()

            with suppress(RuntimeError):  # gloo's reduce-scatter has no future: the wait for it counts as its end
                work.get_future().add_done_callback(ended)
        else:
            launch.ended = self.moment()

    def waited(self, began: Any, work: Any = None) -> None:
        now = self.moment()
        self.waits.append((began, now, self._source))
        launch = self._running.pop(id(work), None)
        if launch is not None and launch.ended is None:
            launch.ended = now


class Record:
    """The record of ``record_steps`` on this rank: one timeline for each step.

    A step begins with a forward that follows a backward, and ends where the next step begins. If the block ends with an
    exception, the steps before it are there.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: list[Timeline] = []
        self._device, self._cut = device, False

    @property
    def timeline(self) -> Timeline:
        """The last whole step. The first steps of a run also allocate buffers that later steps reuse.

        Raises:
            RuntimeError: No step of the model was recorded, or the block has not ended.
        """
        if not self.steps:
            raise RuntimeError(
                "record_steps: the block was ended by an exception in its first step, so no whole step was recorded"
                if self._cut
                else "record_steps recorded no forward; run steps of the model inside the block, and read the record "
                "after it"
            )
        return self.steps[-1]

    def of_ranks(self) -> list[Timeline]:
        """Return the last step of every rank, in rank order, on one clock. Every rank must call it.

        Times start with the step of the earliest rank. This changes the times of this record's last step, too. The
        clocks are compared at the ends of a few small collectives, so the error is about the latency of one.

        Raises:
            RuntimeError: A rank has recorded no whole step.
        """
        if not dist.is_initialized():
            return [self.timeline]
        world = dist.group.WORLD
        assert world is not None
        axis, met = Axis.of_group(world, self._device.type), list[float]()
        own = self.steps[-1].to_json() if self.steps else ""
        for _ in range(_MEETINGS):
            exchange_objects(None, axis, self._device)
            met.append(time.perf_counter())
        found: list[Any] = exchange_objects((own, met), axis, self._device)
        if without := [rank for rank, (text, _) in enumerate(found) if not text]:
            raise RuntimeError(
                f"of_ranks: got no whole step on the ranks {without}, expected one on every rank; run steps of "
                "the model inside the block on these ranks, too"
            )
        ranks = on_one_clock([Timeline.from_json(text) for text, _ in found], [moments for _, moments in found])
        self.steps[-1] = ranks[axis.rank]
        return ranks

    def save(self, path: str | Path, *others: Timeline) -> None:
        """Write the last step and ``others`` below each other; see ``Forecast.save``."""
        save(path, [self.timeline, *others])


@contextmanager
def record_steps(model: nn.Module) -> Iterator[Record]:
    """Record the training steps inside a ``with`` block on this rank.

    It records each gather, reduction and wait, and each forward and backward of a unit of ``model``, with times and
    bytes. Other models that run in the block are left out. On a GPU the times come from events, so the host does not
    wait for the device until the block ends. Outside the block it costs nothing.

    Args:
        model: A module with units of ``fully_shard``.

    Yields:
        The record: ``timeline`` is its last step, ``of_ranks()`` gathers that step from all ranks, ``save`` draws it.

    Raises:
        ValueError: ``model`` has no units.

    Example:
        ```python
        with fsdp2.record_steps(model) as record:
            for batch in batches:
                train(model, batch)
        record.save("step.html")
        ```
    """
    check_module(model, "record_steps")
    groups = _groups(model)
    if not groups:
        raise ValueError(f"record_steps: {class_name(model)} has no units; call fully_shard on it first")
    device = groups[0].mesh.device
    record, recorder = Record(device), _Recorder(Moments(device))
    try:
        with recording_with(recorder):
            yield record
    except BaseException:
        record._cut = True
        with suppress(RuntimeError):  # the device may have failed
            record.steps = _recorded(recorder, model, whole=False)
        raise
    record.steps = _recorded(recorder, model, whole=True)


def _groups(model: nn.Module) -> list[FSDPParamGroup]:
    return list(dict.fromkeys(group for unit in units_below(model) for group in unit.groups))


def _recorded(recorder: _Recorder, model: nn.Module, *, whole: bool) -> list[Timeline]:
    """Return the steps of ``model``. If the last one is not ``whole``, it counts only if its backward has ended."""
    end = recorder.moment()
    recorder.moments.wait()
    # The streams are empty, so this moment has no delay: it relates the clock of the device to that of the host.
    anchor = recorder.moment()
    recorder.moments.wait()
    host, groups = time.perf_counter(), _groups(model)
    roots = [unit.root for unit in units_below(model)]
    recorder.of({*groups, *(group.residency for group in groups), *roots})
    steps = _steps(recorder, groups, end, (anchor, host))
    if not whole and steps:
        last = [event for _, event, _ in recorder.events if event.startswith("root_")][-1:]
        return steps if last == ["root_post_backward"] else steps[:-1]
    return steps


_MEETINGS = 9


def _steps(recorder: _Recorder, groups: list[Any], end: Any, anchor: tuple[Any, float]) -> list[Timeline]:
    if not recorder.events:
        return []
    origin, between = recorder.events[0][0], recorder.moments.between
    marks = [Mark(between(origin, moment), event, source.name) for moment, event, source in recorder.events]
    last = between(origin, end)
    spans = unit_spans(marks)
    for one in recorder.launches:
        begin = between(origin, one.began)
        ended = last if one.ended is None else between(origin, one.ended)
        spans.append(Span(one.lane, one.kind, begin, ended, _name(one.source), one.nbytes, one.ranks, one.axis))
    waits = [
        Exposed(between(origin, begin), between(origin, ended), _name(source))
        for begin, ended, source in recorder.waits
    ]
    memory = _memory(marks, groups)
    starts = _starts(marks)
    rank = dist.get_rank() if dist.is_initialized() else 0
    zero = anchor[1] - between(origin, anchor[0])  # on the host's clock
    steps = []
    for period in zip(starts, [*starts[1:], last]):
        step = Timeline.of("recorded", rank, spans, waits, memory, period)
        steps.append(replace(step, started=zero + period[0]))
    return steps


def _name(source: Source | None) -> str:
    return "" if source is None else source.name


def _starts(marks: list[Mark]) -> list[float]:
    """Return the starts of steps: forwards that follow a backward, and the first forward."""
    starts: list[float] = []
    trained = True
    for mark in marks:
        if mark.event == "root_pre_forward" and trained:
            starts.append(mark.time)
            trained = False
        trained |= mark.event == "root_post_backward"
    return starts


def _memory(marks: list[Mark], groups: list[Any]) -> list[tuple[float, dict[str, int]]]:
    """Return the bytes of shards and of full parameters after each gather and free."""
    by_unit: dict[str, list[int]] = {}
    for group in groups:
        by_unit.setdefault(group.name, []).append(group.store.full_bytes)
    shards, gathered = sum(group.store.shard_bytes for group in groups), 0
    there: dict[str, int] = {}
    points = []
    for mark in marks:
        if mark.event in ("unshard", "reshard") and mark.unit in by_unit:
            sizes = by_unit[mark.unit]
            count = there.get(mark.unit, 0) + (1 if mark.event == "unshard" else -1)
            there[mark.unit] = min(max(count, 0), len(sizes))
        gathered = sum(sum(sizes) * there.get(unit, 0) // len(sizes) for unit, sizes in by_unit.items())
        points.append((mark.time, {"shards": shards, "gathered": gathered}))
    return points
