"""What optimizers and clipping do about gradients that they would not see: those that no backward has reduced yet.

After ``set_requires_gradient_sync(False)`` they are on full parameters, and after ``set_requires_all_reduce(False)``
they are sums over a part of the ranks. Zeroing drops them, like the accumulated gradients of an unsharded model.
Functions that read gradients raise an error on every rank, because they would continue as if there were none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fsdp2.engine import unreduced

__all__ = ["drop_unreduced", "refuse_unreduced", "refuse_unreduced_step"]

_SHOWN = 4  # names in an error


def _ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def drop_unreduced(optimizer: torch.optim.Optimizer) -> None:
    """Drop the unreduced gradients of the parameters of ``optimizer``, which is about to zero their gradients."""
    unreduced.drop_unreduced(_ids(optimizer))


def refuse_unreduced_step(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Raise RuntimeError if ``optimizer`` is about to step on parameters with unreduced gradients."""
    refuse_unreduced((p for group in optimizer.param_groups for p in group["params"]), "optimizer.step")


def refuse_unreduced(params: Iterable[Any], function: str) -> None:
    """Raise RuntimeError if ``params`` have unreduced gradients, which ``function`` would not see."""
    order = {id(param): number for number, param in enumerate(params)}  # alike on all ranks
    found = unreduced.unreduced_params(order)
    found.sort(key=lambda param: min(order.get(id(shard), len(order)) for shard in (param.sharded, param.own)))
    if not found:
        return
    names = ", ".join(param.name for param in found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
    raise RuntimeError(
        f"{function}: got {len(found)} parameters whose gradients are not reduced ({names}), expected reduced ones on "
        "the shards: backwards accumulated them after set_requires_gradient_sync(False), "
        "set_requires_all_reduce(False) or set_manual_backward_finalization(True). Call synchronize_gradients() on the "
        "root module first (finalize_backward() with manual finalization), or zero_grad() to drop them"
    )
