"""Timelines as one HTML page that needs nothing else: lanes and memory over time, with a wheel to zoom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.forecasting.timeline import Timeline

__all__ = ["page"]


def page(timelines: Sequence[Timeline]) -> str:
    """The page."""
    template = Path(__file__).with_name("page.html").read_text()
    data = json.dumps([_compact(timeline) for timeline in timelines]).replace("</", "<\\/")
    return template.replace("/*DATA*/[]", data)


def _compact(timeline: Timeline) -> dict[str, Any]:
    """Times in microseconds, and no field that is not drawn."""
    return {
        "name": timeline.name,
        "begin": timeline.begin,
        "seconds": timeline.seconds,
        "exposed": timeline.exposed_seconds,
        "spans": [
            [span.lane, span.kind, _micro(span.begin), _micro(span.end), span.unit, span.nbytes, span.group, span.ranks]
            for span in timeline.spans
        ],
        "waits": [[_micro(wait.begin), _micro(wait.end), wait.unit] for wait in timeline.waits],
        "memory": [[_micro(point.time), point.by_kind] for point in timeline.memory],
    }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 2)
