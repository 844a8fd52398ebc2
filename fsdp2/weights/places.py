"""The tensors of a module that checkpoints name: what each is called, and which box of it this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from fsdp2._torch.autograd import graph_task_id
from fsdp2._torch.modules import non_persistent_buffers
from fsdp2._torch.tensors import local_tensor
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import groups_below
from fsdp2.engine.lifecycle import Phase, Residency
from fsdp2.engine.param import FSDPParam, is_managed_tensor
from fsdp2.sharding.mesh import Axis
from fsdp2.weights.boxes import Box, intersect, narrow, whole, within
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.state_dict.names import clean_name

__all__ = ["Place", "Places", "find_places", "ranks_of"]


@dataclass(eq=False)
class Place:
    """A parameter or buffer, by all its names, and what this rank holds of it.

    ``box`` is where ``local`` lies in the whole tensor of ``shape``; ranks along ``copies`` hold the same box.
    """

    names: list[str]
    slots: list[tuple[nn.Module, str]]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    copies: tuple[Axis, ...] = ()
    param: FSDPParam | None = None
    group: FSDPParamGroup | None = None
    _staged: torch.Tensor | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype it is kept in."""
        return self.tensor.dtype if self.param is None else self.param.dtype

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds, as a plain tensor."""
        if self.param is not None:
            return self.param.local
        return local_tensor(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh it lies on; None for a plain tensor."""
        tensor = self.tensor if self.param is None else self.param.sharded
        return tensor.device_mesh if isinstance(tensor, DTensor) else None

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank's is the first of equal copies on its mesh."""
        return all(axis.rank == 0 for axis in self.copies)

    def speaks_for_all(self, ranks: Ranks) -> bool:
        """Whether this rank's box is the one to take, of its copies and where it lies on fewer than all ``ranks``."""
        if self.mesh is None:
            return ranks.first
        return self.is_first_copy and bool((self.mesh.mesh == ranks.first_rank).any())

    def read(self, box: Box, target: torch.Tensor) -> None:
        """Copy to ``target``, which is ``box`` of the whole tensor, what this rank holds of it."""
        common = intersect(box, self.box)
        if common is not None:
            narrow(target, within(common, box)).copy_(narrow(self.local.detach(), within(common, self.box)))

    def write(self, box: Box, source: torch.Tensor, *, last: bool) -> None:
        """Take from ``source``, which is ``box`` of the whole tensor, what this rank holds of it.

        A tensor subclass gets its values at once, with the ``last`` block.
        """
        local, common = self.local.detach(), intersect(box, self.box)
        plain = type(local) is torch.Tensor
        if not plain and self._staged is None:
            shape = [length for _, length in self.box]
            self._staged = torch.zeros(shape, dtype=self.dtype, device=local.device)
        if common is not None:
            to = local if plain else self._staged
            assert to is not None
            narrow(to, within(common, self.box)).copy_(narrow(source, within(common, box)))
        if last and self._staged is not None:
            local.copy_(self._staged)
            self._staged = None


@dataclass
class Places:
    """The places of a module in the order of its state dict, and the groups that manage some of them.

    ``extras`` are the modules with extra state, by its name; ``left_out`` the non-persistent buffers.
    """

    found: list[Place]
    groups: list[FSDPParamGroup]
    extras: dict[str, nn.Module]
    left_out: list[Place]

    @property
    def by_name(self) -> dict[str, Place]:
        """The places under each of their names."""
        return {name: place for place in self.found for name in place.names}

    def check_idle(self, where: str) -> None:
        """Raise RuntimeError inside a forward or backward, which would go on with other values than it began with."""
        for group in self.groups:
            running = group.root.forward_root
            if running is not None and len(running.modules) == 1:  # of several the rest may never come
                got = "a forward"
            elif graph_task_id() != -1 or group.lifecycle.phase is Phase.BACKWARD:
                got = "a backward"
            else:
                continue
            raise RuntimeError(
                f"{where}: the parameters of {group.name or 'the root'} are in use; got {got} that is going on or "
                "raised, expected none; call it between iterations, and reset_iter_state() on the root first if one "
                "raised"
            )


def find_places(model: nn.Module, where: str) -> Places:
    """The places of ``model``, which may be sharded, hold sharded modules, or be neither.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: a parameter does not know its shape yet.
        RuntimeError: ``summon_full_params`` shows parameters of it.
        NotImplementedError: a DTensor parameter is placed in a way whose pieces are no boxes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: expected an nn.Module, got {type(model).__name__}")
    groups = _groups_of(model)
    for group in groups:
        if group.lifecycle.lent:
            group.lifecycle.refuse_lent(where)
        if group.lifecycle.residency is Residency.SHARDED:
            group.adopt_shards()  # shards may have been replaced or moved since
    managed = _managed_tensors(groups)
    places: dict[int, Place] = {}
    left_out: dict[int, Place] = {}
    extras: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        skipped = non_persistent_buffers(module)
        for name, tensor, is_buffer in _own_tensors(module):
            full_name = clean_name(f"{prefix}.{name}" if prefix else name)
            manager = managed.get(id(tensor))
            param = None if manager is None else manager[0]
            key = id(tensor if param is None else param)
            into = left_out if is_buffer and name in skipped else places
            if key not in into:
                into[key] = _place(tensor, full_name, manager, where)
            else:
                into[key].names.append(full_name)
            into[key].slots.append((module, name))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extras[clean_name(f"{prefix}._extra_state" if prefix else "_extra_state")] = module
    return Places(list(places.values()), groups, extras, list(left_out.values()))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for name, param in module._parameters.items():
        if param is not None:
            yield name, param, False
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        yield name, buffer, True


def ranks_of(model: object, *, managed: bool = False) -> Ranks | None:
    """The ranks ``model`` is spread over: those of its largest mesh. None where it is not.

    ``managed``: where it is sharded, tensor parallelism alone does not count.
    """
    if not isinstance(model, nn.Module):
        return None
    tensors: list[Any] = [param.sharded for group in _groups_of(model) for param in group.params]
    if not tensors and not managed:
        tensors = list(model.parameters())
    return Ranks.of([tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)])


def _groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """The groups whose parameters ``model`` shows, also those of a unit around it."""
    return list(groups_below(model))


def _managed_tensors(groups: list[FSDPParamGroup]) -> dict[int, tuple[FSDPParam, FSDPParamGroup]]:
    return {
        id(tensor): (param, group)
        for group in groups
        for param in group.params
        for tensor in (param.sharded, param.full, param.subgroup)
        if tensor is not None
    }


def _place(tensor: torch.Tensor, name: str, manager: tuple[FSDPParam, FSDPParamGroup] | None, where: str) -> Place:
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        raise ValueError(
            f"{where}: {name} is uninitialized; got a lazy parameter, expected one with a shape; run a forward first"
        )
    if manager is None and is_managed_tensor(tensor):
        raise RuntimeError(
            f"{where}: {name} is a parameter of a sharded module that is no longer reachable from here; got no group "
            "for it, expected one; pass the module that was given to fully_shard"
        )
    if manager is None:
        if not isinstance(tensor, DTensor):
            return Place([name], [], tensor, tuple(tensor.shape), whole(tensor.shape))
        box, copies = _placed_box(tensor.shape, tensor.device_mesh, tensor.placements, frozenset(), f"{where}: {name}")
        return Place([name], [], tensor, tuple(tensor.shape), box, copies)
    param, group = manager
    sharded = param.sharded
    assert sharded is not None
    shape, spec, mesh = tuple(sharded.shape), param.spec, group.mesh
    box, copies = whole(shape), (mesh.replicate,)
    if spec.full is not None:
        box, tensor_parallel = _placed_box(
            shape, spec.full.mesh, spec.full.placements, spec.dp_dims, f"{where}: {name}"
        )
        copies += tensor_parallel
    dim = spec.layout.dim
    if dim is None:
        copies += (mesh.shard,)
    else:
        start, length = spec.layout.bounds(spec.rank)
        box = (*box[:dim], (box[dim][0] + start, length), *box[dim + 1 :])
    assert tuple(length for _, length in box) == spec.shard_shape
    return Place([name], [], sharded, shape, box, tuple(a for a in copies if a.size > 1), param, group)


def _placed_box(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...], skip: frozenset[int], where: str
) -> tuple[Box, tuple[Axis, ...]]:
    """What this rank holds of a DTensor, and the axes of ``mesh`` along which others hold the same."""
    coordinate = mesh.get_coordinate()
    box, copies = list(whole(shape)), []
    for i, placement in enumerate(placements):
        if i in skip:
            continue
        if isinstance(placement, Replicate):
            copies.append(Axis.of(mesh, i))
        elif type(placement) is Shard and coordinate is not None:
            start, size = box[placement.dim]
            chunk = -(-size // mesh.size(i))
            first = min(coordinate[i] * chunk, size)
            box[placement.dim] = (start + first, min(chunk, size - first))
        else:
            raise NotImplementedError(
                f"{where}: its pieces are not known here; got a DTensor placed as {placements} on {mesh}, expected "
                "Shard and Replicate alone, on a mesh with this rank; redistribute it first"
            )
    return tuple(box), tuple(copies)
