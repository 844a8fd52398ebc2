"""Collect the modules, parameters and buffers of one call: all below its modules that no other call manages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp2._naming import class_name
from fsdp2._torch.fsdp import TorchFSDPState
from fsdp2._torch.modules import composable_state
from fsdp2.engine.param import Site
from fsdp2.engine.unit import FSDPState, apis_of

__all__ = ["Found", "Managed", "check_set", "collect", "move_to"]


@dataclass
class Found:
    """A parameter to manage, its name below the call's modules, and every site that shows it.

    ``memory`` is where its elements are when the call finds it, if they may be those of another parameter.
    """

    param: nn.Parameter
    name: str
    sites: list[Site]
    memory: Any = None


@dataclass
class Managed:
    """The modules, parameters and buffers that one call manages.

    ``others`` are the modules below that it does not manage, and ``ignores`` tells whether it leaves a parameter of one
    that it manages.
    """

    modules: list[nn.Module]
    params: list[Found]
    buffers: list[torch.Tensor]
    others: list[nn.Module]
    ignores: bool


def check_set(where: str, name: str, given: Any, kind: type) -> set[Any]:
    """Return the argument ``name`` of the function ``where`` as a set; None stands for an empty one.

    Raises:
        TypeError: It is no set, list or other collection of objects of that ``kind``.
    """
    if given is None:
        return set()
    found = given if isinstance(given, (kind, str)) or not isinstance(given, Iterable) else list(given)
    if not isinstance(found, list) or not all(isinstance(entry, kind) for entry in found):
        raise TypeError(f"{where}: {name} must be a set of nn.{kind.__name__}, got {found!r}")
    return set(found)


def collect(
    roots: tuple[nn.Module, ...], ignored: set[nn.Parameter], ignored_modules: Collection[nn.Module] = ()
) -> Managed:
    """Walk the modules below ``roots``, children first, without modules that another call or ``replicate`` manages.

    This is stage 1 of the life of a parameter (DESIGN.md). ``place`` then chooses how the parameter is cut.

    Raises:
        ValueError: torch's own fully_shard manages a module below, a lazy module has not made its parameters yet, a
            module is scripted, or ``named_modules()`` hides one that has parameters.
    """
    modules = _managed_modules(roots, ignored_modules)
    prefixes = {module: name for root in roots for name, module in root.named_modules()}
    found: dict[nn.Parameter, Found] = {}
    buffers: dict[torch.Tensor, None] = {}
    ignores = False
    for module in modules:
        for name, param in module._parameters.items():
            if param is None:
                continue
            if param in ignored:
                ignores = True
                continue
            prefix = prefixes.get(module)
            if prefix is None:
                raise ValueError(
                    f"fully_shard: {name} of {class_name(module)} has no name in the model, because a class there "
                    "hides the module from named_modules(); expected every module with parameters among them. Let "
                    "named_modules() return it, or leave it unsharded: ignored_modules={the_module}"
                )
            full_name = f"{prefix}.{name}" if prefix else name
            if is_lazy(param):
                raise ValueError(
                    f"fully_shard: {full_name} of {class_name(module)} has no shape yet; expected a parameter that "
                    "can be cut. Run a forward of the model with a small input before fully_shard"
                )
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(
                    f"fully_shard: {full_name} belongs to a scripted or traced module, {class_name(module)}, which "
                    "cannot show a shard in its place; expected an nn.Module. Call fully_shard on the module that was "
                    "scripted instead of it, or leave its parameters alone: ignored_params=set(scripted.parameters())"
                )
            entry = found.setdefault(param, Found(param, full_name, []))
            entry.sites.append(Site(module, name))
        buffers.update(dict.fromkeys(module.buffers(recurse=False)))
    # A tied parameter may also be in modules of other calls or in ignored ones, which must show the same tensor.
    managed = set(modules)
    others = [module for module in prefixes if module not in managed]
    for module in others:
        for name, param in module._parameters.items():
            if param is not None and param in found:
                found[param].sites.append(Site(module, name))
    return Managed(modules, list(found.values()), list(buffers), others, ignores)


def _managed_modules(roots: tuple[nn.Module, ...], ignored: Collection[nn.Module]) -> list[nn.Module]:
    managed: dict[nn.Module, None] = {}
    visited: set[nn.Module] = set(ignored)

    def visit(module: nn.Module) -> None:
        visited.add(module)
        if "replicate" in apis_of(module):
            return
        state = composable_state(module)
        if isinstance(state, TorchFSDPState):
            raise ValueError(
                f"fully_shard: {class_name(module)} below {class_name(roots[0])} is managed by "
                "torch.distributed.fsdp.fully_shard; one module tree cannot mix it with fsdp2.fully_shard. Use one of "
                "them for the whole tree"
            )
        if isinstance(state, FSDPState) and module not in roots:
            return
        for child in module.children():
            if child not in visited:
                visit(child)
        managed[module] = None

    for root in roots:
        visit(root)
    return list(managed)


def move_to(device: torch.device, params: Iterable[Found], buffers: Iterable[torch.Tensor]) -> None:
    """Move parameters and buffers to ``device`` in place, except those on the meta device.

    Raises:
        ValueError: A DTensor lies on a mesh of another device type. Nothing is moved then.
    """
    named = [(found.name, found.param) for found in params] + [("buffer", b) for b in buffers]
    elsewhere = [(name, tensor) for name, tensor in named if tensor.device != device and not tensor.is_meta]
    for name, tensor in elsewhere:
        if isinstance(tensor, DTensor):
            raise ValueError(
                f"{name}: Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{tensor.device_mesh.device_type} for DTensor and {device.type} for FSDP"
            )
    for _, tensor in elsewhere:
        tensor.data = tensor.to(device)
