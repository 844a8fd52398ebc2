"""Replace tensors that an optimizer was given before they were sharded by the shards, with their state.

A parameter object cannot become a DTensor, so an optimizer built before ``fully_shard`` would continue to train a
tensor that no module uses. So would an optimizer built while a module shows full parameters, after ``unshard()`` or
inside ``summon_full_params``. Weak references to all such tensors are kept, and the optimizer gets the shards before it
steps, zeroes gradients, unscales them, is copied, saves or loads a state dict; and in the first forward, since other
code may read the parameters of its groups.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp2._torch.autograd import explicit_grad_dtype
from fsdp2._torch.hooks import outside_dynamo
from fsdp2._torch.optimizers import around_use, split_averages
from fsdp2._torch.tensors import share_memory_of_complex_views
from fsdp2.autograd.hooks import hook_every_step, hook_modules, hook_optimizers, hook_registrations
from fsdp2.engine.index import (
    follow_parametrization,
    managed_sites,
    originals_remembered,
    param_of,
    remember_originals,
)
from fsdp2.engine.param import FSDPParam, is_managed_tensor, is_summoned, is_temporary, lend_gradient
from fsdp2.engine.stamp import note_optimizer_step
from fsdp2.engine.unit import live_units
from fsdp2.engine.unreduced import any_unreduced
from fsdp2.optim.alike import STEPS_ON_WHOLE, is_counter, refuse_mixed_lists
from fsdp2.optim.averaging import refuse_ddp, warn_of_unaveraged
from fsdp2.optim.host_state import HOST_STATE
from fsdp2.optim.unseen import drop_unreduced, refuse_unreduced_step
from fsdp2.sharding.spec import arrived, on_this_rank, placed_alike

__all__ = ["follow_parameters", "repair", "repair_holders", "shards_of"]

_SIZE = "_fsdp2_size"  # attribute of an optimizer: its number of parameters when it was last searched
_hooked = False
_unsearched = False
"""True if parameters were replaced, and the optimizers that hold them were not looked for since."""
_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_knows_all = False
"""True if ``_optimizers`` has those that were built before the first ``fully_shard``, too."""
# Gradients that originals had when they were replaced: unreduced, or already written to the shard.
_old_gradients: WeakIdKeyDictionary = WeakIdKeyDictionary()  # original -> weak gradient


def follow_parameters(originals: list[nn.Parameter], params: list[FSDPParam]) -> None:
    """Remember the managed parameter that replaces each original."""
    global _hooked, _unsearched
    if not _hooked:
        hook_optimizers(_before_step, note_optimizer_step)
        around_use(_before_zeroing, repair, _after_adding, _around_loading, _making_state)
        split_averages(lambda tensor: tensor.device_mesh if isinstance(tensor, DTensor) else None)
        share_memory_of_complex_views()
        hook_registrations(is_managed_tensor, follow_parametrization)
        hook_modules(refuse_ddp)
        _hooked = True
    _remember(originals, params)
    _unsearched = True


def repair_holders() -> None:
    """Give the shards to all optimizers of the process that hold parameters which were replaced since the last call.

    Other code reads the parameters of their groups before any step: torch's ``clip_grad_norm_`` found no gradients
    there. The first forward calls it, when libraries that give optimizers other parameters themselves have done so.
    """
    global _unsearched, _knows_all
    if not _unsearched or not originals_remembered():
        return
    _unsearched = False
    if not _knows_all:  # once: it takes a tenth of a second
        _knows_all = True
        found = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
        # The others are not made, because __init__ has raised, or pass on to an optimizer that is found as well.
        _optimizers.update(each for each in found if "param_groups" in each.__dict__)
    for optimizer in list(_optimizers):
        with contextlib.suppress(RuntimeError):  # its next step raises it, if there is one
            repair(optimizer)


def _remember(originals: Iterable[nn.Parameter], params: Iterable[FSDPParam]) -> None:
    originals = list(originals)
    remember_originals(originals, params)
    for original in originals:
        if original.grad is not None:
            _old_gradients[original] = weakref.ref(original.grad)


def _before_step(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    repair(optimizer)
    if any_unreduced():
        refuse_unreduced_step(optimizer)
    refuse_mixed_lists(optimizer)
    warn_of_unaveraged(optimizer)


def _before_zeroing(optimizer: torch.optim.Optimizer) -> None:
    repair(optimizer)
    if any_unreduced():
        drop_unreduced(optimizer)


@contextlib.contextmanager
def _making_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let torch.distributed.checkpoint.state_dict make the state of ``optimizer`` in this block.

    It makes it by a step with gradients of zero, in the dtypes of the parameters. Those with another ``grad_dtype`` do
    not take them, so it is set back, and the step gets gradients as after a backward.
    """
    repair(optimizer)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    chosen = {param: dtype for param in params for dtype in explicit_grad_dtype(param)}
    wanted = {param: dtype for param, dtype in chosen.items() if dtype is not None}

    def cast() -> None:
        for param, dtype in wanted.items():
            if param.grad is not None:
                lend_gradient(param, param.grad.to(dtype))

    handle = hook_every_step(cast)
    try:
        for param in wanted:
            param.grad_dtype = None
        yield
    finally:
        handle.remove()
        for param, dtype in wanted.items():
            if param.grad is not None and param.grad.dtype != dtype:
                cast()  # an error came before the step
            param.grad_dtype = dtype


@outside_dynamo
def _after_adding(optimizer: torch.optim.Optimizer) -> None:
    """Remember ``optimizer``, and the tensors that it was just given inside ``summon_full_params``.

    These must be recognized now: after the block no module shows them. The optimizer holds them until the end of the
    block, where it may step on them.
    """
    _optimizers.add(optimizer)
    given = optimizer.param_groups[-1]["params"]
    summoned = [param for param in given if is_summoned(param)]
    if summoned:
        sites = managed_sites(live_units()).items()
        shown = {id(site.shown): param for site, param in sites}
        known = [param for param in summoned if id(param) in shown]
        _remember(known, [shown[id(param)] for param in known])


def shards_of(params: list[Any]) -> list[Any]:
    """Return ``params`` with originals replaced by their shards; shards and full parameters of modules are kept."""
    if not originals_remembered():
        return params
    managed = (param_of(p) if isinstance(p, torch.Tensor) and not is_managed_tensor(p) else None for p in params)
    return [param if found is None or found.sharded is None else found.sharded for param, found in zip(params, managed)]


def repair(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """Replace whole parameters of ``optimizer`` by their shards, with their state and gradients."""
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    # Dynamo traces this test, so a compiled step has a graph break only if there is something to replace.
    if originals_remembered() or optimizer.__dict__.get(_SIZE) != size:
        _replace_originals(optimizer, size)


@outside_dynamo
def _replace_originals(optimizer: torch.optim.Optimizer, size: int) -> None:
    optimizer.__dict__[_SIZE] = size
    known = {id(param) for group in optimizer.param_groups for param in group["params"]}
    again: set[int] = set()
    for group in optimizer.param_groups:
        params = group["params"]
        for i, param in enumerate(params):
            managed = None if is_managed_tensor(param) and not is_temporary(param) else param_of(param)
            if managed is None or managed.sharded is None:
                continue
            if id(managed.sharded) in known:
                again.add(id(managed.sharded))
                optimizer.state.pop(managed.sharded, None)  # of the parameter that this one has replaced
            if param in optimizer.state:  # first: if this raises an error, the next step must still find the state
                any_shape = STEPS_ON_WHOLE in optimizer.__dict__
                optimizer.state[managed.sharded] = _cut_state(optimizer.state[param], param, managed, any_shape)
                del optimizer.state[param]
            if not is_temporary(param):  # the gradient of a full parameter is not reduced yet
                _carry_gradient(param, managed)
            params[i] = managed.sharded  # in place: LBFGS and schedulers keep the same list
            known.add(id(managed.sharded))
    if again:
        _hold_once(optimizer, again)


def _hold_once(optimizer: torch.optim.Optimizer, again: set[int]) -> None:
    """Leave each of the shards with an id in ``again`` to the last group that has it.

    A shard stays the same object when its parameter is replaced (``module.weight = nn.Parameter(...)``). An optimizer
    that held the old parameter, and was given the new one, has the shard twice, and would step on it twice.
    """
    seen: set[int] = set()
    for group in reversed(optimizer.param_groups):
        params = group["params"]
        for i in reversed(range(len(params))):
            key = id(params[i])
            if key in seen:
                del params[i]
                if "param_names" in group:
                    del group["param_names"][i]
            elif key in again:
                seen.add(key)


def _carry_gradient(original: torch.Tensor, managed: FSDPParam) -> None:
    """Move a gradient that ``original`` was given after it was replaced to the shard, unless the shard has its own.

    torch.distributed.checkpoint.state_dict creates an optimizer's state by a step with gradients of zero, which it sets
    on the parameters that the optimizer holds before the step.
    """
    grad: Any = original.grad
    old = _old_gradients.get(original)
    assert managed.sharded is not None
    if grad is None or managed.sharded.grad is not None or (old is not None and old() is grad):
        return
    managed.set_gradient(arrived(grad.full_tensor()) if isinstance(grad, DTensor) else grad)


def _around_loading(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Prepare ``optimizer`` for ``load_state_dict``; return what has to be done after it."""
    repair(optimizer)
    # What is a plain tensor now stays one, except on an owner of whole parameters, where everything is plain.
    whole = {} if STEPS_ON_WHOLE in optimizer.__dict__ else {p: _plain_names(optimizer, p) for p in _managed(optimizer)}

    moves = HOST_STATE not in optimizer.__dict__

    @torch.no_grad()
    def after() -> None:
        """Shard what was loaded whole: torch's checkpoints pass the state of a scalar parameter as plain numbers."""
        for param, managed in _managed(optimizer).items():
            entry = optimizer.state.get(param)
            if isinstance(entry, dict):
                optimizer.state[param] = _cut_state(
                    entry, param, managed, any_shape=True, whole=whole.get(param, ()), moves=moves
                )

    return after


def _managed(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, FSDPParam]:
    """Return the shards that ``optimizer`` holds, and the parameters that they are pieces of."""
    params = [param for group in optimizer.param_groups for param in group["params"] if is_managed_tensor(param)]
    found = {param: param_of(param) for param in params if isinstance(param, DTensor)}
    return {param: managed for param, managed in found.items() if managed is not None}


def _plain_names(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> set[str]:
    entry = optimizer.state.get(param)
    items = entry.items() if isinstance(entry, dict) else ()
    return {key for key, value in items if isinstance(value, torch.Tensor) and not isinstance(value, DTensor)}


def _cut_state(
    state: dict[str, Any],
    original: torch.Tensor,
    managed: FSDPParam,
    any_shape: bool,
    whole: Collection[str] = (),
    moves: bool = True,
) -> dict[str, Any]:
    """Return the optimizer's state of one parameter; tensors of the parameter's shape are sharded like it.

    Tensors with a name in ``whole`` stay as they are, and so do single numbers, unless the parameter is one. What is
    cut moves to the parameter's device if it ``moves``, else it stays on its own.

    Raises:
        RuntimeError: A tensor has another shape and more than one element, so it is unknown how to shard it. With
            ``any_shape`` it stays whole instead.
    """
    cut = {}
    for key, value in state.items():
        single = isinstance(value, torch.Tensor) and value.numel() == 1
        counts = single and (is_counter(key) or value.shape != original.shape)
        if not isinstance(value, torch.Tensor) or counts or key in whole:
            cut[key] = value
        elif value.shape == original.shape:
            cut[key] = _cut(value, original, managed, moves)
        elif any_shape:
            cut[key] = value
        else:
            raise RuntimeError(
                f"{managed.name}: the optimizer was stepped before fully_shard and its state {key!r} has shape "
                f"{tuple(value.shape)}, expected {tuple(original.shape)}; build the optimizer after "
                "fully_shard, or, if it updates each parameter independently, call use_full_params on it"
            )
    return cut


def _cut(value: Any, original: torch.Tensor, managed: FSDPParam, moves: bool) -> torch.Tensor:
    """Return ``value``, of the shape of the whole parameter, sharded like it; loading may have sharded it already."""
    spec = managed.spec
    if placed_alike(value, managed.sharded):
        return value  # type: ignore[no-any-return]  # it is a DTensor
    if placed_alike(value, original):
        local = on_this_rank(value)
    else:  # other placements (replicated, say), the same on every rank, so every rank runs this collective
        local = spec.of_plain(arrived(value.full_tensor()) if isinstance(value, DTensor) else value)
    local = spec.cut(local).detach().to(managed.local.device if moves else local.device, copy=True)
    return spec.shard(local) if local.dtype == managed.dtype else spec.shard_as(local)
