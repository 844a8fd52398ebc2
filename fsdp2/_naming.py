"""The class that the author of a module wrote, by which messages call it, and what is no module."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

__all__ = ["check_module", "class_name", "original_class"]


def original_class(cls: type) -> Any:
    """Return the class that ``fully_shard``, ours or torch's, made ``cls`` of; ``cls`` itself if it made none."""
    return next(base for base in cls.__mro__ if not issubclass(base, TorchFSDPModule))


def class_name(module: object) -> str:
    """Return the name of the class that its author gave the module: ``Linear``, not ``FSDPLinear``."""
    return original_class(type(module)).__name__


def check_module(module: object, where: str) -> None:
    """Raise TypeError in the name of the function ``where`` if its argument is no module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where}: expected an nn.Module, got {class_name(module)}")
