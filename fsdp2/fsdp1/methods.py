"""Compatibility with code for FSDP1: methods of its wrapper, and errors that name the replacement of an argument."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from fsdp2.grouping.modules import no_sync
from fsdp2.optim.clip import clip_grad_norm_

__all__ = ["FSDP1Methods", "names_remedies"]

F = TypeVar("F", bound=Callable[..., Any])

_REMEDIES = {
    "auto_wrap_policy": "pass policy=, which takes the same policies",
    "mixed_precision": "pass mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)",
    "sharding_strategy": "pass strategy=, which takes the same values",
    "device_mesh": "pass mesh=",
    "process_group": "pass mesh=DeviceMesh.from_group(process_group, device_type)",
    "cpu_offload": "pass offload_policy=CPUOffloadPolicy()",
    "ignored_states": "pass ignored_params= or ignored_modules=",
    "backward_prefetch": "leave it out: units are prefetched; set_modules_to_backward_prefetch changes the order",
    "forward_prefetch": "leave it out: units are prefetched; set_modules_to_forward_prefetch changes the order",
    "limit_all_gathers": "leave it out: memory is bounded by gathering one unit ahead",
    "use_orig_params": "leave it out: parameters always keep their names",
    "param_init_fn": "build on the meta device, shard, then call to_empty() and initialize, or load",
    "sync_module_states": "call fsdp2.sync_module_states(model) before the first fully_shard",
    "device_id": "leave it out: shards are on the mesh's device; make that the current device before the call",
}


def names_remedies(function: F) -> F:
    """Return ``function``, wrapped so that an argument of FSDP1 raises an error with the argument to use instead."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known and name in _REMEDIES:
                raise TypeError(f"fully_shard: {name}= is an argument of FSDP1, not of fully_shard; {_REMEDIES[name]}")
        return function(*args, **kwargs)

    return cast(F, call)


class FSDP1Methods:
    """Methods of FSDP1's wrapper that training loops call. The model's own methods of these names take precedence."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication inside a ``with`` block, like ``fsdp2.no_sync(model)``."""
        return no_sync(cast(nn.Module, self))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients to a total norm of at most ``max_norm``, and return the norm before scaling."""
        return clip_grad_norm_(cast(nn.Module, self).parameters(), max_norm, norm_type)
