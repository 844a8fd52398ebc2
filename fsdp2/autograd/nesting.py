"""Nested calls of a module: recursion, a submodule that calls the whole module again, or a method that calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch import nn

__all__ = ["calls_under_way", "counts_as_call"]

F = TypeVar("F", bound=Callable[..., Any])
_calls: set[CodeType] = {nn.Module.__call__.__code__}


def counts_as_call(function: F) -> F:
    """Let ``function``, whose parameter ``self`` is a module, count as a call of that module."""
    _calls.add(function.__code__)
    return function


def calls_under_way(module: nn.Module) -> int:
    """Return the number of calls of ``module`` on this thread's stack.

    It walks the stack instead of keeping a counter, because no hook runs when a KeyboardInterrupt ends a call. It is
    used only where a call may be nested.
    """
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _calls and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count
