"""A device with streams, simulated on a CPU, that notices what a real one would only sometimes get wrong.

    with Device() as device:
        ...  # lanes made in here are streams of the device
    assert not device.mistakes

Kernels run at once, in the order of the program; what is simulated is which of them a real device may run in another
order. Every kernel, collectives too, is noted with the bytes it touches and with what its stream had waited for. Two
that touch the same bytes, one of them writing, must be ordered by streams, events or the host. Memory goes back to the
stream it came from; the next allocation there must be behind everything that used it elsewhere, as the caching
allocator of a device assumes. While a graph is captured nothing may wait for what is outside of it.

``device.on_host(tensor)`` says that memory is the host's. What is computed there runs at once, before what is still
queued; a copy from or to it is queued, and where it cannot be, the host waits (``host_waits``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.comm import streams
from tests.support import ROOT
from tests.support.counting import group_of

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
Clocks = dict[str, int]  # how many kernels of each stream are known to be done


@dataclass(frozen=True)
class Access:
    """One kernel that read or wrote ``start`` to ``end`` of some memory."""

    stream: str
    time: int
    start: int
    end: int
    write: bool
    where: str

    def done_by(self, clocks: Clocks) -> bool:
        """Whether a stream that waited for ``clocks`` comes after it."""
        return clocks.get(self.stream, 0) >= self.time

    def conflicts(self, other: Access) -> bool:
        """Whether the order of the two matters."""
        return (self.write or other.write) and self.start < other.end and other.start < self.end


@dataclass
class Memory:
    """What an allocator gave out: where it lies, the stream whose allocator it came from, and who used it."""

    home: str
    begin: int
    end: int
    accesses: list[Access] = field(default_factory=list)
    host: str = ""  # "pinned" or "pageable" where it is the host's


class Event:
    """What a stream had to do when it was recorded."""

    def __init__(self, device: Device, clocks: Clocks) -> None:
        self._device, self.clocks, self.capture = device, clocks, device.capture

    def record(self, stream: Stream) -> None:
        """Let it be behind what is on ``stream`` now."""
        self.clocks, self.capture = dict(stream.clocks), self._device.capture

    def query(self) -> bool:
        """Tell the host that it is over, which it need not wait for."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Let the host wait."""
        self._device.wait_on_host(self.clocks)


class Stream:
    """A queue of kernels."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.clocks: Clocks = {}

    def record_event(self) -> Event:
        """Return an event behind all that was put on the stream."""
        return Event(self.device, dict(self.clocks))

    def wait_event(self, event: Event) -> None:
        """Let what comes next run behind ``event``."""
        if self.device.ignored is not None and _callers(3) == self.device.ignored:
            return
        if self.device.capture != event.capture:
            self.device.mistake(f"{self.name} waits for an event from outside of the capture")
        _merge(self.clocks, event.clocks)


def _merge(clocks: Clocks, others: Clocks) -> None:
    for stream, time in others.items():
        clocks[stream] = max(time, clocks.get(stream, 0))


class Launch(NamedTuple):
    """A collective. Groups are numbered by when each is first used: ranks of several groups name theirs differently."""

    group: int
    ranks: int
    stream: str
    operator: str
    numel: int
    dtype: torch.dtype


class Mistake(Exception):
    """The first mistake on a device that is told to stop at it."""


class Device(TorchDispatchMode):
    """The device; as a context, all lanes are streams of it."""

    def __init__(self, ignored: tuple[str, ...] | None = None, *, watches: bool = True) -> None:
        """``ignored`` are the functions that the waits come from which the device is to forget, innermost first.

        Then one mistake is enough: it raises ``Mistake``. One that does not watch notes collectives alone.
        """
        super().__init__()
        self.ignored, self.watches = ignored, watches
        self.mistakes: list[str] = []
        self.asked_for: set[object] = set()  # the devices whose streams were asked for; None is the current one
        self.host_waits: list[str] = []  # copies and numbers that the host had to wait for
        self.capture = self._captures = self._begin = 0  # which capture runs, how many there were, where it began
        self.launched: list[Launch] = []
        self.compute = Stream(self, "compute")
        self.streams = [self.compute]
        self._current = [self.compute]
        self._groups: list[str] = []
        self._host: Clocks = {}
        self._cpu = Stream(self, "host")
        self._memory: dict[int, tuple[StorageWeakRef, Memory]] = {}
        self._freed: dict[str, list[Memory]] = {}
        self._patched: list[tuple[Any, str, Any]] = []

    # ---- what torch.cuda has ----

    def Stream(self, device: object = None, priority: int = 0) -> Stream:  # as torch.cuda calls it
        """Return a new stream."""
        self.asked_for.add(device)
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def current_stream(self, device: object = None) -> Stream:
        """Return the stream that kernels are put on."""
        self.asked_for.add(device)
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Put kernels on ``stream``."""
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    def wait_on_host(self, clocks: Clocks) -> None:
        """Let everything put on any stream from now on come behind ``clocks``."""
        if self.capture:
            self.mistake(f"the host waits during a capture, in {_place()}")
        _merge(self._host, clocks)

    def on_host(self, tensor: torch.Tensor, *, pinned: bool = True) -> None:
        """Take the memory of ``tensor`` for the host's, page-locked (``pinned``) or not."""
        self._memory_of(tensor.untyped_storage()).host = "pinned" if pinned else "pageable"

    # ---- graphs ----

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture what the block puts on streams, beginning and ending with the compute stream."""
        self._captures += 1
        self.capture = self._captures
        self._begin = self._tick(self.compute)
        yield
        for stream in self.streams:
            if self.compute.clocks.get(stream.name, 0) < stream.clocks.get(stream.name, 0):
                self.mistake(f"{stream.name} is not joined at the end of the capture")
        self.capture = 0

    # ---- notes ----

    @property
    def live_bytes(self) -> int:
        """The bytes of all memory that is alive, of what kernels have touched."""
        self._collect()
        return sum({id(memory): memory.end - memory.begin for _, memory in self._memory.values()}.values())

    def mistake(self, text: str) -> None:
        """Note ``text`` once."""
        if text not in self.mistakes:
            self.mistakes.append(text)
        if self.ignored is not None:
            raise Mistake(text)

    def _tick(self, stream: Stream) -> int:
        _merge(stream.clocks, self._host)
        stream.clocks[stream.name] = stream.clocks.get(stream.name, 0) + 1
        return stream.clocks[stream.name]

    def _memory_of(self, storage: torch.UntypedStorage) -> Memory:
        key = storage._cdata
        if key not in self._memory:
            self._collect()
            begin = storage.data_ptr()
            around = (memory for _, memory in self._memory.values() if memory.begin <= begin < memory.end)
            self._memory[key] = (StorageWeakRef(storage), next(around, None) or self._allocate(storage))
        return self._memory[key][1]

    def _allocate(self, storage: torch.UntypedStorage) -> Memory:
        """The allocator of the current stream may take any block that came back to it."""
        home, clocks = self._current[-1].name, dict(self._current[-1].clocks)
        _merge(clocks, self._host)
        for memory in self._freed.pop(home, []):
            for access in memory.accesses:
                if access.stream != home and not access.done_by(clocks):
                    self.mistake(f"memory of {home} is used again before {access.where} on {access.stream} is done")
        return Memory(home, storage.data_ptr(), storage.data_ptr() + storage.nbytes())

    def _free(self, memory: Memory) -> None:
        self._freed.setdefault(memory.home, []).append(memory)

    def _collect(self) -> None:
        expired = torch._C.StorageBase._expired  # what StorageWeakRef asks
        gone = [key for key in self._memory if expired(key)]
        freed = [self._memory.pop(key)[1] for key in gone]
        held = {id(memory) for _, memory in self._memory.values()} if freed else set()
        for memory in freed:
            if id(memory) not in held:  # the storage of a shard lies in that of a flat buffer
                self._free(memory)

    def _note(self, tensor: torch.Tensor, stream: Stream, time: int, write: bool, where: str) -> None:
        if not tensor.numel() or tensor.layout != torch.strided:
            return
        memory = self._memory_of(tensor.untyped_storage())
        start = tensor.data_ptr()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        access = Access(stream.name, time, start, start + (last + 1) * tensor.itemsize, write, where)
        for other in memory.accesses:
            if access.conflicts(other) and not other.done_by(stream.clocks):
                self.mistake(f"{where} on {stream.name} does not wait for {other.where} on {other.stream}")
        kept = [a for a in memory.accesses if not _supersedes(access, a)]
        memory.accesses = [*kept, access]

    def _note_launch(self, func: Any, args: Any) -> None:
        tensors, group = _tensors(args), group_of(func, args)
        if group.group_name not in self._groups:
            self._groups.append(group.group_name)
        where = self._groups.index(group.group_name), group.size(), self._current[-1].name
        self.launched.append(Launch(*where, str(func), sum(tensor.numel() for tensor in tensors), tensors[0].dtype))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the kernel and note what it touched."""
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))  # a question about shapes
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # the kernels that a subclass comes to are what counts
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._note_launch(func, args)
        if not self.watches:
            return func(*args, **kwargs)
        if _is_view(func):  # two of three operators; a view touches nothing
            return func(*args, **kwargs)
        read, written = _touched(func, args, kwargs)
        inputs = {_key(tensor) for tensor in (*read, *written)}
        given = {_key(t) for t in _tensors((args, kwargs))}
        out = func(*args, **kwargs)
        made = [t for t in _tensors(out) if _key(t) not in given]
        if not inputs and not made:
            return out
        name = _name(func)
        where = f"{func} in {_place()}"
        kinds = {self._memory_of(tensor.untyped_storage()).host for tensor in (*read, *written)}
        of_host, copies = kinds - {""}, name == "_to_copy" or (name == "copy_" and "" in kinds)
        stream = self._cpu if of_host and not copies else self._current[-1]
        time = self._tick(stream)
        if stream is self._cpu:
            _merge(self._host, {stream.name: time})
        if self.capture and stream is not self.compute and stream.clocks.get("compute", 0) < self._begin:
            self.mistake(f"{where} on {stream.name} is outside of the capture")
        for tensor in read:
            self._note(tensor, stream, time, False, where)
        for tensor in (*written, *([] if name.startswith(("empty", "new_empty")) else made)):
            self._note(tensor, stream, time, True, where)
        for tensor in made:
            memory = self._memory_of(tensor.untyped_storage())
            memory.host = "pageable" if stream is self._cpu else memory.host
        if name in ("_local_scalar_dense", "item"):
            self.host_waits.append(where)
            self.wait_on_host(stream.clocks)
        if copies and of_host and ("pageable" in of_host or not _is_queued(func, args, kwargs)):
            self.host_waits.append(where)
            self.wait_on_host(stream.clocks)
        return out

    # ---- as a context ----

    def __enter__(self) -> Device:
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            if storage.nbytes():
                self._memory_of(storage)
                self._free(self._memory.pop(storage._cdata)[1])
            resize(storage, size)
            if size:
                self._memory_of(storage)

        for owner, name, value in (
            (torch.UntypedStorage, "resize_", resized),
            (streams, "_device_module", lambda device: self),
        ):
            self._patched.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._patched:
            setattr(*self._patched.pop())


def _is_queued(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a copy is asked not to make the host wait."""
    given = dict(zip((name for name, _ in _arguments(func)), args, strict=False)) | kwargs
    return bool(given.get("non_blocking"))


def _supersedes(new: Access, old: Access) -> bool:
    """Whether who waits for ``new`` need not care for ``old``."""
    inside = new.start <= old.start and old.end <= new.end
    return inside and (new.write or (new.stream == old.stream and not old.write))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _tensors(value: Any) -> list[torch.Tensor]:
    if type(value) in PLAIN:
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in _tensors(one)]


@cache
def _is_view(func: Any) -> bool:
    return func.namespace != "c10d" and any(writes is False for _, writes in _arguments(func))


@cache
def _arguments(func: Any) -> list[tuple[str, bool | None]]:
    """Return the names of the operator's arguments, and whether it writes them; None for what it only reads."""
    infos = [(argument.name, argument.alias_info) for argument in func._schema.arguments]
    return [(name, None if info is None else info.is_write) for name, info in infos]


def _touched(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(What ``func`` reads, what it writes) of its arguments."""
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    if func.namespace == "c10d":
        return _tensors(args[1:]), _tensors(args[0])  # the output comes first; an all-reduce has no other
    arguments = _arguments(func)
    values = [(writes, value) for (_, writes), value in zip(arguments, args, strict=False)]
    values += [(writes, kwargs[name]) for name, writes in arguments if name in kwargs]
    for writes, value in values:
        (written if writes else read).extend(_tensors(value))
    if _name(func).startswith(("empty", "new_")) or _name(func).endswith("_like") or _name(func) == "_unsafe_view":
        read = []
    return read, written


def _callers(count: int) -> tuple[str, ...]:
    """The functions of the project that called one here, innermost first."""
    names: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(names) < count:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(names)


def _place() -> str:
    """The innermost line of the project, or else of anybody, that runs now."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = _in_project(frame.f_code.co_filename)
        if path and frame.f_code.co_name != "__torch_dispatch__":  # of another mode
            return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "autograd"


@cache
def _in_project(path: str) -> str:
    """Return a file's path in the project; nothing where it lies elsewhere, or is this one."""
    inside = path.startswith(str(ROOT)) and not path.endswith("streams.py") and ".venv" not in path
    return path[len(str(ROOT)) + 1 :] if inside else ""
