"""Private torch names for forecasts: fake tensors, dispatch modes, and the schemas of operators."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# Has the classes in which torch's own fully_shard takes a mesh for a single parameter.
import torch.distributed.fsdp._fully_shard._fsdp_common as torch_common

# Operators of process groups return a boxed work; FakeWork is a finished one. Their groups are boxed, or names.
from torch._C._distributed_c10d import FakeWork, _resolve_process_group

# Tensors with a shape, a dtype and a device but no memory, so a model of any size fits. The tensors in which a device
# mesh keeps its ranks stay real.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

# Runs an operator on fake tensors as long as whole DTensors, to learn the shape of its result.
from torch.distributed.tensor._sharding_prop import ShardingPropagator

# The store of a process group that sends nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

# The first sees each operator that runs, also in backward; the second hides operators from it.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeStore",
    "FakeTensor",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "fake_tensors",
    "finished_work",
    "key_of",
    "makes_ranks_of_a_mesh",
    "operator_schema",
    "storage_key",
    "torch_placement",
    "unboxed_group",
    "unset_fake_temporarily",
]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make all tensors in the block fake ones. Modules may be cast as usual, and asking for an address is an error.

    The converter keeps a weak reference to each fake tensor, which alone would make ``module.to(dtype)`` raise an
    error, so these references are dropped before a swap.

    Dispatch modes do not see what DTensor runs to learn the shape of a result: no device does that, and DTensor
    remembers it only while the arguments stay the same.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode._allow_unsafe_data_ptr_access = False  # an address raises an error: C code would read or write at 0
    remembered, swap = mode.fake_tensor_converter.meta_converter.tensor_memo, torch.utils.swap_tensors

    def swap_forgotten(first: torch.Tensor, second: torch.Tensor) -> None:
        remembered.clear()
        swap(first, second)

    shape_of_result = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(propagator: ShardingPropagator, schema: Any) -> Any:
        with _disable_current_modes():
            return shape_of_result(propagator, schema)

    # An operator's error about its inputs is raised as well; the log would print its traceback before that.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    muted, log.disabled = log.disabled, True
    torch.utils.swap_tensors = swap_forgotten
    ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign, assignment]  # replaced until the block ends
    try:
        with mode:
            yield
    finally:
        torch.utils.swap_tensors = swap
        ShardingPropagator._propagate_tensor_meta_non_cached = shape_of_result  # type: ignore[method-assign]  # as it was
        log.disabled = muted


def makes_ranks_of_a_mesh() -> bool:
    """Return True if torch's device mesh calls the operator, to make the tensor of its ranks, whose values matter.

    It is an operator without tensor arguments like any other, so only the stack tells.
    """
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.distributed.device_mesh":
            return True
        frame = frame.f_back
    return False


def operator_schema(operator: Any) -> Any:
    """Return the schema of an operator: its name, and its ``arguments`` and ``returns`` with their aliasing."""
    return operator._schema


def key_of(storage: torch.UntypedStorage) -> int:
    """Return a number that is the same for all Python objects of one storage while the storage exists."""
    return storage._cdata


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that is equal for two tensors if and only if they share memory, while one of them exists."""
    return key_of(tensor.untyped_storage())


def finished_work() -> Any:
    """Return the result of an operator for a finished collective."""
    return FakeWork().boxed()


def unboxed_group(group: Any) -> dist.ProcessGroup:
    """Return the process group of an operator's argument: a boxed group, or a name in functional collectives."""
    if isinstance(group, dist.ProcessGroup):
        return group
    return _resolve_process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)  # type: ignore[arg-type]  # the stub takes a tensor


def torch_placement(place: Callable[[Any], Any], own: dist.DeviceMesh | None = None) -> Callable[[Any], Any]:
    """Convert the results of a ``shard_placement_fn`` for a call of torch's own fully_shard on the mesh ``own``.

    Raises:
        NotImplementedError: This torch version accepts no mesh for a single parameter. The new function raises it.
    """
    make = getattr(torch_common, "ShardPlacementResult", None)  # since torch 2.12
    infos: dict[dist.DeviceMesh, Any] = {}  # torch asks for one object for all parameters on a mesh

    def converted(parameter: Any) -> Any:
        result = place(parameter)
        mesh = getattr(result, "mesh_info", None)
        if not isinstance(mesh, dist.DeviceMesh):
            return result
        if mesh == own:
            return result.placement
        if make is None:
            raise NotImplementedError(
                f"shard_placement_fn returned a mesh for a parameter, which torch's own fully_shard of torch "
                f"{torch.__version__} does not take"
            )
        if mesh not in infos:
            one = mesh.ndim == 1
            infos[mesh] = torch_common.FSDPMeshInfo(mesh, 0) if one else torch_common.HSDPMeshInfo(mesh, 1, 0)
        return make(result.placement, infos[mesh])

    return converted
