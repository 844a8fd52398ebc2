"""Which private torch symbols the probes of this folder are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["PROBED", "probes"]

F = TypeVar("F", bound=Callable[..., Any])
PROBED: set[str] = set()


def probes(*names: str) -> Callable[[F], F]:
    """Note which symbols a test is for."""
    PROBED.update(names)
    return lambda function: function
