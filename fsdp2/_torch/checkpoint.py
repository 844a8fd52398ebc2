"""Checkpoints that torch writes in the background."""

from __future__ import annotations

import sys
import threading
from typing import Any

__all__ = ["async_saves"]

_THREAD, _FUNCTION = "AsyncCheckpointExecutor", "save_wrapper"
_START_SECONDS = 1.0  # the longest wait for a new thread's function to start; it takes microseconds


def async_saves() -> list[dict[str, Any]]:
    """Return the arguments of each ``dcp.async_save`` that runs in this process; ``process_group`` is one of them.

    No public function returns running saves or their groups. A save is found by the name of its thread, and its
    arguments in the frame of the function that the thread runs.
    """
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(_THREAD)]
    found = [_arguments(thread) for thread in threads]
    return [arguments for arguments in found if arguments is not None]


def _arguments(thread: threading.Thread) -> dict[str, Any] | None:
    """Return the arguments of the thread's function, or None if the thread has ended."""
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
