"""Nested calls of a module: recursion, or a submodule that calls the whole module again."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

__all__ = ["calls_under_way"]


def calls_under_way(module: nn.Module) -> int:
    """Return the number of calls of ``module`` on this thread's stack.

    It walks the stack instead of keeping a counter, because no hook runs when a KeyboardInterrupt ends a call. It is
    used only where a call may be nested.
    """
    count = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module.__call__.__code__ and frame.f_locals.get("self") is module:
            count += 1
        frame = frame.f_back
    return count
