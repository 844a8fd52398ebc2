"""Lanes: named streams, and the only place where one waits for another.

Every wait between lanes, and what it protects:

| lane that waits | for                               | kind   | stated in                     |
|-----------------|-----------------------------------|--------|-------------------------------|
| gather          | compute, at the root's forward    | order  | RootContext.begin_forward     |
| gather          | compute, at an explicit unshard   | order  | FSDPModule.unshard            |
| gather          | compute, shards were replaced     | order  | FSDPParamGroup.unshard        |
| gather          | compute, at reshard               | memory | FSDPParamGroup.reshard        |
| compute         | gather, before the full is used   | order  | gather.finish_gather          |
| reduce          | compute, gradients are packed     | order  | reduce.reduce_chunk           |
| compute         | reduce, before inputs are dropped | memory | reduce.reduce_chunk           |
| replicate       | reduce, the shard is summed       | order  | reduce.reduce_chunk           |
| compute         | reduce, at the end of backward    | order  | RootContext.end_backward      |

*order*: the data must be there. *memory*: the allocator may hand the block out again, and only to work that is behind
this wait. Gather memory is allocated and freed on the gather lane, so no block is ever recorded on a second stream.

On a CPU a lane is program order: events are None, waits do nothing, and collectives return works that are waited for
late, which is what overlaps them with compute there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from fsdp2.comm.watch import HostWork

__all__ = ["ComputeLane", "Done", "InFlight", "Lane", "Lanes", "Retained"]

T = TypeVar("T")


class Done:
    """What ``with lane.after(...) as done`` gives: after the block, ``event`` marks its end (None on a CPU)."""

    __slots__ = ("_context", "_stream", "event")

    def __init__(self, stream: Any = None, context: Any = None) -> None:
        self.event: torch.Event | None = None
        self._stream = stream
        self._context = context

    def __enter__(self) -> Done:
        if self._context is not None:
            self._context.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._context is not None:
            self.event = self._stream.record_event()
            self._context.__exit__(kind, error, tb)


_HOST_DONE = Done()


def _device_module(device: torch.device) -> Any:
    """Where the streams of ``device`` come from; None on a CPU, which has none."""
    return None if device.type == "cpu" else torch.get_device_module(device)


class Lane:
    """A stream that work is put on: ``with lane.after(event) as done: ...`` runs the block behind ``event``."""

    def __init__(self, device: torch.device, *, priority: int = 0, stream: Any = None) -> None:
        """``stream`` is the caller's own; by default the lane makes one."""
        self._module = _device_module(device)
        self._stream = None if self._module is None else stream or self._module.Stream(priority=priority)

    @property
    def async_op(self) -> bool:
        """Whether collectives on this lane must be asked to run beside the host (a stream does so anyway)."""
        return self._stream is None

    def wait(self, event: torch.Event | None) -> None:
        """Let what comes next on this lane wait for ``event``."""
        if event is not None and self._stream is not None:
            self._stream.wait_event(event)

    def after(self, *events: torch.Event | None) -> Done:
        """Wait for ``events``, then run the block on this lane."""
        if self._stream is None or self._module is None:
            return _HOST_DONE
        for event in events:
            self.wait(event)
        return Done(self._stream, self._module.stream(self._stream))


class ComputeLane:
    """The stream the user's model runs on: whatever is current when it is asked."""

    def __init__(self, device: torch.device) -> None:
        self._module = _device_module(device)

    def event(self) -> torch.Event | None:
        """Marks all work put on the compute stream so far."""
        return None if self._module is None else self._module.current_stream().record_event()

    def wait(self, event: torch.Event | None) -> None:
        """Let the compute stream wait for ``event``."""
        if event is not None and self._module is not None:
            self._module.current_stream().wait_event(event)


class Lanes:
    """The four lanes of one root: compute, gather, reduce, replicate (the all-reduce of hybrid sharding)."""

    def __init__(self, device: torch.device) -> None:
        self.compute = ComputeLane(device)
        self.gather = Lane(device, priority=-1)
        self.reduce = Lane(device, priority=-1)
        self.replicate = Lane(device)


@dataclass
class InFlight(Generic[T]):
    """A value that a collective is still filling."""

    value: T
    works: Sequence[dist.Work | HostWork]
    event: torch.Event | None

    def wait(self, compute: ComputeLane) -> T:
        """The filled value; on a CPU this blocks, elsewhere the compute stream waits."""
        for work in self.works:
            work.wait()
        self.works = ()
        compute.wait(self.event)
        return self.value


class Retained:
    """At most ``limit`` operations in flight: the oldest is carried one step on as soon as there are more.

    An operation is a generator that yields at each point where it waits for communication. Its inputs stay alive in
    its frame, so the limit also bounds memory.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._steps: deque[Generator[None, None, None]] = deque()
        self._later: deque[Generator[None, None, None]] = deque()

    def add(self, operation: Generator[None, None, None]) -> None:
        """Start ``operation`` and keep it in flight."""
        while len(self._steps) >= self.limit:
            self._advance_oldest()
        if _step(operation):
            self._steps.append(operation)

    def _advance_oldest(self) -> None:
        oldest = self._steps.popleft()
        if _step(oldest):
            self._later.append(oldest)
        while len(self._later) > self.limit:
            _exhaust(self._later.popleft())

    def finish(self) -> None:
        """Carry every operation to its end, oldest first."""
        while self._steps:
            self._advance_oldest()
        while self._later:
            _exhaust(self._later.popleft())

    def abandon(self) -> None:
        """Let communication end and throw the results away."""
        operations: Iterable[Generator[None, None, None]] = [*self._later, *self._steps]
        self._steps.clear()
        self._later.clear()
        for operation in operations:
            operation.close()


def _step(operation: Generator[None, None, None]) -> bool:
    """Whether ``operation`` is still in flight after one more step."""
    try:
        next(operation)
    except StopIteration:
        return False
    return True


def _exhaust(operation: Generator[None, None, None]) -> None:
    while _step(operation):
        pass
