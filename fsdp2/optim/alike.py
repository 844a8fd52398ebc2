"""Between DTensors and the plain tensors to compute with: a gradient and a state must be cut like their parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2.sharding.spec import arrived, dtensor_like, on_this_rank, placed_alike

__all__ = ["agreeing_local", "local_state", "shown_state"]


def agreeing_local(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The plain gradient of the elements that ``param`` has here.

    A gradient that is placed otherwise (a partial sum, say) is redistributed: every rank of its mesh must ask for it.
    """
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and not placed_alike(grad, param):
        grad = grad.redistribute(placements=param.placements)
    return arrived(on_this_rank(grad))


def local_state(value: Any, param: torch.Tensor, where: Callable[[], str]) -> Any:
    """What a step on local tensors computes with in place of ``value``, a piece of the state of ``param``.

    Raises:
        RuntimeError: it is placed otherwise than the parameter, or whole where the parameter is cut.
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
    """``value``, made by a step on local tensors, as the optimizer must show it: a DTensor if cut like ``param``."""
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    return dtensor_like(param, value) if value.shape == on_this_rank(param).shape else value
