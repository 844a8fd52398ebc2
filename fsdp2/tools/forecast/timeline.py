"""One step on one rank as a timeline, forecast or recorded: spans, waits, and memory over time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch.distributed as dist

__all__ = [
    "COMPUTE",
    "UNITS",
    "Exposed",
    "Mark",
    "Point",
    "Span",
    "Timeline",
    "axis_name",
    "chrome_trace",
    "lane_names",
    "on_one_clock",
    "unit_spans",
]

COMPUTE, UNITS = "compute", "units"
POINTS = 1500
"""The number of points of memory that are kept: those with the most bytes."""


@dataclass(frozen=True)
class Span:
    """A kernel or collective on a lane, with times in seconds.

    Collectives have ``nbytes``, ``ranks`` and ``group``, the name of a mesh axis. On the lane "units" a span is the
    forward or the backward of a unit, and spans may be nested.
    """

    lane: str
    kind: str
    begin: float
    end: float
    unit: str
    nbytes: int = 0
    ranks: int = 0
    group: str = ""

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.end - self.begin


@dataclass(frozen=True)
class Exposed:
    """A time in which compute waited, and the unit whose communication it waited for."""

    begin: float
    end: float
    unit: str


@dataclass(frozen=True)
class Point:
    """The bytes in memory from ``time`` on, by purpose."""

    time: float
    by_kind: dict[str, int]


@dataclass(frozen=True)
class Mark:
    """An event of a unit, such as "pre_forward", and its time."""

    time: float
    event: str
    unit: str


@dataclass(frozen=True)
class Timeline:
    """One step on one rank. ``title`` tells its origin.

    Times are relative to the start of the step, or to the start of the earliest rank's step, which is ``begin`` seconds
    earlier. ``started`` is the start of the step on the clock of the rank's host.
    """

    title: str
    rank: int
    seconds: float
    spans: list[Span] = field(repr=False)
    waits: list[Exposed] = field(repr=False)
    memory: list[Point] = field(repr=False, default_factory=list)
    begin: float = 0.0
    started: float = 0.0

    @property
    def end(self) -> float:
        """The end of the step."""
        return self.begin + self.seconds

    @property
    def memory_to_the_end(self) -> list[Point]:
        """The memory with a last point at the end of the step, for whoever draws it."""
        return [*self.memory, *(replace(last, time=max(last.time, self.end)) for last in self.memory[-1:])]

    def beginning_at(self, begin: float) -> Timeline:
        """Return the same step, moved to begin at ``begin``."""
        by = begin - self.begin
        return replace(
            self,
            begin=begin,
            spans=[replace(span, begin=span.begin + by, end=span.end + by) for span in self.spans],
            waits=[replace(wait, begin=wait.begin + by, end=wait.end + by) for wait in self.waits],
            memory=[replace(point, time=point.time + by) for point in self.memory],
        )

    @property
    def name(self) -> str:
        """The title and the rank."""
        return f"{self.title}, rank {self.rank}"

    @property
    def exposed_seconds(self) -> float:
        """The time that compute waited for communication."""
        return sum(wait.end - wait.begin for wait in self.waits)

    @property
    def memory_in_part(self) -> bool:
        """True if the memory is that of shards and gathered parameters alone, as in a record."""
        return not any(kind not in ("shards", "gathered") for point in self.memory for kind in point.by_kind)

    def to_json(self) -> str:
        """Return the timeline as JSON, for ``from_json``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Return the timeline from the JSON of ``to_json``."""
        values = json.loads(text)
        for name, kind in (("spans", Span), ("waits", Exposed), ("memory", Point)):
            values[name] = [kind(**value) for value in values[name]]
        return cls(**values)

    @classmethod
    def of(
        cls,
        title: str,
        rank: int,
        spans: Iterable[Span],
        waits: Iterable[Exposed],
        memory: Sequence[tuple[float, Mapping[str, int]]],
        period: tuple[float, float],
    ) -> Timeline:
        """Return the timeline of the part within ``period``, with times relative to its start."""
        start, end = period

        def moved(value: Any) -> Any:
            return type(value)(**{**vars(value), "begin": value.begin - start, "end": value.end - start})

        return cls(
            title,
            rank,
            end - start,
            sorted((moved(s) for s in spans if s.end > start and s.begin < end), key=lambda span: span.begin),
            [moved(wait) for wait in waits if wait.end > start and wait.begin < end],
            [Point(time - start, dict(by_kind)) for time, by_kind in _fewer(memory, start, end)],
        )


def _fewer(
    memory: Sequence[tuple[float, Mapping[str, int]]], start: float, end: float
) -> list[tuple[float, Mapping[str, int]]]:
    """Return at most about ``POINTS`` moments: of close ones, the one with the most bytes."""
    inside = [(time, by_kind) for time, by_kind in memory if start <= time <= end]
    if len(inside) <= POINTS or end <= start:
        return inside
    most: dict[int, tuple[float, Mapping[str, int]]] = {}
    for time, by_kind in inside:
        place = int((time - start) / (end - start) * POINTS)
        if place not in most or sum(by_kind.values()) >= sum(most[place][1].values()):
            most[place] = (time, by_kind)
    return list(most.values())


def on_one_clock(timelines: Sequence[Timeline], met: Sequence[Sequence[float]]) -> list[Timeline]:
    """Return ``timelines`` of several ranks with times relative to the start of the earliest.

    ``met`` has for each rank the ends of some collectives on its own clock. All ranks leave a collective at nearly the
    same time, so the median of the differences is the offset between two clocks.
    """
    ahead = [median(own - first for own, first in zip(moments, met[0])) for moments in met]
    began = [timeline.started - by for timeline, by in zip(timelines, ahead)]
    return [timeline.beginning_at(begin - min(began)) for timeline, begin in zip(timelines, began)]


def axis_name(group: dist.ProcessGroup) -> str:
    """Return the name of the mesh dimension that ``group`` was made for, the purpose of one of our own, or "world"."""
    name = _OWN_GROUP.sub(r"\1", group.group_desc.removeprefix("mesh_"))
    return "world" if name in ("", "default_pg", "undefined") else name


def lane_names(spans: Iterable[Span]) -> dict[str, str]:
    """Return the name of each lane of ``spans``: streams are named after the collectives on them."""
    names: dict[str, str] = {}
    for span in spans:
        if not span.lane.startswith("stream "):
            names[span.lane] = span.lane
        elif span.group:
            names.setdefault(span.lane, _PURPOSES.get(span.kind, span.kind))
    for span in spans:
        names.setdefault(span.lane, "copies")
    return names


_OWN_GROUP = re.compile(r"^fsdp2_(.+)_[0-9a-f]{40}_\d+$")  # as ``own_group`` names them
_PURPOSES = {"all_gather": "gather", "reduce_scatter": "reduce", "all_to_all": "reduce", "all_reduce": "replicate"}


def unit_spans(marks: Iterable[Mark]) -> list[Span]:
    """Return the forwards and backwards of all units from their events."""
    spans: list[Span] = []
    opened: dict[tuple[str, str], list[float]] = {}
    for mark in marks:
        if mark.event in ("pre_forward", "pre_backward"):
            opened.setdefault((mark.event[4:], mark.unit), []).append(mark.time)
        elif mark.event in ("post_forward", "post_backward"):
            if begins := opened.get((mark.event[5:], mark.unit)):
                spans.append(Span(UNITS, mark.event[5:], begins.pop(), mark.time, mark.unit))
    return list(dict.fromkeys(spans))  # the groups of a unit have its name


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return a trace for chrome://tracing and https://ui.perfetto.dev: a process per timeline, a thread per lane."""
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": timeline.name}})
        lanes = list(dict.fromkeys([UNITS, COMPUTE, *(span.lane for span in timeline.spans), "waits"]))
        for number, lane in enumerate(lanes):
            ids = {"pid": process, "tid": number}
            events.append({"ph": "M", "name": "thread_name", **ids, "args": {"name": lane}})
            events.append({"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": number}})
        for span in timeline.spans:
            name = f"{span.kind} {span.unit or 'root'}" if span.lane != COMPUTE else span.kind
            arguments = {"unit": span.unit, "bytes": span.nbytes, "axis": span.group, "ranks": span.ranks}
            events.append(_complete(name, process, lanes.index(span.lane), span, arguments if span.group else {}))
        for wait in timeline.waits:
            events.append(_complete(f"waits for {wait.unit or 'root'}", process, lanes.index("waits"), wait, {}))
        for point in timeline.memory:
            values = {"ph": "C", "name": "memory", "pid": process, "ts": point.time * 1e6, "args": point.by_kind}
            events.append(values)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete(name: str, process: int, thread: int, span: Span | Exposed, arguments: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6}
    return {"ph": "X", "name": name, "pid": process, "tid": thread, **times, "args": arguments}
