"""Live bytes while code runs: their purposes, the unit that ran at the peak, and the pools that they came from.

The caching allocator of a device returns a freed block to the pool of the stream that it was allocated on, where other
streams cannot use it. A process therefore reserves the sum of each stream's own peak, not the peak of the sum.
``pools`` has these peaks, and ``reserved`` is their sum. Splitting and rounding of blocks is not modeled.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch.forecast import TorchDispatchMode, key_of, storage_key
from fsdp2._torch.tensors import local_tensor
from fsdp2.tools.forecast.cost import tensors_in
from fsdp2.tools.forecast.timeline import COMPUTE

__all__ = ["KINDS", "Block", "Memory", "Peak"]

KINDS = ("shards", "gathered", "gradients", "optimizer state", "activations", "other")
Storage = torch.UntypedStorage
_PACKED = {"_chunk_cat", "chunk_cat"}
_CAST = {"_to_copy", "div", "to"}
_ATTENTION_BACKWARD = {
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
}
"""Operators that add up the gradient of the queries in float32 and then cast it (on a GPU, which is forecast)."""


@dataclass(eq=False)
class Block:
    """An allocated block: its bytes, its purpose as far as it is known, and the stream of its pool."""

    nbytes: int
    kind: str
    lane: str = ""


@dataclass(frozen=True)
class Peak:
    """The largest number of live bytes, by kind, and the unit that was running."""

    nbytes: int
    by_kind: dict[str, int]
    running: str


class Memory(TorchDispatchMode):
    """A dispatch mode that follows every storage that an operator returns.

    The purpose of a block is often known later: a block is a gradient because it is reduced in the end. A step is
    therefore recorded as a list of changes, which ``peak`` evaluates afterwards.
    """

    def __init__(
        self,
        running: Callable[[], str] = lambda: "",
        now: Callable[[], float] = lambda: 0.0,
        lane: Callable[[], str] = lambda: COMPUTE,
    ) -> None:
        """``running`` returns a description of the running unit, ``now`` the time, ``lane`` the stream's name."""
        super().__init__()
        self._running, self._now, self._lane = running, now, lane
        self._blocks: dict[int, Block] = {}
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Storage]] = {}
        self._base: list[Block] = []
        self._began = running()
        self._changes: list[tuple[Block, int, str, float]] = []
        self._sent: list[Block] = []

    # ---- live storages ----

    def set_kind(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Set the purpose of ``tensors``, and follow them from now on."""
        for tensor in tensors:
            local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            if not local.is_meta:
                self._follow(local)
                self._blocks[storage_key(local)].kind = kind

    def _follow(self, tensor: torch.Tensor, kind: str = "activations") -> None:
        if tensor.is_meta:
            return  # memory of the host
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key not in self._sizes:
            self._references[key] = weakref.ref(storage, lambda _: self._died(key))
            self._sizes[key] = 0
            self._resize(key, storage.nbytes(), kind)
        elif storage.nbytes() != self._sizes[key]:
            _resize(storage, self._sizes[key])  # a view of a freed fake tensor has given it memory again

    def _resize(self, key: int, size: int, kind: str) -> None:
        if self._sizes[key]:
            self._changes.append((self._blocks[key], -1, self._running(), self._now()))
        self._sizes[key] = size
        self._blocks[key] = Block(size, kind, self._lane())  # it is allocated from the pool of the current stream
        if size:
            self._changes.append((self._blocks[key], 1, self._running(), self._now()))

    def _died(self, key: int) -> None:
        self._resize(key, 0, "other")
        del self._sizes[key], self._references[key], self._blocks[key]

    # ---- one step ----

    def begin(self) -> None:
        """Record changes from now on."""
        self._base = [block for block in self._blocks.values() if block.nbytes]
        self._began = self._running()
        self._changes.clear()

    def peak(self) -> Peak:
        """Return the largest number of live bytes since ``begin``."""
        now = most = sum(block.nbytes for block in self._base)
        at, running = 0, self._began
        for index, (block, sign, label, _) in enumerate(self._changes):
            now += sign * block.nbytes
            if now > most:
                most, at, running = now, index + 1, label
        by_kind = self._at_begin()
        for block, sign, *_ in self._changes[:at]:
            by_kind[block.kind] += sign * block.nbytes
        return Peak(most, {kind: by_kind[kind] for kind in KINDS if by_kind[kind]}, running)

    @property
    def pools(self) -> dict[str, int]:
        """The largest number of live bytes in each stream's pool since ``begin``."""
        now = Counter[str]()
        for block in self._base:
            now[block.lane] += block.nbytes
        most = Counter(now)
        for block, sign, *_ in self._changes:
            now[block.lane] += sign * block.nbytes
            most[block.lane] = max(most[block.lane], now[block.lane])
        return dict(most)

    @property
    def reserved(self) -> int:
        """The bytes that a caching allocator with a pool for each stream reserves for the code since ``begin``."""
        return sum(self.pools.values())

    def _at_begin(self) -> Counter[str]:
        by_kind = Counter[str]()
        for block in self._base:
            by_kind[block.kind] += block.nbytes
        return by_kind

    def points(self) -> list[tuple[float, dict[str, int]]]:
        """Return the time and the live bytes by kind after each change since ``begin``."""
        by_kind, points = self._at_begin(), []
        for block, sign, _, time in self._changes:
            by_kind[block.kind] += sign * block.nbytes
            points.append((time, dict(by_kind)))
        return points

    # ---- methods of a mode ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and follow its results."""
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for tensor in tensors_in(out):
            self._follow(tensor)
        if func.namespace == "c10d":
            self._sent += filter(None, (self._blocks.get(storage_key(tensor)) for tensor in tensors_in(args)))
        elif name in _PACKED:
            self._mark(tensors_in((args, kwargs)))
        elif name in _CAST and args and self._kind(args[0]) == "gradients":
            self._mark(tensors_in(out))
        elif name in _ATTENTION_BACKWARD:
            self._follow(torch.empty_like(out[0], dtype=torch.float32))  # the kernel's sums, which it frees at its end
        return out

    def claim(self, kind: str = "") -> None:
        """Set the purpose of the tensors that collectives took since the last call; "" leaves it unchanged."""
        for block in self._sent:
            if kind and block.kind == "activations":
                block.kind = kind
        self._sent.clear()

    def _kind(self, tensor: Any) -> str:
        block = self._blocks.get(storage_key(tensor)) if isinstance(tensor, torch.Tensor) else None
        return block.kind if block else ""

    def _mark(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            block = self._blocks.get(storage_key(tensor))
            if block is not None and block.kind == "activations":
                block.kind = "gradients"

    def __enter__(self) -> Memory:
        def resized(storage: Storage, size: int) -> Any:
            _resize(storage, size)
            key = key_of(storage)
            if key in self._sizes:
                self._resize(key, size, "gathered")
            return storage

        Storage.resize_ = resized  # type: ignore[method-assign, assignment]  # a patch, until __exit__
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Storage.resize_ = _resize  # type: ignore[method-assign]  # likewise


_resize = Storage.resize_
