"""Find the parameter that a tensor, a site or an original belongs to, and the units and groups below a module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._naming import check_module, class_name
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam, Site, is_managed_tensor, is_summoned
from fsdp2.engine.unit import FSDPState, get_state, live_units

__all__ = [
    "SiteFinder",
    "follow_parametrization",
    "groups_below",
    "managed_sites",
    "mesh_around",
    "originals_remembered",
    "param_of",
    "remember_originals",
    "units_below",
]

# Weak references to originals only: torch cannot swap a tensor that has one, and Module.to swaps the sharded ones.
_originals: WeakIdKeyDictionary = WeakIdKeyDictionary()  # original parameter -> weak FSDPParam
_by_id: weakref.WeakValueDictionary[int, FSDPParam] = weakref.WeakValueDictionary()  # id of a managed tensor -> param


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
    if not is_managed_tensor(tensor) or is_summoned(tensor):
        return None
    param = _by_id.get(id(tensor))
    if param is None or not param.has(tensor):
        _list_tensors()
        param = _by_id.get(id(tensor))
    return param if param is not None and param.has(tensor) else None


def follow_parametrization(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Show the managed parameter of ``tensor`` as ``module.name``, too, if a parametrization takes it or gives it back.

    That may be between a forward and its backward, while it is full: it must not stay full there when its memory is
    freed. The next outermost forward leaves out where it is not shown any more.
    """
    param, site = param_of(tensor), Site(module, name)
    if param is None or site in param.sites:
        return
    if ParametrizationList in map(type, (module, *(other.module for other in param.sites))):
        param.set_sites([*param.sites, site])


def _list_tensors() -> None:
    """List all managed tensors anew: some are new, and ids of freed ones may stand for others by now.

    The first forward asks for every parameter of the model, so a search through all of them for each would be too slow.
    """
    global _by_id
    params = [param for unit in live_units() for group in unit.groups for param in group.params]
    tensors = [(tensor, param) for param in params for tensor in (param.sharded, param.full, param.piece)]
    _by_id = weakref.WeakValueDictionary({id(tensor): param for tensor, param in tensors if tensor is not None})


def units_below(module: nn.Module) -> list[FSDPState]:
    """Return the units of ``module`` and of the modules below it, in their order."""
    return list(dict.fromkeys(unit for unit in map(get_state, module.modules()) if unit is not None))


def managed_sites(units: Iterable[FSDPState]) -> dict[Site, FSDPParam]:
    """Return the managed parameter that each place of a module shows, of the groups that ``units`` drive."""
    groups = dict.fromkeys(group for unit in units for group in unit.groups)
    return {site: param for group in groups for param in group.params for site in param.sites}


def mesh_around(params: Iterable[torch.Tensor]) -> DeviceMesh | None:
    """Return the largest mesh of the units that have one of ``params``, which no group manages, in or below them."""
    wanted = set(map(id, params))
    found: DeviceMesh | None = None
    for unit in live_units():
        meshes = [group.mesh.mesh for group in unit.groups]
        largest = max(meshes, key=DeviceMesh.size, default=None)
        if largest is None or (found is not None and found.size() >= largest.size()):
            continue
        if any(id(param) in wanted for module in unit.modules for param in module.parameters()):
            found = largest
    return found


class SiteFinder:
    """Finds the managed parameters of sites, without listing all sites of the process where it can."""

    def __init__(self) -> None:
        self._sites: dict[Site, FSDPParam] | None = None

    def find(self, site: Site) -> FSDPParam | None:
        """Return the managed parameter whose site this is, else the one that it shows, else None."""
        shown = site.shown
        param = None if shown is None else param_of(shown)
        if param is not None and site in param.sites:
            return param
        if self._sites is None:  # something else is shown there
            self._sites = managed_sites(live_units())
        return self._sites.get(site, param)


def groups_below(module: nn.Module, required_by: str = "") -> dict[FSDPParamGroup, FSDPState]:
    """Return the groups whose parameters ``module`` and modules below it show, in order, each with its unit.

    Raises:
        ValueError: there are none, and ``required_by`` names a function that needs some.
        TypeError: the function was called with something else than a module.
    """
    if required_by:
        check_module(module, required_by)
    finder = SiteFinder()
    found: dict[FSDPParamGroup, FSDPState] = {}
    for inner in module.modules():
        for name, _ in inner._parameters.items():
            param = finder.find(Site(inner, name))
            unit = None if param is None else get_state(param.group.modules[0])
            if param is not None and unit is not None:
                found.setdefault(param.group, unit)
    if required_by and not found:
        what = f"no parameter of {class_name(module)} is managed by fsdp2.fully_shard"
        raise ValueError(f"{required_by}: {what}; shard it, or a module around it, first")
    return found
