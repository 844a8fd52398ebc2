"""Shared parts of the benchmarks: the candidates, the process group, the result table and the dated report."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

FullyShard = Callable[..., Any]
RESULTS = Path(__file__).resolve().parent / "results"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: our figure beside torch's, and what we want it to be.

    `limit` bounds `ours / theirs` where `relative`, else `ours` itself; None: the row informs, nothing is asked.
    """

    figure: str
    ours: float
    theirs: float | None = None
    unit: str = ""
    limit: float | None = None
    relative: bool = True
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.theirs if self.theirs else None

    @property
    def target(self) -> str:
        if self.limit is None:
            return "-"
        return f"<= {self.limit:g} of torch's" if self.relative else f"<= {self.limit:.4g} {self.unit}".rstrip()

    @property
    def reached(self) -> bool | None:
        judged = self.ratio if self.relative else self.ours
        return None if self.limit is None or judged is None else judged <= self.limit


def number(value: float | None) -> str:
    """Three digits or so; a dash for None."""
    if value is None:
        return "-"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 20 else f"{value:.2f}"


def _cells(row: Row) -> list[str]:
    """The row as text; a missed target is marked with the word `missed`."""
    verdict = {None: "", True: "reached", False: "missed"}[row.reached]
    unit = f" ({row.unit})" if row.unit else ""
    ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
    return [row.figure + unit, number(row.ours), number(row.theirs), ratio, row.target, verdict, row.note]


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    cells = [head, *lines]
    widths = [max(3, *(len(line[i]) for line in cells)) for i in range(len(head))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in cells]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table, without the column of notes where nothing is noted."""
    lines = [_cells(row) for row in rows]
    columns = 7 if any(line[6] for line in lines) else 6
    head = ["figure", "ours", "torch's", "ratio", "target", "", "note"]
    return markdown(head[:columns], [line[:columns] for line in lines])


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
    parser.add_argument("--write", action="store_true", help="also write the dated report into benchmarks/results/")
    parser.add_argument(
        "--ours",
        choices=("fsdp2", "torch"),
        default="fsdp2",
        help="what fills the column `ours`; torch: compare torch with itself, which shows the noise",
    )
    return parser


def candidates(ours: str = "fsdp2") -> dict[str, FullyShard]:
    """`fully_shard` of both sides, by column name."""
    theirs = importlib.import_module("torch.distributed.fsdp").fully_shard
    return {"ours": theirs if ours == "torch" else importlib.import_module("fsdp2").fully_shard, "theirs": theirs}


def fake_mesh(world: int) -> DeviceMesh:
    """A CPU mesh of `world` pretended ranks in which this process is rank 0 and collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    return init_device_mesh("cpu", (world,))


def fake_sides(options: argparse.Namespace, world: int) -> tuple[dict[str, FullyShard], DeviceMesh]:
    """Both sides and a pretended mesh for them, in a process that is ready to be measured: one thread, no chatter."""
    quiet_profiler()
    torch.set_num_threads(1)
    return candidates(options.ours), fake_mesh(world)


def shard_units(
    model: nn.Module,
    units: Iterable[nn.Module],
    fully_shard: FullyShard | None,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy | None = None,
    **options: Any,
) -> nn.Module:
    """The model with every unit sharded, then the rest as the root; untouched where `fully_shard` is None."""
    if fully_shard is None:
        return model
    if policy is not None:
        options["mp_policy"] = policy
    for unit in units:
        fully_shard(unit, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """The middle half of the values, as `low-high`."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{number(low)}-{number(high)}"


def collect_garbage() -> None:
    """Free what earlier candidates left in reference cycles, so that it does not count against the next."""
    gc.collect()
    gc.collect()


def quiet_profiler() -> None:
    """Keep torch's profiler from writing a line to stderr at every start and stop."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def hardware() -> str:
    """A short name of this machine for file names, such as `cpu-2core` or `h200`."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")
    return f"cpu-{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}core"


def versions() -> str:
    """One line: Python, torch, our package, system and processor."""
    try:
        own = importlib.metadata.version("fsdp2")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    system = f"{platform.system()} {platform.machine()}"
    return f"Python {platform.python_version()}, torch {torch.__version__}, fsdp2 {own}, {system}, {hardware()}"


def load() -> str:
    """How busy the machine was in the last 15 minutes, in cores."""
    return f"{os.getloadavg()[2]:.1f} cores busy on average" if hasattr(os, "getloadavg") else "load unknown"


def write_report(theme: str, table: str, explanation: str) -> Path:
    """Write `results/<theme>_<hardware>_<year-month>.md`: versions, command and table; returns its path."""
    today = datetime.date.today()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{theme}_{hardware()}_{today:%Y-%m}.md"
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    lines = [
        f"# {theme}, {today:%Y-%m-%d}",
        "",
        explanation.strip(),
        "",
        f"- {versions()}; {load()}",
        f"- `{command}`",
        "",
    ]
    path.write_text("\n".join(lines) + "\n" + table + "\n")
    return path


def publish(theme: str, table: str, data: object, explanation: str, options: argparse.Namespace) -> None:
    """Print the table, or the data as JSON, as asked for on the command line; write the report if that is asked for."""
    if options.json:
        print(json.dumps(data, indent=1))
    else:
        print(f"{theme}: {versions()}")
        print(table)
    if options.write:
        written = write_report(theme, table, explanation)
        print(f"wrote {written.relative_to(RESULTS.parent.parent)}", file=sys.stderr)


def finish(theme: str, rows: Sequence[Row], explanation: str, options: argparse.Namespace) -> None:
    """Publish rows of ours beside torch's."""
    publish(theme, table(rows), [dataclasses.asdict(row) for row in rows], explanation, options)
