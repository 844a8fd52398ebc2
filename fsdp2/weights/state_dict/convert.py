"""What the values of a state dict become under a setting: whole tensors, shards or pieces."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import local_tensor
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Managed
from fsdp2.weights.state_dict.pieces import piece_of
from fsdp2.weights.whole import Source, check_same, gather_whole

__all__ = ["Converter", "Item"]


class Item(NamedTuple):
    """A value by its name, and the managed parameter that it is (``is_parameter``) or is cut like."""

    value: Any
    name: str
    managed: Managed | None = None
    is_parameter: bool = False


class Converter:
    """Makes of the values of one state dict what a setting asks for.

    A parameter with several names is gathered once and stays shared. Where a rank does not ask for whole tensors
    (``rank0_only``) none outlives the gather of its bucket, which is no larger than the largest tensor. ``groups`` are
    those that the values may belong to.
    """

    def __init__(self, kind: StateDictType, config: Any, groups: Collection[FSDPParamGroup], ranks: Ranks) -> None:
        self.kind = kind
        self.offload = config.offload_to_cpu
        self.groups = groups
        self.ranks = ranks
        self.keeps = not getattr(config, "rank0_only", False) or ranks.first
        self._copies: dict[object, torch.Tensor] = {}

    def __call__(self, items: Sequence[Item]) -> list[Any]:
        """The values of ``items`` as asked for, in order."""
        if self.kind is not StateDictType.FULL_STATE_DICT:
            return [self._part(item) for item in items]
        keys = [item.managed[0] if item.is_parameter and item.managed else i for i, item in enumerate(items)]
        sources: dict[object, Source] = {}
        names: dict[str, Source] = {}
        for key, item in zip(keys, items):
            if isinstance(item.value, DTensor) and key not in sources:
                piece = item.value if item.managed is None else local_tensor(item.value).detach()
                sources[key] = names[item.name] = Source.of(piece, item.managed)
        check_same(names, self.groups, self.ranks)
        limit = max((source.nbytes for source in sources.values()), default=0)
        device = torch.device("cpu") if self.offload else None
        whole = dict(zip(sources, gather_whole(list(sources.values()), limit, keep=self.keeps, device=device)))
        return [whole[key] if key in sources else self._copy(item.value) for key, item in zip(keys, items)]

    def _part(self, item: Item) -> Any:
        value = item.value
        if not isinstance(value, torch.Tensor):
            return value
        value = value.cpu() if self.offload else value
        if self.kind is StateDictType.LOCAL_STATE_DICT and isinstance(value, DTensor):
            return piece_of(value, None if item.managed is None else item.managed[0].spec, item.name)
        return value

    def _copy(self, value: Any) -> Any:
        """A copy that later training does not change; the same one for tensors that share their memory."""
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if value.is_meta or not value.numel():
            return value
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
        if self.keeps and key not in self._copies:
            self._copies[key] = value.cpu() if self.offload and value.device.type != "cpu" else value.clone()
        return self._copies.get(key)
