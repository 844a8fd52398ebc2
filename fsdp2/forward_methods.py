"""Methods other than ``forward`` that compute with the parameters of a sharded module."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import nn

from fsdp2.engine.unit import call_method
from fsdp2.module import FSDPModule

__all__ = ["register_fsdp_forward_method"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name(...)`` gather and free parameters as ``forward`` does.

    A plain module is not changed, so the same script also runs unsharded. Without gradients, each part of a generator,
    from one ``yield`` to the next, gathers and frees.

    Args:
        module: A sharded module.
        method_name: The name of a method that reads the module's own parameters, such as "encode".

    Raises:
        ValueError: ``module`` has no such method.

    Example:
        ```python
        fsdp2.fully_shard(autoencoder)
        fsdp2.register_fsdp_forward_method(autoencoder, "encode")
        code = autoencoder.encode(image)
        ```
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    original = getattr(module, method_name)
    of_module = isinstance(original, MethodType) and original.__self__ is module

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A deep copy of the module has this method too; it must compute with the copy's parameters.
        function = MethodType(original.__func__, self) if of_module else original
        return call_method(self, self._get_fsdp_state(), function, args, kwargs)

    setattr(module, method_name, MethodType(method, module))
