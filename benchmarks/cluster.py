"""Memory, time and host work of a step on 8 to 1024 simulated ranks, with layers of real models, beside torch's own.

    python benchmarks/cluster.py                      # Llama 8B on 8 to 1024 ranks, a minute or two
    python benchmarks/cluster.py --all --processes 8  # every model, kind, reduction and machine: an hour on one core
    python benchmarks/cluster.py --models 13b moe --kinds compiled --ranks 128 --reduce bf16 --hardware b200
    python benchmarks/cluster.py --only "compiled, 64 ranks" --picture lanes.png --set memory_bytes_per_second=3e12

The training code of both runs as it is, on one rank of many: with tensors that have no memory, a process group that
sends nothing and counts as NCCL, and streams on which time passes as a cost model says
(`fsdp2/tools/forecast/cost.py`; printed first, `--set` replaces constants). Bytes, calls and the order of kernels,
collectives and waits are those of the real program; the times are estimates.

Columns have torch's figure, then ours. `live` are the most bytes alive above the shards, `pools` the sum of each
stream's own peak, which is what a caching allocator reserves; both in unsharded blocks as they are computed with.
`exposed` is the time in which compute waits, `least` the time that no step goes below whose units are gathered whole.
`calls` are Python calls that sharding adds, for each unit. `reductions` are those of one of our units.
The last column names the targets (`TARGETS`) that the row misses.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace

import torch.distributed.fsdp as torchs
from _common import arguments, markdown, publish
from _llama import SHAPES
from _simulated import COMPRESSED, LANGUAGE, MACHINES, Result, Row, alone, least_seconds, measure, stream_row

import fsdp2
from fsdp2.tools.forecast.pictures import draw_lanes

__all__ = ["SHAPES", "Row", "measure", "stream_row"]

KINDS, RANKS, REDUCE = ("eager", "compiled"), (8, 64, 256, 1024), ("fp32", "bf16")
LAYERS = {"8b": 6, "13b": 4, "70b": 4, "moe": 4}
EXTRA = [
    *(Row("moe", ranks=ranks, kind="lists") for ranks in (8, 64)),
    *(Row(ranks=64, kind=kind) for kind in ("groups", "hybrid")),
    *(Row(ranks=64, kind=kind, gigabits=25) for kind in ("eager", "copy in each node", *COMPRESSED)),
    *(Row(ranks=ranks, tokens=tokens, kind=kind) for tokens in (1024, 8192) for kind in LANGUAGE for ranks in RANKS),
]
"""Experts that are units of their own, two meshes in a unit, replicas, a slow network with compression, and language
models, with an embedding, an output layer and a loss."""
SOME_LESS, MANY = 0.5, 256
TARGETS = {
    "live": "the peak of live bytes is half a block below torch's; blocks compiled and reduced in one dtype: not above",
    "pools": "so is the sum of the streams' pools",
    "exposed": "exposed communication is not above torch's",
    "time": "the step takes at most 0.97 of torch's on an H100, at most 1.0 of it on the others",
    "close": "the step takes at most 1.05 of the least possible, or at most 0.95 of torch's",
    "calls": "at most half of torch's Python calls",
    "reductions": "from 256 ranks on, one reduction a unit",
}
"""What a row is to reach."""


@dataclass
class Compared:
    """What a row came to with both libraries."""

    row: Row
    ours: Result
    theirs: Result
    least: float
    plain_calls: int

    def blocks(self, nbytes: int) -> float:
        """Bytes in unsharded blocks."""
        return nbytes / self.row.block

    def calls(self, result: Result) -> float:
        """Python calls that sharding adds, for each unit; the root's are shared out among them."""
        return (result.calls - self.plain_calls) / self.row.layers

    @property
    def reductions(self) -> float:
        """For each unit."""
        return self.ours.reductions / max(self.theirs.reductions, 1)

    def reached(self) -> dict[str, bool]:
        """Which of the targets the row reaches."""
        ours, theirs, row = self.ours, self.theirs, self.row
        less = SOME_LESS * row.block
        at_once = row.kind == "compiled" and row.reduce == "bf16"
        return {
            "live": ours.live <= theirs.live - (0 if at_once else less),
            "pools": ours.reserved <= theirs.reserved - less,
            "exposed": ours.exposed <= theirs.exposed + 1e-6,
            "time": ours.total <= theirs.total * (0.97 if row.hardware == "h100" and not row.gigabits else 1.0),
            "close": ours.total <= max(1.05 * self.least, 0.95 * theirs.total),
            "calls": self.calls(ours) <= self.calls(theirs) / 2,
            "reductions": row.ranks < MANY or self.reductions <= 1,
        }

    def cells(self) -> list[str]:
        """The line of the table."""
        both = (self.theirs, self.ours)
        missed = [name for name, reached in self.reached().items() if not reached]
        return [
            str(self.row),
            *(f"{self.blocks(one.live):.2f}" for one in both),
            *(f"{self.blocks(one.reserved):.2f}" for one in both),
            " ".join(f"{lane} {self.blocks(nbytes):.2f}" for lane, nbytes in sorted(self.ours.pools.items())),
            *(f"{one.exposed * 1e3:.1f}" for one in both),
            *(f"{one.total * 1e3:.1f}" for one in both),
            f"{self.ours.total / self.theirs.total:.3f}",
            f"{self.least * 1e3:.1f}",
            *(f"{self.calls(one):.0f}" for one in both),
            f"{self.reductions:g}",
            "missed: " + ", ".join(missed) if missed else "met",
        ]

    def values(self) -> dict[str, object]:
        """The figures, for another program."""
        found: dict[str, object] = {"row": str(self.row), **asdict(self.row), "least": self.least}
        for side, one in (("theirs", self.theirs), ("ours", self.ours)):
            pools = {lane: self.blocks(nbytes) for lane, nbytes in one.pools.items()}
            memory = {"live": self.blocks(one.live), "reserved": self.blocks(one.reserved), "pools": pools}
            found[side] = {**memory, "exposed": one.exposed, "total": one.total, "calls": self.calls(one)}
        return found | {"reductions": self.reductions, "reached": self.reached()}


HEAD = [
    "step",
    *("live: torch", "fsdp2", "pools: torch", "fsdp2", "of that"),
    *("exposed ms: torch", "fsdp2", "ms: torch", "fsdp2", "ratio", "least ms"),
    *("calls: torch", "fsdp2", "reductions", "targets"),
]


def compare(row: Row, itself: bool = False) -> Compared:
    """Run the row with both libraries; torch's on both sides to compare it with `itself`."""
    ours, theirs = (measure(row, which, calls=True) for which in (torchs if itself else fsdp2, torchs))
    return Compared(row, ours, theirs, least_seconds(row), alone(row, calls=True).calls)


def compare_all(rows: list[Row], processes: int, itself: bool) -> Iterator[Compared]:
    """All rows in order, in as many processes."""
    if processes < 2:
        yield from (compare(row, itself) for row in rows)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(compare, rows, itertools.repeat(itself))


def chosen(options: argparse.Namespace) -> list[Row]:
    """The rows that were asked for."""
    lists = [options.models, options.kinds, options.ranks, options.reduce, options.hardware, options.tokens]
    everything = [list(SHAPES), KINDS, RANKS, REDUCE, list(MACHINES), (8192,)]
    usual = [["8b"], KINDS, RANKS, ("fp32",), ("h100",), (8192,)]
    filled = [given or other for given, other in zip(lists, everything if options.all else usual, strict=True)]
    rows = [
        Row(model, ranks, tokens, options.layers or LAYERS[model], kind, reduce=reduce, hardware=hardware)
        for model, hardware, kind, reduce, tokens, ranks in itertools.product(*(filled[i] for i in (0, 4, 1, 3, 5, 2)))
    ]
    if options.all and not any(lists):
        rows += EXTRA
    constants = tuple((name, float(value)) for name, _, value in (one.partition("=") for one in options.set))
    rows = [replace(row, constants=constants, keep_last=options.keep_last) for row in rows]
    return [row for row in rows if options.only in str(row)]


def summary(found: Iterable[Compared]) -> str:
    """How many rows miss each target."""
    compared = list(found)
    missed = Counter(name for one in compared for name, reached in one.reached().items() if not reached)
    lines = [f"* {name}: {TARGETS[name]}: missed in {missed[name]} of {len(compared)} rows" for name in TARGETS]
    return "\n".join(lines)


def picture(path: str, one: Compared) -> None:
    """Draw the lanes of both below one another, on one scale."""
    import matplotlib.pyplot as plt

    results = {"torch": one.theirs, "fsdp2": one.ours}
    figure, parts = plt.subplots(len(results), figsize=(16, 3.2 * len(results)), sharex=True, layout="constrained")
    for axes, (name, result) in zip(parts, results.items(), strict=True):
        draw_lanes(axes, result.spans, result.waits)
        axes.set_title(f"{name}: {one.row}: {result.total * 1e3:.1f} ms, {result.exposed * 1e3:.1f} ms exposed")
    parts[-1].set_xlabel("ms")
    figure.savefig(path, dpi=130)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = arguments(__doc__)
    add = made.add_argument
    add("--all", action="store_true", help="every model, kind, number of ranks, reduction and machine, not just a few")
    add("--models", nargs="+", choices=SHAPES, help="of these (8b)")
    add("--kinds", nargs="+", choices=(*KINDS, "hybrid", *LANGUAGE), help="of `Row.kind` (eager compiled)")
    add("--ranks", nargs="+", type=int, help="on so many ranks (8 64 256 1024)")
    add("--reduce", nargs="+", choices=REDUCE, help="in which gradients are reduced; parameters are bf16 (fp32)")
    add("--hardware", nargs="+", choices=MACHINES, help="on these machines (h100)")
    add("--tokens", nargs="+", type=int, help="tokens of a step on one rank, a multiple of 2048 (8192)")
    add("--layers", type=int, help="blocks of the model (6 of 8b, 4 of others)")
    add("--keep-last", action="store_true", help="keep the last block gathered between forward and backward")
    add("--only", default="", help="rows whose name contains this, such as 'compiled, 64 ranks'")
    add("--processes", type=int, default=1, help="run as many rows at once (1)")
    add("--picture", help="draw the lanes of the first row into this file")
    add("--set", nargs="*", default=[], metavar="NAME=VALUE", help="constants of the cost model")
    return made


def main() -> None:
    """Print the table, and draw one row of it."""
    options = parser().parse_args()
    rows = chosen(options)
    if not rows:
        raise SystemExit("no row has such a name; leave --only out to see all")
    found = []
    for one in compare_all(rows, options.processes, options.ours == "torch"):
        found.append(one)
        print(f"{len(found)}/{len(rows)} {' | '.join(one.cells())}", file=sys.stderr, flush=True)
        if options.picture and len(found) == 1:
            picture(options.picture, one)
    machines = "\n\n".join(str(row.machine) for row in {row.hardware: row for row in rows}.values())
    text = f"{machines}\n\n{markdown(HEAD, [one.cells() for one in found])}\n\n{summary(found)}"
    publish("cluster", text, [one.values() for one in found], __doc__ or "", options)


if __name__ == "__main__":
    main()
