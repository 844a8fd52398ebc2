"""Between DTensors and the plain tensors to compute with: a gradient and a state must be cut like their parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2._torch.tensors import AsyncCollectiveTensor, DTensorSpec, dtensor_from_local, dtensor_spec, local_tensor
from fsdp2.sharding.spec import with_dtype

__all__ = ["agreeing_local", "local_state", "same_placement", "shown_state"]


def same_placement(one: DTensorSpec, other: DTensorSpec) -> bool:
    """Whether the same elements of two tensors are on each rank; their dtypes may differ."""
    if one is other:
        return True
    return one.placements == other.placements and one.shape == other.shape and one.mesh == other.mesh


def agreeing_local(grad: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """The plain gradient of the elements that a parameter with this spec has here (None: a plain parameter).

    A gradient that is placed otherwise (a partial sum, say) is redistributed: every rank of its mesh must ask for it.
    """
    if isinstance(grad, DTensor):
        if spec is not None and not same_placement(dtensor_spec(grad), spec):
            grad = grad.redistribute(placements=spec.placements)
        grad = local_tensor(grad)
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad


def local_state(value: Any, spec: DTensorSpec | None, where: Callable[[], str]) -> Any:
    """What a step on local tensors computes with in place of ``value``, a piece of a parameter's state.

    Raises:
        RuntimeError: it is placed otherwise than the parameter, or whole where the parameter is cut.
    """
    if not isinstance(value, torch.Tensor) or spec is None:
        return local_tensor(value) if isinstance(value, DTensor) else value
    if not isinstance(value, DTensor):
        if value.numel() <= 1 or tuple(value.shape) != tuple(spec.shape):
            return value
        got = f"a plain tensor of shape {tuple(value.shape)}"
    else:
        own = dtensor_spec(value)
        same_everywhere = value.numel() == 1 and all(isinstance(p, Replicate) for p in own.placements)
        if same_placement(own, spec) or same_everywhere:
            return local_tensor(value)
        got = f"a DTensor of shape {tuple(value.shape)} placed as {own.placements}"
    raise RuntimeError(
        f"use_local_shards: {where()}: the optimizer's state is not sharded like its parameter; got {got}; expected a "
        f"DTensor of shape {tuple(spec.shape)} placed as {spec.placements}. Load a full state dict with "
        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which shards it"
    )


def shown_state(value: Any, param: torch.Tensor) -> Any:
    """``value``, made by a step on local tensors, as the optimizer must show it: a DTensor if cut like ``param``."""
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.shape != local_tensor(param).shape:
        return value
    return dtensor_from_local(value, with_dtype(dtensor_spec(param), value.dtype))
