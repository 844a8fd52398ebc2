"""One seam for seeing what fsdp2 does: profiler ranges, a debug log, and the events tests listen to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from fsdp2._torch.autograd import profiler_running

__all__ = ["emit", "listening", "refresh", "span"]

# The second is torch's own, which TORCH_LOGS=+fsdp turns on.
_LOGGERS = (logging.getLogger("fsdp2"), logging.getLogger("torch.distributed.fsdp.fully_shard"))
_listeners: list[Callable[[str, str], None]] = []
_log: logging.Logger | None = None  # the one of them whose debug level is on
_nothing = contextlib.nullcontext()
recording = False  # whether anybody sees events or ranges; others need not call


def refresh() -> None:
    """Look who records; once per pass, so that events cost next to nothing when nobody does."""
    global _log, recording
    _log = next((logger for logger in _LOGGERS if logger.isEnabledFor(logging.DEBUG)), None)
    recording = bool(_listeners) or _log is not None or profiler_running()


def emit(event: str, name: str, nbytes: int | None = None) -> None:
    """Call listeners with ``event`` (such as "unshard") and the group ``name`` and log both, with the bytes it moves
    or frees."""
    for listener in _listeners:
        listener(event, name)
    if _log is not None:
        size = "" if nbytes is None else f": {nbytes:,} bytes"
        _log.debug("FSDP::%s%s%s", event, f" ({name})" if name else "", size, stacklevel=2)


def span(event: str, name: str) -> AbstractContextManager[object]:
    """A profiler range called ``FSDP::event (name)``, or nothing when no profiler runs."""
    if not profiler_running():
        return _nothing
    return torch.profiler.record_function(f"FSDP::{event} ({name})" if name else f"FSDP::{event}")


@contextlib.contextmanager
def listening(listener: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``listener(event, name)`` for every event inside the block."""
    _listeners.append(listener)
    refresh()
    try:
        yield
    finally:
        _listeners.remove(listener)
        refresh()
