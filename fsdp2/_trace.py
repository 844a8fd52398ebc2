"""One seam for seeing what fsdp2 does: profiler ranges, a debug log, and the events tests listen to."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from fsdp2._torch import profiler_running

__all__ = ["emit", "listening", "refresh", "span"]

logger = logging.getLogger("fsdp2")
_listeners: list[Callable[[str, str], None]] = []
_logging = False
_nothing = contextlib.nullcontext()


def refresh() -> None:
    """Look whether the debug log is on; once per iteration, so that events cost next to nothing when it is off."""
    global _logging
    _logging = logger.isEnabledFor(logging.DEBUG)


def emit(event: str, name: str) -> None:
    """Tell listeners and the debug log that ``event`` (such as "unshard") happened to the group ``name``."""
    for listener in _listeners:
        listener(event, name)
    if _logging:
        logger.debug("%s %s", event, name)


def span(event: str, name: str) -> AbstractContextManager[object]:
    """A profiler range called ``FSDP::event (name)``, or nothing when no profiler runs."""
    if not profiler_running():
        return _nothing
    return torch.profiler.record_function(f"FSDP::{event} ({name})" if name else f"FSDP::{event}")


@contextlib.contextmanager
def listening(listener: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``listener(event, name)`` for every event inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
