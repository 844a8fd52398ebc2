"""Collectives that the host itself waits for (gloo), in slices of a second, between which an observer may look."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator
from datetime import timedelta
from threading import Event, Thread
from typing import Protocol

import torch.distributed as dist

from fsdp2 import _trace

__all__ = ["HostWork", "WaitObserver", "is_of_collective", "observe_waits", "waits_of_others"]

_SLICE = timedelta(seconds=1)


class WaitObserver(Protocol):
    """Sees waits that take long or fail; each method may raise a better error than the collective's."""

    def waiting(self) -> None:
        """Note that a slice is over, and the collective is not."""

    def waited(self) -> None:
        """Note that a wait of more than a slice is over."""

    def failed(self, error: RuntimeError) -> None:
        """Note that the collective failed."""


class _Nobody:
    def waiting(self) -> None: ...

    def waited(self) -> None: ...

    def failed(self, error: RuntimeError) -> None: ...


_observer: WaitObserver = _Nobody()


def observe_waits(observer: WaitObserver) -> None:
    """Let ``observer`` see the waits of this process from now on."""
    global _observer
    _observer = observer


def is_of_collective(error: BaseException | None) -> bool:
    """Return True if ``error`` is that of a collective which failed.

    gloo raises a plain RuntimeError without a code, so only its text tells.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


@contextlib.contextmanager
def waits_of_others() -> Iterator[None]:
    """Let the observer explain a failed collective of other code that runs inside a ``with`` block.

    An error that is not a collective's passes unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        if is_of_collective(error):
            _observer.failed(error)
        raise


class _WaitElsewhere:
    """A collective that a thread waits for, so that this one can stop waiting."""

    # One thread is enough as long as all of them end: the host waits for one work at a time.
    _waits: queue.SimpleQueue[_WaitElsewhere] = queue.SimpleQueue()
    _thread: Thread | None = None

    def __init__(self, work: dist.Work) -> None:
        self._work = work
        self._done = Event()
        self._is_queued = False
        self._is_waited_for = False  # a thread has come to it
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, limit: timedelta) -> None:
        if not self._is_queued:
            self._waits.put(self)
            self._is_queued = True  # afterwards: if an interrupt comes between the two, it is only waited for twice
            if _WaitElsewhere._thread is None:
                self._start_thread()
        if not self._done.wait(limit.total_seconds()):
            if not self._is_waited_for:
                self._start_thread()  # the other is at a work that an error has left, and that may never end
            raise RuntimeError("not done yet")
        if self._error is not None:
            raise self._error

    @classmethod
    def _start_thread(cls) -> None:
        cls._thread = Thread(target=cls._work_off, name="fsdp2-wait", daemon=True)
        cls._thread.start()

    @classmethod
    def _work_off(cls) -> None:
        while True:
            cls._waits.get()._finish()

    def _finish(self) -> None:
        self._is_waited_for = True
        try:
            self._work.wait()
        except Exception as error:  # of any type: the thread must live on, and whoever waits must learn of it
            self._error = error
        self._done.set()

    @classmethod
    def forget_thread(cls) -> None:
        """Start a new thread when one is needed: this process is a fork, which has none of its parent's threads."""
        cls._thread, cls._waits = None, queue.SimpleQueue()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_WaitElsewhere.forget_thread)


class HostWork:
    """A collective that the host itself waits for, until it ends or the observer finds out that it never will."""

    __slots__ = ("_started", "_work")

    def __init__(self, work: dist.Work, *, takes_limit: bool = True) -> None:
        """``takes_limit``: whether ``work.wait(timeout)`` respects its timeout."""
        self._started = work
        self._work = work if takes_limit else _WaitElsewhere(work)

    def wait(self) -> None:
        """Return when the collective is done.

        Raises:
            RuntimeError: it failed, or the observer of waits raised.
        """
        slices = 0
        began = None if _trace.recorder is None else _trace.recorder.moment()
        try:
            while True:
                completed = self._work.is_completed()
                try:
                    self._work.wait(_SLICE)
                    return
                except RuntimeError as error:
                    if completed:
                        _observer.failed(error)
                        raise
                # Either the slice is over, or the collective has just failed or ended; the next wait tells which.
                slices += 1
                if not self._work.is_completed():
                    _observer.waiting()
        finally:
            if began is not None and _trace.recorder is not None:
                _trace.recorder.waited(began, self._started)
            if slices:
                _observer.waited()
