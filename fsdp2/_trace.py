"""Profiler ranges, the debug log, and events for records and tests."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from fsdp2._torch.autograd import functorch_active, profiler_running, without_functorch

__all__ = ["Recorder", "Source", "emit", "listening", "profiled", "recording_with", "refresh", "span"]

_M = TypeVar("_M", bound=Callable[..., Any])


class Source(Protocol):
    """What an event is of: a root, a group, or a part of one. Two models may have units of one name."""

    @property
    def name(self) -> str:
        """The name of the module, or ""."""


class Recorder(Protocol):
    """Records when collectives run and what waits for them, and events, each with its source."""

    def heard(self, event: str, source: Source) -> None:
        """Record an event, such as "unshard"."""

    def enter(self, source: Source) -> None:
        """Attribute communication and waits from now on to ``source``."""

    def moment(self) -> Any:
        """Return the current point in time on the current stream, or on the host if there are no streams."""

    def launched(self, what: tuple[str, str], axis: Any, nbytes: int, began: Any, work: Any) -> None:
        """Record a collective ``what`` (lane, kind) over ``axis`` that started at ``began``; ``work`` is its handle."""

    def waited(self, began: Any, work: Any = None) -> None:
        """Record that the compute stream, or the host for ``work``, has waited since ``began``."""


# The second is torch's own logger, which TORCH_LOGS=+fsdp enables.
_LOGGERS = (logging.getLogger("fsdp2"), logging.getLogger("torch.distributed.fsdp.fully_shard"))
_listeners: list[Callable[[str, str], None]] = []
_log: logging.Logger | None = None  # the first of them with the debug level enabled
_nothing = contextlib.nullcontext()
recorder: Recorder | None = None
recording = False  # True if a listener, a recorder, the log or the profiler is active; callers skip events otherwise


def refresh() -> None:
    """Update ``recording``. This runs once per pass, so that events cost almost nothing while nothing records."""
    global _log, recording
    _log = next((logger for logger in _LOGGERS if logger.isEnabledFor(logging.DEBUG)), None)
    recording = bool(_listeners) or recorder is not None or _log is not None or profiler_running()


def emit(event: str, source: Source, nbytes: int | None = None) -> None:
    """Pass ``event`` (such as "unshard") and its source to the recorder, the source's name to listeners and the log.

    ``nbytes`` is the number of bytes that the event moves or frees.
    """
    name = source.name
    if recorder is not None:
        recorder.enter(source)
        recorder.heard(event, source)
    for listener in _listeners:
        listener(event, name)
    if _log is not None:
        size = "" if nbytes is None else f": {nbytes:,} bytes"
        _log.debug("FSDP::%s%s%s", event, f" ({name})" if name else "", size, stacklevel=2)


def span(event: str, source: Source) -> AbstractContextManager[object]:
    """Return a profiler range called ``FSDP::event (name)``, or an empty context if no profiler runs."""
    if recorder is not None:
        recorder.enter(source)
    if not profiler_running():
        return _nothing
    name = source.name
    return torch.profiler.record_function(f"FSDP::{event} ({name})" if name else f"FSDP::{event}")


def profiled(event: str) -> Callable[[_M], _M]:
    """Return a decorator that runs a method of an object with a ``name`` inside a profiler range.

    It disables functorch transforms meanwhile: they would wrap the tensors that the method resizes.
    """

    def decorate(method: _M) -> _M:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not (recording or functorch_active()):
                return method(self, *args, **kwargs)
            with without_functorch(), span(event, self):
                return method(self, *args, **kwargs)

        return run  # type: ignore[return-value]  # wraps() hides that the signature is method's

    return decorate


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


@contextlib.contextmanager
def recording_with(new: Recorder) -> Iterator[None]:
    """Replace the recorder by ``new`` inside the block."""
    global recorder
    before, recorder = recorder, new
    refresh()
    try:
        yield
    finally:
        recorder = before
        refresh()
