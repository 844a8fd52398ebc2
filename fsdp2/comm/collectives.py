"""The collectives, and nothing else in the package calls one. An axis of size 1 communicates nothing."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp2._torch import coalescing_manager, foreach_copy
from fsdp2.policies import AllGather, ReduceScatter
from fsdp2.sharding.mesh import Axis

__all__ = ["all_gather", "all_reduce", "all_to_all", "prefers_all_to_all", "reduce_scatter", "wire_view"]

# torch 2.13 renamed these two and deprecates the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_WIRE_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8}

# gloo's reduce-scatter is a copy and an all-reduce; above this size sending each rank its part and summing there is
# 1.4 to 3.7 times faster (measured on 2 to 8 processes), below it the extra message costs more than it saves.
_ALL_TO_ALL_BYTES = 256 << 10


def wire_view(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or its bytes where backends do not carry its dtype (float8, bool, int16, complex)."""
    return tensor if tensor.dtype in _WIRE_DTYPES else tensor.view(torch.uint8)


def prefers_all_to_all(axis: Axis, nbytes: int) -> bool:
    """Whether a reduce-scatter of ``nbytes`` is better done as all-to-all and a local sum."""
    return axis.backend == "gloo" and nbytes >= _ALL_TO_ALL_BYTES


def all_gather(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    axis: Axis,
    *,
    async_op: bool,
    custom: AllGather | None = None,
) -> list[dist.Work]:
    """Fill each 1D output with the inputs of all ranks in rank order; outputs are valid after the works' ``wait``."""
    if axis.size == 1:
        foreach_copy([out.view(-1) for out in outputs], inputs)
        return []
    assert axis.group is not None
    if custom is not None:
        works = [
            custom(output_tensor=out, input_tensor=inp, group=axis.group, async_op=async_op)
            for out, inp in zip(outputs, inputs)
        ]
        return [work for work in works if work is not None]
    if axis.backend == "nccl" and len(outputs) > 1:
        with coalescing_manager(axis.group, async_ops=async_op) as manager:
            for out, inp in zip(outputs, inputs):
                _all_gather_single(out, inp, group=axis.group)
        return [manager] if async_op else []
    works = [_all_gather_single(out, inp, group=axis.group, async_op=async_op) for out, inp in zip(outputs, inputs)]
    return [work for work in works if work is not None]


def reduce_scatter(
    output: torch.Tensor,
    rows: torch.Tensor,
    axis: Axis,
    *,
    average: bool,
    async_op: bool,
    custom: ReduceScatter | None = None,
) -> list[dist.Work]:
    """Fill ``output`` with the sum (or mean) over ranks of this rank's row of ``rows`` (1D, one row per rank)."""
    if axis.size == 1:
        output.copy_(rows)
        return []
    assert axis.group is not None
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    if custom is not None:
        work = custom(output_tensor=output, input_tensor=rows, group=axis.group, op=op, async_op=async_op)
    else:
        work = _reduce_scatter_single(output, rows, op=op, group=axis.group, async_op=async_op)
    return [] if work is None else [work]


def all_to_all(output: torch.Tensor, rows: torch.Tensor, axis: Axis, *, async_op: bool) -> list[dist.Work]:
    """Fill ``output`` with this rank's row of every rank's ``rows``, in rank order (both 1D)."""
    work = dist.all_to_all_single(output, rows, group=axis.group, async_op=async_op)
    return [] if work is None else [work]


def all_reduce(tensor: torch.Tensor, axis: Axis, *, average: bool, async_op: bool) -> list[dist.Work]:
    """Replace ``tensor`` by its sum (or mean) over the ranks of ``axis``."""
    if axis.size == 1:
        return []
    op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
    work = dist.all_reduce(tensor, op=op, group=axis.group, async_op=async_op)
    return [] if work is None else [work]
