"""Keep torch.compile and dispatch modes out of hooks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint as checkpointing

# The mode that computes nothing; nothing public tells whether it is active.
from torch._subclasses.fake_tensor import FakeTensorMode

# The mode of ``allow_mutation_on_saved_tensors``, which nothing public tells of.
from torch.autograd.graph import _CloneArgBeforeMutateMode

# Public functions enter and leave modes, but cannot remove one for a while.
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

__all__ = [
    "TorchDispatchMode",
    "clones_before_writes",
    "dispatch_modes",
    "dynamo_is_tracing",
    "fakes_results",
    "is_exporting",
    "makes_view",
    "outside_dynamo",
    "outside_dynamo_and_modes",
    "skipped_by_dynamo",
    "written_by",
]

_M = TypeVar("_M", bound=Callable[..., Any])

# The function that compiles Python frames now; None outside of compiled code, where nothing has to be disabled.
_frames = torch._C._dynamo.eval_frame
_compile_callback: Callable[[], object] = _frames.get_eval_frame_callback

# What to do with a frame, and with those that it calls. Functions of torch._dynamo set this too, but it is imported
# when a program compiles something, and then it meets our hooks before we could call them.
_SKIP, _DEFAULT = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
_SKIPPED = _frames._FrameExecStrategy(_SKIP, _DEFAULT)
_ALL_SKIPPED = _frames._FrameExecStrategy(_SKIP, _SKIP)

# The number of active modes. Every hook calls it, so it must be fast.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

# The mode with which ``make_fx`` writes down operators; nothing public tells whether it is active.
_get_mode = torch._C._get_dispatch_mode
_WRITES_DOWN = torch._C._TorchDispatchModeKey.PROXY

# Selective checkpointing stores results by operation and count. A gather that runs only in the forward, or only in the
# recomputation, would make it return wrong results or raise an error.
_names = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
_CHECKPOINTS = tuple(getattr(checkpointing, name) for name in _names if hasattr(checkpointing, name))


def skipped_by_dynamo(function: _M) -> _M:
    """Return ``function``, which autograd calls. Dynamo leaves it as it is, and everything that it calls.

    That is for a backward inside a compiled function. Unlike ``outside_dynamo`` it costs nothing per call, and it does
    not help where Dynamo traces the caller.
    """
    _frames.set_code_exec_strategy(function.__code__, _ALL_SKIPPED)  # type: ignore[attr-defined]  # it is a function
    return function


def outside_dynamo(method: _M, among_modes: Callable[..., Any] | None = None) -> _M:
    """Return ``method`` with compilation disabled: torch.compile breaks its graph there instead of tracing hooks.

    Dynamo is not imported for this. Outside of compiled code, a call costs one test. If dispatch modes are active,
    ``among_modes`` runs instead, if given.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        called = method if among_modes is None or not dispatch_modes() else among_modes
        disable = getattr(sys.modules.get("torch._dynamo"), "disable", None)
        if disable is None:  # not imported, or another thread is importing it just now: then nothing is compiled
            return called(*args, **kwargs)
        if not disabled:
            why = "fsdp2's hooks are not compiled"
            disabled.append(disable(among_modes or method, recursive=True, reason=why))
        if _compile_callback() is None:
            return called(*args, **kwargs)
        return disabled[0](*args, **kwargs)

    # Dynamo heeds the mark where it traces a call of ``run``, and the strategy where Python comes to ``run`` by itself.
    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo's mark, on a function
    _frames.set_code_exec_strategy(run.__code__, _SKIPPED)  # type: ignore[attr-defined]  # wraps() hides what it is
    return run  # type: ignore[return-value]  # wraps() hides that the signature is method's


def outside_dynamo_and_modes(outer: Callable[[Any], int]) -> Callable[[_M], _M]:
    """Return a decorator that also hides a method from some dispatch modes.

    These are the modes of selective checkpointing, and all modes above the first ``outer(self)`` ones. Modes with which
    torch traces or makes fake tensors stay.
    """

    def decorate(method: _M) -> _M:
        def hidden(self: Any, *args: Any) -> Any:
            stack = _get_current_dispatch_mode_stack()
            keep = next((i for i, mode in enumerate(stack) if isinstance(mode, _CHECKPOINTS)), len(stack))
            keep = min(keep, outer(self))
            taken = [mode for mode in stack[keep:] if getattr(mode, "_mode_key", None) is None]
            for _ in taken:
                _pop_mode()
            try:
                return method(self, *args)
            finally:
                for mode in taken:
                    _push_mode(mode)

        return outside_dynamo(method, hidden)

    return decorate


def clones_before_writes() -> bool:
    """Return True inside ``torch.autograd.graph.allow_mutation_on_saved_tensors``.

    When memory is written, it clones what autograd has saved at that address, a full parameter that was freed included.
    """
    stack = _get_current_dispatch_mode_stack() if dispatch_modes() else []
    return any([isinstance(mode, _CloneArgBeforeMutateMode) for mode in stack])


def fakes_results() -> bool:
    """Return True inside ``FakeTensorMode``: operators compute nothing, also on tensors that are not fake."""
    stack = _get_current_dispatch_mode_stack() if dispatch_modes() else []
    return any([isinstance(mode, FakeTensorMode) for mode in stack])


def is_exporting() -> bool:
    """Return True inside ``torch.export``, ``torch.onnx.export``, ``torch.jit.trace`` and ``make_fx``.

    ``torch.func.linearize`` calls the last of them.
    """
    return torch.jit.is_tracing() or torch.compiler.is_exporting() or _get_mode(_WRITES_DOWN) is not None


def dynamo_is_tracing() -> bool:
    """Return True if Dynamo runs this function while it traces: it would treat unknown tensors as constants."""
    return "torch._dynamo" in sys.modules and torch._guards.TracingContext.try_get() is not None


def makes_view(operator: Any) -> bool:
    """Return True if the results of an operator are views of its first argument."""
    return bool(operator.is_view)


def written_by(operator: Any, args: Sequence[Any]) -> list[Any]:
    """Return those of the arguments ``args`` of an operator that it writes to."""
    infos = [argument.alias_info for argument in operator._schema.arguments]
    return [value for info, value in zip(infos, args) if info is not None and info.is_write]
