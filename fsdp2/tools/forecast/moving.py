"""What the operators of process groups move on this rank, and the seconds that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch.forecast import operator_schema, unboxed_group
from fsdp2.tools.forecast.cost import Hardware, nbytes_of, tensors_in

__all__ = ["Moving", "moving_functional", "moving_in_group"]

_KINDS = {
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "recv_any_source_": "recv",
}
_FUNCTIONAL = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Moving:
    """A collective or a message: its kind, its group, the bytes of its whole tensor, and the seconds that it takes."""

    kind: str
    group: dist.ProcessGroup
    nbytes: int
    seconds: float


def moving_in_group(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], hardware: Hardware) -> Moving:
    """Describe an operator of torch's namespace c10d, which writes to its first argument or reads that."""
    named = {argument.name: value for argument, value in zip(operator_schema(func).arguments, args)} | dict(kwargs)
    group = unboxed_group(named["process_group"])
    name = func.overloadpacket.__name__
    kind = _KINDS.get(name, name.strip("_"))
    if kind == "all_to_all":
        return _exchange(
            group, (args[0], named.get("output_split_sizes")), (args[1], named.get("input_split_sizes")), hardware
        )
    nbytes = _nbytes(args[1] if kind in ("reduce_scatter", "scatter") else args[0])
    peer = named.get("dst", named.get("src"))
    if peer is not None:
        ranks = dist.get_process_group_ranks(group)
        return Moving(kind, group, nbytes, hardware.message_seconds(nbytes, (ranks[group.rank()], ranks[peer])))
    return _collective(kind, group, nbytes, hardware)


def moving_functional(func: Any, args: Sequence[Any], out: Any, hardware: Hardware) -> Moving | None:
    """Describe a functional collective that returned ``out``; None for an operator that only wraps a tensor."""
    name = func.overloadpacket.__name__
    kind = next((kind for part, kind in _FUNCTIONAL.items() if name.startswith(part)), None)
    if kind is None:
        return None
    group = unboxed_group(args[-1])
    if kind == "all_to_all":
        sent, output_sizes, sent_sizes, _ = args
        return _exchange(group, (out, output_sizes), (sent, sent_sizes), hardware)
    return _collective(kind, group, _nbytes(args if kind == "reduce_scatter" else out), hardware)


def _collective(kind: str, group: dist.ProcessGroup, nbytes: int, hardware: Hardware) -> Moving:
    return Moving(kind, group, nbytes, hardware.collective_seconds(nbytes, dist.get_process_group_ranks(group), kind))


_Rows = tuple[Any, Sequence[int] | None]
"""What goes to every rank or comes from it: a tensor for each, or one tensor and its rows for each (even without)."""


def _exchange(group: dist.ProcessGroup, received: _Rows, sent: _Rows, hardware: Hardware) -> Moving:
    ranks = dist.get_process_group_ranks(group)
    both = [_of_ranks(one, len(ranks)) for one in (received, sent)]
    seconds = hardware.exchange_seconds(both[0], both[1], ranks, group.rank())
    return Moving("all_to_all", group, _nbytes(received[0]), seconds)


def _of_ranks(rows: _Rows, count: int) -> list[float]:
    """Return the bytes of each rank."""
    tensors, sizes = rows
    if not isinstance(tensors, torch.Tensor):
        return [float(nbytes_of(tensor)) for tensor in tensors]
    nbytes = nbytes_of(tensors)
    if not sizes:
        return [nbytes / count] * count
    return [nbytes * size / max(sum(sizes), 1) for size in sizes]


def _nbytes(tensors: Any) -> int:
    return sum(map(nbytes_of, tensors_in(tensors)))
