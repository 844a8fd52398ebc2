"""Convert the values of a state dict as a setting asks: to whole tensors, shards or pieces."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import OptimStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import address_of
from fsdp2.engine.index import groups_below
from fsdp2.engine.param import FSDPParam
from fsdp2.sharding.spec import dtensor_like, on_this_rank
from fsdp2.weights.local_pieces import piece_of
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import ranks_of
from fsdp2.weights.whole import Source, check_same, gather_whole

__all__ = ["Item", "convert"]


class Item(NamedTuple):
    """A named value, and the managed parameter that it is (``is_parameter``) or that it is sharded like."""

    value: Any
    name: str
    param: FSDPParam | None = None
    is_parameter: bool = False


def convert(items: Sequence[Item], model: nn.Module, kind: StateDictType, config: Any) -> list[Any] | None:
    """Convert values of ``model`` or of its optimizer to ``kind``; return None on ranks that get nothing.

    A parameter with several names is gathered once and stays shared. On ranks that get nothing (``rank0_only``), no
    whole tensor outlives the gather of its bucket, which is no larger than the largest tensor, or 1 MiB.

    Raises:
        RuntimeError: The first rank lacks a name with ``rank0_only``, or ranks have different tensors to gather.
    """
    if kind is not StateDictType.FULL_STATE_DICT:
        hosted: dict[int, torch.Tensor] = {}
        return [_part(item, kind, config, hosted) for item in items]
    ranks = ranks_of(model, managed=True) or Ranks.world()
    keep = ranks.first or not config.rank0_only
    if config.rank0_only:
        _check_nothing_is_lost([item.name for item in items], ranks)
    keys = [item.param if item.is_parameter and item.param else i for i, item in enumerate(items)]
    sources: dict[object, Source] = {}
    names: dict[str, Source] = {}
    # In the order of names: the optimizer's state of one rank may list parameters in another order.
    for key, item in sorted(zip(keys, items), key=lambda pair: pair[1].name):
        if isinstance(item.value, DTensor) and key not in sources:
            piece = item.value if item.param is None else on_this_rank(item.value).detach()
            sources[key] = names[item.name] = Source.of(piece, item.param)
    check_same(names, groups_below(model), ranks)
    device = torch.device("cpu") if config.offload_to_cpu else None
    whole = dict(zip(sources, gather_whole(list(sources.values()), keep=keep, device=device)))
    if not keep:
        return None
    copies: dict[object, torch.Tensor] = {}
    return [whole[key] if key in sources else _copy(item.value, device, copies) for key, item in zip(keys, items)]


def _check_nothing_is_lost(names: list[str], ranks: Ranks) -> None:
    """Raise RuntimeError on every rank if the first, which alone returns values, lacks names that others have."""
    digest = hashlib.sha256("\n".join(sorted(names)).encode()).digest()
    if len(set(ranks.gather(digest))) == 1:
        return
    everybodys = dict(ranks.gather((dist.get_rank(), names)))
    for rank, theirs in sorted(everybodys.items()):
        lost = sorted(set(theirs) - set(everybodys[ranks.first_rank]))
        if lost:
            raise RuntimeError(
                f"rank0_only: rank {ranks.first_rank}, which alone gets the state dict, lacks what rank {rank} has; "
                f"got {lost}, expected the same names on every rank. Pass rank0_only=False and save every rank's state "
                "dict"
            )


def _part(item: Item, kind: StateDictType, config: Any, copies: dict[int, torch.Tensor]) -> Any:
    if not isinstance(item.value, torch.Tensor):
        return item.value
    value = item.value
    if config.offload_to_cpu:
        # Of an optimizer's state that is the default, so what is on the CPU stays shared, as in a plain state dict.
        value = value.cpu() if isinstance(config, OptimStateDictConfig) else _on_host(value, copies)
    if kind is StateDictType.LOCAL_STATE_DICT and isinstance(value, DTensor):
        return piece_of(value, None if item.param is None else item.param.spec, item.name)
    return value


def _on_host(value: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return a copy on the CPU, also of what is there already (CPU offload): training goes on with that.

    A tied parameter has one copy.
    """
    if id(value) not in copies:
        copy = on_this_rank(value).detach().to("cpu", copy=True)
        copies[id(value)] = dtensor_like(value, copy) if isinstance(value, DTensor) else copy
    return copies[id(value)]


def _copy(value: Any, device: torch.device | None, copies: dict[object, torch.Tensor]) -> Any:
    """Return a copy that later training does not change, the same copy for tensors that share memory."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if value.is_meta or not value.numel():
        return value
    key = (address_of(value), value.shape, value.stride(), value.dtype, value.device)
    if key not in copies:
        copies[key] = value.to(device or value.device, copy=True)
    return copies[key]
