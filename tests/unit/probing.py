"""The private torch symbols of all subjects, and which of them the probes of this folder are for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any, TypeVar

from fsdp2 import _torch

__all__ = ["PRIVATE", "PROBED", "probes"]

F = TypeVar("F", bound=Callable[..., Any])
PROBED: set[str] = set()
PRIVATE = SimpleNamespace()
for subject in iter_modules(_torch.__path__):
    found = import_module(f"fsdp2._torch.{subject.name}")
    vars(PRIVATE).update({name: getattr(found, name) for name in found.__all__})


def probes(*names: str) -> Callable[[F], F]:
    """Note which symbols a test is for."""
    PROBED.update(names)
    return lambda function: function
