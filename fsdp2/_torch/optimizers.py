"""Optimizers, and the kernels of clipping and loss scaling."""

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
    "check_finite_and_unscale",
    "foreach_mul",
    "foreach_norm",
    "put_first_after_step",
]

# One kernel unscales a list of gradients and notes whether one is not finite; what torch.amp.GradScaler itself calls.
check_finite_and_unscale: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_

# The same for norms and for scaling in place, which clipping is made of.
foreach_norm: Callable[..., Sequence[torch.Tensor]] = torch._foreach_norm

foreach_mul: Callable[[list[torch.Tensor], torch.Tensor], None] = torch._foreach_mul_


def around_init_group(
    optimizer: torch.optim.Optimizer,
    around: Callable[[Callable[[], Any], dict[str, Any], tuple[list[Any], ...]], Any],
) -> None:
    """Let ``around(collect, group, lists)`` fill the lists with a group's tensors in each step of torch's optimizer.

    All of torch's do that in this method: parameters with a gradient, gradients, then one list for each kind of state.
    ``collect()`` does it their way; what it returns must be returned. What the lists hold in the end is what the step
    computes with; the optimizer itself keeps what it has. A copy of the optimizer does without ``around``. A compiled
    step breaks here, or calls it while it is traced (torch before 2.15).
    """
    own, reference = type(optimizer)._init_group, weakref.ref(optimizer)  # type: ignore[attr-defined]  # not in Optimizer

    @outside_dynamo
    @functools.wraps(own)
    def init_group(group: dict[str, Any], *lists: list[Any]) -> Any:
        return around(lambda: own(reference(), group, *lists), group, lists)

    optimizer._init_group = init_group  # type: ignore[attr-defined]  # as above


def put_first_after_step(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Move a hook after the step ahead of those that were registered before it; torch can only append one."""
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # a plain dict in the stubs
