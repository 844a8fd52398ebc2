"""The command line of ``python -m fsdp2 check``."""

from __future__ import annotations

import argparse
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fsdp2.tools.check.environment import known_problems
from fsdp2.tools.check.forecasted import assumed, hardware_of
from fsdp2.tools.check.place import BAD, Outcome
from fsdp2.tools.check.report import Report, figures_of, row_of
from fsdp2.tools.check.supervisor import Job, Supervisor
from fsdp2.tools.check.tasks import ENVIRONMENT, FORECAST, RATES, TASKS, Task, chosen
from fsdp2.tools.forecast.cost import Hardware, Link
from fsdp2.tools.forecast.saving import file_for

__all__ = ["main"]

_DESCRIPTION = """\
Check that fsdp2 works on your machines. The check lists machines and versions, trains small
models and compares them with torch's own fully_shard and with one process, and measures a
training step of a real size. Run it as you run your training. It prints a table and writes it as
Markdown and as JSON, for you to attach to a report. The exit status is 1 if something is wrong. A
rank that hangs is named, and the remaining checks still run."""
_EXAMPLES = """\
examples:
  torchrun --nproc-per-node 8 -m fsdp2 check
  torchrun --nproc-per-node 8 -m fsdp2 check --only "mixed precision" hybrid
  python -m fsdp2 check --quick
  torchrun --nproc-per-node 2 -m fsdp2 check --device cpu
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
    -m fsdp2 check

"""
PATIENCE = 45.0


def main(arguments: Sequence[str]) -> int:
    """Run the checks in ``arguments``; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.only if name not in TASKS]:
        parser.error(f"--only {', '.join(map(repr, unknown))}: expected one or more of {', '.join(map(repr, TASKS))}")
    if given.only and given.quick:
        parser.error("--quick and --only: both choose the checks; expected one of them")
    names = [task.name for task in chosen(given.only, quick=given.quick, cuda=True)]
    if given.save_hardware and RATES not in names:
        parser.error(
            f"--save-hardware: its constants are those of the check {RATES!r}, which is not among those chosen"
        )
    signal.signal(signal.SIGTERM, _interrupt)  # torchrun sends it; the worker must not be left behind
    job = Job.found(given.device)
    if given.device == "cuda" and job.device == "cpu":
        parser.error("--device cuda: not every rank has a GPU of its own here")
    if job.rank == 0:  # which writes them, on its host
        try:
            given.json = file_for(given.json, (".json",))
            file_for(given.json.with_suffix(".md"), (".md",))
            given.save_hardware = given.save_hardware and file_for(given.save_hardware, (".json",))
        except (ValueError, OSError) as error:
            parser.error(f"--json and --save-hardware: {error}")
        if given.save_hardware and given.save_hardware.resolve() == given.json.resolve():
            parser.error(f"--save-hardware {given.save_hardware}: --json writes this file; expected another name")
    tasks = chosen(given.only, quick=given.quick, cuda=job.device != "cpu")
    progress = _Progress(len(tasks)) if job.rank == 0 else lambda task, outcome: None
    supervisor = Supervisor(
        job, tasks, patience=given.patience, against_torch=given.against == "torch", progress=progress
    )
    interrupted = False
    try:
        supervisor.run()
    except KeyboardInterrupt:
        interrupted = True
    found = supervisor.collect()
    if job.rank:
        return 0  # only rank 0 returns the status: torchrun would end rank 0 before it has written the report
    report = _report(arguments, found, job, tasks, interrupted)
    _write(report, given)
    return report.status


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 check",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + "checks:\n" + "\n".join(f"  {task.name:<24}{task.about}" for task in TASKS.values()),
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=26, width=100),
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="only small models: no compilation, no large model, no measurement")
    add(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="run only these checks; their names are below",
    )
    add(
        "--against",
        default="torch",
        choices=("torch", "none"),
        help="none: do not compare with torch's own fully_shard",
    )
    add("--device", choices=("cuda", "cpu"), help="cpu: do not use GPUs; cuda: refuse to run without")
    add(
        "--json",
        default="fsdp2-check.json",
        metavar="FILE",
        help="the JSON file to write, beside a Markdown file (fsdp2-check.json)",
    )
    add("--save-hardware", metavar="FILE", help="write this machine's constants for forecast --hardware")
    add(
        "--patience",
        type=_seconds,
        default=PATIENCE,
        metavar="SECONDS",
        help=f"a rank without progress for this long counts as hanging ({PATIENCE:.0f})",
    )
    return parser


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds above 0")


class _Progress:
    """Prints a line for each check: its name while it runs, then its verdict."""

    def __init__(self, count: int) -> None:
        self._terminal, self._count, self._number = sys.stderr.isatty(), count, 0
        self._began = time.monotonic()

    def __call__(self, task: str, outcome: Outcome | None) -> None:
        if outcome is None:
            self._number += 1
            if self._terminal:
                print(f"\r\x1b[K[{self._number}/{self._count}] {task} ...", end="", file=sys.stderr, flush=True)
            return
        verdict = "done" if outcome.verdict == "seen" else outcome.verdict
        verdict = verdict.upper() if outcome.verdict in BAD else verdict
        clear = "\r\x1b[K" if self._terminal else ""
        line = f"[{self._number}/{self._count}] {task}: {verdict}"
        print(f"{clear}{line} ({time.monotonic() - self._began:.0f} s)", file=sys.stderr, flush=True)


def _report(
    arguments: Sequence[str],
    found: dict[str, list[Outcome | None]],
    job: Job,
    tasks: Sequence[Task],
    interrupted: bool,
) -> Report:
    about = [outcome.figures if outcome else {} for outcome in found.get(ENVIRONMENT, [])]
    report = Report(shlex.join(["python", "-m", "fsdp2", "check", *arguments]), interrupted=interrupted)
    report.here = about[0].get("job", {}) if about else {}
    report.ranks = [one.get("rank", {}) for one in about]
    report.links = about[0].get("links", "") if about else ""
    report.problems = known_problems(
        torch.__version__, cuda=job.device != "cpu", gpus=job.gpus_here, ranks_here=job.ranks_here
    )
    parts = {part: [task for task in tasks if task.part == part] for part in ("here", "right", "good")}
    report.rows = [row_of(task.name, task.about, found[task.name]) for task in parts["right"]]
    others = [row_of(task.name, task.about, found[task.name]) for task in (*parts["here"], *parts["good"])]
    report.rows += [row for row in others if row.verdict != "seen"]  # a measurement has a row only if it failed
    report.figures = figures_of(found[task.name] for task in parts["good"])
    report.done = [task.name for task in parts["good"] if any(found[task.name])]
    fitted, rates = ((found.get(name) or [None])[0] for name in (FORECAST, RATES))
    if rates is not None and rates.verdict == "seen":
        values = asdict(hardware_of(job.world, job.hosts, rates.figures))
        report.hardware = (fitted.figures if fitted else {}).get("hardware", values)
        report.assumed = assumed(job.hosts, rates.figures)
    every = [outcome.figures for ranks in found.values() for outcome in ranks if outcome is not None]
    report.measured = next((figures["model"] for figures in every if "model" in figures), "small units")
    return report


def _write(report: Report, given: Any) -> None:
    print(report.text(), flush=True)  # before the files are written, which may fail
    path: Path = given.json
    beside = path.with_suffix(".md")
    path.write_text(report.json() + "\n")
    beside.write_text(report.markdown())
    print(f"\nwrote {path} and {beside}: attach both to a report", file=sys.stderr)
    if given.save_hardware and report.hardware:
        links = tuple(Link(**one) for one in report.hardware["links"])  # dictionaries from JSON
        Hardware(**{**report.hardware, "links": links}).save(given.save_hardware)
        print(f"wrote {given.save_hardware}: python -m fsdp2 forecast --hardware uses it", file=sys.stderr)
    elif given.save_hardware:
        print(f"did not write {given.save_hardware}: the check {RATES!r} has measured nothing", file=sys.stderr)
