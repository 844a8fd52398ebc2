"""Users' hooks on the gradients of shards, which get the reduced gradient as a DTensor.

They were written for plain models, so they combine the gradient with plain masks, write to its rows, and return tensors
of several shapes. What DTensor supports works. A write that DTensor would silently lose raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch.hooks import TorchDispatchMode, makes_view, written_by
from fsdp2._torch.tensors import local_tensor, plain_tensors_replicated, storages_of
from fsdp2.sharding.spec import ShardedSpec

__all__ = ["call_hook", "gradient_after"]

Hook = Callable[[torch.Tensor], Any]

# DTensor's errors are plain RuntimeErrors, without a class or a code: only their texts tell them from the hook's own.
_REFUSALS = ("DTensor", "Sharding propagation failed", "does not have a sharding strategy registered")


def call_hook(hook: Hook, tensor: torch.Tensor, name: str, spec: ShardedSpec) -> Any:
    """Return ``hook(tensor)``; ``tensor`` is the parameter ``name``, or its gradient.

    The hook may combine DTensors with plain tensors of the whole shape, such as a mask.

    Raises:
        RuntimeError: The hook did what DTensor refuses or would lose. The text names the parameter and a remedy.
    """
    try:
        with plain_tensors_replicated(), _RefuseLostWrites():
            return hook(tensor)
    except RuntimeError as error:
        text = error.args[0] if error.args and isinstance(error.args[0], str) else ""
        if any(refusal in text for refusal in _REFUSALS):
            called = getattr(hook, "__qualname__", type(hook).__name__)
            error.args = (
                f"{name}: its gradient hook {called} got a DTensor of shape {tuple(spec.dtensor.shape)} placed as "
                f"{spec.dtensor.placements}, and did what DTensors do not support: {text}\nExpected operators on the "
                "whole gradient, which return a new one: grad * mask, or grad.masked_fill(mask, 0), where mask has the "
                "shape of the whole parameter",
                *error.args[1:],
            )
        raise


def gradient_after(hook: Hook, grad: DTensor, name: str, spec: ShardedSpec) -> DTensor:
    """Return the gradient to go on with after ``hook(grad)``, cut as the parameter is.

    Raises:
        RuntimeError: The hook raised as in ``call_hook``, or did not return a gradient of the parameter.
    """
    changed = call_hook(hook, grad, name, spec)
    if changed is None or changed is grad:
        return grad
    own = tuple(local_tensor(grad).shape)
    if isinstance(changed, DTensor) and changed.shape == grad.shape:
        same = changed.placements == grad.placements
        return changed if same else changed.redistribute(placements=grad.placements)
    if isinstance(changed, torch.Tensor) and not isinstance(changed, DTensor):
        if changed.shape == grad.shape:
            return spec.shard_as(spec.cut(spec.of_plain(changed)).contiguous())
        if tuple(changed.shape) == own:
            return spec.shard_as(changed)
    got = f"a {type(changed).__name__} of shape {tuple(changed.shape)}" if hasattr(changed, "shape") else repr(changed)
    raise RuntimeError(
        f"{name}: its gradient hook returned {got}; expected None, or a gradient of the whole shape "
        f"{tuple(grad.shape)} or of the shape {own} of this rank's piece. Return the hook's argument, changed by "
        "operators that keep its shape"
    )


class _RefuseLostWrites(TorchDispatchMode):
    """Refuses writes to a part of a DTensor that is a copy, although the same part of a plain tensor is a view.

    DTensor copies a row that is taken from a tensor sharded by rows, so a write to the row would be lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copied: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in written_by(func, args):
            if isinstance(value, DTensor) and value in self._copied:
                raise RuntimeError(
                    f"{func}: got a write to a part of a DTensor that is sharded along the dimension of that part. It "
                    "is a copy, so the write would be lost"
                )
        result = func(*args, **(kwargs or {}))
        if makes_view(func) and isinstance(args[0], DTensor):
            for part in result if isinstance(result, (list, tuple)) else (result,):
                own, of_whole = storages_of([local_tensor(part), local_tensor(args[0])])
                if own != of_whole or args[0] in self._copied:
                    self._copied[part] = None
        return result
