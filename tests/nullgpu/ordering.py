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

import ctypes
import sys
import threading
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.tools.check.accesses import HOST, Accesses, Clock, extent, used

__all__ = ["Ordering"]

RECORD, WAIT, READ_WRITE, KERNEL, SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE, HOST_READ = range(1, 9)


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
        if name.startswith(("c10d::", "_c10d_functional::")):
            self._note(first, [], [], name)  # NCCL's buffers are in the log
        else:
            reads, writes = used(func, args, kwargs, out)
            self._note(first, reads, writes, name)
        return out

    def _note(self, first: int, reads: list[torch.Tensor], writes: list[torch.Tensor], name: str) -> None:
        self._threads.add(threading.get_native_id())
        on_device = any(tensor.is_cuda for tensor in (*reads, *writes))
        stream = (torch.cuda.current_stream().cuda_stream or 0) if on_device else HOST
        # Copies between host and device are in the log, with both of their ranges.
        ranges = ([extent(t) for t in ts if t.is_cuda == on_device] for ts in (reads, writes))
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
    """Goes through the operators and the log in the order of the host."""

    def __init__(self, log: Any, first: int, last: int, operators: list[Operator], threads: set[int]) -> None:
        self.log, self.first, self.last, self.operators, self.threads = log, first, last, operators, threads
        self.recorded: dict[int, Clock] = {}
        self.accesses = Accesses()

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
                what = f"{operator.name} at {operator.where}"
                self.accesses.use(operator.stream, operator.reads, operator.writes, what)
                operator = next(pending, None)
            if index < self.last:
                self.line(self.log[index], by.get(index))
        return self.accesses.mistakes

    def line(self, entry: Any, by: Operator | None) -> None:
        """Go on with a line of the log."""
        stream = entry.stream or 0
        if entry.kind == RECORD:
            self.recorded[entry.read] = self.accesses.so_far(stream)
        elif entry.kind == WAIT:
            self.accesses.wait(stream, self.recorded.get(entry.read, {}))
        elif entry.kind in (SYNC_STREAM, SYNC_EVENT, SYNC_DEVICE):
            if entry.thread in self.threads:
                self.accesses.wait(HOST, self.known(entry, stream))
        elif entry.kind == HOST_READ:
            reads = [(entry.read, entry.read + entry.nread)]
            self.accesses.use(HOST, reads, [], "a copy from memory that is not page-locked")
        elif entry.kind == READ_WRITE:
            what = "a copy or collective" if by is None else f"{by.name} at {by.where}"
            reads = [(entry.read, entry.read + entry.nread)] if entry.nread else []
            writes = [(entry.written, entry.written + entry.nwritten)] if entry.nwritten else []
            self.accesses.use(stream, reads, writes, what)

    def known(self, entry: Any, stream: Any) -> Clock:
        """Return what the host knows after a wait of its own."""
        if entry.kind == SYNC_DEVICE:
            return self.accesses.so_far_everywhere()
        return self.accesses.so_far(stream) if entry.kind == SYNC_STREAM else self.recorded.get(entry.read, {})
