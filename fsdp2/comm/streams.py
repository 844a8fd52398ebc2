"""Lanes: named streams, and the only place where one waits for another.

Every wait between lanes, and what it protects:

| lane that waits | for                               | kind   | stated in                     |
|-----------------|-----------------------------------|--------|-------------------------------|
| gather          | compute, at the root's forward    | order  | RootContext.begin_forward     |
| gather          | compute, at an explicit unshard   | order  | by_hand._start                |
| gather          | compute, shards were replaced     | order  | Residency._take_in_replaced   |
| gather          | compute, at reshard               | memory | Residency._free_full          |
| replicate       | gather, before portions change    | both   | Portions.start                |
| gather          | replicate, portions are there     | order  | Portions.let_read             |
| compute         | replicate, of portions not used   | memory | Portions.end_pass             |
| copy            | compute, shards are written       | order  | HostCopies.start              |
| gather          | copy, shards are on the device    | order  | gather.start_gather           |
| copy            | gather, before copies are dropped | memory | HostCopies._drop_oldest       |
| compute         | gather, before the full is used   | order  | gather.finish_gather          |
| compute         | gather, before extensions decode  | order  | GroupExtensions.decode        |
| gather          | compute, before sent inputs go    | memory | GroupExtensions.decode        |
| compute         | compute of a hook's own stream    | order  | ComputeLane.event             |
| compute         | a hook's own stream, packing      | order  | ComputeLane.here              |
| pack            | compute, gradients are finished   | order  | reduce._inputs                |
| pack, reduce    | compute, gradients are finished   | order  | _EncodedExchange.start        |
| reduce          | pack, compute, inputs are there   | order  | _OverShards.start             |
| compute         | pack, reduce, before inputs go    | memory | Retained.make_room            |
| compute         | reduce, before the gather ahead   | memory | Retained.drop                 |
| compute         | pack, before packed gradients go  | memory | Retained.drop_packed          |
| pack            | reduce, before encoded rows go    | memory | Retained.add                  |
| replicate       | reduce, the shard is summed       | order  | _OverCopies.run               |
| replicate, hook | the sum, before the user's hook   | order  | reduce.reduce_chunk           |
| reduce          | replicate, hook, before sums go   | memory | Retained.add                  |
| compute         | all of them, at the end           | order  | Retained.finish               |
| compute         | all of them, after an error       | memory | Retained.abandon              |

*order*: the data must be there. *memory*: the allocator may hand the block out again, and only to work that is behind
this wait. Memory goes back to the lane that it came from, so no block is ever recorded on a second stream: what is
gathered to the gather lane, encoded gradients to the pack lane, what shards on the host are copied into to the copy
lane. An allocator keeps memory for each stream, so what a lane takes for a moment is lost to all others for good. That
is why gradients are packed into memory of the compute stream, where they and activations are freed. A step that follows
a collective is queued right behind it.

On a CPU a lane is program order: events are None, waits do nothing, and collectives return works that are waited for
late, which is what overlaps them with compute there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any

import torch

from fsdp2 import _trace

__all__ = ["Before", "ComputeLane", "Done", "Lane", "Lanes", "Moments", "Retained", "simulated_streams"]


class Done:
    """The result of ``with lane.after(...) as done``: after the block, ``event`` marks its end (None on a CPU).

    Without a ``context`` the stream is the current one already.
    """

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
        if self._stream is not None:
            self.event = self._stream.record_event()
        if self._context is not None:
            self._context.__exit__(kind, error, tb)


_HOST_DONE = Done()


_simulated: list[Any] = []


@contextmanager
def simulated_streams(module: Any) -> Iterator[None]:
    """Make the lanes of the block on streams of ``module``, which has what ``torch.cuda`` has, whatever the device.

    With None they are those of a CPU.
    """
    _simulated.append(module)
    try:
        yield
    finally:
        _simulated.pop()


def _device_module(device: torch.device) -> Any:
    """Return the module that makes the streams of ``device``; None for a CPU, which has none."""
    if _simulated:
        return _simulated[-1]
    return None if device.type == "cpu" else torch.get_device_module(device)


class Lane:
    """A stream that work is put on: ``with lane.after(other) as done: ...`` runs the block behind the other's work."""

    def __init__(self, device: torch.device, *, priority: int = 0, stream: Any = None) -> None:
        """``stream`` is the caller's own; by default the lane makes one."""
        self._module = _device_module(device)
        if self._module is not None and stream is None:
            stream = self._module.Stream(device=device, priority=priority)  # another device may be the current one
        self._stream = None if self._module is None else stream
        self.on_stream = self._stream is not None
        self.async_op = not self.on_stream  # collectives must be asked to run beside the host; a stream does so anyway

    def event(self) -> torch.Event | None:
        """Marks all work put on this lane so far."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, before: Before) -> None:
        """Let what comes next on this lane wait for ``before``."""
        if self._stream is not None and before is not None:
            self._stream.wait_event(before.event() if isinstance(before, (Lane, ComputeLane)) else before)

    def after(self, before: Before = None) -> Done:
        """Wait for ``before``, then run the block on this lane."""
        if self._stream is None or self._module is None:
            return _HOST_DONE
        self.wait(before)
        return Done(self._stream, self._module.stream(self._stream))


class Moments:
    """Points in time: of the current stream of ``device``, or of the host where there are no streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = _device_module(device)

    def now(self) -> Any:
        """This point; on a stream it is known when the stream has come there."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Let the host wait until all moments are over, of every stream."""
        if self._module is not None:
            self._module.synchronize()

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one moment to another, both of which are over."""
        return end - start if self._module is None else start.elapsed_time(end) / 1e3  # type: ignore[no-any-return]


class ComputeLane:
    """The stream the user's model runs on: the current one, and in a backward the one that it entered a unit on.

    Hooks of gradients run on the stream that their autograd node was made on, which may be another if somebody kept
    the node. What they put there counts as compute, and both streams wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = _device_module(device)
        self._backward: Any = None

    def enter_backward(self) -> None:
        """Backward runs on the current stream from now on."""
        if self._module is not None:
            self._backward = self._module.current_stream(self._device)

    def leave_backward(self) -> None:
        """Backward is over."""
        self._backward = None

    def event(self) -> torch.Event | None:
        """Marks all work put on the compute stream so far."""
        if self._module is None:
            return None
        current = self._module.current_stream(self._device)
        event: torch.Event = current.record_event()
        if self._backward is None or self._backward == current:
            return event
        self._backward.wait_event(event)
        both: torch.Event = self._backward.record_event()
        return both

    def here(self) -> Done:
        """Run the block on the compute stream, behind all that counts as compute.

        Gradients are memory of the stream that backward runs on. On a hook's own stream a gradient that is dropped in
        the block would be used again before the block has read it.
        """
        if self._module is None:
            return _HOST_DONE
        current = self._module.current_stream(self._device)
        if self._backward is None or self._backward == current:
            return Done(current)
        self._backward.wait_event(current.record_event())
        return Done(self._backward, self._module.stream(self._backward))

    def wait(self, event: torch.Event | None) -> None:
        """Let the compute stream wait for ``event``."""
        if event is None or self._module is None:
            return
        current = self._module.current_stream(self._device)
        recorder = _trace.recorder
        began = None if recorder is None else recorder.moment()
        current.wait_event(event)
        if recorder is not None:
            recorder.waited(began)
        if self._backward is not None and self._backward != current:
            self._backward.wait_event(event)


Before = torch.Event | Lane | ComputeLane | None
"""A lane waits for an event, or for all work that was put on another lane so far."""


class Lanes:
    """The lanes of one root: compute, copy, gather, pack, reduce, replicate (the all-reduce of hybrid sharding).

    Streams are made when they are first used, by the root alone: a device has few, and shares them out beyond these.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_streams = _device_module(device) is not None  # else a lane is program order, and the host waits
        self.compute = ComputeLane(device)
        self.shards_written: torch.Event | None = None

    @cached_property
    def gather(self) -> Lane:
        """The lane on which parameters are gathered."""
        return Lane(self._device, priority=-1)

    @cached_property
    def copy(self) -> Lane:
        """The lane on which shards on the host are copied to the device, while the gather before is on its way."""
        return Lane(self._device, priority=-1)

    def gather_after_compute(self, event: torch.Event | None = None) -> None:
        """Let gathers that start from now on read what compute has written, until ``event`` or until now."""
        self.shards_written = event or self.compute.event()
        self.gather.wait(self.shards_written)

    @cached_property
    def pack(self) -> Lane:
        """The lane on which gradients are packed, while the chunk before is on its way."""
        return Lane(self._device, priority=-1)

    @cached_property
    def reduce(self) -> Lane:
        """The lane on which gradients are summed over the shard axis."""
        return Lane(self._device, priority=-1)

    @cached_property
    def replicate(self) -> Lane:
        """The lane on which gradients are summed, and portions are gathered, over the replicate axis."""
        return Lane(self._device)


class Retained:
    """Operations in flight, and what they still need: bounded, because it is memory.

    An operation is a generator that yields where the host has to wait. On a CPU that is wherever it communicates: its
    inputs stay alive in its frame, and the oldest is carried one step on when there are more than ``limit``, or than
    ``limit_bytes`` of gradients. On streams it runs to its end at once, and what stays alive is what it named with
    ``retain``, up to ``limit_bytes``: compute waits for the oldest before more is held.
    """

    def __init__(self, lanes: Lanes, limit: int = 1) -> None:
        self.lanes = lanes
        self.limit, self.limit_bytes = limit, 0
        # On a CPU: operations at their first wait, with the bytes of their gradients, and those that are past it (they
        # wait for the replicate axis). Of either no more than ``limit`` are in flight.
        self._started: deque[tuple[Generator[None, None, None], int]] = deque()
        self._flying_bytes = 0
        self._advanced: deque[Generator[None, None, None]] = deque()
        # On streams: memory of the compute stream that a lane still reads, of which ``packed`` are gradients that are
        # copied beside compute; their bytes, which each chunk asks for; and memory of the pack and the reduce lane.
        self._inputs: deque[_Retention] = deque()
        self.packed: deque[_Retention] = deque()
        self._retained_bytes = 0
        self._rows: deque[_Retention] = deque()
        self._sums: deque[_Retention] = deque()
        self._used: dict[Lane, None] = {}  # the lanes that operations are on, in order

    def add(self, operation: Generator[None, None, None], nbytes: int = 0) -> None:
        """Start ``operation`` on gradients of so many bytes, and keep it in flight."""
        if not self.lanes.on_streams:
            while self._is_full(nbytes):
                self._advance_oldest()
        else:
            self._drop_rows()
            self._drop_sums()
        if _resume(operation):
            self._started.append((operation, nbytes))
            self._flying_bytes += nbytes

    def _is_full(self, nbytes: int) -> bool:
        too_many = len(self._started) >= self.limit
        return bool(self._started) and (too_many or self._flying_bytes + nbytes > self.limit_bytes)

    def make_room(self, nbytes: int) -> None:
        """Let compute wait for the oldest operations, until ``nbytes`` more may be held."""
        while (self.packed or self._inputs) and self._retained_bytes + nbytes > self.limit_bytes:
            self._drop_oldest()

    def drop(self) -> None:
        """Give back all that is held of the compute stream's memory, which waits for it."""
        while self.packed or self._inputs:
            self._drop_oldest()

    def drop_packed(self) -> None:
        """Give back the gradients that were copied beside compute, which waits for that."""
        while self.packed:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = (self.packed or self._inputs).popleft()
        self._retained_bytes -= oldest.nbytes
        # Before the references go: the allocator gives this memory to the next kernel of the compute stream.
        self.lanes.compute.wait(oldest.event)

    def _drop_rows(self) -> None:
        """Let the pack lane wait until all rows but the last were read: the communication of these may still run."""
        while len(self._rows) > 1:
            self.lanes.pack.wait(self._rows.popleft().event)

    def _drop_sums(self) -> None:
        """Let the reduce lane wait until all sums but the last were read."""
        while len(self._sums) > 1:
            self.lanes.reduce.wait(self._sums.popleft().event)

    def retain(self, event: torch.Event | None, tensors: list[torch.Tensor], nbytes: int) -> None:
        """Keep ``tensors``, ``nbytes`` of the compute stream, until ``event`` of the lane that reads them."""
        if event is not None and tensors:
            self._inputs.append(_Retention(event, tensors, nbytes))
            self._retained_bytes += nbytes

    def retain_packed(self, event: torch.Event | None, tensors: list[torch.Tensor], nbytes: int) -> None:
        """Keep gradients, ``nbytes`` of the compute stream, until ``event`` of the pack lane, which copies them."""
        if event is not None and tensors:
            self.packed.append(_Retention(event, tensors, nbytes))
            self._retained_bytes += nbytes

    def retain_rows(self, event: torch.Event | None, rows: list[torch.Tensor]) -> None:
        """Keep ``rows``, of the pack lane, until ``event`` of the reduce lane."""
        if event is not None:
            self._rows.append(_Retention(event, rows))

    def retain_sums(self, event: torch.Event | None, sums: torch.Tensor) -> None:
        """Keep ``sums``, of the reduce lane, until ``event`` of the lane that they went to."""
        if event is not None:
            self._sums.append(_Retention(event, [sums]))

    def use(self, lane: Lane) -> Lane:
        """Return ``lane``, on which an operation will put work that ``finish`` has to wait for."""
        self._used[lane] = None
        return lane

    def _advance_oldest(self) -> None:
        oldest, nbytes = self._started.popleft()
        self._flying_bytes -= nbytes
        if _resume(oldest):
            self._advanced.append(oldest)
        while len(self._advanced) > self.limit:
            _exhaust(self._advanced.popleft())

    def finish(self) -> None:
        """Carry every operation to its end, oldest first."""
        while self._started:
            self._advance_oldest()
        while self._advanced:
            _exhaust(self._advanced.popleft())
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        # All that is on them, since an operation that raised has no end: lanes may still read its inputs and sums.
        for lane in self._used:
            self.lanes.compute.wait(lane.event())
        self._used.clear()
        self._inputs.clear()
        self.packed.clear()
        self._retained_bytes = 0
        self._rows.clear()
        self._sums.clear()

    def abandon(self) -> None:
        """Let communication end and throw the results away."""
        operations: list[Generator[None, None, None]] = [
            *self._advanced,
            *[operation for operation, _ in self._started],
        ]
        self._started.clear()
        self._flying_bytes = 0
        self._advanced.clear()
        try:
            with ExitStack() as closing:  # closes all of them, also where waiting for one raises
                for operation in reversed(operations):
                    closing.callback(operation.close)
        finally:
            self._wait_for_all()


@dataclass
class _Retention:
    """Memory that must not be used again before ``event``."""

    event: torch.Event
    tensors: list[torch.Tensor]
    nbytes: int = 0


def _resume(operation: Generator[None, None, None]) -> bool:
    """Return whether ``operation`` is still in flight after one more step."""
    try:
        next(operation)
    except StopIteration:
        return False
    return True


def _exhaust(operation: Generator[None, None, None]) -> None:
    while _resume(operation):
        pass
