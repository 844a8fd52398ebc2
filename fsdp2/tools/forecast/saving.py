"""Files that show timelines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from fsdp2.tools.forecast.page import page
from fsdp2.tools.forecast.pictures import save_picture
from fsdp2.tools.forecast.timeline import Timeline, chrome_trace

__all__ = ["save"]


def save(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """Write ``timelines`` below each other: a page (.html), a picture (.png, .svg, .pdf) or a Chrome trace (.json).

    Raises:
        ModuleNotFoundError: A picture needs matplotlib, which is not installed.
        ValueError: The name has another ending.
    """
    path = Path(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(timelines)))
    elif path.suffix == ".html":
        path.write_text(page(timelines))
    elif path.suffix in (".png", ".svg", ".pdf"):
        save_picture(path, timelines)
    else:
        raise ValueError(f"save: {path}; expected a name that ends in .html, .png, .svg, .pdf or .json")
