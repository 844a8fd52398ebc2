"""Who used which bytes, and what each stream is behind: which accesses no wait orders."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from fsdp2._torch.forecast import operator_schema
from fsdp2.tools.forecast.cost import tensors_in

__all__ = ["HOST", "Accesses", "Clock", "extent", "used"]

Clock = dict[Any, int]
"""How much of each stream is done."""
Range = tuple[int, int]
"""First address, and the one behind the last."""
HOST = "host"
"""The stream that the host is: what it launches is behind all that it has waited for."""
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_WITHOUT_KERNEL = re.compile(r"(empty|^resize_|^set_$)")
"""Operators that only make tensors."""
_LIKE = re.compile(r"(^new_|_like$)")
"""Operators that fill a new tensor of the shape of another one, which they do not read."""


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


class Accesses:
    """All accesses, in the order of the host; ``mistakes`` lists each pair that uses the same bytes without an order.

    An access is a range of addresses: memory that was freed and given out again is still the memory that another
    stream may be reading.
    """

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self._clocks: dict[Any, Clock] = {HOST: {}}
        self._time = 0
        self._starts: list[int] = []
        self._pieces: list[_Piece] = []

    def so_far(self, stream: Any) -> Clock:
        """Return what an event says that is recorded on ``stream`` now."""
        return dict(self._launched(stream))

    def so_far_everywhere(self) -> Clock:
        """Return what the host knows when it has waited for the device."""
        clock: Clock = {}
        for one in self._clocks.values():
            _join(clock, one)
        return clock

    def wait(self, stream: Any, clock: Clock) -> None:
        """Let what comes next on ``stream`` be behind ``clock``."""
        _join(self._clocks.setdefault(stream, {}), clock)

    def use(self, stream: Any, reads: Iterable[Range], writes: Iterable[Range], what: str) -> None:
        """Let ``stream`` read and write, and note what it does not wait for."""
        self._time += 1
        clock = self._launched(stream)
        clock[stream] = self._time
        now = _Access(stream, self._time, what)
        for low, high in reads:
            for piece in self._within(low, high):
                if piece.write:
                    self._compare(piece.write, "writes", now, "reads", clock)
                piece.reads[stream] = now
        for low, high in writes:
            for piece in self._within(low, high):
                for old in piece.reads.values():
                    self._compare(old, "reads", now, "writes", clock)
                if piece.write:
                    self._compare(piece.write, "writes", now, "writes", clock)
                piece.reads, piece.write = {}, now

    def _launched(self, stream: Any) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        _join(clock, self._clocks[HOST])
        return clock

    def _compare(self, old: _Access, did: str, now: _Access, does: str, clock: Clock) -> None:
        if old.stream != now.stream and clock.get(old.stream, 0) < old.time:
            text = (
                f"{now.what}, which {does} memory on {self._name(now.stream)}, does not wait for "
                f"{old.what}, which {did} it on {self._name(old.stream)}"
            )
            if text not in self.mistakes:
                self.mistakes.append(text)

    def _name(self, stream: Any) -> str:
        return "the host" if stream == HOST else f"stream {list(self._clocks).index(stream)}"

    def _within(self, low: int, high: int) -> Iterator[_Piece]:
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


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time


def extent(tensor: torch.Tensor) -> Range:
    """Return the addresses of the elements of a strided tensor; an empty range if it has none."""
    low = tensor.data_ptr()
    if not tensor.numel():
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return low, low + (last + 1) * tensor.itemsize


def used(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (what an operator reads, what it writes), as its schema says."""
    schema = operator_schema(func)
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    name = schema.name.split("::")[1]
    if _WITHOUT_KERNEL.search(name) or name == "record_stream":
        return reads, writes
    given = [*zip(schema.arguments, args)]
    given += [
        (argument, kwargs[argument.name]) for argument in schema.arguments[len(args) :] if argument.name in kwargs
    ]
    for argument, value in given:
        if argument.alias_info is None:
            reads += _plain(value)
        elif argument.alias_info.is_write:
            writes += _plain(value)
    outputs = out if isinstance(out, tuple) and len(schema.returns) > 1 else (out,)
    for result, value in zip(schema.returns, outputs):
        if result.alias_info is None:
            writes += _plain(value)
    return ([] if _LIKE.search(name) else reads), writes


def _plain(value: Any) -> list[torch.Tensor]:
    return [
        t
        for t in tensors_in(value)
        if type(t) in _PLAIN and t.device.type in ("cpu", "cuda") and t.layout == torch.strided
    ]
