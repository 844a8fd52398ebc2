"""Checkpoints that torch writes in the background."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["async_saves"]

_THREAD, _FUNCTION = "AsyncCheckpointExecutor", "save_wrapper"
_START_SECONDS = 1.0  # that a thread may need until it shows what it was started for; in truth microseconds


def async_saves() -> list[dict[str, Any]]:
    """The arguments of each ``dcp.async_save`` whose thread runs in this process; ``process_group`` is one of them.

    Nothing public says that a save is under way, nor on which group: its thread has a name, and the function that it
    runs has the arguments.
    """
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_THREAD)]
    found = [_arguments(thread) for thread in threads]
    return [arguments for arguments in found if arguments is not None]


def _arguments(thread: threading.Thread) -> dict[str, Any] | None:
    """What the thread was started with; None if it is through."""
    for _ in range(int(_START_SECONDS / 0.001)):
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None:
            if frame.f_code.co_name == _FUNCTION:
                return dict(frame.f_locals)
            frame = frame.f_back
        thread.join(0.001)
        if not thread.is_alive():
            break
    return None
