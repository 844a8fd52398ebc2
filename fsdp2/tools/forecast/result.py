"""The result of a forecast: its figures and tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdp2.tools.forecast.memory import Peak
from fsdp2.tools.forecast.saving import save
from fsdp2.tools.forecast.timeline import Timeline

__all__ = ["Collectives", "Forecast"]


@dataclass(frozen=True)
class Collectives:
    """One kind of collective along one mesh axis in a step: the launches, and the bytes of the whole tensors."""

    axis: str
    kind: str
    launches: int
    nbytes: int


@dataclass(frozen=True)
class Forecast:
    """The memory, collectives and time of a training step on one rank.

    ``pools`` has the largest number of live bytes in each stream's pool. ``padding_bytes`` is the padding in a gather
    of all parameters, and ``padded`` names the parameters with most of it, each with a remedy. ``beside`` is the
    forecast with torch's own ``fully_shard``, if it was requested.
    """

    mesh: dict[str, int]
    device: str
    peak: Peak
    pools: dict[str, int]
    collectives: tuple[Collectives, ...]
    padding_bytes: int
    padded: tuple[str, ...]
    step_seconds: float
    compute_seconds: float
    exposed_seconds: float
    exposed_by_unit: dict[str, float]
    timeline: Timeline = field(repr=False)
    beside: Forecast | None = None

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes."""
        return self.peak.nbytes

    @property
    def reserved_bytes(self) -> int:
        """The bytes that a caching allocator reserves on the device: the sum of the streams' own peaks."""
        return sum(self.pools.values())

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """The bytes of the peak by purpose."""
        return self.peak.by_kind

    @property
    def launches(self) -> int:
        """The number of collectives in a step."""
        return sum(one.launches for one in self.collectives)

    @property
    def sent_bytes(self) -> int:
        """The bytes of all collectives in a step."""
        return sum(one.nbytes for one in self.collectives)

    @property
    def timelines(self) -> list[Timeline]:
        """The timeline of the step, and that of torch's own if there is one."""
        return [self.timeline, *(self.beside.timelines if self.beside else [])]

    def to_json(self) -> str:
        """Return all figures as JSON, without the lanes."""
        return json.dumps(self.figures(), indent=2)

    def figures(self) -> dict[str, Any]:
        """Return all figures by name, without the lanes."""
        values = {name: value for name, value in asdict(self).items() if name not in ("timeline", "beside")}
        values["reserved_bytes"] = self.reserved_bytes
        return values if self.beside is None else {**values, "beside": self.beside.figures()}

    def table(self) -> str:
        """Return the figures as a table."""
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        lines = [f"one rank of {mesh}, {self.device}", ""]
        lines += self._alone() if self.beside is None else _side_by_side(self, self.beside)
        if self.padded:
            lines += ["", "padding that a gather carries:", *(f"  {text}" for text in self.padded)]
        return "\n".join(lines)

    def _alone(self) -> list[str]:
        lines = [f"peak memory     {_size(self.peak_bytes)}, {self.peak.running}"]
        lines += [f"  {kind:<16}{_size(nbytes)}" for kind, nbytes in self.bytes_by_kind.items()]
        lines += [f"reserved        {_size(self.reserved_bytes)}, the sum of the streams' pools"]
        lines += [f"  {lane:<16}{_size(nbytes)}" for lane, nbytes in self.pools.items()]
        lines += ["", "sent in a step  launches       bytes"]
        lines += [f"  {c.axis + ' ' + c.kind:<22}{c.launches:>4}  {_size(c.nbytes)}" for c in self.collectives]
        lines += [f"  padding of a gather       {_size(self.padding_bytes)}", ""]
        lines += [f"step            {self.step_seconds * 1e3:10.2f} ms (estimate)"]
        lines += [f"  compute       {self.compute_seconds * 1e3:10.2f} ms"]
        lines += [f"  exposed       {self.exposed_seconds * 1e3:10.2f} ms of communication"]
        most = sorted(self.exposed_by_unit.items(), key=lambda item: -item[1])[:5]
        return [*lines, *(f"    {unit or 'the root':<20}{seconds * 1e3:8.2f} ms" for unit, seconds in most)]

    def save(self, path: str | Path, *others: Timeline) -> None:
        """Write the step as a page (.html), a picture (.png, .svg, .pdf) or a Chrome trace (.json).

        The step with torch's own, if there is one, and ``others``, such as ``record.timeline``, are shown below it on
        the same scale.

        A missing folder is made.

        Raises:
            ModuleNotFoundError: A picture needs matplotlib, which is not installed.
            OSError: The file cannot be written.
            ValueError: The name has another ending.
        """
        save(path, [*self.timelines, *others])

    def __str__(self) -> str:
        return self.table()


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):10.1f} MiB"


def _side_by_side(ours: Forecast, theirs: Forecast) -> list[str]:
    """Return one row for each figure: fsdp2's, torch's own, and their ratio."""
    lines = [f"{'':<26}{'fsdp2':>12}{'torch':>12}{'ratio':>8}"]

    def row(name: str, unit: str, value: Callable[[Forecast], float], digits: int = 1) -> None:
        first, second = value(ours), value(theirs)
        ratio = f"{first / second:8.3f}" if second else f"{'-':>8}"
        lines.append(f"{name + unit:<26}{first:12,.{digits}f}{second:12,.{digits}f}{ratio}")

    row("peak memory", ", MiB", lambda one: one.peak_bytes / 2**20)
    for kind in dict.fromkeys([*ours.bytes_by_kind, *theirs.bytes_by_kind]):
        row(f"  {kind}", "", lambda one, kind=kind: one.bytes_by_kind.get(kind, 0) / 2**20)  # type: ignore[misc]  # its type is not inferred
    row("reserved", ", MiB", lambda one: one.reserved_bytes / 2**20)
    for lane in dict.fromkeys([*ours.pools, *theirs.pools]):
        row(f"  {lane}", "", lambda one, lane=lane: one.pools.get(lane, 0) / 2**20)  # type: ignore[misc]  # its type is not inferred
    lines.append("")
    row("sent", ", MiB", lambda one: one.sent_bytes / 2**20)
    row("launches", "", lambda one: one.launches, 0)
    lines.append("")
    row("step", ", ms (estimate)", lambda one: one.step_seconds * 1e3, 2)
    row("  compute", "", lambda one: one.compute_seconds * 1e3, 2)
    row("  exposed communication", "", lambda one: one.exposed_seconds * 1e3, 2)
    return [*lines, "", f"peak of fsdp2: {ours.peak.running}; of torch: {theirs.peak.running}"]
