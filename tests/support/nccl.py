"""A process group of any size that accepts only what NCCL accepts, inside this process and without a GPU.

    with strict_nccl(), fake_mesh(64) as mesh:
        ...  # meshes made in here have the backend "nccl", and every collective of their groups is checked

The checks are those that ProcessGroupNCCL makes before it launches, plus what makes a launch slow: NCCL can be ten
times slower where what each rank sends does not begin and end at a multiple of 16 bytes. The collectives themselves
run on the fake process group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2.sharding.platform import Platform, using

NAMES = ("nccl", "nccl2", "nccl-legacy", "nccl-lazy")
"""What a process group that is NCCL may be called."""
ALIGN = 16
WORDS = 1024
"""Fewer bytes than these are what ranks have to say, not tensors; nobody needs them fast."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SUPPORTED = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8),
    *(torch.bool, *FLOAT8),
}

too_with_nccl = pytest.mark.usefixtures("backend")
"""Runs a test on the plain fake process group and on the strict one."""


def check_tensors(op: str, tensors: Sequence[Tensor]) -> None:
    """Raise unless NCCL takes ``tensors`` together, and fast."""
    if not tensors:
        raise ValueError(f"{op}: tensor list must be nonempty")
    for tensor in tensors:
        if tensor.dtype not in SUPPORTED:
            raise TypeError(f"{op}: input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        if tensor.layout != torch.strided or not tensor.is_contiguous():
            raise ValueError(f"{op}: tensors must be contiguous, got {tuple(tensor.shape)} {tensor.stride()}")
        if tensor.device != tensors[0].device:
            raise ValueError(f"{op}: expected tensors on one device, got {tensors[0].device} and {tensor.device}")
        if tensor.data_ptr() % ALIGN:
            raise AssertionError(f"{op}: a tensor begins {tensor.data_ptr() % ALIGN} bytes behind a multiple of 16")


def check_pair(op: str, group: dist.ProcessGroup, one: Tensor, all_ranks: Tensor) -> None:
    """Raise unless ``all_ranks`` has room for each rank's ``one``."""
    check_tensors(op, [one, all_ranks])
    if one.dtype != all_ranks.dtype:
        raise TypeError(f"{op}: output and input must have the same dtype, got {all_ranks.dtype} and {one.dtype}")
    if one.numel() * group.size() != all_ranks.numel():
        raise ValueError(
            f"{op}: one tensor must be world size times the other: {one.numel()} x {group.size()} ranks is not "
            f"{all_ranks.numel()}"
        )
    if one.nbytes % ALIGN and not (one.dtype == torch.uint8 and one.nbytes < WORDS):
        raise AssertionError(f"{op}: each rank has {one.nbytes} bytes ({one.dtype}), no multiple of 16")
    begin, offset = all_ranks.data_ptr(), one.data_ptr() - all_ranks.data_ptr()
    if begin - one.nbytes < one.data_ptr() < begin + all_ranks.nbytes and offset != group.rank() * one.nbytes:
        raise AssertionError(f"{op}: in place, but not in the place of rank {group.rank()}")


def check_reduction(op: str, tensor: Tensor, options: Any) -> None:
    """Raise unless NCCL can combine such elements."""
    kind = dist.ReduceOp.SUM if options is None else options.reduceOp
    if tensor.dtype in FLOAT8 or (tensor.dtype == torch.bool and kind == dist.ReduceOp.AVG):
        raise TypeError(f"{op}: NCCL does not reduce {tensor.dtype}")


def check_gather(op: str, group: dist.ProcessGroup, output: Tensor, piece: Tensor, options: Any = None) -> None:
    """Check a gather into one tensor."""
    check_pair(op, group, piece, output)


def check_gathers(op: str, group: dist.ProcessGroup, outputs: Any, pieces: Any, options: Any = None) -> None:
    """Check several gathers that are one launch, of one dtype: not every version of torch and NCCL may take several."""
    check_tensors(op, [*outputs, *pieces])
    if len({tensor.dtype for tensor in pieces}) > 1:
        raise TypeError(f"{op}: tensors must have identical type, got {[tensor.dtype for tensor in pieces]}")
    for output, piece in zip(outputs, pieces, strict=True):
        check_pair(op, group, piece, output)


def check_scatter(op: str, group: dist.ProcessGroup, output: Tensor, rows: Tensor, options: Any = None) -> None:
    """Check a reduction of which each rank gets a part."""
    check_pair(op, group, output, rows)
    check_reduction(op, rows, options)


def check_scatters(op: str, group: dist.ProcessGroup, outputs: Any, rows: Any, options: Any = None) -> None:
    """Check several reductions that are one launch, of one dtype."""
    check_tensors(op, [*outputs, *rows])
    if len({tensor.dtype for tensor in rows}) > 1:
        raise TypeError(f"{op}: tensors must have identical type, got {[tensor.dtype for tensor in rows]}")
    for output, each in zip(outputs, rows, strict=True):
        check_scatter(op, group, output, each, options)


def check_exchange(
    op: str, group: dist.ProcessGroup, output: Tensor, rows: Tensor, out_sizes: Any, sizes: Any, options: Any = None
) -> None:
    """Check an all-to-all."""
    check_tensors(op, [output, rows])
    if output.dtype != rows.dtype:
        raise TypeError(f"{op}: tensors are not equal in data type: {output.dtype} and {rows.dtype}")
    for tensor, split in ((output, out_sizes), (rows, sizes)):
        if split and (len(split) != group.size() or sum(split) != tensor.numel()):
            raise ValueError(f"{op}: splits {split} of {tensor.numel()} elements")
        if not split and tensor.numel() % group.size():
            raise ValueError(f"{op}: tensor's dim 0 does not divide equally across group size")
        for numel in split or [tensor.numel() // group.size()]:
            if numel * tensor.itemsize % ALIGN:
                raise AssertionError(f"{op}: a rank gets {numel * tensor.itemsize} bytes, no multiple of 16")


def check_all_reduce(op: str, group: dist.ProcessGroup, tensors: Any, options: Any = None) -> None:
    """Check an all-reduce: of one tensor, which may be complex."""
    tensor = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
    if isinstance(tensors, (list, tuple)) and len(tensors) != 1:
        raise ValueError(f"{op}: expected one tensor, got {len(tensors)}")
    check_tensors(op, [torch.view_as_real(tensor) if tensor.is_complex() else tensor])
    check_reduction(op, tensor, options)


CHECKS: dict[str, Callable[..., None]] = {
    "all_gather_single": check_gather,
    "_allgather_base": check_gather,
    "all_gather_single_coalesced": check_gathers,
    "allgather_into_tensor_coalesced": check_gathers,
    "reduce_scatter_single": check_scatter,
    "_reduce_scatter_base": check_scatter,
    "reduce_scatter_single_coalesced": check_scatters,
    "reduce_scatter_tensor_coalesced": check_scatters,
    "all_to_all_single": check_exchange,
    "alltoall_base": check_exchange,
    "allreduce": check_all_reduce,
}
"""For each method of a process group that the package calls: what NCCL checks there. torch renamed some."""


def _all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
    values[:] = [value] * len(values)


@contextmanager
def strict_nccl(name: str = "nccl") -> Iterator[None]:
    """Let fake process groups be called ``name`` and be as strict as NCCL in the block."""
    config = dist.get_backend_config

    def renamed(group: dist.ProcessGroup, device_type: str) -> str:
        return name if "fake" in config(group) else Platform().backend(group, device_type)

    def checked(method: str, check: Callable[..., None], call: Any) -> Any:
        @functools.wraps(call)
        def checked_call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if "fake" in config(group):
                check(method, group, *args, **kwargs)
            return call(group, *args, **kwargs)

        return checked_call

    with ExitStack() as stack:
        stack.enter_context(using(Platform(backend=renamed)))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", _all_gather_object))
        stack.enter_context(mock.patch.object(dist, "broadcast_object_list", lambda *args, **kwargs: None))
        for method, check in CHECKS.items():
            call = getattr(dist.ProcessGroup, method, None)
            if call is not None:
                stack.enter_context(mock.patch.object(dist.ProcessGroup, method, checked(method, check, call)))
        yield
