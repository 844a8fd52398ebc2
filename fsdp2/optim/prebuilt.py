"""Optimizers that hold other tensors than the shards: they get the shards, state included, before it matters.

A parameter object cannot become a DTensor, so an optimizer built before ``fully_shard`` would go on training a tensor
that no module uses. So would an optimizer built while a module shows full parameters, as a root does after an
evaluation, or inside ``summon_full_params``. Every such tensor is remembered, weakly, and replaced by its shard before
the optimizer steps, zeroes gradients, is unscaled or loaded into.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch.hooks import outside_dynamo
from fsdp2._torch.optimizers import around_use
from fsdp2.autograd.hooks import hook_optimizers, hook_registrations
from fsdp2.engine.index import managed_slots, originals_remembered, param_of, remember_originals
from fsdp2.engine.param import FSDPParam, is_managed_tensor, is_temporary
from fsdp2.engine.residency import note_optimizer_step
from fsdp2.engine.unit import live_states
from fsdp2.sharding.spec import arrived, on_this_rank, placed_alike

__all__ = ["STEPS_ON_WHOLE", "follow_parameters", "repair", "shards_of"]

_SIZE = "_fsdp2_size"  # of an optimizer: how many parameters it had when it was last looked through
STEPS_ON_WHOLE = "_fsdp2_full_params"
"""An attribute of optimizers that step on whole parameters, for which state of any shape is right as it is."""
_hooked = False
# Gradients that originals had when they were replaced: of this rank's data alone, or written to the shard already.
_old_gradients: WeakIdKeyDictionary = WeakIdKeyDictionary()  # original -> weak gradient


def follow_parameters(originals: list[nn.Parameter], params: list[FSDPParam]) -> None:
    """Remember which managed parameter took the place of each original."""
    global _hooked
    if not _hooked:
        hook_optimizers(repair, note_optimizer_step)
        around_use(repair, _follow_summoned)
        hook_registrations(is_managed_tensor)
        _hooked = True
    _remember(originals, params)


def _remember(originals: Iterable[nn.Parameter], params: Iterable[FSDPParam]) -> None:
    originals = list(originals)
    remember_originals(originals, params)
    for original in originals:
        if original.grad is not None:
            _old_gradients[original] = weakref.ref(original.grad)


@outside_dynamo
def _follow_summoned(optimizer: torch.optim.Optimizer) -> None:
    """Remember what ``optimizer`` was just given inside ``summon_full_params``.

    Only then can these tensors be recognized: after the block no module shows them. The optimizer keeps them for the
    length of the block, where it may step on them.
    """
    given = optimizer.param_groups[-1]["params"]
    summoned = [param for param in given if _is_summoned(param)]
    if summoned:
        slots = managed_slots(live_states()).items()
        shown = {id(slot.module._parameters.get(slot.name)): param for slot, param in slots}
        known = [param for param in summoned if id(param) in shown]
        _remember(known, [shown[id(param)] for param in known])


def _is_summoned(param: torch.Tensor) -> bool:
    """Whether ``summon_full_params`` shows ``param`` at the moment; a shard would be a DTensor."""
    return is_managed_tensor(param) and not is_temporary(param) and not isinstance(param, DTensor)


def shards_of(params: list[Any]) -> list[Any]:
    """``params``, with the shards in place of originals; what modules show at the moment stays."""
    if not originals_remembered():
        return params
    managed = (None if is_managed_tensor(param) else param_of(param) for param in params)
    return [param if found is None or found.sharded is None else found.sharded for param, found in zip(params, managed)]


def repair(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Let ``optimizer`` hold the shards of parameters that it was given whole, with their state and gradients."""
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
            if param in optimizer.state:  # first, since it may raise: the next step must not begin without this state
                any_shape = STEPS_ON_WHOLE in optimizer.__dict__
                optimizer.state[managed.sharded] = _cut_state(optimizer.state[param], param, managed, any_shape)
                del optimizer.state[param]
            if not is_temporary(param):  # what a full parameter has is still to be reduced
                _carry_gradient(param, managed)
            params[i] = managed.sharded  # in place: LBFGS and schedulers keep the same list


def _carry_gradient(original: torch.Tensor, managed: FSDPParam) -> None:
    """Let the shard have the gradient that ``original`` was given since it was replaced, unless it has its own.

    torch.distributed.checkpoint.state_dict makes an optimizer's state by a step with gradients of zero, which it gives
    to the parameters that the optimizer holds before the step.
    """
    grad: Any = original.grad
    old = _old_gradients.get(original)
    assert managed.sharded is not None
    if grad is None or managed.sharded.grad is not None or (old is not None and old() is grad):
        return
    managed.set_gradient(arrived(grad.full_tensor()) if isinstance(grad, DTensor) else grad)


def _cut_state(state: dict[str, Any], original: torch.Tensor, managed: FSDPParam, any_shape: bool) -> dict[str, Any]:
    """The optimizer's state of one parameter, tensors of the parameter's shape cut like the parameter itself.

    Raises:
        RuntimeError: a tensor in it has another shape and more than one element, so nobody knows how to cut it; not
            with ``any_shape``, where it stays whole.
    """
    cut = {}
    for key, value in state.items():
        tensor = isinstance(value, torch.Tensor) and key != "step"
        if not tensor or (value.numel() == 1 and value.shape != original.shape):
            cut[key] = value
        elif value.shape == original.shape:
            cut[key] = _cut(value, original, managed)
        elif any_shape:
            cut[key] = value
        else:
            raise RuntimeError(
                f"{managed.name}: the optimizer was stepped before fully_shard and its state {key!r} has shape "
                f"{tuple(value.shape)}, expected {tuple(original.shape)}; build the optimizer after "
                "fully_shard, or, if it updates each parameter independently, call use_full_params on it"
            )
    return cut


def _cut(value: Any, original: torch.Tensor, managed: FSDPParam) -> torch.Tensor:
    """``value``, of the shape of the whole parameter, cut like its shard; loading may have cut it already."""
    spec = managed.spec
    if placed_alike(value, managed.sharded):
        return value  # type: ignore[no-any-return]  # it is a DTensor
    if placed_alike(value, original):
        local = on_this_rank(value)
    else:  # placed in another way (replicated, say): every rank has it so, and every rank comes here
        local = spec.of_plain(arrived(value.full_tensor()) if isinstance(value, DTensor) else value)
    local = spec.cut(local).detach().to(managed.local.device, copy=True)
    return spec.shard(local) if local.dtype == managed.dtype else spec.shard_as(local)
