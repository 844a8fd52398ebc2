"""Pictures of a step; matplotlib is imported by whoever hands the axes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp2.forecasting.clock import COMPUTE, Exposed, Span, lane_names

__all__ = ["draw_lanes"]

COLOURS = {
    COMPUTE: "#4c78a8",
    "all_gather": "#72b7b2",
    "reduce_scatter": "#f2a541",
    "all_to_all": "#f2a541",
    "all_reduce": "#9d6fb0",
}
EXPOSED = "#d62728"


def draw_lanes(axes: Any, spans: Sequence[Span], exposed: Sequence[Exposed]) -> None:
    """One row for each lane, time in ms from left to right; where compute waits its row is red."""
    if not spans:
        return
    start = min(span.begin for span in spans)
    names = lane_names(list(spans))
    lanes = sorted(set(names.values()), key=lambda name: (name != COMPUTE, name))
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in spans:
        kind = COMPUTE if span.kind == COMPUTE else span.kind
        bars.setdefault((names[span.lane], COLOURS.get(kind, "#888888")), []).append(
            ((span.begin - start) * 1e3, span.seconds * 1e3)
        )
    for wait in exposed:
        bars.setdefault((COMPUTE, EXPOSED), []).append(((wait.begin - start) * 1e3, (wait.end - wait.begin) * 1e3))
    for (lane, colour), pieces in bars.items():
        edge = "white" if lane != COMPUTE else "none"
        axes.broken_barh(pieces, (lanes.index(lane) - 0.4, 0.8), facecolors=colour, edgecolors=edge, linewidth=0.4)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
