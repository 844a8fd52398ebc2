"""Allocate memory for tensors on the meta device in place: modules and optimizers keep the same objects."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.engine.param import FSDPParam, parameter_like
from fsdp2.sharding.spec import dtensor_like, on_this_rank
from fsdp2.weights.select import Place

__all__ = ["materialize"]


def materialize(places: Iterable[Place], device: torch.device) -> None:
    """Allocate uninitialized memory for those of ``places`` that are on the meta device.

    Sharded parameters go to the device on which their unit computes, or to the CPU if the unit offloads. All others go
    to ``device``. No temporary memory is allocated.

    An unsharded parameter with a weak reference to it is replaced on its modules instead.

    Raises:
        RuntimeError: A sharded parameter has a weak reference to it.
    """
    waiting = [place for place in places if place.local.is_meta]
    going = {place.param for place in waiting if place.param is not None}
    for place in waiting:
        if place.param is not None:
            shard = place.param.spec.shard(_shard_of(place, going))
            _swap(place.param.sharded, shard)  # type: ignore[arg-type]  # never None here: it has a local
        elif isinstance(place.tensor, nn.Parameter):
            new = _empty_like(place.tensor, device)
            if weakref.getweakrefs(place.tensor):  # as in an LSTM: torch cannot swap such tensors
                place.tensor = parameter_like(place.tensor, new)
                for site in place.sites:
                    site.show(place.tensor)
            else:
                _swap(place.tensor, new)
        else:
            place.tensor = _empty_like(place.tensor, device)
            for site in place.sites:
                setattr(site.module, site.name, place.tensor)
    for group in dict.fromkeys(place.param.group for place in waiting if place.param is not None):
        group.residency.adopt(lasting=True)


def _shard_of(place: Place, going: Collection[FSDPParam]) -> torch.Tensor:
    """Return the shard's new memory.

    If all parameters of its group are materialized, one expanded element stands in for the shard until ``adopt`` gives
    the group its flat buffer: allocating the shard here as well would need its memory twice.
    """
    param, local = place.param, place.local
    assert param is not None
    group, device = param.group, param.group.store.home
    if type(local) is not torch.Tensor:
        return torch.empty_like(local, device=device)
    if all(other in going or not other.local.is_meta for other in group.params):
        return torch.zeros((), dtype=local.dtype, device=device).expand(local.shape)
    spec = param.spec
    return torch.empty_strided(spec.shard_shape, spec.shard_stride, dtype=local.dtype, device=device)


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return dtensor_like(tensor, torch.empty_like(on_this_rank(tensor), device=device))
    return torch.empty_like(tensor, device=device)


def _swap(param: torch.Tensor, new: torch.Tensor) -> None:
    """Give the object ``param`` the memory of ``new``; its attributes and hooks stay."""
    torch.utils.swap_tensors(param, parameter_like(param, new))
