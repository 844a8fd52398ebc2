"""What a root does between passes, without modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fsdp2.engine.passes import RootContext
from tests.support.streams import Device


def test_recovery_ends_what_the_backward_left_on_its_own_stream() -> None:
    """The next work on the stream that the backward ran on takes the memory of gradients that were being reduced."""
    with Device() as device:
        root: RootContext[Any] = RootContext(torch.device("cpu"), SimpleNamespace(name="", groups=[]))
        lanes, reductions, stream = root.comm.lanes, root.comm.reductions, device.Stream()
        with device.stream(stream):
            lanes.compute.enter_backward()
            gradients = torch.ones(3)
            with lanes.reduce.after(lanes.compute) as done:
                gradients.add(1)
            reductions.hold(done.event, [gradients])
            reductions.end(lanes.reduce, done.event)
        del gradients
        root.reset()
        with device.stream(stream):
            torch.ones(3)
    assert not device.mistakes
