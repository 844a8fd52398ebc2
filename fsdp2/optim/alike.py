"""Local tensors of gradients and optimizer states, which must be sharded like their parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2.sharding.spec import arrived, dtensor_like, on_this_rank, placed_alike

__all__ = ["local_gradient", "local_state", "shown_state"]


def local_gradient(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the gradient of this rank's elements of ``param`` as a plain tensor.

    A gradient with other placements (a partial sum, say) is redistributed, so every rank of its mesh must call this.
    """
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and not placed_alike(grad, param):
        grad = grad.redistribute(placements=param.placements)
    return arrived(on_this_rank(grad))


def local_state(value: Any, param: torch.Tensor, where: Callable[[], str]) -> Any:
    """Return the local tensor of ``value``, an entry of the state of ``param``, for a step on local tensors.

    Raises:
        RuntimeError: The state is not sharded like its parameter.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(param, DTensor):
        return on_this_rank(value)
    if not isinstance(value, DTensor):
        if value.numel() <= 1 or value.shape != param.shape:
            return value
        got = f"a plain tensor of shape {tuple(value.shape)}"
    else:
        same_everywhere = value.numel() == 1 and all(isinstance(p, Replicate) for p in value.placements)
        if placed_alike(value, param) or same_everywhere:
            return on_this_rank(value)
        got = f"a DTensor of shape {tuple(value.shape)} placed as {value.placements}"
    raise RuntimeError(
        f"use_local_shards: {where()}: the optimizer's state is not sharded like its parameter; got {got}; expected a "
        f"DTensor of shape {tuple(param.shape)} placed as {param.placements}. Load a full state dict with "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards it"
    )


def shown_state(value: Any, param: torch.Tensor) -> Any:
    """Return ``value``, made by a step on local tensors, as a DTensor if it has the shape of the local ``param``."""
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    return dtensor_like(param, value) if value.shape == on_this_rank(param).shape else value
