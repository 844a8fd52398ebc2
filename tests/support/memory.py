"""Counting the bytes of live tensor storages: exact on every device, freed and resized ones included."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """While active, follows every storage that an operator returns or that was named at the start.

    ``now`` are the bytes alive, ``peak`` the most there were since the start or the last ``reset_peak``. Storages are
    often freed by resizing them to zero, which no operator shows; so ``resize_`` is watched as well.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.now = self.peak = 0
        for tensor in known:
            self.follow(tensor)
        self.reset_peak()

    def reset_peak(self) -> None:
        """Forget the peak."""
        self.peak = self.now

    def follow(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it dies; one on the meta device, or of a fake tensor, has no bytes."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.device.type == "meta":
            return
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            self.references[key] = weakref.ref(storage, lambda _, key=key: self.forget(key))
        self.update(key, storage.size())

    def update(self, key: int, size: int) -> None:
        """Note that a storage has ``size`` bytes now."""
        self.now += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def forget(self, key: int) -> None:
        """Note that a storage has died."""
        self.now -= self.sizes.pop(key)
        del self.references[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # the kernels that they come to make the memory
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self.follow(value)
        return result

    def __enter__(self) -> LiveBytes:
        original = self.original = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            original(storage, size)
            if storage._cdata in self.sizes:
                self.update(storage._cdata, size)
            return storage

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self.original  # type: ignore[method-assign]
