"""Simulated streams, with times from a cost model.

``Clock`` is a dispatch mode. It puts all operators on simulated streams, one kernel after the other, and lets a
collective wait for the one before it on its communicator. The order of kernels, events and waits is that of the real
program. The host takes no time, and collectives send nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from fsdp2._torch.forecast import (
    FakeTensor,
    TorchDispatchMode,
    finished_work,
    makes_ranks_of_a_mesh,
    operator_schema,
    storage_key,
    unset_fake_temporarily,
)
from fsdp2.tools.forecast.cost import H100, Hardware, tensors_in
from fsdp2.tools.forecast.moving import Moving, moving_functional, moving_in_group
from fsdp2.tools.forecast.timeline import COMPUTE, Exposed, Span, axis_name

__all__ = ["Clock", "Event", "Ranges", "Stream"]


class Ranges(Protocol):
    """A listener for profiler ranges."""

    def began(self, name: str) -> None:
        """Note that a range was entered."""

    def ended(self) -> None:
        """Note that the innermost range was left."""


class Event:
    """The time at which a stream reaches a point."""

    def __init__(self, clock: Clock, time: float = 0.0, **unused: Any) -> None:
        self._clock, self.time = clock, time

    def record(self, stream: Stream | None = None) -> Event:
        """Take the time of ``stream``, by default the current one."""
        self.time = (stream or self._clock.current_stream()).time
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Let ``stream`` wait, by default the current one."""
        (stream or self._clock.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait, and so all kernels that it launches later."""
        self._clock.host = max(self._clock.host, self.time)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to ``end``."""
        return (end.time - self.time) * 1e3

    def query(self) -> bool:
        """Return True: the event counts as reached."""
        return True


class Stream:
    """A queue of kernels; ``time`` is when the last of them ends."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock, self.name, self.time = clock, name, 0.0

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event behind all kernels of the stream."""
        return (event or Event(self._clock)).record(self)

    def wait_event(self, event: Event | None) -> None:
        """Let later kernels run after ``event``."""
        if event is not None and event.time > self.time:
            if self.name == COMPUTE:
                self._clock.exposed.append(Exposed(self.time, event.time, self._clock.owner))
            self.time = event.time

    def wait_stream(self, stream: Stream) -> None:
        """Let later kernels run after all kernels of ``stream``."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Let the host wait."""
        self.record_event().synchronize()


class Clock(TorchDispatchMode):
    """A dispatch mode with simulated streams. It also takes the place of the device module that makes streams."""

    def __init__(self, hardware: Hardware = H100) -> None:
        super().__init__()
        self.hardware = hardware
        self.compute = Stream(self, COMPUTE)
        self.streams = [self.compute]
        self.spans: list[Span] = []
        self.exposed: list[Exposed] = []
        self.unit = ""
        """The unit that computes."""
        self._owner: str | None = None  # the unit that communicates or is waited for, if events name one
        self.host = 0.0
        self.stopped = False
        """True: kernels take no time."""
        self.Stream, self.Event = self._new_stream, self._new_event  # the names in torch.cuda
        self.ranges: Ranges | None = None
        """A listener for the profiler ranges that code opens."""
        self.axes: dict[str, str] = {}
        """The names of mesh dimensions by the names of their groups; others come from the group's description."""
        self._current = [self.compute]
        self._free: dict[str, float] = {}  # the time at which each communicator has finished its collectives
        self._works: dict[int, tuple[object, float]] = {}  # works that the host will wait for, and their end
        self._ready: dict[int, float] = {}  # by storage: the end of the functional collective that writes it

    # ---- functions of torch.cuda ----

    def _new_stream(self, device: Any = None, priority: int = 0, **unused: Any) -> Stream:
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def _new_event(self, **unused: Any) -> Event:
        return Event(self)

    def current_stream(self, device: Any = None) -> Stream:
        """Return the stream for kernels."""
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Put the kernels of the block on ``stream``."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def synchronize(self) -> None:
        """Let the host wait for all streams."""
        self.host = self.now

    @contextmanager
    def in_place_of(self, module: Any) -> Iterator[None]:
        """Replace the stream functions of ``module``, such as ``torch.cpu``, by those of the clock."""
        names = ("Stream", "Event", "current_stream", "stream")
        before = {name: getattr(module, name) for name in names}
        for name in names:
            setattr(module, name, getattr(self, name))
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(module, name, value)

    # ---- methods of a recorder ----

    @property
    def owner(self) -> str:
        """The unit that communicates or is waited for; by default the one that computes."""
        return self.unit if self._owner is None else self._owner

    def enter(self, name: str) -> None:
        """Attribute communication and waits from now on to the unit ``name``."""
        self._owner = name

    def lane(self) -> str:
        """Return the name of the current stream."""
        return self._current[-1].name

    def moment(self) -> float:
        """Return the time at which the current stream has finished its kernels."""
        return self._current[-1].time

    def launched(self, what: tuple[str, str], axis: Any, nbytes: int, began: Any, work: Any) -> None:
        """Let compute continue during the collective that was just started, if the host waits for ``work`` later.

        Exchanges of matrices are shown on a lane of their own, also where they share the stream of reductions.
        """
        if what[0] == "exchange":
            self.spans[-1] = replace(self.spans[-1], lane=what[0])
        if axis.backend == "gloo" and work is not None:
            self.spans[-1] = replace(self.spans[-1], lane=what[0])
            self._works[id(work)] = work, self.spans[-1].end
            self._current[-1].time = began
            while self.exposed and self.exposed[-1].end > began:  # compute does not wait here for what was just started
                self.exposed.pop()

    def waited(self, began: Any, work: Any = None) -> None:
        """Let compute wait for the end of ``work``. Waits of streams are handled by their events."""
        _, end = self._works.pop(id(work), (None, 0.0))
        self._current[-1].wait_event(Event(self, end))

    # ---- one step ----

    def begin(self) -> float:
        """Synchronize all streams, drop earlier spans, and return the time."""
        now = max(self.host, *(stream.time for stream in self.streams))
        for stream in self.streams:
            stream.time = now
        self.spans.clear()
        self.exposed.clear()
        return now

    @property
    def now(self) -> float:
        """The end of all work so far."""
        return max(self.host, *(stream.time for stream in self.streams))

    # ---- kernels ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and add its time."""
        kwargs = kwargs or {}
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented  # the kernels that these tensors call are counted instead
        if func.namespace == "profiler" and self.ranges is not None:
            if func.overloadpacket.__name__ == "_record_function_exit":
                self.ranges.ended()
            else:
                self.ranges.began(args[0])
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if not any(issubclass(kind, FakeTensor) for kind in types) and (tensors_in(args) or makes_ranks_of_a_mesh()):
            with unset_fake_temporarily():  # real tensors, such as the ranks of a mesh: code reads their values
                return func(*args, **kwargs)
        if func.overloadpacket.__name__ == "_local_scalar_dense" and _in_optimizer():
            return 1.0  # the number of steps so far: its value only scales the update
        out = func(*args, **kwargs)
        if func.namespace == "_c10d_functional":
            self._functional(func, args, out)
        elif not _is_free(func):
            self._run(COMPUTE, self.hardware.kernel_seconds(func, args, kwargs, out))
        return out

    def _run(self, kind: str, seconds: float) -> None:
        if self.stopped:
            return
        stream = self._current[-1]
        begin = max(stream.time, self.host)
        stream.time = begin + seconds
        if seconds:
            self.spans.append(Span(stream.name, kind, begin, stream.time, self.unit))

    def _communicate(self, moving: Moving, lane: str, ready: float) -> float:
        """Add a collective after the others of its group, by default on a lane of its own; return its end."""
        name = moving.group.group_name
        axis = self.axes.get(name) or axis_name(moving.group)
        begin = max(ready, self.host, self._free.get(name, 0.0))
        end = self._free[name] = begin + moving.seconds
        size = moving.group.size()
        self.spans.append(Span(lane or axis, moving.kind, begin, end, self.owner, moving.nbytes, size, axis))
        return end

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Count the bytes of a process group's collective without sending anything."""
        stream = self._current[-1]
        moving = moving_in_group(func, args, kwargs, self.hardware)
        end = self._communicate(moving, stream.name, stream.time)
        stream.wait_event(Event(self, end))  # on the compute stream it is a wait, as of any communication
        outputs = [finished_work() if "Work" in str(value.type) else args[0] for value in operator_schema(func).returns]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _functional(self, func: Any, args: Any, out: Any) -> None:
        """Let a functional collective run in parallel with compute until ``wait_tensor``."""
        waits, stream = func.overloadpacket.__name__ == "wait_tensor", self._current[-1]
        keys = [storage_key(tensor) for tensor in tensors_in(args if waits else out)]
        if waits:
            stream.wait_event(Event(self, max((self._ready.pop(key, 0.0) for key in keys), default=0.0)))
            return
        moving = moving_functional(func, args, out, self.hardware)
        if moving is not None:
            self._ready.update(dict.fromkeys(keys, self._communicate(moving, "", stream.time)))


def _in_optimizer() -> bool:
    """Return whether a step is under way. A flag set by hooks around it would stay set if the step raises."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("torch.optim"):
        frame = frame.f_back
    return frame is not None


def _is_free(func: Any) -> bool:
    """Return True if ``func`` only reads metadata, or makes a view or an uninitialized tensor."""
    if func.namespace == "prim" or func.overloadpacket.__name__.startswith(("empty", "new_empty", "_unsafe_view")):
        return True
    infos = [argument.alias_info for argument in operator_schema(func).arguments]
    return any(info is not None and not info.is_write for info in infos)
