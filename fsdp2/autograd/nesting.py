"""Nested calls of a module: recursion, a submodule that calls the whole module again, or a method that calls it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from torch import nn

__all__ = ["calls_under_way", "counts_as_call", "is_called_by_method"]

F = TypeVar("F", bound=Callable[..., Any])
_CALL = nn.Module.__call__.__code__
_calls: set[int] = {id(_CALL)}  # ids of code objects, since the hash of one goes through all of it for each frame


def counts_as_call(function: F) -> F:
    """Let a call of ``function``, which runs a method of the module ``self``, count as a call of that module."""
    _calls.add(id(function.__code__))
    return function


def calls_under_way(module: nn.Module) -> int:
    """Return the number of calls of ``module`` on this thread's stack.

    It walks the stack instead of keeping a counter, because torch runs no hook when a KeyboardInterrupt ends a call: it
    runs ``always_call`` hooks after an Exception only. It is used only if a call may be nested.
    """
    return len(_codes(module))


def is_called_by_method(module: nn.Module) -> bool:
    """Return whether the call around the latest one of ``module`` is that of a method that counts as a call."""
    return _codes(module)[1] is not _CALL


def _codes(module: nn.Module) -> list[CodeType]:
    """Return the code of each call of ``module`` on this thread's stack, the latest first."""
    codes: list[CodeType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if id(frame.f_code) in _calls and frame.f_locals.get("self") is module:
            codes.append(frame.f_code)
        frame = frame.f_back
    return codes
