"""Whose gradients are averaged by whom: parameters beside sharded ones that nobody averages, or that DDP would too."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp2._naming import class_name
from fsdp2._torch.autograd import have_gradient_hooks
from fsdp2._torch.hooks import outside_dynamo
from fsdp2._warn import warn
from fsdp2.engine.param import is_managed_tensor
from fsdp2.engine.unit import FSDPState, live_units

__all__ = ["refuse_ddp", "warn_of_unaveraged"]

_SEEN = "_fsdp2_averaging_seen"  # attribute of an optimizer: its number of groups when a step was looked at
_SHOWN = 8


def refuse_ddp(wrapper: nn.Module, name: str, module: Any) -> None:
    """Raise RuntimeError if DistributedDataParallel is about to wrap sharded parameters, which it would broadcast."""
    if not isinstance(wrapper, DistributedDataParallel) or name != "module" or not isinstance(module, nn.Module):
        return
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    named = [n for n, p in module.named_parameters() if is_managed_tensor(p) and n not in ignored]
    if named:
        raise RuntimeError(
            f"DistributedDataParallel: {_list(named)} of {class_name(module)} are sharded by fully_shard, which "
            "averages their gradients over all ranks of its mesh; expected parameters that are not. Leave "
            "DistributedDataParallel out. For replicas of the shards, pass fully_shard a 2D mesh with the dimensions "
            "('replicate', 'shard')"
        )


def warn_of_unaveraged(optimizer: torch.optim.Optimizer) -> None:
    """Warn at the first step on gradients if some are of plain parameters that nobody averages over ranks.

    That is a model whose blocks are units, while ``fully_shard`` was not called on the whole. The first step with
    another number of groups is looked at, too.
    """
    if optimizer.__dict__.get(_SEEN) != len(optimizer.param_groups):
        _look(optimizer)


@outside_dynamo
def _look(optimizer: torch.optim.Optimizer) -> None:
    held = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)]
    if all(p.grad is None for p in held):
        return
    optimizer.__dict__[_SEEN] = len(optimizer.param_groups)
    units = [unit for unit in live_units() if any(group.mesh.mesh.size() > 1 for group in unit.groups)]
    plain = {id(p): p for p in held if type(p) is nn.Parameter and p.grad is not None and not is_managed_tensor(p)}
    for unit in live_units() if plain else ():  # also those of which every parameter is left out
        for ignored in unit.made_by.ignored_now():
            plain.pop(id(ignored), None)
    # A hook on a gradient may average it.
    unaveraged = {key: p for key, p in plain.items() if not have_gradient_hooks([p])}
    if not units or not unaveraged:
        return
    names = _names(unaveraged, units, beside=any(map(is_managed_tensor, held)))
    if names:
        warn(
            f"{_list(names)}: trained beside sharded parameters, but no fully_shard call has them, so nobody averages "
            "their gradients, and each rank trains values of its own. Call fully_shard on the whole model too, after "
            "its blocks: fully_shard(model); to leave them out on purpose, pass them to it as ignored_params",
            here=not any(any(_place(group)) for unit in units for group in unit.groups),  # on each mesh's first rank
        )


def _place(group: Any) -> Iterable[int]:
    return group.mesh.mesh.get_coordinate() or ()


def _names(params: dict[int, nn.Parameter], units: Iterable[FSDPState], *, beside: bool) -> list[str]:
    """Return names of those of ``params`` that belong to a model with ``units``, or are ``beside`` sharded ones.

    DistributedDataParallel averages its own. Nothing leads from a unit to the modules around it, so all modules of the
    process are looked for, once.
    """
    found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    modules = [each for each in found if "_modules" in each.__dict__]  # the others are not made: __init__ has raised
    for wrapper in modules:
        if isinstance(wrapper, DistributedDataParallel) and "module" in wrapper._modules:
            for name, param in wrapper.module.named_parameters():
                if name not in wrapper.parameters_to_ignore:
                    params.pop(id(param), None)
    children = {id(child) for module in modules for child in module._modules.values()}
    inside = {id(module) for unit in units for module in unit.modules}
    named: dict[int, str] = {}
    for top in modules:
        if id(top) in children:
            continue
        around = not inside.isdisjoint(map(id, top.modules()))
        for name, param in top.named_parameters() if around or beside else ():
            if id(param) in params and (around or id(param) not in named):
                named[id(param)] = name if "." in name else f"{name} of {class_name(top)}"
    return [named[key] for key in params if key in named]


def _list(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
