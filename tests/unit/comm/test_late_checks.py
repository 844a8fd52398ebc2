"""Checks that a device makes, and whose results the host reads later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from fsdp2.comm.late_checks import LateChecks
from fsdp2.comm.streams import ComputeLane
from tests.support.streams import Device, Event
from tests.unit.comm.transforms import in_jvp

YES = torch.tensor([True])


@contextmanager
def checking() -> Iterator[tuple[Device, LateChecks]]:
    """Yield a device, which says whether it is captured as CUDA does, and its checks."""
    with Device() as device:
        device.is_current_stream_capturing = lambda: bool(device.capture)  # type: ignore[attr-defined]
        yield device, LateChecks(ComputeLane(torch.device("cpu")))


def test_each_failure_is_named_once() -> None:
    """In the order in which they were made, and only those that have failed."""
    with checking() as (device, checks):
        for name in ("wrong", "another", "wrong"):
            checks.add([("right", 1), (name, 2), ("right too", 1)], torch.tensor([False, False, True, False]))
            assert checks.failed() == []
        checks.end_forward()
        checks.add([("a third", 1)], YES.clone())
        checks.end_forward()
        assert checks.failed() == ["wrong", "another", "a third"]
        assert checks.failed() == []
        assert not device.host_waits


def test_what_has_not_arrived_is_asked_for_again() -> None:
    """The host waits for nothing, and results arrive in order."""
    with checking() as (_, checks):
        for name in ("first", "second"):
            checks.add([(name, 1)], YES.clone())
            checks.end_forward()
        with mock.patch.object(Event, "query", side_effect=[True, False]):
            assert checks.failed() == ["first"]
        assert checks.failed() == ["second"]


def test_they_are_due_behind_the_first_forward_and_then_now_and_then() -> None:
    """A graph would repeat them, and nobody would read the results."""
    with checking() as (device, checks):
        due = []
        for forward in range(40):
            if checks.are_due:
                due.append(forward)
            with device.capturing():
                assert not checks.are_due
            checks.end_forward()
        assert due == [1, 2, 17, 34]


def test_a_capture_asks_for_no_result() -> None:
    """CUDA refuses to ask for an event that is not part of the capture, which would be lost."""
    with checking() as (device, checks):
        checks.add([("wrong", 1)], YES.clone())
        checks.end_forward()
        with device.capturing():
            assert checks.failed() == []
        assert checks.failed() == ["wrong"]


def test_a_capture_sends_no_results_of_a_forward_that_broke_off() -> None:
    """Each replay would send them again, and nobody may ask for the event."""
    with checking() as (device, checks):
        checks.add([("wrong", 1)], YES.clone())
        with device.capturing():
            checks.end_forward()
        checks.end_forward()
        assert checks.failed() == []


def test_results_of_a_forward_inside_transforms_are_read_outside() -> None:
    """They are made in one call, and read in another one."""
    found: list[str] = []
    with checking() as (_, checks):
        checks.add([("wrong", 1)], YES.clone())
        in_jvp(lambda: in_jvp(checks.end_forward))
        in_jvp(lambda: found.extend(checks.failed()))
    assert found == ["wrong"]
