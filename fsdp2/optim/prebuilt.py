"""Optimizers not given the shards: their next step finds the sharded parameters, state included.

A parameter object cannot become a DTensor, so an optimizer built before ``fully_shard`` would go on training a tensor
nobody uses. Every original is remembered, weakly, until its optimizer has been repaired. So would an optimizer built
while a module shows full parameters, as a root does after an evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp2._torch.hooks import outside_dynamo
from fsdp2.autograd.hooks import hook_optimizers, hook_registrations
from fsdp2.engine.index import originals_remembered, param_of, remember_originals
from fsdp2.engine.param import FSDPParam, is_managed_tensor, is_temporary
from fsdp2.engine.residency import note_optimizer_step
from fsdp2.sharding.spec import on_this_rank

__all__ = ["follow_parameters", "repair"]

_SIZE = "_fsdp2_size"  # of an optimizer: how many parameters it had when it was last looked through
_hooked = False


def follow_parameters(originals: list[nn.Parameter], params: list[FSDPParam]) -> None:
    """Remember which managed parameter took the place of each original."""
    global _hooked
    if not _hooked:
        hook_optimizers(repair, note_optimizer_step)
        hook_registrations(is_managed_tensor)
        _hooked = True
    remember_originals(originals, params)


def repair(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Let ``optimizer`` hold the shards of parameters that it was given whole; every step does."""
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    # Dynamo follows as far as this, so a compiled step breaks only where there is something to look for.
    if originals_remembered() or optimizer.__dict__.get(_SIZE) != size:
        _look_through(optimizer, size)


@outside_dynamo
def _look_through(optimizer: torch.optim.Optimizer, size: int) -> None:
    optimizer.__dict__[_SIZE] = size
    for group in optimizer.param_groups:
        params = group["params"]
        for i, param in enumerate(params):
            managed = None if is_managed_tensor(param) and not is_temporary(param) else param_of(param)
            if managed is None or managed.sharded is None:
                continue
            params[i] = managed.sharded  # in place: LBFGS and schedulers keep the same list
            if param in optimizer.state:
                optimizer.state[managed.sharded] = _cut_state(optimizer.state.pop(param), param, managed)


def _cut_state(state: dict[str, Any], original: torch.Tensor, managed: FSDPParam) -> dict[str, Any]:
    """The optimizer's state of one parameter, tensors of the parameter's shape cut like the parameter itself.

    Raises:
        RuntimeError: a tensor in it has another shape and more than one element, so nobody knows how to cut it.
    """
    spec = managed.spec
    cut = {}
    for key, value in state.items():
        tensor = isinstance(value, torch.Tensor) and key != "step"
        if not tensor or (value.numel() == 1 and value.shape != original.shape):
            cut[key] = value
        elif value.shape == original.shape:
            local = spec.cut(on_this_rank(value).detach()).clone()
            cut[key] = spec.shard(local) if value.dtype == managed.dtype else spec.shard_as(local)
        else:
            raise RuntimeError(
                f"{managed.name}: the optimizer was stepped before fully_shard and its state {key!r} has shape "
                f"{tuple(value.shape)}, expected {tuple(original.shape)}; build the optimizer after fully_shard"
            )
    return cut
