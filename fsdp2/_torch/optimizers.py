"""Optimizers, and kernels for clipping and loss scaling."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fsdp2._torch.hooks import outside_dynamo

__all__ = [
    "around_init_group",
    "around_use",
    "check_finite_and_unscale",
    "foreach_mul",
    "foreach_norm",
    "put_first_after_step",
]

# One kernel unscales a list of gradients and records if one is not finite. torch.amp.GradScaler uses it too.
check_finite_and_unscale: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_

# Kernels on lists for norms and for scaling in place, for clipping.
foreach_norm: Callable[..., Sequence[torch.Tensor]] = torch._foreach_norm

foreach_mul: Callable[[list[torch.Tensor], torch.Tensor], None] = torch._foreach_mul_


def around_init_group(
    optimizer: torch.optim.Optimizer,
    around: Callable[[Callable[[], Any], dict[str, Any], tuple[list[Any], ...]], Any],
) -> None:
    """Let ``around(collect, group, lists)`` fill the lists with a group's tensors in each step of torch's optimizer.

    All of torch's optimizers fill them in this method: parameters with a gradient, gradients, then one list for each
    kind of state. ``collect()`` calls the original method; return its result. The step computes with the tensors in the
    lists, while the optimizer keeps its own. A copy of the optimizer does not call ``around``. A compiled step has a
    graph break here, or calls it during tracing (torch before 2.15).
    """
    own, reference = type(optimizer)._init_group, weakref.ref(optimizer)  # type: ignore[attr-defined]  # not in Optimizer

    @outside_dynamo
    @functools.wraps(own)
    def init_group(group: dict[str, Any], *lists: list[Any]) -> Any:
        return around(lambda: own(reference(), group, *lists), group, lists)

    optimizer._init_group = init_group  # type: ignore[attr-defined]  # as above


def around_use(
    before_zeroing: Callable[[torch.optim.Optimizer], None], after_adding: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Call functions before each ``zero_grad`` and after each ``add_param_group`` of every optimizer in the process.

    An optimizer's ``__init__`` adds its groups by ``add_param_group`` too. torch has hooks only for steps and state
    dicts, so the two methods of the base class are replaced. Subclasses that override them call the base class's.
    """
    base = torch.optim.Optimizer
    zero, add = base.zero_grad, base.add_param_group

    @outside_dynamo  # like torch's own methods
    @functools.wraps(zero)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        before_zeroing(self)
        zero(self, set_to_none)

    @outside_dynamo
    @functools.wraps(add)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        after_adding(self)

    base.zero_grad, base.add_param_group = zero_grad, add_param_group  # type: ignore[method-assign]  # on purpose


def put_first_after_step(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Move a step post-hook before all others; torch can only append one."""
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # a plain dict in the stubs
