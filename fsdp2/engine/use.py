"""Parameters used outside forward: a head's weight inside a fused loss, an embedding's for a penalty."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp2._torch.autograd import hooks_of_saved_tensors
from fsdp2._torch.hooks import outside_dynamo, skipped_by_dynamo
from fsdp2.engine.by_hand import gather_by_hand
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import groups_below
from fsdp2.engine.unit import FSDPState
from fsdp2.sharding.spec import on_this_rank

__all__ = ["use_weights"]


@outside_dynamo
@contextlib.contextmanager
@skipped_by_dynamo
def use_weights(module: nn.Module) -> Iterator[nn.Module]:
    """Make the parameters of ``module`` full inside a ``with`` block, in the dtype that forward computes with.

    Computation with them is differentiated like a part of the model: backward gathers them again and reduces their
    gradients with all others. It is a collective: all ranks must enter and leave the block in the same order. A forward
    with gradients or a backward inside the block frees the parameters of the units that it uses, as everywhere else.

    A checkpoint runs its function again in backward, when the block is over: let that function enter ``use_weights``
    itself, or pass it the parameters as arguments. An autograd function of your own must save the parameters by
    ``ctx.save_for_backward``: what it keeps as an attribute is not gathered again. Hooks of saved tensors
    (``save_on_cpu``) go around the block, not into it.

        with fsdp2.use_weights(model.head):
            loss = F.cross_entropy(F.linear(hidden, model.head.weight), targets)

    Args:
        module: Any module, a unit or one inside a unit. All parameters below it are gathered, and with them those of
            their units that communicate together with them.

    Yields:
        ``module``.

    Raises:
        ValueError: No parameter of ``module`` is sharded.
    """
    used = groups_below(module, required_by="use_weights")
    units = dict.fromkeys(used.values())
    for unit in units:
        unit.reconcile()
    if any(group not in used for unit in units for group in unit.groups):  # made just now, of added parameters
        used = groups_below(module)
    before = [(group.residency.kept, group.residency.shown) for group in used]
    try:
        gather_by_hand(used, "use_weights")
        for group in used:
            group.wait_for_unshard()
            if torch.is_grad_enabled():
                group.gradients.watch_all()
        with torch.autograd.graph.saved_tensors_hooks(*_saving(used)):
            yield module
    finally:
        for (group, unit), (kept, shown) in zip(used.items(), before):
            if torch.is_grad_enabled():
                unit.root.pending.record([group])
            if kept and shown == "shards":
                group.residency.show_shards()  # as before: the parameters stay in memory only for backward
            if kept or group.is_entered:
                continue  # somebody else keeps or uses the parameters
            if torch.is_grad_enabled():
                group.release(group.after_forward)
            else:
                group.reshard()  # this block alone has kept the parameters


def _saving(used: dict[FSDPParamGroup, FSDPState]) -> tuple[Any, Any]:
    """Return hooks for tensors that autograd saves. They gather a saved full parameter before backward reads it.

    Autograd calls the innermost hooks alone. So these pass what is not theirs on to those around the block: those of a
    checkpoint, which saves nothing, of ``save_on_cpu``, or of another such block.
    """
    fulls = [(param.full, unit) for group, unit in used.items() for param in group.params]
    # There are none yet if summon_full_params shows parameters that were never gathered.
    owners = {_memory(full): unit for full, unit in fulls if full is not None}
    around = hooks_of_saved_tensors()

    @skipped_by_dynamo
    def pack(tensor: torch.Tensor) -> Any:
        owner = owners.get(_memory(tensor))
        if owner is not None:
            return tensor, owner
        # A node that saves its own result (tanh, a softmax) would be held by it, and without a backward never be freed.
        return tensor.detach() if around is None else around[0](tensor), None

    @skipped_by_dynamo
    def unpack(packed: Any) -> torch.Tensor:
        tensor, owner = packed
        if owner is not None:
            owner.pre_backward(tensor)
        elif around is not None:
            return around[1](tensor)
        return tensor

    return pack, unpack


def _memory(tensor: Any) -> torch.UntypedStorage | None:
    """Return the storage object of ``tensor``, which stays the same while its memory comes and goes.

    None for one without a single storage, such as a sparse tensor, which is no full parameter.
    """
    own = on_this_rank(tensor)
    return own.untyped_storage() if own.layout is torch.strided else None
