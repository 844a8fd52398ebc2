"""Report the results of a job: a table with a column for each run, and a picture of loss, memory and speed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gpt.processes import UserError
from gpt.record import Progress, Run
from gpt.screen import heading

STATE_BYTES = 16  # per parameter: float32 value, gradient, and AdamW's two moments
COLORS = ("tab:blue", "tab:orange", "tab:green", "tab:purple")


def table(progress: Progress) -> str:
    """Return a table with a column for each run of the job: sizes, memory, speed and losses."""
    rows = [
        ("", _title),
        ("steps", lambda run: f"{run.first_step} to {run.last_step}"),
        ("computed in", lambda run: run.compute),
        ("parameters, whole model", lambda run: f"{run.parameters:,}"),
        ("parameters, one rank", lambda run: f"{run.parameters_per_rank:,}"),
        ("parameters, gradients, AdamW, one rank", lambda run: _megabytes(run.parameters_per_rank * STATE_BYTES)),
        ("  without sharding", lambda run: _megabytes(run.parameters * STATE_BYTES)),
        ("peak memory of a step, one rank", lambda run: _megabytes(run.peak_bytes)),
        ("  without sharding", lambda run: _megabytes(run.peak_bytes_unsharded)),
        ("  ratio", _saving),
        ("tokens per second, all ranks", lambda run: f"{run.tokens_per_second:,.0f}"),
        ("held-out loss, first", lambda run: f"{run.held_out[0][1]:.4f}"),
        ("held-out loss, last", lambda run: f"{run.held_out[-1][1]:.4f}"),
    ]
    lines = [[name, *(cell(run) for run in progress.runs)] for name, cell in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    body = [
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    note = (
        "Peak memory is that of live tensors in a step: parameters, gradients, optimizer state, activations, and what\n"
        "fully_shard gathers and sends. Without sharding, it is that of the float32 model on a rank's sequences,\n"
        "with autocast for bfloat16. The progress bar shows the memory of the whole process, libraries included.\n"
        "Losses are in nats per byte. The held-out text is the same on any number of processes."
    )
    return "\n".join([heading("result"), *(f"  {line}".rstrip() for line in body), "", note])


def picture(progress: Progress, path: Path) -> Path:
    """Draw loss, memory and speed of all runs as a PNG, and return its `path`. A complete picture replaces an old one.

    Raise a UserError if it cannot be written.
    """
    from matplotlib.figure import Figure  # here, because only rank 0 ever draws

    figure = Figure(figsize=(12, 5), dpi=130, layout="constrained")
    figure.suptitle("A byte-level GPT, sharded by fsdp2.fully_shard")
    axes = figure.subplot_mosaic([["loss", "memory"], ["loss", "speed"]], width_ratios=[2.2, 1])
    _draw_losses(axes["loss"], progress)
    _draw_memory(axes["memory"], progress)
    _draw_speed(axes["speed"], progress)
    for one in axes.values():
        one.spines[["top", "right"]].set_visible(False)
    partial = path.with_name(f".{path.name}.partial")
    try:
        figure.savefig(partial, format="png")
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"could not draw {path}: {error.strerror or error}; the checkpoints are saved") from error
    return path


def _draw_losses(axes: Any, progress: Progress) -> None:
    losses = [loss for run in progress.runs for loss in run.losses]
    smooth = _smooth(losses)
    for number, run in enumerate(progress.runs):
        color = COLORS[number % len(COLORS)]
        steps = range(run.first_step + 1, run.last_step + 1)
        axes.plot(steps, run.losses, color=color, alpha=0.25, linewidth=0.8)
        mine = smooth[run.first_step : run.last_step]
        axes.plot(steps, mine, color=color, linewidth=2, label=f"training on {_title(run)}")
        if number:
            axes.axvline(run.first_step, color="0.5", linestyle=":", linewidth=1.2)
            text = f"saved by {progress.runs[number - 1].ranks}, resumed on {run.ranks} "
            axes.annotate(text, (run.first_step, 0.62), xycoords=("data", "axes fraction"), ha="right", color="0.35")
    seen = [point for run in progress.runs for point in run.held_out]
    axes.plot(*zip(*seen, strict=True), "o--", color="0.15", markersize=4, linewidth=1, label="held-out text")
    axes.annotate(f" {seen[-1][1]:.3f}", seen[-1], va="center", ha="left", color="0.15")
    axes.margins(x=0.06)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="upper center")


def _draw_memory(axes: Any, progress: Progress) -> None:
    """Draw each run's peak of a step on one rank, and beside it in grey the peak without sharding.

    Both are of a rank's sequences, of which there are fewer on more ranks.
    """
    for number, run in enumerate(progress.runs):
        grey = "without sharding" if number == 0 else None
        sharded, whole = (nbytes / 1e6 for nbytes in (run.peak_bytes, run.peak_bytes_unsharded))
        bars = [axes.bar(number - 0.2, sharded, width=0.38, color=COLORS[number % len(COLORS)])]
        bars.append(axes.bar(number + 0.2, whole, width=0.38, color="0.8", label=grey))
        for bar in bars:
            axes.bar_label(bar, fmt="{:,.0f}", padding=3, color="0.15", fontsize=9)
    axes.set(title="peak memory of a step, one rank", ylabel="MB")
    each = [progress.settings.batch // run.ranks for run in progress.runs]
    names = [f"{_processes(run)},\n{count} sequence{'s' * (count > 1)} each" for run, count in zip(progress.runs, each)]
    axes.set_xticks(range(len(progress.runs)), names, fontsize=9)
    axes.margins(y=0.35)
    axes.legend(frameon=False, loc="upper right")


def _draw_speed(axes: Any, progress: Progress) -> None:
    for number, run in enumerate(progress.runs):
        bar = axes.bar(number, run.tokens_per_second, width=0.5, color=COLORS[number % len(COLORS)])
        axes.bar_label(bar, fmt="{:,.0f}", padding=2, color="0.15")
    axes.set(title="tokens per second, all ranks")
    axes.set_xticks(range(len(progress.runs)), [_processes(run) for run in progress.runs])
    axes.margins(y=0.2)


def _smooth(values: list[float], reach: int = 8) -> list[float]:
    """Return moving means over up to `reach` values on both sides, fewer near the start, where the curve is steep."""
    windows = [values[at - min(reach, at) : at + min(reach, at) + 1] for at in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _title(run: Run) -> str:
    return f"{_processes(run)} ({run.backend})"


def _processes(run: Run) -> str:
    return f"{run.ranks} process{'es' if run.ranks > 1 else ''}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _saving(run: Run) -> str:
    return f"{run.peak_bytes / run.peak_bytes_unsharded:.2f}"
