"""The report as text, Markdown and JSON, for readers who do not know the project."""

from __future__ import annotations

import datetime
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2.tools.check.place import BAD, Comparison, Outcome, worst

__all__ = ["Figure", "Report", "Row", "figures_of", "row_of", "rows_of_ranks"]

MUCH = 1.1
"""A figure deserves a look if its ratio to torch's own is larger than this."""
_EXPLAINED = {
    "right": "all differences are allowed",
    "wrong": "a difference is larger than allowed, or memory was not freed",
    "failed": "an exception was raised",
    "hangs": "there was no progress; the ranks that block the others are named",
    "died": "a process ended unexpectedly",
    "skipped": "it cannot be run here",
    "not run": "another problem ended it",
}


@dataclass(frozen=True)
class Row:
    """A row of the table of correctness checks."""

    name: str
    verdict: str
    about: str
    compared: list[Comparison]
    text: str
    seconds: float
    details: str = ""


@dataclass(frozen=True)
class Figure:
    """A row of the table of costs; None stands for a value that was not measured or forecast."""

    name: str
    unit: str
    ours: float
    theirs: float | None = None
    forecast: float | None = None

    @property
    def ratio(self) -> float | None:
        """The ratio to torch's own."""
        return self.ours / self.theirs if self.theirs and self.theirs > 0 else None

    @property
    def verdict(self) -> str:
        """Less than torch's, the same, or more. More does not make the check fail."""
        if self.ratio is None:
            return ""
        return "more: look" if self.ratio > MUCH else "less" if self.ratio < 1 / MUCH else "as torch's"


def row_of(name: str, about: str, outcomes: Sequence[Outcome | None]) -> Row:
    """Return the row of a task from the outcomes of its ranks: the worst verdict, and the largest differences."""
    ran = [outcome for outcome in outcomes if outcome is not None]
    verdict = worst([outcome.verdict for outcome in ran])
    compared: dict[str, Comparison] = {}
    for comparison in (comparison for outcome in ran for comparison in outcome.comparisons):
        known = compared.get(comparison.against)
        if known is None or _badness(comparison) > _badness(known):
            compared[comparison.against] = comparison
    texts = rows_of_ranks(outcomes, verdict)
    alike = sorted((o for o in enumerate(outcomes) if o[1] is not None), key=lambda one: one[0] != _first(outcomes))
    details = next((found for _, o in alike if o and o.verdict == verdict and (found := _details(o))), "")
    seconds = max((outcome.seconds for outcome in ran), default=0.0)
    return Row(name, verdict, about, list(compared.values()), texts, seconds, details)


def rows_of_ranks(outcomes: Sequence[Outcome | None], verdict: str) -> str:
    """Return the texts of the ranks with this verdict, each once with its ranks; the first rank to fail comes first."""
    said: dict[str, list[int]] = {}
    for rank, outcome in sorted(enumerate(outcomes), key=lambda one: one[0] != _first(outcomes)):
        if outcome is not None and outcome.verdict == verdict and outcome.text:
            said.setdefault(outcome.text, []).append(rank)
    if verdict in ("hangs", "skipped", "not run"):  # the same for all
        return next(iter(said), "")
    if len(outcomes) == 1:
        return "; ".join(said)
    return "\n".join(f"{_ranks(ranks, len(outcomes))}: {text}" for text, ranks in said.items())


def _first(outcomes: Sequence[Outcome | None]) -> int:
    """Return the rank that failed first, or -1. The errors of other ranks are consequences."""
    return next((o.figures["first"] for o in outcomes if o is not None and "first" in o.figures), -1)


def _ranks(ranks: Sequence[int], count: int) -> str:
    if len(ranks) == count:
        return "all ranks"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _details(outcome: Outcome) -> str:
    return str(outcome.figures.get("traceback") or outcome.figures.get("stacks") or "")


def _badness(comparison: Comparison) -> tuple[bool, bool, float]:
    share = comparison.difference / comparison.bound if comparison.bound else comparison.difference
    return not comparison.right, not comparison.same_bits, math.inf if math.isnan(share) else share


_UNITS = {"peak memory allocated": "MiB", "peak memory reserved": "MiB", "Python calls for a unit": ""}
_SCALES = {"MiB": 1 / (1 << 20), "": 1.0, "ms": 1e3}
_HIGHEST = ("peak memory",)


def figures_of(outcomes: Iterable[Sequence[Outcome | None]]) -> list[Figure]:
    """Return the measured figures: memory of the rank with the most, all else of rank 0."""
    found: dict[str, dict[str, float]] = {}
    for ranks in outcomes:
        for rank, outcome in enumerate(ranks):
            for name, values in (outcome.figures if outcome is not None else {}).items():
                if not isinstance(values, dict) or not set(values) <= {"fsdp2", "torch", "plain", "forecast"}:
                    continue
                mine = found.setdefault(name, {})
                for who, value in values.items():
                    if rank == 0 or (name.startswith(_HIGHEST) and value > mine.get(who, value)):
                        mine[who] = value
    figures = []
    for name, values in found.items():
        if "fsdp2" in values:
            unit = _UNITS.get(name, "ms")
            scaled = {who: value * _SCALES[unit] for who, value in values.items()}
            figures.append(Figure(name, unit, scaled["fsdp2"], scaled.get("torch"), scaled.get("forecast")))
    return figures


@dataclass
class Report:
    """The results of all checks."""

    command: str
    here: dict[str, str] = field(default_factory=dict)
    ranks: list[dict[str, str]] = field(default_factory=list)
    links: str = ""
    problems: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    measured: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    """The constants of ``hardware`` that were not measured."""
    done: list[str] = field(default_factory=list)
    """The measurements that ran."""
    interrupted: bool = False

    @property
    def bad(self) -> list[Row]:
        """The rows that make the exit status 1."""
        return [row for row in self.rows if row.verdict in BAD]

    @property
    def status(self) -> int:
        """The exit status."""
        return 1 if self.bad or self.interrupted else 0

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        counts = {v: sum(row.verdict == v for row in self.rows) for v in (*BAD, "right", "skipped", "not run")}
        listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        if self.interrupted:
            return f"The check was interrupted: {listed or 'nothing had run'}."
        if self.bad:
            return f"Something is wrong: {listed}."
        if listed:
            return f"Nothing is wrong: {listed}."
        measured = f" Measured: {', '.join(self.done)}." if self.done else ""
        return f"No result was compared with another.{measured}" if measured else "Nothing was checked."

    def text(self) -> str:
        """Return the report for a terminal."""
        parts = [*_facts(self.here), *_wrapped(self._rank_lines()), ""]
        parts += _wrapped(f"note: {problem}" for problem in self.problems)
        if self.rows:
            head = ["is it right", "verdict", *(name.removeprefix("against ") for name in _HEAD[:-1])]
            parts += ["", *_aligned(head, [_cells(row)[:-1] for row in self.rows])]
        for row in self.rows:
            if row.text:
                parts += ["", f"{row.name}: {row.verdict}", *_indented(row.text)]
        if self.figures:
            head = ["is it good", "fsdp2", "torch's", "ratio", "forecast", "verdict"]
            parts += ["", f"({self.measured})", *_aligned(head, [_figure_cells(figure) for figure in self.figures])]
            parts += _wrapped(self._about_memory())
        if self.hardware:
            measured, others = self._constants()
            parts += ["", "constants of this machine, for forecasts:", *_facts(measured)]
            parts += ["", "not measured here, so those of an H100:", *_facts(others)] if others else []
        return "\n".join([*parts, "", self.summary])

    def markdown(self) -> str:
        """Return the report as Markdown, to attach to an issue."""
        date = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
        parts = ["# fsdp2 check", "", f"**{self.summary}** {date}, `{self.command}`", "", *_INTRODUCTION]
        parts += ["", "## What is here", "", *_bullets(self.here), *[f"- {line}" for line in self._rank_lines()]]
        if self.problems:
            parts += ["", *[f"> {problem}\n>" for problem in self.problems]]
            parts[-1] = parts[-1].removesuffix("\n>")
        if self.links:
            parts += ["", "```text", self.links, "```"]
        if self.rows:
            used = [verdict for verdict in _EXPLAINED if any(row.verdict == verdict for row in self.rows)]
            parts += ["", "## Is it right", "", *_RIGHT, ""]
            parts += _table(["check", "verdict", *_HEAD], [_cells(row) for row in self.rows])
            parts += ["", *[f"- *{verdict}*: {_EXPLAINED[verdict]}" for verdict in used]]
        for row in self.rows:
            if row.text and row.verdict != "skipped":
                parts += ["", f"### {row.name}: {row.verdict}", "", "```text", row.text, "```"]
                if row.details:
                    parts += ["", "<details><summary>stack</summary>", "", "```text", row.details.strip(), "```"]
                    parts += ["", "</details>"]
        if self.figures:
            parts += ["", "## Is it good", "", f"Measured with {self.measured}. {_GOOD}", ""]
            head = ["one step", "fsdp2", "torch's own", "ratio", "forecast", "verdict"]
            parts += _table(head, [_figure_cells(figure) for figure in self.figures])
            parts += [text for note in self._about_memory() for text in ("", note)]
        if self.hardware:
            measured, others = self._constants()
            parts += ["", "## Constants of this machine", "", _CONSTANTS, "", *_bullets(measured)]
            parts += ["", "Not measured here, so those of an H100:", "", *_bullets(others)] if others else []
        return "\n".join(parts) + "\n"

    def json(self) -> str:
        """Return all figures as JSON, for programs."""
        values = {
            "summary": self.summary,
            "status": self.status,
            "command": self.command,
            "here": self.here,
            "ranks": self.ranks,
            "links": self.links,
            "problems": self.problems,
            "right": [_row_values(row) for row in self.rows],
            "good": [vars(figure) | {"ratio": figure.ratio, "verdict": figure.verdict} for figure in self.figures],
            "hardware": self.hardware,
            "not measured": self.assumed,
        }
        return json.dumps(_finite(values), indent=1)

    def _about_memory(self) -> list[str]:
        """Return what a figure of memory on CPUs says about GPUs, if there is one."""
        found = any(figure.name.startswith("peak memory") for figure in self.figures)
        return [_ON_CPUS] if found and self.here.get("backend") == "gloo" else []

    def _constants(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the constants that were measured, and the others."""
        parts = [{}, {}]  # type: list[dict[str, Any]]
        for name, value in self.hardware.items():
            parts[name in self.assumed][name] = value
        return _flat(parts[0]), _flat(parts[1])

    def _rank_lines(self) -> list[str]:
        """Return a line for each kind of rank; ranks that differ only in their number share a line."""
        alike: dict[str, list[int]] = {}
        for rank, facts in enumerate(self.ranks):
            text = ", ".join(f"{name} {value}" for name, value in facts.items())
            alike.setdefault(text, []).append(rank)
        shown = list(alike.items())
        lines = [f"{_ranks(ranks, len(self.ranks))}: {text}" for text, ranks in shown[:16]]
        return lines + ([f"and {len(shown) - 16} more"] if len(shown) > 16 else [])


def _row_values(row: Row) -> dict[str, Any]:
    return {**vars(row), "compared": [vars(one) | {"right": one.right} for one in row.compared]}


_HEAD = ["against torch's own", "against one process", "against itself", "about"]
_INTRODUCTION = (
    "fsdp2 is a drop-in replacement for `torch.distributed.fsdp.fully_shard`, which shards a model's parameters over",
    "processes. `python -m fsdp2 check` trains small models with it and compares every loss, gradient and weight, then",
    "measures one training step. If you send this to the project, attach the JSON file too.",
)
_RIGHT = (
    "Each check trains a small model for three steps. *Same bits* means that nothing differs. Otherwise the table has",
    "the largest difference and its bound. Sums in another order differ slightly.",
)
_GOOD = (
    "A step is forward and backward, without an optimizer. The forecast is that of `python -m fsdp2 forecast` with the "
    "constants below. Times on a busy machine mean little."
)
_ON_CPUS = (
    "Peak memory on CPUs is about that of torch's own, with many ranks up to about half a layer more: gloo has several "
    "chunks of gradients on their way. What torch's gloo allocates inside of a collective is not counted. On GPUs a "
    "step needs up to a layer less: python -m fsdp2 forecast MODULE:FUNCTION --mesh shard=8 --beside torch shows it "
    "for your model."
)
_CONSTANTS = "`--save-hardware FILE` writes them, and `python -m fsdp2 forecast --hardware FILE` uses them."


def _cells(row: Row) -> list[str]:
    columns: dict[str, list[str]] = {}
    for one in row.compared:
        place = one.against if one.against in ("torch's own", "one process") else "itself"
        columns.setdefault(place, []).append(_cell(one))
    cells = ["; ".join(dict.fromkeys(columns.get(place, ["-"]))) for place in ("torch's own", "one process", "itself")]
    about = f"{row.about} ({row.text})" if row.verdict == "skipped" else row.about
    return [row.name, row.verdict.upper() if row.verdict in BAD else row.verdict, *cells, about]


def _cell(one: Comparison) -> str:
    if one.same_bits:
        return "same bits"
    difference = "missing" if math.isinf(one.difference) else f"{one.difference:.1e}"
    if one.exact:
        return f"{difference}, expected the same bits"
    return f"{difference} {'of' if one.right else 'EXCEEDS'} {one.bound:.1e}"


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {unit}".rstrip()


def _figure_cells(figure: Figure) -> list[str]:
    values = [_number(value, figure.unit) for value in (figure.ours, figure.theirs)]
    ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
    return [figure.name, *values, ratio, _number(figure.forecast, figure.unit), figure.verdict]


def _flat(hardware: dict[str, Any]) -> dict[str, str]:
    found = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in hardware.items()}
    links = [f"{one['seconds'] * 1e3:.3g} ms, {one['bytes_per_second']:.4g} B/s" for one in hardware.get("links", ())]
    ranks = [one["ranks"] for one in hardware.get("links", ())]
    found.pop("links", None)
    return found | {f"a collective of {count} ranks": text for count, text in zip(ranks, links)}


def _facts(facts: dict[str, str]) -> list[str]:
    width = max(map(len, facts), default=0)
    return [f"{name:<{width}}  {value}" for name, value in facts.items()]


def _bullets(facts: dict[str, str]) -> list[str]:
    return [f"- {name}: {value}" for name, value in facts.items()]


def _wrapped(lines: Iterable[str]) -> list[str]:
    """Return the lines for a terminal, continued where they are too long."""
    return [part for line in lines for part in textwrap.wrap(line, 100, subsequent_indent="  ", break_long_words=False)]


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def _aligned(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table for a terminal, without empty columns."""
    head, lines = _used(head, lines)
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in (head, *lines)]
    return [rows[0], "-" * max(map(len, rows)), *rows[1:]]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    head, lines = _used(head, [[cell.replace("|", "\\|") for cell in line] for line in lines])
    rows = [f"| {' | '.join(line)} |" for line in (head, *lines)]
    return [rows[0], "|" + "---|" * len(head), *rows[1:]]


def _used(head: Sequence[str], lines: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    kept = [i for i in range(len(head)) if any(line[i] not in ("", "-") for line in lines)]
    return [head[i] for i in kept], [[line[i] for i in kept] for line in lines]


def _finite(value: Any) -> Any:
    """Return ``value`` with None for infinite numbers and NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
