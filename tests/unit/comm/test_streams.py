"""Lanes, on a CPU and on a simulated device with streams."""

from __future__ import annotations

import pytest
import torch

from fsdp2.comm.streams import ComputeLane, Lane, Lanes
from tests.support.streams import Device

CPU = torch.device("cpu")


# ---- lanes ----


def test_a_cpu_lane_is_program_order() -> None:
    """Whatever stream it is given, and also after an error."""
    lane, log = Lane(CPU, priority=-1, stream=object()), []
    with pytest.raises(KeyError), lane.after():
        raise KeyError("inside")
    with lane.after(None) as done:
        log.append("inside")
    log.append("behind")
    assert log == ["inside", "behind"]
    assert done.event is None
    assert lane.async_op


def test_lanes_of_a_cpu_have_no_events() -> None:
    lanes, compute = Lanes(CPU), ComputeLane(CPU)
    with lanes.gather.after(lanes.compute) as outer, lanes.reduce.after(outer.event) as inner:
        pass
    assert outer.event is None and inner.event is None
    assert compute.event() is None
    assert compute.wait(None) is None


# ---- streams ----


def test_lanes_are_made_when_they_are_used() -> None:
    """Each state has lanes until a root takes it in; a device has thirty-two streams, shared by whoever asks."""
    with Device() as device:
        lanes = Lanes(CPU)
        lanes.compute.wait(lanes.compute.event())
        assert device.streams == [device.compute]
        with lanes.gather.after(), lanes.gather.after():
            pass
        assert len(device.streams) == 2


def test_lanes_are_made_on_the_device_of_the_mesh() -> None:
    """Another device may be the current one when a lane is first used; the lane's stream was made there."""
    second = torch.device("cuda", 1)
    with Device() as device:
        lanes = Lanes(second)
        with lanes.gather.after(lanes.compute):
            pass
        lanes.compute.enter_backward()
    assert device.asked_for == {second}


def test_in_a_backward_compute_is_the_stream_that_it_entered_on() -> None:
    """The hooks of gradients may run on the stream of an earlier iteration: what they put there is waited for too."""
    with Device() as device:
        compute, stale, later = Lanes(CPU).compute, device.Stream(), device.Stream()
        compute.enter_backward()
        with device.stream(stale):
            torch.zeros(3)
            compute.catch_up()
            event = compute.event()
            assert event is not None and stale.name in event.clocks
            with device.stream(later):
                torch.zeros(3)
                done = later.record_event()
            compute.wait(done)
        for stream in (device.compute, stale):
            assert later.name in stream.clocks and stale.name in stream.clocks
        compute.leave_backward()
        with device.stream(stale):
            torch.zeros(3)
            compute.catch_up()
        assert device.compute.clocks[stale.name] < stale.clocks[stale.name]


def test_what_a_hook_has_written_on_its_own_stream_is_there_on_the_stream_of_the_backward() -> None:
    """Packing runs on the backward's stream, and reads the gradient that autograd has finished on the hook's."""
    with Device() as device:
        compute, stale = Lanes(CPU).compute, device.Stream()
        compute.enter_backward()
        with device.stream(stale):
            gradient = torch.ones(3)
            compute.catch_up()
            with compute.here() as done:
                assert device.current_stream() is device.compute
                gradient + 1
        assert done.event is not None and stale.name in done.event.clocks
    assert not device.mistakes
