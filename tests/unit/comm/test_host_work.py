"""What an observer sees of collectives that the host waits for, with works that end when the test says so."""

from __future__ import annotations

import multiprocessing
import queue
import sys
import threading
import time
import warnings
from contextlib import nullcontext, suppress
from datetime import timedelta
from types import FrameType
from typing import Any
from unittest import mock

import pytest

from fsdp2 import _trace
from fsdp2.comm import host_work
from fsdp2.comm.host_work import HostWork, observe_waits


class Work:
    """A collective that is done after so many slices, and fails then if it has an error."""

    def __init__(self, slices: int, error: str = "") -> None:
        self.slices, self.error = slices, error

    def is_completed(self) -> bool:
        return self.slices == 0

    def wait(self, limit: timedelta) -> None:
        if self.slices:
            self.slices -= 1
            raise RuntimeError("not done yet")
        if self.error:
            raise RuntimeError(self.error)


class Observer:
    """Keeps what it is called with, and raises where it is told to."""

    def __init__(self, raises: str = "") -> None:
        self.seen: list[str] = []
        self.raises = raises

    def waiting(self) -> None:
        self.note("waiting")

    def waited(self) -> None:
        self.note("waited")

    def failed(self, error: RuntimeError) -> None:
        self.note(f"failed: {error}")

    def note(self, what: str) -> None:
        self.seen.append(what)
        if what == self.raises:
            raise RuntimeError("ranks differ")


@pytest.fixture(autouse=True)
def own_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back the observer of before, and look for it often."""
    monkeypatch.setattr(host_work, "_observer", host_work._observer)
    monkeypatch.setattr(host_work, "_SLICE", timedelta(milliseconds=10))


@pytest.fixture
def own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a thread of this test wait for collectives, should it end."""
    for name, value in (("_thread", None), ("_waits", queue.SimpleQueue())):
        monkeypatch.setattr(host_work._WaitElsewhere, name, value)


def wait(work: Any, observer: Observer) -> list[str]:
    """Wait for the work under an observer and return what that saw."""
    observe_waits(observer)
    HostWork(work).wait()
    return observer.seen


def test_a_short_wait_is_not_seen() -> None:
    assert wait(Work(0), Observer()) == []


def test_a_long_wait_is_seen_slice_by_slice_and_its_end_once() -> None:
    """What ends with a slice is done: nobody looks why it is not."""
    assert wait(Work(3), Observer()) == ["waiting", "waiting", "waited"]


@pytest.mark.parametrize(("slices", "before", "after"), [(0, [], []), (2, ["waiting"], ["waited"])])
def test_a_failure_is_seen_and_raised(slices: int, before: list[str], after: list[str]) -> None:
    observer = Observer()
    with pytest.raises(RuntimeError, match="connection closed"):
        wait(Work(slices, "connection closed"), observer)
    assert observer.seen == [*before, "failed: connection closed", *after]


def test_what_an_observer_raises_ends_the_wait() -> None:
    observer = Observer(raises="waiting")
    with pytest.raises(RuntimeError, match="ranks differ"):
        wait(Work(100), observer)
    assert observer.seen == ["waiting", "waited"]


def test_a_wait_is_recorded_with_what_it_was_for() -> None:
    """A recorder of steps learns when the host began to wait and for which collective, also where that fails."""
    recorder, works = mock.Mock(), [Work(1), Work(0, "connection closed")]
    with _trace.recording_with(recorder):
        HostWork(works[0]).wait()
        with pytest.raises(RuntimeError):
            HostWork(works[1]).wait()
    assert recorder.waited.call_args_list == [mock.call(recorder.moment(), work) for work in works]


@pytest.mark.parametrize("error", ["", "connection closed"])
def test_one_that_waits_whatever_the_limit_is_waited_for_elsewhere(error: str) -> None:
    done, by = threading.Event(), []

    class Blocking:
        def wait(self) -> None:
            by.append(threading.current_thread())
            done.wait()
            if error:
                raise RuntimeError(error)

    class Ends(Observer):
        def waiting(self) -> None:
            super().waiting()
            done.set()

    observer, work = Ends(), HostWork(Blocking(), takes_limit=False)
    observe_waits(observer)
    with pytest.raises(RuntimeError, match=error) if error else nullcontext():
        work.wait()
    assert observer.seen[0] == "waiting" and observer.seen[-1] == "waited" and observer.seen.count("waited") == 1
    assert [seen for seen in observer.seen if seen.startswith("failed")] == ([f"failed: {error}"] if error else [])
    for _ in range(2):  # once it is over, nobody waits again
        with pytest.raises(RuntimeError, match=error) if error else nullcontext():
            work.wait()
    assert len(by) == 1 and by[0] is not threading.current_thread()


class AtOnce:
    """A collective that ends at once, with an exception if it has one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        if self.error is not None:
            raise self.error


def wait_elsewhere(error: Exception | None = None) -> None:
    """Wait for such a collective in the thread that waits for all of them."""
    HostWork(AtOnce(error), takes_limit=False).wait()


@pytest.mark.usefixtures("own_thread")
def test_any_exception_of_a_wait_elsewhere_is_raised_here() -> None:
    """The thread ended with an exception that was no RuntimeError, and all later reductions waited for ever."""
    seen: list[str] = []

    def wait_twice() -> None:
        try:
            wait_elsewhere(ValueError("an error of another kind"))
        except ValueError as error:
            seen.append(str(error))
        wait_elsewhere()
        seen.append("done")

    waiter = threading.Thread(target=wait_twice, daemon=True)
    waiter.start()
    waiter.join(60)  # far more than a busy machine needs, and it ends at once where it is right
    assert seen == ["an error of another kind", "done"]


@pytest.mark.usefixtures("own_thread")
@pytest.mark.parametrize("line", range(24))
def test_an_interrupted_wait_elsewhere_can_be_waited_for_again(line: int) -> None:
    """``reset_iter_state()`` waits for what an interrupt has left; after one at the wrong line it waited for ever.

    That line was before the thread had the collective, or after the end of the collective had been noticed.
    """
    work, steps = HostWork(AtOnce(), takes_limit=False), iter(range(line + 1))

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != host_work.__file__:
            return None
        if event == "line" and next(steps, line) == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    with suppress(KeyboardInterrupt):
        work.wait()
    sys.settrace(before)
    deadline = time.monotonic() + 60  # it ends at once where it is right

    class Ends(Observer):
        def waiting(self) -> None:
            assert time.monotonic() < deadline

    observe_waits(Ends())
    work.wait()
    work.wait()


def test_a_forked_process_waits_in_a_thread_of_its_own() -> None:
    """A child of fork has none of its parent's threads, but took the parent's for its own and waited for ever."""
    wait_elsewhere()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process has threads is what is tested
        child = multiprocessing.get_context("fork").Process(target=wait_elsewhere)
        child.start()
    child.join(60)  # far more than a busy machine needs, and it ends at once where it is right
    ended = child.exitcode
    child.kill()
    child.join()
    assert ended == 0


def test_a_work_that_never_ends_holds_up_no_other() -> None:
    """An error may leave one that other ranks never launch. Later ones waited behind it until it timed out."""
    left = threading.Event()

    class Hanging:
        def wait(self) -> None:
            left.wait()

    class Ends(Observer):
        def waiting(self) -> None:
            super().waiting()
            assert len(self.seen) < 6000, "it waits for the one that was left"  # a minute

    observe_waits(Observer(raises="waiting"))
    with pytest.raises(RuntimeError, match="ranks differ"):
        HostWork(Hanging(), takes_limit=False).wait()  # type: ignore[arg-type]  # as far as it is one
    observe_waits(Ends())
    try:
        for _ in range(2):
            HostWork(mock.Mock(), takes_limit=False).wait()
    finally:
        left.set()
