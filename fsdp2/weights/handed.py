"""Tensors that callers hand in to be loaded. They may lie in memory that loading frees, or that was freed before.

A module that is unsharded, or that keeps pieces after forward, shows tensors whose memory comes and goes. They are read
off it by ``dict(model.named_parameters())``, and by torch.distributed.checkpoint.state_dict, which writes new values
into what it finds there and then loads that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import param_of
from fsdp2.engine.param import is_temporary
from fsdp2.sharding.spec import dtensor_like, on_this_rank

__all__ = ["copies_of_lent", "why_unreadable"]


def copies_of_lent(values: Mapping[str, Any], groups: Iterable[FSDPParamGroup]) -> dict[str, Any]:
    """Return copies of those of ``values`` that lie in gathered memory of ``groups``: loading frees that memory."""
    lending = [group.store for group in groups if group.residency.in_memory]
    copies: dict[str, Any] = {}
    for key, value in values.items() if lending else ():
        if isinstance(value, torch.Tensor) and any(store.lends(value) for store in lending):
            copy = on_this_rank(value).detach().clone()
            copies[key] = dtensor_like(value, copy) if isinstance(value, DTensor) else copy
    return copies


def why_unreadable(value: Any) -> str:
    """Return why a tensor does not have the values that its caller expects, and what to do; "" if it has them."""
    if not isinstance(value, torch.Tensor):
        return ""
    local = on_this_rank(value)
    if type(local) in (torch.Tensor, torch.nn.Parameter) and _is_freed(local):
        return (
            "its memory was freed; got a full parameter, or a view of one, that was read off an unsharded module, "
            "expected values. Call clone() on it while the module is unsharded, or pass model.state_dict()"
        )
    param = param_of(value) if is_temporary(value) else None
    if param is not None and (value.dtype != param.dtype or param.formats.gather is not None):
        return (
            f"got what the module computes with, rounded for that ({value.dtype}), expected the values of its shards "
            f"({param.dtype}). Call reshard() on every unit of the model first, so that it shows them"
        )
    return ""


def _is_freed(local: torch.Tensor) -> bool:
    if local.is_meta or local.layout is not torch.strided or not local.numel():
        return False
    return local.untyped_storage().nbytes() == 0
