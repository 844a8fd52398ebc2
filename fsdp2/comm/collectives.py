"""The collectives, and nothing else in the package calls one. An axis of size 1 communicates nothing."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp2 import _trace
from fsdp2._torch.collectives import (
    TORCH_COMMS,
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    ReduceScatterOptions,
    SymmMemAllGather,
    SymmMemReduceScatter,
    group_all_gather,
    group_all_gather_coalesced,
    group_all_reduce,
    group_all_to_all,
    group_reduce_scatter,
    group_reduce_scatter_coalesced,
)
from fsdp2.comm.host_work import HostWork
from fsdp2.comm.pieces import copy_all
from fsdp2.policies import AllGather, ReduceScatter
from fsdp2.sharding.mesh import Axis

__all__ = [
    "Work",
    "all_gather",
    "all_reduce",
    "all_reduce_max",
    "all_to_all",
    "all_to_all_uneven",
    "broadcast",
    "chunks_in_flight",
    "exchange_objects",
    "gather_bytes",
    "in_memory_of_groups",
    "in_symmetric_memory",
    "is_torchs_own",
    "max_over_ranks",
    "needs_one_buffer",
    "prefers_all_to_all",
    "reduce_scatter",
    "reduce_scatter_together",
    "share_bytes",
    "wire_view",
]

Work = dist.Work | HostWork

_WIRE_DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8}

# gloo's reduce-scatter is a copy and an all-reduce; above this size sending each rank its part and summing there is
# 1.4 to 3.7 times faster (measured on 2 to 8 processes), below it the extra message costs more than it saves. Its
# all-gather goes round a ring; two ranks that swap pieces are 1.4 to 1.9 times faster.
_ALL_TO_ALL_BYTES = 256 << 10


def wire_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or its bytes if backends do not send its dtype (float8, bool, int16, complex)."""
    return tensor if tensor.dtype in _WIRE_DTYPES else tensor.view(torch.uint8)


def prefers_all_to_all(axis: Axis, nbytes: int, asked: int | None = None) -> bool:
    """Return whether ranks send each other ``nbytes`` directly, instead of by a collective that combines them.

    They do from ``asked`` bytes on; by default, from the size on at which it is faster with the axis' backend.
    """
    if asked is None:
        return axis.size > 1 and axis.backend == "gloo" and nbytes >= _ALL_TO_ALL_BYTES
    return axis.size > 1 and nbytes >= asked


def chunks_in_flight(axis: Axis) -> int:
    """Return how many chunks of gradients travel at once by default.

    A stream needs one: the next is queued behind it, and each further one costs memory. gloo works beside the host,
    which must not wait for it while there is something to compute. Each chunk is in memory twice, as sent and as
    received. With four chunks a step is as fast as with eight, a whole unit, within 2 % (measured on two processes);
    with three it takes 5 % longer over a link of 2 Gbit/s.
    """
    return 4 if axis.backend == "gloo" else 1


def all_gather(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    axis: Axis,
    *,
    async_op: bool,
    custom: AllGather | None = None,
) -> list[Work]:
    """Fill each 1D output with the inputs of all ranks in rank order; outputs are valid after the works' ``wait``."""
    if axis.size == 1:
        copy_all([out.view(-1) for out in outputs], inputs)
        return []
    assert axis.group is not None
    if custom is not None:
        works = [
            custom(output_tensor=out, input_tensor=inp, group=axis.group, async_op=async_op)
            for out, inp in zip(outputs, inputs)
        ]
        return [work for work in works if work is not None]
    options, what = _gather_options(async_op), ("gather", "all_gather")
    if len(outputs) > 1 and axis.is_nccl:
        if len({tensor.dtype for tensor in inputs}) > 1:  # one launch has one dtype
            outputs, inputs = _as_bytes(outputs), _as_bytes(inputs)
        work = _start(what, axis, outputs, group_all_gather_coalesced, outputs, inputs, options)
        return _works(work, axis, async_op)
    started: list[Work] = []
    for out, inp in zip(outputs, inputs):
        swaps = axis.size == 2 and prefers_all_to_all(axis, out.nbytes)
        if swaps or (axis.backend == "gloo" and out.device.type == "cpu"):
            # Send this rank's own part of the output: gloo's threads send while the program may write to shards.
            inp = out.view(axis.size, -1)[axis.rank].copy_(inp)
        if swaps:
            started += _swap(out, inp, axis, async_op=async_op)
        else:
            started += _works(_start(what, axis, [out], group_all_gather, out, inp, options), axis, async_op)
    return started


def _as_bytes(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8) for tensor in tensors]


def _start(
    what: tuple[str, str],
    axis: Axis,
    moved: list[torch.Tensor],
    method: Callable[[dist.ProcessGroup | None], Callable[..., dist.Work | None]],
    *arguments: Any,
) -> dist.Work | None:
    """Call this method of the group of ``axis``; a recorder is told ``what`` it is and the bytes of ``moved``."""
    recorder = _trace.recorder
    if recorder is None:
        return method(axis.group)(*arguments)
    began = recorder.moment()
    work = method(axis.group)(*arguments)
    recorder.launched(what, axis, sum(tensor.nbytes for tensor in moved), began, work)
    return work


def _swap(output: torch.Tensor, own: torch.Tensor, axis: Axis, *, async_op: bool) -> list[Work]:
    """Let two ranks send each other their ``own`` half of the ``output``."""
    target, sizes = output.view(2, -1)[1 - axis.rank], _sizes_of_others(own, axis)
    options = _exchange_options(async_op)
    work = _start(("gather", "all_to_all"), axis, [target], group_all_to_all, target, own, sizes, sizes, options)
    return _works(work, axis, async_op)


def _sizes_of_others(rows: torch.Tensor, axis: Axis) -> list[int]:
    """Return the elements for each rank if ``rows`` (1D) has a row for every rank but this one."""
    sizes = [rows.numel() // (axis.size - 1)] * axis.size
    sizes[axis.rank] = 0
    return sizes


def _works(work: dist.Work | None, axis: Axis, async_op: bool, *, takes_limit: bool = True) -> list[Work]:
    """Return the works that the caller must wait for. A synchronous call waits here, if the backend did not."""
    if work is None:
        return []
    if async_op:
        return [HostWork(work, takes_limit=takes_limit) if axis.backend == "gloo" else work]
    work.wait()
    return []


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as twice as many real numbers, which backends can add; other tensors unchanged."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def _op(average: bool) -> Any:
    return dist.ReduceOp.AVG if average else dist.ReduceOp.SUM


@functools.cache
def _gather_options(async_op: bool) -> AllgatherOptions:
    options = AllgatherOptions()
    options.asyncOp = async_op
    return options


@functools.cache
def _exchange_options(async_op: bool) -> AllToAllOptions:
    options = AllToAllOptions()
    options.asyncOp = async_op
    return options


@functools.cache
def _scatter_options(async_op: bool, average: bool) -> ReduceScatterOptions:
    options = ReduceScatterOptions()
    options.asyncOp = async_op
    options.reduceOp = _op(average)
    return options


def reduce_scatter(
    output: torch.Tensor,
    rows: torch.Tensor,
    axis: Axis,
    *,
    average: bool,
    async_op: bool,
    custom: ReduceScatter | None = None,
) -> list[Work]:
    """Fill ``output`` with the sum (or mean) over ranks of this rank's row of ``rows`` (1D, one row per rank)."""
    if axis.size == 1:
        output.copy_(rows)
        return []
    assert axis.group is not None
    if rows.is_complex():
        output, rows = _real(output), _real(rows)
    if custom is not None:
        work = custom(output_tensor=output, input_tensor=rows, group=axis.group, op=_op(average), async_op=async_op)
        return [] if work is None else [work]
    what, options = ("reduce", "reduce_scatter"), _scatter_options(async_op, average)
    work = _start(what, axis, [rows], group_reduce_scatter, output, rows, options)
    return _works(work, axis, async_op, takes_limit=False)  # the work of gloo's reduce-scatter ignores the timeout


def reduce_scatter_together(
    outputs: list[torch.Tensor], rows: list[torch.Tensor], axis: Axis, *, average: bool, async_op: bool
) -> list[Work]:
    """Do for each of ``outputs`` what ``reduce_scatter`` does for one, in one launch; they have one dtype."""
    if axis.size == 1:
        copy_all(outputs, rows)
        return []
    if len(rows) == 1:
        return reduce_scatter(outputs[0], rows[0], axis, average=average, async_op=async_op)
    if rows[0].is_complex():
        outputs, rows = [_real(tensor) for tensor in outputs], [_real(tensor) for tensor in rows]
    what, options = ("reduce", "reduce_scatter"), _scatter_options(async_op, average)
    work = _start(what, axis, rows, group_reduce_scatter_coalesced, outputs, rows, options)
    return _works(work, axis, async_op, takes_limit=False)


def all_to_all(
    output: torch.Tensor, rows: torch.Tensor, axis: Axis, *, async_op: bool, with_own: bool = True
) -> list[Work]:
    """Fill ``output`` with this rank's row of every rank's ``rows``, in rank order (both 1D).

    Neither has a row of this rank's own for itself unless ``with_own``.
    """
    assert axis.group is not None
    output, rows = _real(output), _real(rows)
    sizes: list[int] = [] if with_own else _sizes_of_others(rows, axis)
    what, options = ("reduce", "all_to_all"), _exchange_options(async_op)
    work = _start(what, axis, [output], group_all_to_all, output, rows, sizes, sizes, options)
    return _works(work, axis, async_op)


def all_to_all_uneven(
    output: torch.Tensor,
    sent: torch.Tensor,
    output_sizes: list[int],
    sent_sizes: list[int],
    axis: Axis,
    *,
    async_op: bool,
) -> list[Work]:
    """Send each rank its part of ``sent``, of its own size, and fill ``output`` with theirs, in rank order (bytes)."""
    if axis.size == 1:
        return []
    assert axis.group is not None
    what, options = ("exchange", "all_to_all"), _exchange_options(async_op)
    work = _start(what, axis, [output], group_all_to_all, output, sent, output_sizes, sent_sizes, options)
    return _works(work, axis, async_op)


def all_reduce(tensor: torch.Tensor, axis: Axis, *, average: bool, async_op: bool) -> list[Work]:
    """Replace ``tensor`` by its sum (or mean) over the ranks of ``axis``."""
    if axis.size == 1:
        return []
    assert axis.group is not None
    options = AllreduceOptions()
    options.asyncOp = async_op
    options.reduceOp = _op(average)
    work = _start(("replicate", "all_reduce"), axis, [tensor], group_all_reduce, [_real(tensor)], options)
    return _works(work, axis, async_op)


def broadcast(tensor: torch.Tensor, axis: Axis, source: int = 0) -> None:
    """Replace ``tensor`` by that of rank ``source`` of ``axis``."""
    if axis.size > 1:
        dist.broadcast(wire_view(tensor), group=axis.group, group_src=source)


def share_bytes(data: bytes, axis: Axis, source: int, device: torch.device) -> bytes:
    """Return the ``data`` of rank ``source`` of ``axis``; its backend must serve ``device``.

    torch's collectives for objects need numpy: if one rank lacks it, that rank raises, and the others wait for ever.
    """
    if axis.reaches_nobody:
        return data
    size = torch.tensor([len(data)], device=device)
    broadcast(size, axis, source)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    if axis.rank == source and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    broadcast(buffer, axis, source)
    return _to_bytes(buffer)


def gather_bytes(data: bytes, axis: Axis, device: torch.device) -> list[bytes]:
    """Return the ``data`` of every rank of ``axis``, in rank order; its backend must serve ``device``."""
    if axis.reaches_nobody:
        return [data] * axis.size
    size = torch.tensor([len(data), 0], device=device)  # 16 bytes: NCCL is slow on sizes that are no multiple
    sizes = torch.empty(2 * axis.size, dtype=torch.int64, device=device)
    all_gather([sizes], [size], axis, async_op=False)
    lengths = sizes.tolist()[::2]
    row = torch.zeros(-(-max(*lengths, 1) // 16) * 16, dtype=torch.uint8, device=device)
    if data:
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    rows = torch.empty(axis.size, len(row), dtype=torch.uint8, device=device)
    all_gather([rows.view(-1)], [row], axis, async_op=False)
    return [_to_bytes(rows[rank, :length]) for rank, length in enumerate(lengths)]


def exchange_objects(value: Any, axis: Axis, device: torch.device) -> list[Any]:
    """Return the ``value`` of every rank of ``axis``, in rank order; it can be anything that pickles."""
    return [pickle.loads(data) for data in gather_bytes(pickle.dumps(value), axis, device)]


def _to_bytes(tensor: torch.Tensor) -> bytes:
    data = bytearray(tensor.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(tensor)
    return bytes(data)


def max_over_ranks(values: list[int], axis: Axis, device: torch.device, flags: torch.Tensor | None = None) -> list[int]:
    """Return the elementwise maximum over ranks; the host waits for it. In a forecast, all ranks have ``values``.

    ``flags`` are more values, which are known on ``device`` only; in a forecast all are 0.
    """
    count = len(values)
    if flags is not None:
        values = [*values, *[0] * len(flags)]
    tensor = torch.tensor(values, dtype=torch.int32).to(device)
    if flags is not None:
        tensor[count:].copy_(flags)
    all_reduce_max(tensor, axis)
    return values if tensor.untyped_storage().device.type == "meta" else tensor.tolist()


def all_reduce_max(tensor: torch.Tensor, axis: Axis) -> None:
    """Replace ``tensor`` by its elementwise maximum over ranks. The maximum of NaN and a number may be either."""
    if axis.size == 1:
        return
    assert axis.group is not None
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]  # as torch's own functions set it
    _works(group_all_reduce(axis.group)([tensor], options), axis, async_op=False)


# ---- torch's own custom collectives, which bring memory of their own ----


def in_memory_of_groups(
    gathers: dist.ProcessGroup | None, scatters: dist.ProcessGroup | None
) -> tuple[AllGather | None, ReduceScatter | None]:
    """Return collectives that use memory from the allocators of these groups."""
    return (
        None if gathers is None else ProcessGroupAllocAllGather(gathers),
        None if scatters is None else ProcessGroupAllocReduceScatter(scatters),
    )


def in_symmetric_memory(
    gathers: dist.ProcessGroup, scatters: dist.ProcessGroup | None, backend: str
) -> tuple[AllGather, ReduceScatter | None]:
    """Return collectives that use symmetric memory of these groups."""
    return SymmMemAllGather(gathers, backend), None if scatters is None else SymmMemReduceScatter(scatters, backend)


def is_torchs_own(custom: object) -> bool:
    """Return whether ``custom`` is one of torch's own collectives, which another of them may replace."""
    return isinstance(custom, TORCH_COMMS)


def needs_one_buffer(custom: object) -> bool:
    """Return whether all ranks set up memory together for each new address that ``custom`` reduces from."""
    return SymmMemReduceScatter is not None and isinstance(custom, SymmMemReduceScatter)
