"""Memory for tensors on the meta device, in place: modules and optimizers keep the objects they hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.engine.param import parameter_like
from fsdp2.sharding.spec import dtensor_like, on_this_rank
from fsdp2.weights.select import Place

__all__ = ["materialize"]


def materialize(places: Iterable[Place], device: torch.device) -> None:
    """Give those of ``places`` that are on the meta device memory of undefined content.

    Sharded parameters go where their unit computes, to the CPU if it offloads; all others to ``device``. No more is
    allocated than stays.

    A parameter that is not sharded and that somebody holds a weak reference to is replaced on its modules instead.

    Raises:
        RuntimeError: somebody holds a weak reference to a sharded parameter.
    """
    waiting = [place for place in places if place.local.is_meta]
    going = {place.param for place in waiting if place.param is not None}
    for place in waiting:
        if place.param is not None:
            _swap(place.param.sharded, place.param.spec.shard(_shard_of(place, going)))  # type: ignore[arg-type]  # has one
        elif isinstance(place.tensor, nn.Parameter):
            new = _empty_like(place.tensor, device)
            if weakref.getweakrefs(place.tensor):  # an LSTM's: torch cannot swap these
                place.tensor = parameter_like(place.tensor, new)
                for slot in place.slots:
                    slot.show(place.tensor)
            else:
                _swap(place.tensor, new)
        else:
            place.tensor = _empty_like(place.tensor, device)
            for slot in place.slots:
                setattr(slot.module, slot.name, place.tensor)
    for group in dict.fromkeys(place.param.group for place in waiting if place.param is not None):
        group.residency.adopt()


def _shard_of(place: Place, going: set[object]) -> torch.Tensor:
    """What becomes the shard's memory; where all of its group goes, one number stands for it until it has a buffer."""
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
    """Let the object ``param``, its attributes and hooks stay, and its memory be that of ``new``."""
    torch.utils.swap_tensors(param, parameter_like(param, new))
