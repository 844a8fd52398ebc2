"""Which kernels and collectives use bytes that another stream may still be using, watched on a real device."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

import torch

from fsdp2._torch.forecast import TorchDispatchMode, operator_schema
from fsdp2.tools.check.accesses import HOST, Accesses, Clock, extent, used
from fsdp2.tools.forecast.cost import tensors_in

__all__ = ["Ordering"]


class Ordering(TorchDispatchMode):
    """A mode that lists in ``mistakes`` each pair of accesses of the same bytes that no wait orders.

    torch's own stream sanitizer knows a tensor by its first byte and forgets what is freed, and what it raises in a
    hook of autograd is lost. Operators are seen by the dispatcher, collectives with them, and waits where Python asks
    for them; what compiled kernels and C++ do by themselves is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._accesses = Accesses()
        self.mistakes = self._accesses.mistakes
        self._recorded: dict[int, tuple[Any, Clock]] = {}  # with the event, so that no other gets its id
        self._patches = [
            mock.patch.object(torch.cuda.Event, "record", self._around(torch.cuda.Event.record, self._record)),
            mock.patch.object(torch.cuda.Event, "wait", self._around(torch.cuda.Event.wait, self._wait)),
            mock.patch.object(torch.cuda.Event, "synchronize", self._around(torch.cuda.Event.synchronize, self._host)),
            mock.patch.object(torch.cuda.Stream, "synchronize", self._around(torch.cuda.Stream.synchronize, self._end)),
            mock.patch.object(torch.cuda.Event, "query", self._if_done(torch.cuda.Event.query, self._host)),
            mock.patch.object(torch.cuda.Stream, "query", self._if_done(torch.cuda.Stream.query, self._end)),
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

    @staticmethod
    def _if_done(query: Any, note: Any) -> Any:
        """Note an answer of ``query`` that all is done: the host knows as much as if it had waited."""

        def noted(*args: Any) -> Any:
            done = query(*args)
            if done:
                note(*args)
            return done

        return noted

    def _record(self, event: Any, stream: Any = None) -> None:
        self._recorded[id(event)] = event, self._accesses.so_far(_key(stream))

    def _wait(self, event: Any, stream: Any = None) -> None:
        self._accesses.wait(_key(stream), self._behind(event))

    def _host(self, event: Any) -> None:
        self._accesses.wait(HOST, self._behind(event))

    def _end(self, stream: Any) -> None:
        self._accesses.wait(HOST, self._accesses.so_far(_key(stream)))

    def _all(self, *unused: Any, **named: Any) -> None:
        self._accesses.wait(HOST, self._accesses.so_far_everywhere())

    def _behind(self, event: Any) -> Clock:
        return self._recorded.get(id(event), (None, {}))[1]

    # ---- what is used ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and compare what it uses."""
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = operator_schema(func).name
        if func.namespace == "c10d":  # the output comes first; an all-reduce has no other
            reads, writes = tensors_in(args[1:]), tensors_in(args[0])
        else:
            reads, writes = used(func, args, kwargs, out)
        on_device = [tensor.is_cuda for tensor in (*reads, *writes)]
        if not any(on_device):
            return out
        read, written = ([extent(tensor) for tensor in tensors if _is_seen(tensor)] for tensors in (reads, writes))
        stream = torch.cuda.current_stream().cuda_stream
        self._accesses.use(stream, read, written, f"{name.split('::')[1]} at {_where()}")
        copies = not all(on_device)  # from or to the host
        if "local_scalar" in name or (copies and not _given(func, args, kwargs).get("non_blocking")):
            self._accesses.wait(HOST, self._accesses.so_far(stream))  # the host has waited for the copy
        return out


def _is_seen(tensor: torch.Tensor) -> bool:
    """Return whether a stream may use the memory of ``tensor``: the device's, and what is page-locked of the host's."""
    return tensor.is_cuda or tensor.is_pinned()


def _key(stream: Any) -> Any:
    return (stream or torch.cuda.current_stream()).cuda_stream


def _given(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(zip([argument.name for argument in operator_schema(func).arguments], args)) | kwargs


def _where() -> str:
    """Return the innermost line of fsdp2, for a report; else that autograd calls. An operator knows no caller."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if "/fsdp2/" in frame.f_code.co_filename and not frame.f_code.co_filename.endswith("check/ordering.py"):
            return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return "autograd"
