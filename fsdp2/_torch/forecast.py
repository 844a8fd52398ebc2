"""Private torch names that a forecast needs: fake tensors, dispatch modes, and what operators say of themselves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# The classes in which torch's own fully_shard takes a mesh for a single parameter.
import torch.distributed.fsdp._fully_shard._fsdp_common as torch_common

# Operators of process groups return a work in a box; this is one that is done. They name groups or put them in a box.
from torch._C._distributed_c10d import FakeWork, _resolve_process_group

# Tensors without memory that know their shape, dtype and device: a model of any size fits. What a device mesh keeps its
# ranks in stays real.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)

# A process group that sends nothing is made from a store that holds nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

# Sees each operator that runs, also in backward.
from torch.utils._python_dispatch import TorchDispatchMode

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
    "operator_arguments",
    "operator_returns",
    "storage_key",
    "torch_placement",
    "unboxed_group",
    "unset_fake_temporarily",
]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made in the block have no memory, and modules may be cast as usual.

    The converter remembers each fake tensor weakly, and for that alone ``module.to(dtype)`` would refuse it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    remembered, swap = mode.fake_tensor_converter.meta_converter.tensor_memo, torch.utils.swap_tensors

    def swap_forgotten(first: torch.Tensor, second: torch.Tensor) -> None:
        remembered.clear()
        swap(first, second)

    # What an operator says against its inputs is raised as well; the log would print its traceback before that.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    muted, log.disabled = log.disabled, True
    torch.utils.swap_tensors = swap_forgotten
    try:
        with mode:
            yield
    finally:
        torch.utils.swap_tensors = swap
        log.disabled = muted


def makes_ranks_of_a_mesh() -> bool:
    """Whether torch's device mesh calls the operator, for the ranks it is made of: their values count."""
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.distributed.device_mesh":
            return True
        frame = frame.f_back
    return False


def operator_arguments(func: Any) -> Any:
    """The arguments of an operator's schema: their names, and whether one is written or viewed."""
    return func._schema.arguments


def operator_returns(func: Any) -> Any:
    """What an operator's schema says that it returns."""
    return func._schema.returns


def key_of(storage: torch.UntypedStorage) -> int:
    """A number that Python objects of one storage share, as long as the storage lives."""
    return storage._cdata


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share if and only if they share their memory, as long as one of them lives."""
    return key_of(tensor.untyped_storage())


def finished_work() -> Any:
    """What an operator returns for a collective that is done."""
    return FakeWork().boxed()


def unboxed_group(group: Any) -> dist.ProcessGroup:
    """The process group of an operator's argument: a box, or for functional collectives its name."""
    if isinstance(group, dist.ProcessGroup):
        return group
    return _resolve_process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)  # type: ignore[arg-type]  # the stub takes a tensor


def torch_placement(result: Any) -> Any:
    """What ``shard_placement_fn`` returned, as torch's own takes it: the mesh of a result of ours in torch's class.

    Raises:
        NotImplementedError: this torch takes no mesh for a single parameter.
    """
    mesh = getattr(result, "mesh_info", None)
    if not isinstance(mesh, dist.DeviceMesh):
        return result
    if not hasattr(torch_common, "ShardPlacementResult"):
        raise NotImplementedError(
            f"shard_placement_fn returned a mesh for a parameter, which torch's own fully_shard of torch "
            f"{torch.__version__} does not take"
        )
    info = torch_common.FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else torch_common.HSDPMeshInfo(mesh, 1, 0)
    return torch_common.ShardPlacementResult(result.placement, info)
