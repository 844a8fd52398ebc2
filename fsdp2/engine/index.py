"""Find the parameter that a tensor, a site or an original belongs to, and the units and groups below a module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam, Site, is_managed_tensor
from fsdp2.engine.unit import FSDPState, get_state, live_units

__all__ = ["groups_below", "managed_sites", "originals_remembered", "param_of", "remember_originals", "units_below"]

# Weak references to originals only: torch cannot swap a tensor that has one, and Module.to swaps the sharded ones.
_originals: WeakIdKeyDictionary = WeakIdKeyDictionary()  # original parameter -> weak FSDPParam


def remember_originals(originals: Iterable[nn.Parameter], params: Iterable[FSDPParam]) -> None:
    """Note which managed parameter took the place of each original."""
    for original, param in zip(originals, params):
        _originals[original] = weakref.ref(param)


def originals_remembered() -> bool:
    """Return whether anybody still holds a parameter that was replaced by shards."""
    return bool(_originals.data)


def param_of(tensor: torch.Tensor) -> FSDPParam | None:
    """Return the managed parameter that ``tensor`` is the original, the shard, the full tensor or a piece of."""
    reference = _originals.get(tensor)
    if reference is not None:
        return reference()
    if not is_managed_tensor(tensor):
        return None
    params = (param for unit in live_units() for group in unit.groups for param in group.params)
    return next((p for p in params if tensor is p.sharded or tensor is p.full or tensor is p.subgroup), None)


def units_below(module: nn.Module) -> list[FSDPState]:
    """Return the units of ``module`` and of the modules below it, in their order."""
    return list(dict.fromkeys(unit for unit in map(get_state, module.modules()) if unit is not None))


def managed_sites(units: Iterable[FSDPState]) -> dict[Site, FSDPParam]:
    """Return the managed parameter that each place of a module shows, of the groups that ``units`` drive."""
    groups = dict.fromkeys(group for unit in units for group in unit.groups)
    return {site: param for group in groups for param in group.params for site in param.sites}


def groups_below(module: nn.Module, required_by: str = "") -> dict[FSDPParamGroup, FSDPState]:
    """Return the groups whose parameters ``module`` and modules below it show, in order, each with its unit.

    Raises:
        ValueError: there are none, and ``required_by`` names a function that needs some.
    """
    sites = managed_sites(live_units())
    found: dict[FSDPParamGroup, FSDPState] = {}
    for inner in module.modules():
        for name in inner._parameters:
            param = sites.get(Site(inner, name))
            unit = None if param is None else get_state(param.group.modules[0])
            if param is not None and unit is not None:
                found.setdefault(param.group, unit)
    if required_by and not found:
        what = f"no parameter of {type(module).__name__} is managed by fsdp2.fully_shard"
        raise ValueError(f"{required_by}: {what}; shard it, or a module around it, first")
    return found
