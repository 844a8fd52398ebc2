"""Pictures of a step. Only this file needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.tools.forecast.timeline import COMPUTE, UNITS, Exposed, Span, Timeline, lane_names

__all__ = ["draw_lanes", "draw_memory", "picture", "save_picture"]

COLOURS = {
    COMPUTE: "#4c78a8",
    "forward": "#7a9cc6",
    "backward": "#2f5d8c",
    "gather": "#54a59f",
    "reduce": "#f2a541",
    "replicate": "#9d6fb0",
    "exchange": "#8c6d46",
    "copies": "#888888",
}
OTHER = "#c2577e"  # other lanes, such as tensor parallelism
EXPOSED = "#d62728"
KINDS = {  # what is gathered and what is reduced have the colours of their lanes; the others are no lane's
    "shards": "#a39a4c",
    "gathered": "#54a59f",
    "gradients": "#f2a541",
    "optimizer state": "#b07a5b",
    "activations": "#9ecae1",
    "other": "#b5bcc2",
}


_APART = 20
"""Steps whose times differ by more than this factor have scales of their own, so that the shortest is visible."""


def draw_lanes(axes: Any, spans: Sequence[Span], exposed: Sequence[Exposed], start: float | None = None) -> None:
    """Draw one row for each lane, with time in ms from left to right; red marks the times in which compute waits.

    Times are relative to ``start``, by default to the first span.
    """
    if not spans:
        return
    if start is None:
        start = min(span.begin for span in spans)
    names = lane_names(spans)
    lanes = sorted({names[span.lane] for span in spans}, key=_row)
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in spans:
        bars.setdefault((names[span.lane], _colour(names[span.lane], span.kind)), []).append(
            ((span.begin - start) * 1e3, span.seconds * 1e3)
        )
    for wait in exposed:
        bars.setdefault((COMPUTE, EXPOSED), []).append(((wait.begin - start) * 1e3, (wait.end - wait.begin) * 1e3))
        if COMPUTE not in lanes:
            lanes.insert(int(UNITS in lanes), COMPUTE)
    for (lane, colour), pieces in bars.items():
        edge = "white" if lane == UNITS else colour  # short spans stay visible
        axes.broken_barh(pieces, (lanes.index(lane) - 0.4, 0.8), facecolors=colour, edgecolors=edge, linewidth=0.4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()


def _row(lane: str) -> tuple[int, str]:
    order = (UNITS, COMPUTE, "gather", "reduce", "replicate", "exchange")
    return (order.index(lane) if lane in order else len(order)), lane


def _colour(lane: str, kind: str) -> str:
    return COLOURS.get(kind if lane == UNITS else lane, OTHER)


def draw_memory(axes: Any, timeline: Timeline) -> None:
    """Draw bytes over time in GiB or MiB, stacked by purpose; dotted lines mark the starts of units."""
    kinds = [kind for kind in KINDS if any(point.by_kind.get(kind) for point in timeline.memory)]
    most = max(sum(point.by_kind.values()) for point in timeline.memory)
    name, scale = ("GiB", 1 << 30) if most >= 1 << 30 else ("MiB", 1 << 20)
    points = timeline.memory_to_the_end
    times = [point.time * 1e3 for point in points]
    rows = [[point.by_kind.get(kind, 0) / scale for point in points] for kind in kinds]
    axes.stackplot(times, rows, step="post", labels=kinds, colors=[KINDS[kind] for kind in kinds], linewidth=0)
    for span in timeline.spans:
        if span.lane == UNITS:
            axes.axvline(span.begin * 1e3, color="#1f2933", alpha=0.25, linewidth=0.5, linestyle=":")
    axes.set_ylabel(f"{name}, only these" if timeline.memory_in_part else name, fontsize=8)
    axes.set_ylim(0, most / scale * 1.05)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=8)


def save_picture(path: Path, timelines: Sequence[Timeline]) -> None:
    """Write lanes and memory of ``timelines`` on one scale of time."""
    picture(timelines).savefig(path)


def picture(timelines: Sequence[Timeline]) -> Any:
    """Return a matplotlib figure with lanes and memory of ``timelines``.

    They share one scale of time, unless their durations differ by more than a factor of ``_APART``.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    kinds: list[tuple[Timeline, bool]] = []
    for timeline in timelines:
        kinds += [(timeline, False), *([(timeline, True)] if timeline.memory else [])]
    figure = Figure(figsize=(10, 0.5 + 2.0 * len(kinds)), dpi=150, layout="constrained")
    ends = [timeline.end for timeline in timelines]
    apart = max(ends) > _APART * min(ends)
    panels = figure.subplots(len(kinds), 1, sharex=not apart, squeeze=False)[:, 0]
    shown: dict[str, str] = {}
    for axes, (timeline, memory) in zip(panels, kinds):
        if memory:
            draw_memory(axes, timeline)
        else:
            draw_lanes(axes, timeline.spans, timeline.waits, start=0.0)  # as memory is, from the beginning of the step
            waits = f"{timeline.seconds * 1e3:.4g} ms, of which compute waits {timeline.exposed_seconds * 1e3:.3g} ms"
            axes.set_title(f"{timeline.name}: {waits}", loc="left", fontsize=9)
            for span in timeline.spans:
                shown.setdefault(span.kind if span.lane == UNITS else span.lane, _colour(span.lane, span.kind))
            shown |= {"exposed": EXPOSED} if timeline.waits else {}
        axes.tick_params(labelsize=8)
        axes.set_xlim(0, (timeline.end if apart else max(ends)) * 1e3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    patches = [Patch(color=colour, label=kind) for kind, colour in shown.items()]
    panels[0].legend(
        handles=patches, loc="upper left", bbox_to_anchor=(1.005, 1), frameon=False, fontsize=8, borderaxespad=0
    )
    panels[-1].set_xlabel("ms, each step on its own scale" if apart else "ms", fontsize=8)
    return figure
