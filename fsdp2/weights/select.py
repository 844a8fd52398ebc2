"""The tensors of a module: their names, the groups that manage them, and the boxes that this rank holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fsdp2._naming import check_module
from fsdp2._torch.modules import loads_as_torch_does, non_persistent_buffers
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import SiteFinder, groups_below
from fsdp2.engine.param import FSDPParam, Site, is_managed_tensor
from fsdp2.engine.passes import backward_runs
from fsdp2.engine.unit import get_state
from fsdp2.sharding.boxes import Box, box_of, box_on_mesh, copy_common, whole
from fsdp2.sharding.spec import on_this_rank
from fsdp2.weights.names import clean_name
from fsdp2.weights.ranks import Ranks

__all__ = ["Place", "Selection", "loaded_plainly", "ranks_of", "select"]


@dataclass(eq=False)
class Place:
    """A parameter or buffer with all its names, and the sites that show it.

    ``param`` is set if a group manages the parameter. ``tensor`` is then its shard, whatever the module shows now.
    """

    names: list[str]
    tensor: torch.Tensor
    param: FSDPParam | None = None
    sites: list[Site] = field(default_factory=list)
    _staged: torch.Tensor | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is stored in."""
        return self.tensor.dtype

    @property
    def local(self) -> torch.Tensor:
        """The part that this rank holds, as a plain tensor."""
        return on_this_rank(self.tensor)

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of a DTensor; None for a plain tensor."""
        return self.tensor.device_mesh if isinstance(self.tensor, DTensor) else None

    @cached_property
    def box(self) -> Box:
        """The box of the whole tensor that ``local`` covers.

        Raises:
            NotImplementedError: The pieces of a DTensor with these placements are not boxes.
        """
        if self.param is not None:
            return box_of(self.param.spec, self.name)
        if isinstance(self.tensor, DTensor):
            return box_on_mesh(self.shape, self.tensor.device_mesh, self.tensor.placements, self.name)
        return whole(self.shape)

    @cached_property
    def copies(self) -> Ranks:
        """The ranks of the mesh that hold the same box."""
        assert isinstance(self.tensor, DTensor)
        dims = (dim for dim, placement in enumerate(self.tensor.placements) if isinstance(placement, Replicate))
        return Ranks.along(self.tensor.device_mesh, dims)

    def is_sender(self, ranks: Ranks, holder: int | None = None) -> bool:
        """Return True if this rank sends its box: exactly one copy of each box is taken, from the mesh of ``holder``.

        ``holder`` is the first rank that has the tensor; it defaults to the first of ``ranks``.
        """
        holder = ranks.first_rank if holder is None else holder
        if self.mesh is None:
            return not ranks.lines or dist.get_rank() == holder
        return self.copies.first and bool((self.mesh.mesh == holder).any())

    def read(self, box: Box, target: torch.Tensor) -> None:
        """Copy this rank's part of ``box`` into ``target``, which has the shape of ``box``."""
        copy_common(self.local.detach(), self.box, target, box)

    def write(self, box: Box, source: torch.Tensor, *, last: bool) -> None:
        """Copy this rank's part of ``box`` from ``source``, which has the shape of ``box``.

        Pass ``last`` with the last block: a tensor subclass is written then, in one copy.
        """
        local = self.local.detach()
        if type(local) is torch.Tensor:
            copy_common(source, box, local, self.box)
            return
        if self._staged is None:
            shape = [length for _, length in self.box]
            self._staged = torch.zeros(shape, dtype=self.dtype, device=local.device)
        copy_common(source, box, self._staged, self.box)
        if last:
            local.copy_(self._staged)
            self._staged = None


@dataclass
class Selection:
    """The parameters and persistent buffers of a module, in the order of its state dict.

    ``extras`` maps the name of each extra state to its module. ``left_out`` are the non-persistent buffers.
    """

    places: list[Place] = field(default_factory=list)
    left_out: list[Place] = field(default_factory=list)
    extras: dict[str, nn.Module] = field(default_factory=dict)

    @cached_property
    def by_name(self) -> dict[str, Place]:
        """Each name's place."""
        return {name: place for place in self.places for name in place.names}

    @cached_property
    def managed(self) -> dict[FSDPParam, Place]:
        """The places of managed parameters."""
        return {place.param: place for place in self.places if place.param is not None}

    @cached_property
    def groups(self) -> dict[FSDPParamGroup, list[FSDPParam]]:
        """The selected parameters of each group."""
        groups: dict[FSDPParamGroup, list[FSDPParam]] = {}
        for param in self.managed:
            groups.setdefault(param.group, []).append(param)
        return groups

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Prepare the groups for a block that writes to shards or replaces them, and adopt the shards after it."""
        for group in self.groups:
            group.before_load()
        try:
            yield
        finally:
            for group in self.groups:
                group.residency.adopt(lasting=True)

    def refuse_summoned(self, what: str) -> None:
        """Raise RuntimeError if ``summon_full_params`` shows one of the parameters."""
        for param, place in self.managed.items():
            if param in param.group.residency.summoned:
                raise RuntimeError(
                    f"{place.name}: {what}, but summon_full_params already shows it; expected parameters that are not "
                    "summoned. Leave that context first"
                )

    def check(self, where: str, *, idle: bool) -> None:
        """Raise an error if whole values cannot be read or written.

        Raises:
            ValueError: A lazy parameter has no shape yet.
            RuntimeError: ``summon_full_params`` shows parameters, a managed parameter has no group, two tensors have
                the same name in the plain model, or ``idle`` is set and a forward or backward is running, which
                would continue with other values than it began with.
            NotImplementedError: The pieces of a DTensor parameter are not boxes.
        """
        for group in self.groups:
            group.residency.refuse_summoned(where)
            if idle:
                _check_idle(group, where)
        named: dict[str, Place] = {}
        for place in self.places + self.left_out:
            for name in place.names:
                if named.setdefault(name, place) is not place:
                    raise RuntimeError(
                        f"{where}: two tensors of the module are {name} without the prefixes of torch.compile and "
                        "checkpoint_wrapper; got two values for one name, expected one; rename one of them"
                    )
            if isinstance(place.tensor, (UninitializedBuffer, UninitializedParameter)):
                raise ValueError(
                    f"{where}: {place.name} is uninitialized; got a lazy parameter, expected one with a shape; run a "
                    "forward first"
                )
            if place.param is None and is_managed_tensor(place.tensor):
                raise RuntimeError(
                    f"{where}: {place.name} is a parameter of a sharded module that is no longer reachable from here; "
                    "got no group for it, expected one; pass the module that was given to fully_shard"
                )
            _ = place.box  # it raises NotImplementedError


def _check_idle(group: FSDPParamGroup, where: str) -> None:
    unit = get_state(group.modules[0])
    running = None if unit is None else unit.root.forward
    if running is not None and len(running.outermost.modules) == 1:  # a grouped call's other modules may never run
        got = "a forward"
    elif backward_runs() or group.phases.in_backward:
        got = "a backward"
    else:
        return
    raise RuntimeError(
        f"{where}: the parameters of {group.name or 'the root'} are in use; got {got} that still runs or raised, "
        "expected none; call it between iterations, and reset_iter_state() on the root first if one raised"
    )


def select(module: Any, where: str, *, recurse: bool = True) -> Selection:
    """Return the tensors of ``module``. It may be sharded, contain sharded modules, or be a plain module.

    Without ``recurse``, the tensors of units below it are left out. What was put on modules in the place of their
    parameters is taken in first.

    Raises:
        TypeError: ``module`` is not an nn.Module.
    """
    check_module(module, where)
    for unit in dict.fromkeys(groups_below(module).values()):
        unit.reconcile()
    finder = SiteFinder()
    places: dict[int, Place] = {}
    left_out: dict[int, Place] = {}
    extras: dict[str, nn.Module] = {}
    for prefix, inner in _modules(module, recurse):
        skipped = non_persistent_buffers(inner)
        buffers = inner.named_buffers(recurse=False, remove_duplicate=False)
        for name, tensor in [*inner._parameters.items(), *buffers]:
            if tensor is None:
                continue
            site = Site(inner, name)
            param = finder.find(site) if name in inner._parameters else None
            value = tensor if param is None or param.sharded is None else param.sharded
            into = left_out if name in skipped else places
            place = into.setdefault(id(value), Place([], value, param))
            place.names.append(clean_name(f"{prefix}.{name}" if prefix else name))
            place.sites.append(site)
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            extras[clean_name(f"{prefix}._extra_state" if prefix else "_extra_state")] = inner
    return Selection(list(places.values()), list(left_out.values()), extras)


def _modules(module: nn.Module, recurse: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``module`` and the modules below it under all names; without ``recurse``, not those of other units."""
    if recurse:
        return module.named_modules(remove_duplicate=False)
    own = get_state(module)

    def visit(inner: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        yield name, inner
        for key, child in inner.named_children():
            if get_state(child) in (None, own):
                yield from visit(child, f"{name}.{key}" if name else key)

    return visit(module, "")


def ranks_of(model: object, *, managed: bool = False) -> Ranks | None:
    """Return the ranks of the largest mesh of the model's sharded parameters, or None if the model is not distributed.

    If no parameter is sharded, the meshes of tensor parallelism count, except with ``managed``.
    """
    if not isinstance(model, nn.Module):
        return None
    tensors: list[Any] = [param.sharded for group in groups_below(model) for param in group.params]
    if not tensors and not managed:
        tensors = list(model.parameters())
    return Ranks.of([tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)])


def loaded_plainly(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield path, owner, name and value of each parameter and buffer below ``module`` that torch loads unchanged.

    A module with its own loading code may convert what it is given, for itself and the modules below it. Their shapes
    need not match those of the state dict, so they are left out.
    """
    if not loads_as_torch_does(module):
        return
    tensors = [*module._parameters.items(), *module.named_buffers(recurse=False)]
    yield from ((path, module, name, tensor) for name, tensor in tensors if tensor is not None)
    for name, child in module.named_children():
        yield from loaded_plainly(child, f"{path}.{name}" if path else name)
