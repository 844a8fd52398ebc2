"""Tensors: internals of DTensors, meshes, containers, and kernels over lists."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

# A fake tensor keeps its internals in Python attributes, which must not be copied to another tensor. It stands for a
# plain tensor, though it has a class of its own.
from torch._subclasses.fake_tensor import FakeTensor

# A gradient that a collective of tensor parallelism is still writing; wait for it before packing.
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

# The sharded parameter is a DTensor built from a local tensor without communication or autograd.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# The placement of a dimension that tensor parallelism cuts before data parallelism: its shards interleave.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# The only weak reference to memory, which has no number that is not given again; it is not documented.
from torch.multiprocessing.reductions import StorageWeakRef

# torch's own walk of containers, including those that users have registered.
from torch.utils import _pytree as pytree

__all__ = [
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "FakeTensor",
    "StridedShard",
    "TensorMeta",
    "address_of",
    "as_parameter",
    "chunk_cat",
    "concatenate_meshes",
    "dtensor_from_local",
    "dtensor_spec",
    "dtensor_specs",
    "flatten_mesh",
    "foreach_copy",
    "inner_tensors",
    "lies_in",
    "local_tensor",
    "local_tensors",
    "memory_of",
    "mesh_order",
    "plain_tensors_replicated",
    "python_attributes",
    "pytree",
    "set_local_tensor",
    "set_versions",
    "share_memory_of_complex_views",
    "storages_of",
    "takes_plain_tensors",
    "uncount_write",
    "versions_of",
    "with_inner_tensors",
    "without_dispatch",
    "wrapper_of",
]

# One kernel packs gradients into one row per rank, padded and cast.
chunk_cat: Callable[..., torch.Tensor] = torch._chunk_cat

# One call copies (and casts) a whole list of tensors; there is no public form of it.
foreach_copy: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_


# Sets the counts of in-place changes of a list of tensors; there is no public form of it.
set_versions: Callable[[Any, Any], None] = torch._C._autograd._unsafe_set_version_counter


def versions_of(tensors: Iterable[Any]) -> list[int]:
    """Return each tensor's count of in-place changes, or -1 for inference tensors, which have none."""
    tensors = [*tensors]
    try:
        return [t._version for t in tensors]
    except RuntimeError:  # some are inference tensors; to ask each one first would cost more than the rest
        return [-1 if t.is_inference() else t._version for t in tensors]


def uncount_write(tensor: torch.Tensor) -> None:
    """Take one in-place change of ``tensor`` back from its count; it has no public form."""
    set_versions([tensor], [tensor._version - 1])


def lies_in(tensor: torch.Tensor, storage: Any) -> bool:
    """Return whether ``tensor`` is strided and its memory is ``storage``, an untyped one."""
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata == storage._cdata


def storages_of(tensors: Iterable[Any]) -> list[int]:
    """Return a number for each tensor's storage, unique while that exists. Assigning ``.data`` changes only this."""
    return [t.untyped_storage()._cdata for t in tensors]


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return what is equal for tensors whose elements are the same memory, now or later; None if that is unknown.

    It does not keep the memory alive, and it never equals that of memory that is allocated after this was freed.
    """
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return None
    return StorageWeakRef(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()


def address_of(tensor: torch.Tensor) -> int:
    """Return where the elements of ``tensor`` begin in memory.

    A tensor without memory (a fake one, in a forecast or for torch's own estimators) raises an error at its address, or
    has 0. Here it has one as if its storage lay in memory far from all others.
    """
    storage = tensor.untyped_storage()
    if storage.device.type != "meta":
        return tensor.data_ptr()
    return (storage._cdata << 48) + tensor.storage_offset() * tensor.itemsize


def python_attributes(param: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that users set on ``param``, without what a tensor subclass keeps of itself.

    A subclass keeps that in Python attributes too (the inner tensors, a scale), and they are on every tensor that it
    makes, also on a detached one, which has none of the users'.
    """
    if type(param) is nn.Parameter:
        return dict(param.__dict__)
    if type(param) is DTensor:  # steps ask for those of all shards; what is its own is in slots
        return {name: value for name, value in param.__dict__.items() if name != "_is_param"}
    inner = param.__tensor_flatten__()[0] if hasattr(param, "__tensor_flatten__") else []
    own = {*param.detach().__dict__, *inner, "_is_param"}
    return {name: value for name, value in param.__dict__.items() if name not in own}


def inner_tensors(tensor: Any) -> list[torch.Tensor]:
    """Return the tensors that a subclass keeps its values in, such as codes and scales; a plain tensor is the only one.

    torch has this protocol for compilers, without a public function that uses it.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def with_inner_tensors(tensor: Any, inner: Sequence[torch.Tensor]) -> Any:
    """Return a tensor like ``tensor`` with other ``inner_tensors`` of the same shapes."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return inner[0]
    names, context = tensor.__tensor_flatten__()
    return type(tensor).__tensor_unflatten__(dict(zip(names, inner)), context, tensor.shape, tensor.stride())


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the dimensions of all meshes: data-parallel before tensor-parallel ones, for DTensor."""
    return DeviceMesh._concatenate(meshes)


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a 1D mesh over all ranks of ``mesh``, for data parallelism over several of its dimensions."""
    return mesh._flatten()


def mesh_order(mesh: DeviceMesh) -> dict[str, Any]:
    """Return arguments for a mesh of the same ranks that give its process groups the same order as those of ``mesh``.

    Process groups sort their ranks, unless the mesh was made with ``preserve_rank_order=True`` (torch 2.15).
    """
    return {"preserve_rank_order": True} if getattr(mesh, "_preserve_rank_order", False) else {}


# A context that hides operations from all dispatch modes, including FakeTensorMode.
without_dispatch: Callable[[], AbstractContextManager[None]] = torch._C._DisableTorchDispatch


@contextlib.contextmanager
def plain_tensors_replicated() -> Iterator[None]:
    """Let operators take plain tensors beside DTensors, as replicated: the same whole tensor on every rank.

    torch's own ``implicit_replication`` ends such a block of the caller's around this one, too.
    """
    dispatcher: Any = DTensor._op_dispatcher
    before, dispatcher._allow_implicit_replication = dispatcher._allow_implicit_replication, True
    try:
        yield
    finally:
        dispatcher._allow_implicit_replication = before


def takes_plain_tensors() -> bool:
    """Return True inside a block in which operators take plain tensors beside DTensors."""
    dispatcher: Any = DTensor._op_dispatcher
    return dispatcher._allow_implicit_replication


# Makes a DTensor of a local tensor itself. ``DTensor.from_local`` would make a view and check it in every call.
dtensor_from_local: Callable[[torch.Tensor, DTensorSpec], DTensor] = functools.partial(
    DTensor.__new__, DTensor, requires_grad=False
)


def share_memory_of_complex_views() -> None:
    """Let ``torch.view_as_real`` and ``view_as_complex`` of every DTensor be views of its memory, cut like it.

    Optimizers write to complex parameters through them. Where pieces are uneven, torch gathers the DTensor first, and
    what is written to a view of that copy is lost.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers  # no public form keeps uneven pieces
    handlers.setdefault(torch.ops.aten.view_as_real.default, _view_as_real)
    handlers.setdefault(torch.ops.aten.view_as_complex.default, _view_as_complex)


def _view_as_real(operator: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    spec, local = args[0]._spec, operator(args[0]._local_tensor)
    shape, stride = (*spec.tensor_meta.shape, 2), (*(2 * step for step in spec.tensor_meta.stride), 1)
    return dtensor_from_local(local, replace(spec, tensor_meta=TensorMeta(torch.Size(shape), stride, local.dtype)))


def _view_as_complex(operator: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    spec, last = args[0]._spec, args[0].ndim - 1
    whole = [Replicate() if getattr(p, "dim", None) == last else p for p in spec.placements]
    given = args[0] if whole == [*spec.placements] else args[0].redistribute(placements=whole)
    local = operator(given._local_tensor)
    shape, stride = spec.tensor_meta.shape[:-1], tuple(step // 2 for step in spec.tensor_meta.stride[:-1])
    return dtensor_from_local(local, replace(given._spec, tensor_meta=TensorMeta(shape, stride, local.dtype)))


def as_parameter(tensor: DTensor, *, requires_grad: bool) -> nn.Parameter:
    """Make ``tensor`` itself a parameter; ``nn.Parameter`` does this to an alias of it."""
    tensor.requires_grad_(requires_grad)
    tensor._is_param = True  # type: ignore[attr-defined]  # what a parameter of a tensor subclass is known by
    return tensor  # type: ignore[return-value]  # isinstance agrees


# Returns the local tensor object of a DTensor. ``to_local`` would go through autograd and make a view.
local_tensor: Callable[[Any], torch.Tensor] = operator.attrgetter("_local_tensor")


def local_tensors(tensors: Iterable[Any]) -> list[Any]:
    """Return the local tensor of each DTensor, and other values unchanged; fast for thousands of them."""
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def wrapper_of(cls: type[Any], tensor: torch.Tensor) -> Any:
    """Return an empty tensor of ``cls`` with the metadata of ``tensor``; no public function makes one.

    ``cls`` keeps tensors inside, and has no memory itself.
    """
    return torch.Tensor._make_wrapper_subclass(
        cls, tensor.size(), strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def dtensor_specs(tensors: Iterable[Any]) -> list[DTensorSpec | None]:
    """Return the spec of each DTensor, and None for other values; fast for thousands of them."""
    return [t._spec if isinstance(t, DTensor) else None for t in tensors]


def set_local_tensor(dtensor: Any, local: torch.Tensor) -> None:
    """Replace the local tensor of a DTensor, which stays the same object."""
    dtensor._local_tensor = local


# The spec of a DTensor; ``Module.to`` changes its dtype.
dtensor_spec: Callable[[Any], DTensorSpec] = operator.attrgetter("_spec")
