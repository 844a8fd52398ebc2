"""Files that show timelines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from fsdp2.tools.forecast.page import page
from fsdp2.tools.forecast.pictures import save_picture
from fsdp2.tools.forecast.timeline import Timeline, chrome_trace

__all__ = ["ENDINGS", "file_for", "save"]

_PICTURES = (".png", ".svg", ".pdf")
ENDINGS = (".html", *_PICTURES, ".json")
"""The endings of the names that ``save`` takes."""


def file_for(path: str | Path, endings: Sequence[str] = ENDINGS) -> Path:
    """Return ``path`` if a file with one of the ``endings`` can be written there. A missing folder is made.

    Raises:
        ModuleNotFoundError: A picture needs matplotlib, which is not installed.
        OSError: The folder cannot be made or written to, or the name is that of a folder.
        ValueError: The name has another ending.
    """
    path = Path(path)
    if path.suffix not in endings:
        *others, last = endings
        raise ValueError(f"{path}: expected a name that ends in {', '.join(others)}{' or ' * bool(others)}{last}")
    if path.suffix in _PICTURES and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"{path}: a picture needs matplotlib, which is not installed; pip install matplotlib, or save as .html"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path}: this is a folder; expected the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path}: this file cannot be written; expected one in a folder of your own")
    return path


def save(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """Write ``timelines`` below each other: a page (.html), a picture (.png, .svg, .pdf) or a Chrome trace (.json).

    A missing folder is made.

    Raises:
        ModuleNotFoundError: A picture needs matplotlib, which is not installed.
        OSError: The file cannot be written.
        ValueError: The name has another ending.
    """
    path = file_for(path)
    if path.suffix == ".json":
        path.write_text(json.dumps(chrome_trace(timelines)))
    elif path.suffix == ".html":
        path.write_text(page(timelines))
    else:
        save_picture(path, timelines)
