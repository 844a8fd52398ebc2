"""One seam for seeing what fsdp2 does: profiler ranges, a debug log, and the events tests listen to."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from fsdp2._torch.autograd import functorch_active, profiler_running, without_functorch

__all__ = ["Recorder", "emit", "listening", "owned", "profiled", "recording_with", "refresh", "span"]

_M = TypeVar("_M", bound=Callable[..., Any])


class Recorder(Protocol):
    """Notes when collectives run and what waits for them, and for which unit."""

    def enter(self, name: str) -> None:
        """What communicates or waits from now on is for the unit ``name``."""

    def moment(self) -> Any:
        """This point in time on the stream that work is put on; without streams, of the host."""

    def launched(self, what: tuple[str, str], axis: Any, nbytes: int, began: Any, work: Any) -> None:
        """``what`` (lane, kind) was started at ``began``, over ``axis``; the host may have to wait for ``work``."""

    def waited(self, began: Any, work: Any = None) -> None:
        """Compute waited from ``began`` until now: on streams, or the host for ``work``."""


# The second is torch's own, which TORCH_LOGS=+fsdp turns on.
_LOGGERS = (logging.getLogger("fsdp2"), logging.getLogger("torch.distributed.fsdp.fully_shard"))
_listeners: list[Callable[[str, str], None]] = []
_log: logging.Logger | None = None  # the one of them whose debug level is on
_nothing = contextlib.nullcontext()
recorder: Recorder | None = None
recording = False  # whether anybody sees events or ranges; others need not call


def refresh() -> None:
    """Look who records; once per pass, so that events cost next to nothing when nobody does."""
    global _log, recording
    _log = next((logger for logger in _LOGGERS if logger.isEnabledFor(logging.DEBUG)), None)
    recording = bool(_listeners) or recorder is not None or _log is not None or profiler_running()


def emit(event: str, name: str, nbytes: int | None = None) -> None:
    """Call listeners with ``event`` (such as "unshard") and the group ``name`` and log both, with the bytes it moves
    or frees."""
    if recorder is not None:
        recorder.enter(name)
    for listener in _listeners:
        listener(event, name)
    if _log is not None:
        size = "" if nbytes is None else f": {nbytes:,} bytes"
        _log.debug("FSDP::%s%s%s", event, f" ({name})" if name else "", size, stacklevel=2)


def span(event: str, name: str) -> AbstractContextManager[object]:
    """A profiler range called ``FSDP::event (name)``, or nothing when no profiler runs."""
    if recorder is not None:
        recorder.enter(name)
    if not profiler_running():
        return _nothing
    return torch.profiler.record_function(f"FSDP::{event} ({name})" if name else f"FSDP::{event}")


def profiled(event: str) -> Callable[[_M], _M]:
    """Run a method of an object with a ``name`` as a profiler range.

    Transforms of functorch are off meanwhile: they would wrap the tensors that it resizes.
    """

    def decorate(method: _M) -> _M:
        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not (recording or functorch_active()):
                return method(self, *args, **kwargs)
            with without_functorch(), span(event, self.name):
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
    """Let ``new`` record what runs in the block, in place of whoever does around it."""
    global recorder
    before, recorder = recorder, new
    refresh()
    try:
        yield
    finally:
        recorder = before
        refresh()


def owned(name: str, operation: Generator[None, None, None]) -> Generator[None, None, None]:
    """``operation``, which belongs to the unit ``name`` whenever it goes on."""
    try:
        while True:
            if recorder is not None:
                recorder.enter(name)
            next(operation)
            yield
    except StopIteration:
        return
    finally:
        operation.close()
