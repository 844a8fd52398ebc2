"""Modes that see every operation: those of a checkpoint must not see what sharding does inside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as checkpointing
from torch.distributed.device_mesh import DeviceMesh

# Modes can be entered and left in public, but not taken off for a while.
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = ["dispatch_modes", "outside_modes", "ranks_in"]

_M = TypeVar("_M", bound=Callable[..., Any])

# How many modes there are; asked by every hook, so it must cost nothing.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# Selective checkpointing keeps results by operation and number, so a gather that happens in the forward alone, or in
# the recomputation alone, makes it give out wrong ones or raise.
_names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
_CHECKPOINTS = tuple(getattr(checkpointing, name) for name in _names if hasattr(checkpointing, name))


def ranks_in(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh in the order of its elements, also where a mode makes fake tensors of everything."""
    with torch._C._DisableTorchDispatch():
        return mesh.mesh.flatten().tolist()


def outside_modes(outer: Callable[[Any], int]) -> Callable[[_M], _M]:
    """Take a method out of sight of the modes of a checkpoint, and of all that are inside of the ``outer(self)`` first.

    Modes by which torch traces and makes fake tensors stay.
    """

    def decorate(method: _M) -> _M:
        @functools.wraps(method)
        def run(self: Any, *args: Any) -> Any:
            if not dispatch_modes():
                return method(self, *args)
            stack = _get_current_dispatch_mode_stack()
            keep = next((i for i, mode in enumerate(stack) if isinstance(mode, _CHECKPOINTS)), len(stack))
            keep = min(keep, outer(self))
            hidden = [mode for mode in stack[keep:] if getattr(mode, "_mode_key", None) is None]
            for _ in hidden:
                _pop_mode()
            try:
                return method(self, *args)
            finally:
                for mode in hidden:
                    _push_mode(mode)

        return run  # type: ignore[return-value]  # wraps() hides that the signature is method's

    return decorate
