"""The class that the author of a module wrote, by which messages call it."""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

__all__ = ["class_name", "original_class"]


def original_class(cls: type) -> Any:
    """Return the class that ``fully_shard``, ours or torch's, made ``cls`` of; ``cls`` itself if it made none."""
    return next(base for base in cls.__mro__ if not issubclass(base, TorchFSDPModule))


def class_name(module: object) -> str:
    """Return the name of the class that its author gave the module: ``Linear``, not ``FSDPLinear``."""
    return original_class(type(module)).__name__
