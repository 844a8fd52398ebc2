"""Local tensors of gradients and optimizer states, which must be sharded like their parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from fsdp2._torch.tensors import takes_plain_tensors
from fsdp2.engine.index import param_of
from fsdp2.sharding.spec import arrived, dtensor_like, on_this_rank, placed_alike

__all__ = [
    "STEPS_ON_LOCAL",
    "STEPS_ON_WHOLE",
    "about_plain_gradient",
    "is_counter",
    "local_gradient",
    "local_state",
    "refuse_mixed_lists",
    "shown_state",
]

STEPS_ON_LOCAL = "_fsdp2_local_shards"
"""An attribute of optimizers that step on local shards: what ``elementwise`` was. Copies carry it."""
STEPS_ON_WHOLE = "_fsdp2_full_params"
"""An attribute of optimizers that step on whole parameters. Their state may have any shape."""

_COUNTERS = frozenset(("eta", "mu", "mu_product", "step"))
"""Single numbers in the state of torch's optimizers. Beside a parameter that is a single number itself, the name tells
them from moments."""


def is_counter(key: object) -> bool:
    """Return True if an optimizer's state of this name is a single number, whatever the parameter's shape."""
    return key in _COUNTERS


def local_gradient(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the gradient of this rank's elements of ``param`` as a plain tensor.

    A gradient with other placements (a partial sum, say) is redistributed, so every rank of its mesh must call this.

    Raises:
        RuntimeError: Somebody has made the gradient of a sharded parameter a plain tensor.
    """
    if (error := about_plain_gradient(param)) is not None:
        raise error
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and not placed_alike(grad, param):
        grad = grad.redistribute(placements=param.placements)
    return arrived(on_this_rank(grad))


def about_plain_gradient(param: Any) -> RuntimeError | None:
    """Return an error if somebody has made the gradient of a sharded parameter a plain tensor, of the whole's shape."""
    if not isinstance(param, DTensor) or param.grad is None or isinstance(param.grad, DTensor):
        return None
    name = getattr(param_of(param), "name", "") or f"a parameter of shape {tuple(param.shape)}"
    return RuntimeError(
        f"optimizer.step: {name}: its .grad is a plain tensor, expected a DTensor placed as {param.placements} as the "
        "parameter is. Set torch.distributed.tensor.distribute_tensor(grad, param.device_mesh, param.placements)"
    )


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
        f"DTensor of shape {tuple(param.shape)} placed as {param.placements}. Call zero_grad(), clear the "
        "optimizer's state and load a full state dict with torch.distributed.checkpoint.state_dict."
        "set_optimizer_state_dict(..., options=StateDictOptions(full_state_dict=True)), which shards it"
    )


def shown_state(value: Any, param: torch.Tensor) -> Any:
    """Return ``value``, made by a step on local tensors, as a DTensor if it has the shape of the local ``param``."""
    if not isinstance(param, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    return dtensor_like(param, value) if value.shape == on_this_rank(param).shape else value


def refuse_mixed_lists(optimizer: torch.optim.Optimizer) -> None:
    """Raise RuntimeError if torch's optimizer is about to compute with lists of sharded and plain tensors at once.

    Inside torch's ``implicit_replication()`` operators take such lists.
    """
    if takes_plain_tensors():
        return
    for number, group in enumerate(optimizer.param_groups):
        how = next((name for name in ("fused", "foreach") if group.get(name)), None)
        if how is None or not hasattr(optimizer, "_init_group"):
            continue
        kinds = [isinstance(param, DTensor) for param in group["params"] if param.grad is not None]
        if all(kinds) or not any(kinds) or not optimizer.__dict__.keys().isdisjoint((STEPS_ON_LOCAL, STEPS_ON_WHOLE)):
            continue
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: group {number} has {how}=True and got {sum(kinds)} sharded and "
            f"{len(kinds) - sum(kinds)} plain parameters (such as ignored_params), expected one kind: operators on "
            "lists do not take both. Call fsdp2.use_local_shards(optimizer), or make a group of plain ones"
        )
