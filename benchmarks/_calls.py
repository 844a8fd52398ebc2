"""Python calls of a step, without those that are the simulation's own."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

import torch._compile
from torch._library import simple_registry
from torch._subclasses import fake_tensor

from fsdp2.tools.forecast import clock, memory

SIMULATION = {clock.__file__, memory.__file__, fake_tensor.__file__}
"""What is called below a function of these files would not be called on a device."""
UNSEEN = {(simple_registry.__file__, "find_torch_dispatch_rule"), (weakref.__file__, "remove")}
"""So is this: how torch looks for what a mode does with an operator, and how a dead fake tensor is forgotten."""


def calls_of(step: Callable[[], object]) -> dict[str, int]:
    """How often one step calls a function of Python (`call`) or of C (`c_call`).

    A method of a simulated stream counts as one call. What dispatch modes do with an operator does not count.
    """
    events = {"call": 0, "c_call": 0}
    inside: list[FrameType] = []  # the outermost frame of the simulation, while it runs

    def note(frame: FrameType, event: str, argument: object) -> None:
        if inside:
            if event == "return" and frame is inside[0]:
                inside.clear()
            return
        if event == "call":
            code = _code(frame)
            unseen = (code.co_filename, code.co_name) in UNSEEN
            if unseen or code.co_filename in SIMULATION:
                inside.append(frame)
                if unseen or code.co_name.startswith(("_", "<")):
                    return  # what a dispatch mode does with an operator, or the callback of a storage that died
        if event in events:
            events[event] += 1

    with no_garbage():  # what is freed when it happens to run would count as calls of this step
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
    return events


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Collect garbage before and after the block, not in it, where it would free memory at some random moment."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        gc.collect()


def _code(frame: FrameType) -> CodeType:
    """What a frame runs; torch wraps the methods of dispatch modes in a function of its own."""
    code = frame.f_code
    if code.co_filename == torch._compile.__file__ and code.co_name == "inner":
        return frame.f_locals["fn"].__code__
    return code
