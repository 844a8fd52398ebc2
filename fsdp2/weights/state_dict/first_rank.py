"""From the first rank to the others: a state of whole tensors that only the first rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import pytree
from fsdp2.comm.collectives import broadcast, share_object
from fsdp2.sharding.mesh import Axis
from fsdp2.weights.state_dict.names import clean_name

__all__ = ["from_first_rank"]

_SMALL = 64
"""Tensors of so many elements or fewer, step counters above all, travel together."""


@dataclass(frozen=True)
class _Coming:
    """Stands for a tensor that the first rank is about to send."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


class _Sharded:
    """Stands for a DTensor, which the first rank cannot send."""


def _announce(value: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        return _Sharded()
    if value.numel() <= _SMALL:
        return value.detach().cpu()
    tensors.append(value)
    return _Coming(tuple(value.shape), value.dtype, value.device.type)


@torch.no_grad()
def from_first_rank(state_dict: Any, mesh: DeviceMesh, keep: Callable[[torch.Tensor, str | None], torch.Tensor]) -> Any:
    """The optimizer state that the first rank of ``mesh`` gave; every rank of it must call this.

    Tensors are sent one by one; ``keep(tensor, name)`` is what a rank keeps of one, where ``name`` is the parameter's
    whose state it is, None for what belongs to no parameter.

    Raises:
        TypeError: the first rank gave DTensors; on every rank.
    """
    first = not any(mesh.get_coordinate() or ())
    tensors: list[torch.Tensor] = []
    plan = pytree.tree_map(lambda value: _announce(value, tensors), state_dict) if first else None
    axes, device = [Axis.of(mesh, dim) for dim in range(mesh.ndim)], torch.device(mesh.device_type)
    for axis in axes:
        plan = share_object(plan, axis, device)
    if not isinstance(plan, Mapping) or not isinstance(plan.get("state"), Mapping):
        return plan  # every rank says so
    if any(isinstance(value, _Sharded) for value in pytree.tree_leaves(plan)):
        raise TypeError(
            "optim_state_dict_to_load: with rank0_only the first rank must give whole tensors, got a DTensor; load "
            "sharded state without rank0_only, on every rank"
        )
    sending = iter(tensors)

    def receive(value: Any, name: str | None) -> Any:
        if not isinstance(value, _Coming):
            return value
        if first:
            tensor = next(sending).detach().to(device).contiguous()
        else:
            tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
        for axis in axes:
            broadcast(tensor, axis)
        kept = keep(tensor, name)
        return kept.to(value.device) if kept is tensor else kept

    received: dict[str, Any] = {}
    for key, entry in plan.items():  # in the order in which the tensors were announced
        if key == "state":
            names = {name: clean_name(name) if isinstance(name, str) else None for name in entry}
            received[key] = {
                name: pytree.tree_map(lambda value, n=names[name]: receive(value, n), state)
                for name, state in entry.items()
            }
        else:
            received[key] = pytree.tree_map(lambda value: receive(value, None), entry)
    return received
