"""Which kernels and collectives use bytes that another stream may still be using, watched on a real device."""

from __future__ import annotations

import bisect
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from fsdp2._torch.forecast import TorchDispatchMode, operator_schema
from fsdp2.tools.forecast.cost import tensors_in

__all__ = ["Ordering"]

_Clock = dict[Any, int]
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WITHOUT_KERNEL = re.compile(r"(^new_|empty|_like$|^resize_|^set_$)")
_HOST = "the host"


class _Access(NamedTuple):
    """Who used some bytes, and when."""

    stream: Any
    time: int
    what: str


class _Piece:
    """Bytes that were always used together."""

    __slots__ = ("high", "low", "reads", "write")

    def __init__(self, low: int, high: int, write: _Access | None = None, reads: dict[Any, _Access] | None = None):
        self.low, self.high, self.write, self.reads = low, high, write, reads or {}


class Ordering(TorchDispatchMode):
    """A mode that lists in ``mistakes`` each pair of accesses of the same bytes that no wait orders.

    An access is a range of addresses: memory that was freed and given out again is still the memory that another
    stream may be reading. torch's own stream sanitizer knows a tensor by its first byte and forgets what is freed, and
    what it raises in a hook of autograd is lost. Operators are seen by the dispatcher, collectives with them, and waits
    where Python asks for them; what compiled kernels and C++ do by themselves is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mistakes: list[str] = []
        self._clocks: dict[Any, _Clock] = {_HOST: {}}
        self._recorded: dict[int, tuple[Any, _Clock]] = {}  # with the event, so that no other gets its id
        self._time = 0
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []
        self._patches = [
            mock.patch.object(torch.cuda.Event, "record", self._around(torch.cuda.Event.record, self._record)),
            mock.patch.object(torch.cuda.Event, "wait", self._around(torch.cuda.Event.wait, self._wait)),
            mock.patch.object(torch.cuda.Event, "synchronize", self._around(torch.cuda.Event.synchronize, self._host)),
            mock.patch.object(torch.cuda.Stream, "synchronize", self._around(torch.cuda.Stream.synchronize, self._end)),
            mock.patch.object(torch.cuda, "synchronize", self._around(torch.cuda.synchronize, self._all)),
        ]

    def __enter__(self) -> Ordering:
        for patch in self._patches:
            patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patch in self._patches:
            patch.stop()

    # ---- what waits for what ----

    @staticmethod
    def _around(call: Any, note: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            note(*args, **kwargs)
            return call(*args, **kwargs)

        return noted

    def _clock(self, stream: Any) -> _Clock:
        return self._clocks.setdefault((stream or torch.cuda.current_stream()).cuda_stream, {})

    def _record(self, event: Any, stream: Any = None) -> None:
        clock = self._clock(stream)
        _join(clock, self._clocks[_HOST])
        self._recorded[id(event)] = event, dict(clock)

    def _wait(self, event: Any, stream: Any = None) -> None:
        _join(self._clock(stream), self._recorded.get(id(event), (None, {}))[1])

    def _host(self, event: Any) -> None:
        _join(self._clocks[_HOST], self._recorded.get(id(event), (None, {}))[1])

    def _end(self, stream: Any) -> None:
        _join(self._clocks[_HOST], dict(self._clock(stream)))

    def _all(self, *unused: Any, **named: Any) -> None:
        for clock in list(self._clocks.values()):
            _join(self._clocks[_HOST], dict(clock))

    # ---- what is used ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and compare what it uses."""
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = operator_schema(func).name
        reads, writes = _used(func, args, kwargs, out)
        on_device = [tensor for tensor in (*reads, *writes) if tensor.is_cuda]
        if not on_device:
            return out
        stream = torch.cuda.current_stream().cuda_stream
        self._use(stream, reads, writes, f"{name.split('::')[1]} at {_where()}")
        copies = len(on_device) < len(reads) + len(writes)  # from or to the host
        if "local_scalar" in name or (copies and not _given(func, args, kwargs).get("non_blocking")):
            _join(self._clocks[_HOST], dict(self._clocks[stream]))  # the host has waited for the copy
        return out

    def _use(self, stream: Any, reads: list[torch.Tensor], writes: list[torch.Tensor], what: str) -> None:
        self._time += 1
        clock = self._clocks.setdefault(stream, {})
        _join(clock, self._clocks[_HOST])
        clock[stream] = self._time
        now = _Access(stream, self._time, what)
        for tensor in reads:
            for piece in self._within(tensor):
                if piece.write:
                    self._compare(piece.write, now, clock)
                piece.reads[stream] = now
        for tensor in writes:
            for piece in self._within(tensor):
                for old in (*piece.reads.values(), *filter(None, [piece.write])):
                    self._compare(old, now, clock)
                piece.reads, piece.write = {}, now

    def _compare(self, old: _Access, now: _Access, clock: _Clock) -> None:
        if old.stream != now.stream and clock.get(old.stream, 0) < old.time:
            text = f"{now.what} does not wait for {old.what}, which uses the same memory on another stream"
            if text not in self.mistakes:
                self.mistakes.append(text)

    def _within(self, tensor: torch.Tensor) -> Iterator[_Piece]:
        if not tensor.is_cuda or not tensor.numel():
            return
        low = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        high = low + (last + 1) * tensor.itemsize
        self._cut(low)
        self._cut(high)
        index = bisect.bisect_left(self._starts, low)
        while low < high:
            if index == len(self._pieces) or self._starts[index] > low:
                self._insert(index, _Piece(low, min([high, *self._starts[index : index + 1]])))
            yield self._pieces[index]
            low, index = self._pieces[index].high, index + 1

    def _cut(self, at: int) -> None:
        index = bisect.bisect_right(self._starts, at) - 1
        if index >= 0 and self._pieces[index].low < at < self._pieces[index].high:
            piece = self._pieces[index]
            self._insert(index + 1, _Piece(at, piece.high, piece.write, dict(piece.reads)))
            piece.high = at

    def _insert(self, index: int, piece: _Piece) -> None:
        self._starts.insert(index, piece.low)
        self._pieces.insert(index, piece)


def _join(clock: _Clock, other: _Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def _tensors(value: Any) -> list[torch.Tensor]:
    return [t for t in tensors_in(value) if type(t) in _PLAIN and t.layout == torch.strided]


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip([argument.name for argument in operator_schema(func).arguments], args)) | kwargs


def _used(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (what an operator reads, what it writes)."""
    schema = operator_schema(func)
    if func.namespace == "c10d":
        return _tensors(args[1:]), _tensors(args[0])  # the output comes first; an all-reduce has no other
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    if _WITHOUT_KERNEL.search(schema.name.split("::")[1]) or schema.name == "aten::record_stream":
        return reads, writes
    given = [*zip(schema.arguments, args)]
    given += [
        (argument, kwargs[argument.name]) for argument in schema.arguments[len(args) :] if argument.name in kwargs
    ]
    for argument, value in given:
        if argument.alias_info is None:
            reads += _tensors(value)
        elif argument.alias_info.is_write:
            writes += _tensors(value)
    outputs = out if isinstance(out, tuple) and len(schema.returns) > 1 else (out,)
    for result, value in zip(schema.returns, outputs):
        if result.alias_info is None:
            writes += _tensors(value)
    return reads, writes


def _where() -> str:
    """Return the innermost line of fsdp2, or else that autograd calls."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if "/fsdp2/" in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("check/ordering.py"):
            return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"
