"""Lanes: named streams, and the only place where one waits for another.

Every wait between lanes, and what it protects:

| lane that waits | for                                     | kind   | stated in                     |
|-----------------|-----------------------------------------|--------|-------------------------------|
| gather          | compute, at the root's forward          | order  | RootContext.begin_forward     |
| gather          | compute, at each unit's forward         | order  | FSDPState.pre_forward         |
| gather          | compute, at an explicit unshard         | order  | by_hand._start                |
| gather          | compute, at an explicit reshard         | order  | FSDPModule.reshard            |
| gather          | compute, shards were replaced           | order  | Residency._take_in_replaced   |
| gather          | compute, at reshard                     | memory | Residency._free_full          |
| replicate       | gather, before portions change          | both   | Portions.start_gather         |
| gather          | replicate, portions are there           | order  | Portions.let_read             |
| compute         | replicate, of portions not used         | memory | Portions.end_pass             |
| compute         | replicate, before shards are written    | memory | Residency.before_write        |
| copy            | compute, shards are written             | order  | HostCopies.start_copy         |
| gather          | copy, shards are on the device          | order  | gather.start_gather           |
| copy            | gather, before copies are dropped       | memory | HostCopies._drop              |
| compute         | gather, before full parameters are used | order  | gather.finish_gather          |
| compute         | gather, before extensions decode        | order  | GroupExtensions.decode        |
| gather          | compute, before sent inputs go          | memory | GroupExtensions.decode        |
| compute         | a hook's own stream, gradient finished  | order  | GroupGradients._arrives       |
| pack            | compute, gradients are finished         | order  | reduce._inputs                |
| reduce          | compute, gradients are finished         | order  | _CustomReduceScatter.start    |
| pack, reduce    | compute, then pack: rows are there      | order  | _EncodedExchange.start        |
| reduce          | pack, compute, inputs are there         | order  | _OverShards.start             |
| compute         | pack, reduce, before inputs go          | memory | Retained.make_room            |
| compute         | reduce, before the gather ahead         | memory | Retained.drop                 |
| compute         | pack, before packed gradients go        | memory | Retained.drop_packed          |
| pack            | reduce, before encoded rows go          | memory | Retained.drop_encoded         |
| replicate       | reduce, the shard is summed             | order  | _AllReduceOverReplicas.reduce |
| replicate, hook | the sum, before the user's hook         | order  | reduce.reduce_chunk           |
| reduce          | replicate, hook, before sums go         | memory | Retained.drop_sums            |
| compute         | all of them, at the end                 | order  | Reductions.finish             |
| compute         | all of them, after an error             | memory | Reductions.abandon            |
| inward          | compute, whose memory the slots are     | memory | Staging.begin                 |
| compute         | inward, the piece is on the device      | order  | Staging.use                   |
| outward         | compute, the piece was changed          | order  | Staging.send_back             |
| inward          | outward, before the slot's next piece   | memory | Staging.send_back             |
| exchange        | compute, pieces are packed              | order  | Layout.send                   |
| compute         | exchange, pieces have arrived           | order  | Arriving.wait                 |

*order*: the data must be ready. *memory*: from here on the allocator may reuse the block, for work behind this wait.
Memory goes back to the lane that allocated it, so no block is recorded on a second stream (only destructors do that,
``Lane.keep``): gathered parameters go back to the gather lane, encoded gradients to the pack lane, and copies of shards
on the host to the copy lane. The allocator has a pool for each stream, so memory that one lane has allocated, however
briefly, never serves another lane. That is why gradients are packed into memory of the compute stream, which frees
gradients and activations. Work that follows a collective is queued right behind it.

On a CPU a lane is program order: events are None, and waits do nothing. Collectives return works, which are waited for
as late as possible, so that they overlap compute.
"""

from __future__ import annotations

import time
from functools import cached_property
from types import TracebackType
from typing import Any

import torch

from fsdp2 import _trace
from fsdp2._torch.streams import current_key
from fsdp2.sharding.platform import platform

__all__ = ["Before", "ComputeLane", "Done", "Lane", "Lanes", "Moments", "current_stream"]


class Done:
    """The result of ``with lane.after(...) as done``: after the block, ``event`` marks its end (None on a CPU).

    Without a ``context``, the stream is the current one already.
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


def _device_module(device: torch.device) -> Any:
    """Return the module that makes the streams of ``device``; None for a CPU, which has none."""
    return platform().streams(device)


def current_stream(device: torch.device) -> Any:
    """Return the stream of ``device`` that work is put on now; None for a CPU."""
    module = _device_module(device)
    return None if module is None else module.current_stream(device)


def _on(stream: Any, module: Any) -> Any:
    """Return a context that makes ``stream`` the current one.

    A stream of CUDA is such a context itself, which must not be entered twice: the lane's object is nobody else's. The
    context of ``torch.cuda.stream`` costs 84 Python calls each time, because it asks for devices.
    """
    return stream if module is torch.cuda else module.stream(stream)


class Lane:
    """A stream that work is put on: ``with lane.after(other) as done: ...`` runs the block behind the other's work."""

    def __init__(self, device: torch.device, *, priority: int = 0, stream: Any = None) -> None:
        """``stream`` is a stream of the caller's; by default the lane makes one."""
        self._module = module = _device_module(device)
        if module is None:
            stream = None
        elif stream is None:
            stream = module.Stream(device=device, priority=priority)  # another device may be the current one
        elif isinstance(stream, torch.Stream):
            # Another object on the same stream: entering the caller's could enter it twice. It is one of the device's
            # class, because a torch.Stream silently ignores waits for events of torch.cuda.
            same = {name: getattr(stream, name) for name in ("stream_id", "device_index", "device_type")}
            stream = module.Stream(**same)
        self._stream = stream
        self.on_stream = self._stream is not None
        self.async_op = not self.on_stream  # collectives must be asked to run beside the host; a stream does so anyway

    def event(self) -> torch.Event | None:
        """Return an event behind all work put on this lane so far; None on a CPU."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, before: Before) -> None:
        """Let what comes next on this lane wait for ``before``."""
        if self._stream is not None and before is not None:
            self._stream.wait_event(before.event() if isinstance(before, (Lane, ComputeLane)) else before)

    def keep(self, tensor: torch.Tensor) -> None:
        """Let the memory of ``tensor``, which may be freed at once, be used again only behind what this lane does now.

        No lane waits, so the interpreter may call it where it collects garbage: on any stream, or inside a capture.
        """
        if isinstance(self._stream, torch.Stream):
            tensor.record_stream(self._stream)

    def after(self, before: Before = None) -> Done:
        """Wait for ``before``, then run the block on this lane."""
        if self._stream is None:
            return _HOST_DONE
        self.wait(before)
        return Done(self._stream, _on(self._stream, self._module))


class Moments:
    """Points in time: of the current stream of ``device``, or of the host if the device has no streams.

    A ``Recorder`` needs them; see that of ``record_steps``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = _device_module(device)

    def now(self) -> Any:
        """Return this point; on a stream, its time is known when the stream has reached it."""
        if self._module is None:
            return time.perf_counter()
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def wait(self) -> None:
        """Let the host wait until every stream has passed its moments."""
        if self._module is not None:
            self._module.synchronize()

    def between(self, start: Any, end: Any) -> float:
        """Return the seconds from one moment to another, both of which are over."""
        return end - start if self._module is None else start.elapsed_time(end) / 1e3  # type: ignore[no-any-return]  # a float


class ComputeLane:
    """The stream that the user's model runs on: the current one; in a backward, the one on which it entered a unit.

    Autograd runs a hook of a gradient on the stream on which the gradient's node was made. That may be another stream,
    if somebody kept the node. Its work counts as compute: each hook calls ``catch_up``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = _device_module(device)
        self.on_stream = self._module is not None
        self._backward: Any = None
        self._key = current_key(device) if self._module is torch.cuda else None
        self._known: tuple[Any, Any] = (None, None)  # the key of the current stream, and the stream with that key

    def _current(self) -> Any:
        if self._key is None:
            return self._module.current_stream(self._device)
        key = self._key()
        if self._known[1] is None or key != self._known[0]:
            self._known = key, self._module.current_stream(self._device)
        return self._known[1]

    @property
    def captured(self) -> bool:
        """True while a graph captures what is put on the current stream."""
        asked = getattr(self._module, "is_current_stream_capturing", None)
        return asked is not None and bool(asked())

    def enter_backward(self) -> None:
        """Take the current stream for that of the backward."""
        if self._module is not None:
            self._backward = self._current()

    def leave_backward(self) -> None:
        """Forget the backward's stream."""
        self._backward = None

    def catch_up(self) -> None:
        """Let the backward's stream wait for the current one, that of a hook, if they differ."""
        if self._backward is None:
            return
        current = self._current()
        if self._backward != current:
            self._backward.wait_event(current.record_event())

    def event(self) -> torch.Event | None:
        """Return an event behind all work put on the compute stream so far; None on a CPU."""
        if self._module is None:
            return None
        event: torch.Event = (self._backward or self._current()).record_event()
        return event

    def here(self) -> Done:
        """Run the block on the compute stream.

        Gradients are memory of the stream that backward runs on. If the block ran on a hook's own stream and dropped a
        gradient, the allocator could reuse its memory before the block has read it.
        """
        if self._module is None:
            return _HOST_DONE
        current = self._current()
        if self._backward is None or self._backward == current:
            return Done(current)
        return Done(self._backward, _on(self._backward, self._module))

    def after(self, event: torch.Event | None = None) -> Done:
        """Wait for ``event``, then run the block on the compute stream."""
        self.wait(event)
        return self.here()

    def wait(self, event: torch.Event | None) -> None:
        """Let the compute stream wait for ``event``."""
        if event is None or self._module is None:
            return
        current = self._current()
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

    Streams are made on first use, one set for each root: a device has few, and maps further ones onto these.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_streams = _device_module(device) is not None  # otherwise lanes are program order, and the host waits
        self.compute = ComputeLane(device)
        self.shards_written: torch.Event | None = None  # compute has written shards by then; copies of them wait for it

    # Compute waits for all lanes but ``replicate``. So their short kernels have priority over a long matrix product.
    @cached_property
    def gather(self) -> Lane:
        """The lane on which parameters are gathered."""
        return Lane(self._device, priority=-1)

    @cached_property
    def copy(self) -> Lane:
        """The lane on which shards on the host are copied to the device, while the gather before is on its way."""
        return Lane(self._device, priority=-1)

    def gather_after_compute(self, event: torch.Event | None = None) -> None:
        """Let gathers from now on wait for what compute has written, up to ``event`` or up to now."""
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
