"""Which kernels, copies and collectives are not ordered with others that use the same bytes.

    with Ordering() as ordering:
        ...  # on the null device, started with room for its log
    assert not ordering.races()

An access is a range of addresses, so memory that was freed and given out again is still the memory that another stream
may be reading. What operators read and write comes from a dispatch mode; what a kernel of Triton reads and writes comes
from the names of its arguments; records, waits, copies and the buffers of NCCL come from the device's log. The host is
one more stream: what it launches is behind all that it has waited for, and what it reads must be.

Not seen: kernels that an operator launches on memory of its own (the workspace of cuBLAS), and operators inside of a
kernel that autograd runs without the dispatcher.
"""

from __future__ import annotations

import bisect
import ctypes
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Ordering"]

RECORD, WAIT, READ_WRITE, KERNEL, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE, HOST_READ = range(1, 9)
WITHOUT_KERNEL = re.compile(r"(^new_|empty|_like$|^resize_|^set_$)")
"""Operators that only make tensors. (``zeros_like`` and the like fill them with another operator.)"""
PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
HOST = "host"
Clock = dict[Any, int]  # how much of each stream is done


class Entry(ctypes.Structure):
    """One line of the log, as in ``device/queue.c``."""

    _fields_ = [
        ("kind", ctypes.c_longlong),
        ("stream", ctypes.c_void_p),
        ("read", ctypes.c_void_p),
        ("nread", ctypes.c_longlong),
        ("written", ctypes.c_void_p),
        ("nwritten", ctypes.c_longlong),
        ("thread", ctypes.c_longlong),
    ]


class Operator(NamedTuple):
    """What ran between two lines of the log."""

    first: int
    last: int
    stream: Any
    reads: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    name: str
    where: str


class Access(NamedTuple):
    """Who used some bytes, and when."""

    stream: Any
    time: int
    what: str


class Piece:
    """Bytes that were always used together."""

    __slots__ = ("high", "low", "reads", "write")

    def __init__(self, low: int, high: int, write: Access | None = None, reads: dict[Any, Access] | None = None):
        self.low, self.high, self.write, self.reads = low, high, write, reads or {}


class Pieces:
    """The address space, cut where accesses begin and end."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._all: list[Piece] = []

    def _cut(self, at: int) -> None:
        index = bisect.bisect_right(self._starts, at) - 1
        if index >= 0 and self._all[index].low < at < self._all[index].high:
            piece = self._all[index]
            self._insert(index + 1, Piece(at, piece.high, piece.write, dict(piece.reads)))
            piece.high = at

    def _insert(self, index: int, piece: Piece) -> None:
        self._starts.insert(index, piece.low)
        self._all.insert(index, piece)

    def within(self, low: int, high: int) -> Iterator[Piece]:
        """Yield the pieces from ``low`` to ``high``."""
        self._cut(low)
        self._cut(high)
        index = bisect.bisect_left(self._starts, low)
        while low < high:
            if index == len(self._all) or self._starts[index] > low:
                self._insert(index, Piece(low, min([high, *self._starts[index : index + 1]])))
            yield self._all[index]
            low, index = self._all[index].high, index + 1


class Ordering(TorchDispatchMode):
    """A mode that notes every access in its block; ``races()`` returns the pairs that are not ordered."""

    def __init__(self) -> None:
        super().__init__()
        library = ctypes.CDLL(None)
        self._count = ctypes.c_longlong.in_dll(library, "nullgpu_logged")
        self._room = ctypes.c_longlong.in_dll(library, "nullgpu_log_room").value
        self._log = ctypes.POINTER(Entry).in_dll(library, "nullgpu_log")
        assert self._log, "the null device has no log: start the program with environment(log=...)"
        self._operators: list[Operator] = []
        self._threads = {threading.get_native_id()}
        self._triton = mock.patch.object(_autotuner(), "run", self._running(_autotuner().run))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as it does without the mode."""
        return True

    def __enter__(self) -> Ordering:
        self._count.value = self._first = 0  # one recorder at a time
        self._triton.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._triton.stop()
        self._last = self._count.value
        assert self._last < self._room, "the null device's log is full"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what it used."""
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented  # their own operators count
        kwargs = kwargs or {}
        first = self._count.value
        out = func(*args, **kwargs)
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) or name == "aten::record_stream":
            self._note(first, [], [], name)  # NCCL's buffers are in the log
        else:
            reads, writes = _used(func._schema, args, kwargs, out)
            self._note(first, reads, writes, name)
        return out

    def _note(self, first: int, reads: list[torch.Tensor], writes: list[torch.Tensor], name: str) -> None:
        self._threads.add(threading.get_native_id())
        on_device = any(tensor.is_cuda for tensor in (*reads, *writes))
        stream = (torch.cuda.current_stream().cuda_stream or 0) if on_device else HOST
        # Copies between host and device are in the log, with both of their ranges.
        ranges = ([_extent(t) for t in ts if t.is_cuda == on_device and t.numel()] for ts in (reads, writes))
        self._operators.append(Operator(first, self._count.value, stream, *ranges, name, _where()))

    def _running(self, run: Any) -> Any:
        def noted(tuner: Any, *args: Any, **kwargs: Any) -> Any:
            first = self._count.value
            out = run(tuner, *args, **kwargs)
            names = list(tuner.triton_meta["signature"])
            given = [(n, t) for n, t in zip(names, args, strict=False) if isinstance(t, torch.Tensor)]
            writes = [t for name, t in given if "out_ptr" in name]
            reads = [t for name, t in given if not name.startswith("out_ptr")]
            self._note(first, reads, writes, f"triton::{tuner.fn.__name__}")
            return out

        return noted

    def races(self) -> list[str]:
        """Return the pairs that are not ordered, each once."""
        return _Analysis(self._log, self._first, self._last, self._operators, self._threads).run()

    @property
    def seen(self) -> set[str]:
        """The names of the operators that were seen."""
        return {operator.name for operator in self._operators}


def _autotuner() -> Any:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    return CachingAutotuner


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _plain(value: Any) -> list[torch.Tensor]:
    return [
        t
        for t in pytree.tree_leaves(value)
        if type(t) in PLAIN and t.device.type in ("cpu", "cuda") and t.layout == torch.strided
    ]


def _used(schema: Any, args: Any, kwargs: Any, out: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (what an operator reads, what it writes)."""
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    if WITHOUT_KERNEL.search(schema.name.split("::")[1]):
        return reads, writes
    given = [*zip(schema.arguments, args, strict=False)]
    given += [
        (argument, kwargs[argument.name]) for argument in schema.arguments[len(args) :] if argument.name in kwargs
    ]
    for argument, value in given:
        if argument.alias_info is None:
            reads += _plain(value)
        elif argument.alias_info.is_write:
            writes += _plain(value)
    outputs = out if isinstance(out, tuple) and len(schema.returns) > 1 else (out,)
    for result, value in zip(schema.returns, outputs, strict=False):
        if result.alias_info is None:
            writes += _plain(value)
    return reads, writes


def _where(depth: int = 3) -> str:
    """Return the innermost lines of fsdp2, or of a test, that the current operator comes from."""
    frame: Any = sys._getframe(depth)
    lines: list[str] = []
    while frame is not None and len(lines) < 3:
        path = frame.f_code.co_filename
        if ("fsdp" in path or "/tests/" in path) and "/nullgpu/ordering" not in path:
            lines.append(f"{'/'.join(path.split('/')[-2:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


class _Analysis:
    """Goes through the operators and the log in the order of the host, with a clock for each stream."""

    def __init__(self, log: Any, first: int, last: int, operators: list[Operator], threads: set[int]) -> None:
        self.log, self.first, self.last, self.operators, self.threads = log, first, last, operators, threads
        self.clocks: dict[Any, Clock] = {HOST: {}}
        self.recorded: dict[int, Clock] = {}
        self.memory = Pieces()
        self.time = 0
        self.found: dict[str, None] = {}

    def run(self) -> list[str]:
        """Return what is not ordered."""
        by: dict[int, Operator] = {}
        for operator in self.operators:  # the outermost comes last, and the innermost made the line
            for index in range(operator.first, operator.last):
                by.setdefault(index, operator)
        pending = iter(sorted(self.operators, key=lambda operator: operator.first))
        operator = next(pending, None)
        for index in range(self.first, self.last + 1):
            while operator is not None and operator.first <= index:
                self.use(operator.stream, operator.reads, operator.writes, f"{operator.name} at {operator.where}")
                operator = next(pending, None)
            if index < self.last:
                self.line(self.log[index], by.get(index))
        return list(self.found)

    def line(self, entry: Any, by: Operator | None) -> None:
        """Go on with a line of the log."""
        stream = entry.stream or 0
        clock = self.clocks.setdefault(stream, {})
        if entry.kind == RECORD:
            _join(clock, self.clocks[HOST])
            self.recorded[entry.read] = dict(clock)
        elif entry.kind == WAIT:
            _join(clock, self.recorded.get(entry.read, {}))
        elif entry.kind in (SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE) and entry.thread in self.threads:
            done = {SYNC_STREAM: [clock], SYNC_EVENT: [self.recorded.get(entry.read, {})]}
            for one in done.get(entry.kind, list(self.clocks.values())):
                _join(self.clocks[HOST], dict(one))
        elif entry.kind == HOST_READ:
            self.use(HOST, [(entry.read, entry.read + entry.nread)], [], "a copy from memory that is not page-locked")
        elif entry.kind == READ_WRITE:
            what = "a copy or collective" if by is None else f"{by.name} at {by.where}"
            reads = [(entry.read, entry.read + entry.nread)] if entry.nread else []
            writes = [(entry.written, entry.written + entry.nwritten)] if entry.nwritten else []
            self.use(stream, reads, writes, what)

    def use(self, stream: Any, reads: Iterable[Any], writes: Iterable[Any], what: str) -> None:
        """Let ``stream`` read and write, and note what it does not wait for."""
        self.time += 1
        clock = self.clocks.setdefault(stream, {})
        _join(clock, self.clocks[HOST])
        clock[stream] = self.time
        now = Access(stream, self.time, what)
        for low, high in reads:
            for piece in self.memory.within(low, high):
                if piece.write:
                    self.compare(piece.write, now, clock, "writes", "reads")
                piece.reads[stream] = now
        for low, high in writes:
            for piece in self.memory.within(low, high):
                for old in piece.reads.values():
                    self.compare(old, now, clock, "reads", "writes")
                if piece.write:
                    self.compare(piece.write, now, clock, "writes", "writes")
                piece.reads, piece.write = {}, now

    def compare(self, old: Access, now: Access, clock: Clock, first: str, then: str) -> None:
        """Note two accesses of the same bytes that are not ordered."""
        if old.stream != now.stream and clock.get(old.stream, 0) < old.time:
            text = f"{now.what} {then} on {self.name(now.stream)} what {old.what} {first} on {self.name(old.stream)}"
            self.found[text] = None

    def name(self, stream: Any) -> str:
        """Return a short name of a stream."""
        return "the host" if stream == HOST else f"stream {list(self.clocks).index(stream)}"


def _join(clock: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, 0) < time:
            clock[stream] = time
