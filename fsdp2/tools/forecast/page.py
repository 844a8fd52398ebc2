"""Timelines as one self-contained HTML page: lanes and memory over time; the mouse wheel zooms."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2.tools.forecast.timeline import Timeline

__all__ = ["page"]


def page(timelines: Sequence[Timeline]) -> str:
    """Return the page as HTML."""
    template = Path(__file__).with_name("page.html").read_text()
    data = json.dumps([_compact(timeline) for timeline in timelines]).replace("</", "<\\/")
    return template.replace("/*DATA*/[]", data)


def _compact(timeline: Timeline) -> dict[str, Any]:
    """Return the fields that the page draws, with times in microseconds."""
    return {
        "name": timeline.name,
        "begin": timeline.begin,
        "seconds": timeline.seconds,
        "exposed": timeline.exposed_seconds,
        "part": timeline.memory_in_part,
        "spans": [
            [span.lane, span.kind, _micro(span.begin), _micro(span.end), span.unit, span.nbytes, span.group, span.ranks]
            for span in timeline.spans
        ],
        "waits": [[_micro(wait.begin), _micro(wait.end), wait.unit] for wait in timeline.waits],
        "memory": [[_micro(point.time), point.by_kind] for point in timeline.memory_to_the_end],
    }


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 2)
