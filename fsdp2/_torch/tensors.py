"""Tensors: DTensors from the inside, meshes, containers, and kernels over lists."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

# A tensor without memory keeps in its Python attributes what makes it one.
from torch._subclasses.fake_tensor import FakeTensor

# A gradient that tensor parallelism is still communicating; it must be waited for before it is packed.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# The sharded parameter is a DTensor built from a local tensor without communication or autograd.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# A dimension that tensor parallelism cut before data parallelism: its shards interleave, which this placement states.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# User-registered containers are walked the way torch walks them.
from torch.utils import _pytree as pytree

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "StridedShard",
    "TensorMeta",
    "chunk_cat",
    "concatenate_meshes",
    "dtensor_from_local",
    "dtensor_spec",
    "dtensor_specs",
    "flatten_mesh",
    "foreach_copy",
    "local_tensor",
    "local_tensors",
    "mesh_order",
    "python_attributes",
    "pytree",
    "set_local_tensor",
    "storages_of",
    "versions_of",
    "without_dispatch",
]

# One kernel packs gradients into one row per rank, padded and cast.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat

# One call copies (and casts) a whole list of tensors; there is no public form of it.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_


def versions_of(tensors: Iterable[Any]) -> list[int]:
    """How often each was changed in place; -1 for inference tensors, which do not count. One pass in Python."""
    return [-1 if t.is_inference() else t._version for t in tensors]


def storages_of(tensors: Iterable[Any]) -> list[int]:
    """A number for the storage of each, unique among living ones; assigning ``.data`` changes it, and no version."""
    return [t.untyped_storage()._cdata for t in tensors]


def python_attributes(param: torch.Tensor) -> dict[str, Any]:
    """What users stored on ``param``, without what tensor subclasses keep there to be tensors."""
    if type(param) is nn.Parameter:
        return dict(param.__dict__)
    if isinstance(param, FakeTensor):
        own = {*param.detach().__dict__, "_is_param"}
        return {name: value for name, value in param.__dict__.items() if name not in own}
    inner = param.__tensor_flatten__()[0] if hasattr(param, "__tensor_flatten__") else []
    own = {"_spec", "_is_param", *inner}
    return {name: value for name, value in param.__dict__.items() if name not in own}


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of all: data-parallel ones outside tensor-parallel ones, as DTensor expects."""
    return DeviceMesh._concatenate(meshes)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """A 1D mesh over all ranks of ``mesh``, for data parallelism over several of its dimensions."""
    return mesh._flatten(name)


def mesh_order(mesh: DeviceMesh) -> dict[str, Any]:
    """The arguments that let a mesh of the same ranks order its process groups as ``mesh`` does.

    They sort their ranks unless the mesh was told to preserve the order in which it lists them (torch 2.15).
    """
    return {"preserve_rank_order": True} if getattr(mesh, "_preserve_rank_order", False) else {}


# Modes do not see what happens in a block of this, not even those that make fake tensors of everything.
without_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch


# A DTensor around a local tensor itself; ``DTensor.from_local`` would make a view and check it on every call.
dtensor_from_local: Callable[[torch.Tensor, DTensorSpec], DTensor] = functools.partial(
    DTensor.__new__, DTensor, requires_grad=False
)


# The local tensor object of a DTensor; ``to_local`` would go through autograd and make a view.
local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")


def local_tensors(tensors: Iterable[Any]) -> list[Any]:
    """The local tensor of each DTensor, the rest as it is; one pass in Python over what may be thousands."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def dtensor_specs(tensors: Iterable[Any]) -> list[DTensorSpec | None]:
    """The spec of each DTensor, None for the rest; one pass in Python over what may be thousands."""
    return [t._spec if isinstance(t, DTensor) else None for t in tensors]


def set_local_tensor(dtensor: Any, local: torch.Tensor, spec: DTensorSpec | None = None) -> None:
    """Let a DTensor keep its identity while its local tensor moves into another buffer; ``spec`` equals its own."""
    dtensor._local_tensor, dtensor._spec = local, spec or dtensor._spec


# The spec of a DTensor; ``Module.to`` changes its dtype.
dtensor_spec: Callable[[Any], DTensorSpec] = operator.attrgetter("_spec")
