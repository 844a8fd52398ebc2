"""Draw the pictures of README.md and of docs/how_it_works.md.

python docs/make_pictures.py                      # all of them; numbers.png from the newest report of all benchmarks
python docs/make_pictures.py numbers [REPORT.md]  # memory and time beside torch's, from another report
python docs/make_pictures.py life                 # the life of a parameter
python docs/make_pictures.py lanes                # the lanes of a training step
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
MEMORY = {
    "streams, 64 ranks, bf16: forward (B)": "forward,\n64 ranks\nbf16",
    "streams, 64 ranks, bf16: backward (B)": "backward,\n64 ranks\nbf16",
    "streams, 8 ranks, bf16, fp32 reduce: backward (B)": "backward,\n8 ranks\nfp32 reduce",
    "streams, 64 ranks, bf16, fp32 reduce: backward (B)": "backward,\n64 ranks\nfp32 reduce",
    "streams, 256 ranks, bf16, fp32 reduce: backward (B)": "backward,\n256 ranks\nfp32 reduce",
}
TIME = {
    "step / torch's of the same turn": "step of a GPT,\n2 processes (gloo)",
    "host time per unit and step, fp32 (us)": "host time\nper unit",
    "AdamW step, foreach (ms)": "AdamW step",
    "clip_grad_norm_ (ms)": "gradient\nclipping",
}
OURS, THEIRS = "#e4572e", "#9aa5b1"
GATHER, REDUCE, STEP, EMPTY = "#2e86ab", "#3c9d5b", "#7b5ea7", "#f1f3f5"

STAGES = (
    # title, what happens below it, parts of the weight in memory on ranks 0 and 1, and parts of its gradient
    ("the model\nis built", "whole on\nevery rank", ((0, 1), (0, 1)), ((), ())),
    ("between\niterations", "fully_shard kept\na shard per rank", ((0,), (1,)), ((), ())),
    ("forward", "gathered,\ncomputed with", ((0, 1), (0, 1)), ((), ())),
    ("after\nforward", "freed", ((0,), (1,)), ((), ())),
    ("backward", "gathered again,\ngradient computed", ((0, 1), (0, 1)), ((0, 1), (0, 1))),
    ("after\nbackward", "reduce-scattered:\na shard of the mean", ((0,), (1,)), ((0,), (1,))),
    ("optimizer\nstep", "each rank updates\nits own shard", ((0,), (1,)), ((0,), (1,))),
)
"""The stages of a parameter's life, from left to right."""

LANES = ("gather", "compute", "reduce")
SPANS = (
    # lane, begin, end, text, colour
    ("gather", 0.0, 1.0, "root", GATHER),
    ("gather", 1.0, 2.0, "1", GATHER),
    ("compute", 1.0, 2.0, "root", OURS),
    ("compute", 2.0, 4.0, "1", OURS),
    ("gather", 2.0, 3.0, "2", GATHER),
    ("compute", 4.0, 6.0, "2", OURS),
    ("gather", 4.0, 5.0, "3", GATHER),
    ("compute", 6.0, 8.0, "3", OURS),
    ("compute", 8.0, 9.0, "root", OURS),
    ("compute", 9.0, 10.0, "root", OURS),
    ("gather", 10.0, 11.0, "2", GATHER),
    ("compute", 10.0, 13.0, "3", OURS),
    ("gather", 13.0, 14.0, "1", GATHER),
    ("compute", 13.0, 16.0, "2", OURS),
    ("compute", 16.0, 19.0, "1", OURS),
    ("compute", 19.0, 20.0, "root", OURS),
    *(("reduce", begin + part, begin + part + 1.4, "", REDUCE) for begin in (11.5, 14.5, 17.5) for part in (0.0, 1.5)),
    ("reduce", 20.5, 21.0, "", REDUCE),
    ("compute", 21.0, 23.2, "optimizer", STEP),
)
"""The lanes of a step of three blocks on a fast network. Block 3 stays in memory from forward to backward."""


def newest() -> Path:
    """Return the newest report with all benchmarks."""
    reports = sorted((ROOT / "benchmarks" / "results").glob("all_*.md"), key=lambda path: path.read_text()[:60])
    if not reports:
        raise SystemExit("no report in benchmarks/results; write one with: make bench ARGS=--write")
    return reports[-1]


def figures(report: Path) -> dict[str, tuple[float, float]]:
    """Return fsdp2's and torch's values by the name of the figure."""
    found = {}
    for line in report.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 3:
            try:
                found[cells[0]] = float(cells[1]), float(cells[2])
            except ValueError:
                continue
    return found


def draw(report: Path) -> None:
    """Draw two groups of bars: layers of memory, and time as a part of torch's."""
    from matplotlib import pyplot

    known = figures(report)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.9), width_ratios=[5, 4], layout="constrained")
    for axes, names, title in (
        (left, MEMORY, "Peak memory above the shards on (simulated) streams, in unsharded layers"),
        (right, TIME, "Time on a CPU, torch's fully_shard = 1"),
    ):
        missing = [name for name in names if name not in known]
        if missing:
            raise SystemExit(f"{report.name} lacks {missing}; run every benchmark: make bench ARGS=--write")
        scale = [1.0 if axes is left else known[name][1] for name in names]
        for shift, side, label, colour in ((-0.2, 1, "torch's fully_shard", THEIRS), (0.2, 0, "fsdp2", OURS)):
            heights = [known[name][side] / unit for name, unit in zip(names, scale)]
            bars = axes.bar([x + shift for x in range(len(names))], heights, 0.38, label=label, color=colour)
            axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
        axes.set_xticks(range(len(names)), list(names.values()), fontsize=8)
        axes.set_title(title, fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.15)
    left.legend(frameon=False, fontsize=9, loc="upper left")
    save(figure, "numbers")


def draw_life() -> None:
    """Draw the parts of one weight and of its gradient that two ranks have in memory, stage by stage."""
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch, Rectangle

    figure, axes = pyplot.subplots(figsize=(9.2, 4.1), layout="constrained")
    for column, (title, below, weights, gradients) in enumerate(STAGES):
        x = column * 2.0
        axes.text(x + 0.65, 4.75, title, ha="center", va="center", fontsize=10, weight="bold")
        axes.text(x + 0.65, -0.75, below, ha="center", va="center", fontsize=8, color="#333333")
        for rank, y in ((0, 2.5), (1, 0.0)):
            for shift, held, colour in ((0.0, weights[rank], OURS), (0.7, gradients[rank], REDUCE)):
                for part in (0, 1):
                    place = (x + shift, y + (1 - part) * 0.85)
                    shown = part in held
                    fill = colour if shown else EMPTY
                    axes.add_patch(
                        Rectangle(place, 0.6, 0.8, facecolor=fill, edgecolor="white" if shown else "#d0d5da")
                    )
        if column:
            axes.add_patch(
                FancyArrowPatch((x - 0.6, 2.08), (x - 0.1, 2.08), arrowstyle="-|>", mutation_scale=11, color="#555")
            )
    for rank, y in ((0, 3.35), (1, 0.85)):
        axes.text(-0.3, y, f"rank {rank}", ha="right", va="center", fontsize=10)
    for y, text, colour in ((-1.75, "weight", OURS), (-1.75, "gradient", REDUCE), (-1.75, "not in memory", EMPTY)):
        x = {"weight": 4.0, "gradient": 6.0, "not in memory": 8.2}[text]
        axes.add_patch(Rectangle((x, y - 0.15), 0.3, 0.3, facecolor=colour, edgecolor="#d0d5da"))
        axes.text(x + 0.4, y, text, va="center", fontsize=9)
    axes.set(xlim=(-1.4, 13.6), ylim=(-2.1, 5.3))
    axes.axis("off")
    save(figure, "life")


def draw_lanes() -> None:
    """Draw the lanes of a step: gathers ahead of compute, and chunks of gradients behind it."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.2, 2.7), layout="constrained")
    for lane, begin, end, text, colour in SPANS:
        y = len(LANES) - 1 - LANES.index(lane)
        axes.barh(y, end - begin - 0.06, left=begin + 0.03, height=0.62, color=colour)
        axes.text((begin + end) / 2, y, text, ha="center", va="center", fontsize=8.5, color="white")
    for x in (9.0, 21.0):
        axes.axvline(x, color="#9aa5b1", linewidth=0.8, linestyle=":")
    for x, text in ((4.5, "forward"), (15.0, "backward"), (22.1, "step")):
        axes.text(x, len(LANES) - 0.35, text, ha="center", fontsize=10, weight="bold")
    axes.set_yticks(range(len(LANES)), LANES[::-1], fontsize=10)
    axes.set_xticks([])
    axes.set_xlabel("time", fontsize=9)
    axes.set(xlim=(-0.1, 23.3), ylim=(-0.6, len(LANES)))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    save(figure, "lanes")


def save(figure: Any, name: str) -> None:
    """Write a picture."""
    PICTURES.mkdir(exist_ok=True)
    figure.savefig(PICTURES / f"{name}.png", dpi=130)
    print(f"wrote docs/pictures/{name}.png")


def main(arguments: list[str]) -> None:
    """Draw the pictures that are named, or all."""
    import matplotlib

    matplotlib.use("Agg")
    kinds: dict[str, Callable[[], None]] = {
        "numbers": lambda: draw(Path(arguments[1]) if len(arguments) > 1 else newest()),
        "life": draw_life,
        "lanes": draw_lanes,
    }
    for kind in arguments[:1] or kinds:
        if kind not in kinds:
            raise SystemExit(f"no picture {kind!r}; choose one of {', '.join(kinds)}")
        kinds[kind]()


if __name__ == "__main__":
    main(sys.argv[1:])
