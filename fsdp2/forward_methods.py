"""Methods beside ``forward`` that compute with the parameters of a sharded module."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn

from fsdp2.module import FSDPModule

__all__ = ["register_fsdp_forward_method"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather and free parameters as ``forward`` does; does nothing to a plain module.

    Raises:
        ValueError: ``module`` has no such method.
    """
    if not isinstance(module, FSDPModule):
        return  # the same script also runs unsharded
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)
    of_module = isinstance(original, MethodType) and original.__self__ is module

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A deep copy of the module takes this method along, and must not compute with the original's parameters.
        call = MethodType(original.__func__, self) if of_module else original
        state = self._get_fsdp_state()
        args, kwargs = state.pre_forward(self, args, kwargs)
        try:
            output = call(*args, **kwargs)
        except Exception as error:
            state.explain(error)  # the hook that explains errors of forward does not see this call
            raise
        return state.post_forward(self, args, output)

    setattr(module, method_name, MethodType(method, module))
