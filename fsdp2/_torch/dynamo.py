"""What keeps torch.compile out of hooks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = [
    "dynamo_is_tracing",
    "outside_dynamo",
]

_M = TypeVar("_M", bound=Callable[..., Any])

# What Python frames are compiled by now; None outside of what is compiled, where there is nothing to turn off.
_compile_callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


def outside_dynamo(method: _M) -> _M:
    """``method`` with compilation off while it runs: torch.compile breaks its graph there instead of tracing hooks.

    Dynamo is not imported for it. Outside of what is compiled, a call costs one look at whether it is.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None:
            return method(*args, **kwargs)
        if not disabled:
            disabled.append(dynamo.disable(method, recursive=True, reason="fsdp2's hooks are not compiled"))
            dynamo.eval_frame.skip_code(run.__code__)  # type: ignore[attr-defined]  # wraps() hides that it is a function
        if _compile_callback() is None:
            return method(*args, **kwargs)
        return disabled[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # Dynamo's mark, on a function
    return run  # type: ignore[return-value]  # wraps() hides that the signature is method's


def dynamo_is_tracing() -> bool:
    """Whether Dynamo runs this function while it traces: it takes tensors it has not seen for constants."""
    return "torch._dynamo" in sys.modules and torch._guards.TracingContext.try_get() is not None
