"""Methods other than ``forward`` that compute with the parameters of a sharded module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from fsdp2.autograd.nesting import counts_as_call
from fsdp2.module import FSDPModule

__all__ = ["register_fsdp_forward_method"]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.method_name(...)`` gather and free parameters as ``forward`` does.

    A plain module is not changed, so the same script also runs unsharded.

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
        return _call(self, MethodType(original.__func__, self) if of_module else original, args, kwargs)

    setattr(module, method_name, MethodType(method, module))


@counts_as_call
def _call(self: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a method of the module ``self`` with what happens around ``forward``."""
    unit = self._get_fsdp_state()
    outermost = unit.root.forward is None
    try:
        args, kwargs = unit.pre_forward(self, args, kwargs)
        return unit.post_forward(self, args, original(*args, **kwargs))
    except Exception as error:
        unit.explain(error)  # the hook on errors of forward does not see this call
        if outermost:
            unit.break_off_forward()
        raise
