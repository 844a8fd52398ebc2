"""Draw docs/pictures/numbers.png from the newest report in benchmarks/results: memory and time beside torch's.

python docs/make_pictures.py                  # the newest report of all benchmarks
python docs/make_pictures.py REPORT.md        # another one
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "pictures" / "numbers.png"
MEMORY = {
    "forward peak, fp32 (B)": "forward\nfp32",
    "forward peak, bf16 (B)": "forward\nbf16",
    "backward peak, fp32 (B)": "backward\nfp32",
    "backward peak, bf16 (B)": "backward\nbf16",
    "backward peak, bf16, fp32 reduce (B)": "backward\nbf16, fp32 reduce",
}
TIME = {
    "step / torch's of the same turn": "step of a GPT,\n2 processes (gloo)",
    "host time per unit and step, fp32 (us)": "host time\nper unit",
    "AdamW step, foreach (ms)": "AdamW step",
    "clip_grad_norm_ (ms)": "gradient\nclipping",
}
OURS, THEIRS = "#e4572e", "#9aa5b1"


def newest() -> Path:
    """The newest report that holds every benchmark."""
    reports = sorted((ROOT / "benchmarks" / "results").glob("all_*.md"), key=lambda path: path.read_text()[:60])
    if not reports:
        raise SystemExit("no report in benchmarks/results; write one with: make bench ARGS=--write")
    return reports[-1]


def figures(report: Path) -> dict[str, tuple[float, float]]:
    """Ours and torch's by the name of the figure."""
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
    """Two groups of bars: layers of memory, and time in parts of torch's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    known = figures(report)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.9), width_ratios=[5, 4], layout="constrained")
    for axes, names, title in (
        (left, MEMORY, "Peak memory above the shards, in unsharded layers"),
        (right, TIME, "Time, torch's fully_shard = 1"),
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
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, dpi=130)
    print(f"wrote {TARGET.relative_to(ROOT)} from {report.name}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else newest())
