"""Small models under harder conditions: overwritten memory, and a test for memory that stays."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from fsdp2._torch.forecast import TorchDispatchMode, key_of, storage_key
from fsdp2._torch.tensors import local_tensor
from fsdp2.tools.check.models import Small
from fsdp2.tools.check.on_streams import streams
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.check.trial import MIXED, Trial, loss_of, shard
from fsdp2.tools.forecast.cost import tensors_in

__all__ = [
    "STRICT",
    "LiveBytes",
    "allocated",
    "filled_memory",
    "freed_memory",
    "kept_memory",
    "settled",
]

POLICIES = {"float32": MixedPrecisionPolicy(), "mixed": MIXED}
NOT_A_NUMBER = 0xFF
"""A byte that makes NaN of every floating-point type."""
FREED_SECONDS = 10.0
"""The time that a thread of gloo may keep a tensor after sending it."""


@contextmanager
def filled_memory(*, fill: bool = True) -> Iterator[None]:
    """Fill all memory that is allocated in the block with NaN.

    Otherwise a kernel that reads memory before it is written, or after it was freed and allocated again, often finds
    the right values from before. ``resize_`` is included, because it allocates the memory of full parameters.

    Operators use their deterministic kernels in the block, also if ``fill`` is False, so that results are comparable.
    """
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        grows = size > storage.nbytes()
        resize(storage, size)
        if grows and fill:
            # On the current stream, on which the memory was allocated: its next kernel may write the memory.
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(NOT_A_NUMBER)
        return storage

    deterministic: Any = torch.utils.deterministic  # its attribute is a property of the module, which has no stub
    was, filled = torch.are_deterministic_algorithms_enabled(), deterministic.fill_uninitialized_memory
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # a patch, until the end of the block
    torch.use_deterministic_algorithms(True, warn_only=True)  # makes torch.empty fill its result
    deterministic.fill_uninitialized_memory = fill
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about operators without a deterministic kernel
            yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]  # likewise
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        deterministic.fill_uninitialized_memory = filled


def freed_memory(place: Place) -> Outcome:
    """all new memory is filled with NaN, and results must have the same bits"""
    trial = Trial(place)
    for name, policy in POLICIES.items():
        prepare = partial(shard, mesh=trial.mesh(), mp_policy=policy)
        with filled_memory(fill=False):
            usual = trial.train(trial.sharded(Small, prepare), f"{name}, memory as it is")
        with filled_memory():
            strict = trial.train(trial.sharded(Small, prepare), f"{name}, memory overwritten")
        trial.compare(f"memory as it is ({name})", strict, usual, 0.0, exact=True)
    return trial.outcome()


def kept_memory(place: Place) -> Outcome:
    """a training step leaves no memory behind"""
    trial = Trial(place)
    model = trial.sharded(Small, partial(shard, mesh=trial.mesh()))
    rows = trial.rows(0, model.width).chunk(trial.data[1])[trial.data[0]]

    def step() -> None:
        loss_of(model(rows)).backward()
        model.zero_grad()

    for number in range(2):
        place.doing(f"step {number + 1}")
        step()
    with allocated(place, model.parameters()) as bytes_now:
        step()
        place.wait()
        gc.collect()
        before = bytes_now()
        place.doing("the step that must leave nothing behind")
        step()
        place.wait()
        left = settled(bytes_now, before) - before
    text = f"{left:,} bytes more are allocated after a step than before it" if left > 0 else ""
    return Outcome("wrong" if left > 0 else "right", text, figures={"bytes left by a step": left})


def settled(bytes_now: Callable[[], int], at_most: int) -> int:
    """Return the bytes that are allocated once they are ``at_most``, or those after ``FREED_SECONDS``.

    A thread of gloo frees a tensor that it sent some time later, without an event to wait for.
    """
    deadline = time.monotonic() + FREED_SECONDS
    while (now := bytes_now()) > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return now


@contextmanager
def allocated(place: Place, known: Iterable[Tensor]) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the allocated bytes: those of a GPU's allocator, or of live tensors."""
    if place.cuda:
        yield torch.cuda.memory_allocated
        return
    with LiveBytes(known) as live:
        yield lambda: live.now


class LiveBytes(TorchDispatchMode):
    """A mode that follows every storage that an operator returns, and the storages of ``known`` tensors.

    ``now`` is the number of live bytes, and ``peak`` its maximum since the start or the last ``reset_peak``. Storages
    are often freed by resizing them to zero without an operator, so ``resize_`` is replaced as well.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.peak = 0
        for tensor in known:
            self.follow(tensor)
        self.reset_peak()

    def reset_peak(self) -> None:
        """Reset the peak to the current bytes."""
        self.peak = self.now

    def follow(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it is freed."""
        local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
        storage, key = local.untyped_storage(), storage_key(local)
        if storage.device.type == "meta":
            return
        if key not in self._sizes:
            self._sizes[key] = 0
            self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._update(key, storage.nbytes())

    def _update(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._references[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and follow what it returns."""
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented  # the kernels that these tensors call allocate the memory
        out = func(*args, **(kwargs or {}))
        for tensor in tensors_in(out):
            self.follow(tensor)
        return out

    def __enter__(self) -> LiveBytes:
        resize = self._resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            resize(storage, size)
            if key_of(storage) in self._sizes:
                self._update(key_of(storage), size)
            return storage

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]  # a patch, until __exit__
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]  # likewise


STRICT: dict[str, Callable[[Place], Outcome]] = {
    "freed memory": freed_memory,
    "memory left": kept_memory,
    "streams": streams,
}
