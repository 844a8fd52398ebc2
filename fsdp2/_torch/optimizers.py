"""Optimizers, and kernels for clipping and loss scaling."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from itertools import compress
from types import ModuleType
from typing import Any

import torch
from torch.optim import swa_utils
from torch.utils.hooks import RemovableHandle

from fsdp2._torch.hooks import outside_dynamo
from fsdp2._torch.imports import WhenImported

__all__ = [
    "around_init_group",
    "around_use",
    "carry_attribute",
    "check_finite_and_unscale",
    "foreach_mul",
    "foreach_norm",
    "note_step",
    "put_first_after_step",
    "split_averages",
]

_Use = Callable[[torch.optim.Optimizer], None]

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
    lists, while the optimizer keeps its own. A copy of the optimizer does not call ``around``: see `carry_attribute`. A
    compiled step has a graph break here, or calls it during tracing (torch before 2.15).
    """
    own, reference = type(optimizer)._init_group, weakref.ref(optimizer)  # type: ignore[attr-defined]  # not in Optimizer

    @outside_dynamo
    @functools.wraps(own)
    def init_group(group: dict[str, Any], *lists: list[Any]) -> Any:
        return around(lambda: own(reference(), group, *lists), group, lists)

    optimizer._init_group = init_group  # type: ignore[attr-defined]  # as above


def around_use(
    before_zeroing: _Use,
    before_reading: _Use,
    after_adding: _Use,
    around_loading: Callable[..., Callable[[], None]],
    around_making: Callable[[torch.optim.Optimizer], AbstractContextManager[None]],
) -> None:
    """Call functions around the methods of every optimizer in the process that use its parameters.

    torch has hooks for every optimizer only for steps. So methods of the base class are replaced; subclasses that
    override them call the base class's. An optimizer's ``__init__`` adds its groups by ``add_param_group`` too.

    Args:
        before_zeroing: Is called before ``zero_grad``.
        before_reading: Is called before ``state_dict``, copying and pickling.
        after_adding: Is called after ``add_param_group``.
        around_loading: Is called before ``load_state_dict``, and what it returns after it.
        around_making: Returns what is entered while torch.distributed.checkpoint.state_dict looks for state, and makes
            it by a step if there is none.
    """
    base = torch.optim.Optimizer
    zero, save, load, add, pickled = (
        base.zero_grad,
        base.state_dict,
        base.load_state_dict,
        base.add_param_group,
        base.__getstate__,
    )

    @outside_dynamo  # like torch's own methods
    @functools.wraps(zero)
    def zero_grad(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        before_zeroing(self)
        zero(self, set_to_none)

    @outside_dynamo
    @functools.wraps(save)
    def state_dict(self: torch.optim.Optimizer) -> dict[str, Any]:
        before_reading(self)
        return save(self)

    @outside_dynamo
    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        after = around_loading(self)
        load(self, state_dict)
        after()

    @outside_dynamo
    @functools.wraps(add)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        add(self, param_group)
        after_adding(self)

    @functools.wraps(pickled)
    def getstate(self: torch.optim.Optimizer) -> dict[str, Any]:
        before_reading(self)
        return pickled(self)

    base.zero_grad, base.state_dict, base.load_state_dict = zero_grad, state_dict, load_state_dict  # type: ignore[method-assign]  # on purpose
    base.add_param_group, base.__getstate__ = add_param_group, getstate  # type: ignore[method-assign]  # likewise
    # A program that saves no such checkpoint does not need that module, which imports eighty others.
    patch = functools.partial(_around_checkpoints, around_making)
    WhenImported(["torch.distributed.checkpoint.state_dict"], patch).start()


def _around_checkpoints(
    around: Callable[[torch.optim.Optimizer], AbstractContextManager[None]], checkpoints: ModuleType
) -> None:
    """Enter ``around(optimizer)`` where torch.distributed.checkpoint.state_dict is about to use the optimizer's state.

    It looks up the parameters of an optimizer that has state before it calls any method of it.
    """
    make = checkpoints._init_optim_state

    @functools.wraps(make)
    def init_optim_state(optim: torch.optim.Optimizer) -> None:
        with around(optim):
            make(optim)

    checkpoints._init_optim_state = init_optim_state  # type: ignore[attr-defined]  # not in ModuleType


def carry_attribute(name: str, restore: Callable[[torch.optim.Optimizer, Any], object]) -> None:
    """Let copies of optimizers, and pickled ones, carry the attribute ``name``, which torch leaves out.

    ``restore(copy, value)`` is called with the value when the copy has its groups and state; it sets the attribute.
    """
    base = torch.optim.Optimizer
    get, set_ = base.__getstate__, base.__setstate__

    @functools.wraps(get)
    def getstate(self: torch.optim.Optimizer) -> dict[str, Any]:
        state = get(self)
        return {**state, name: self.__dict__[name]} if name in self.__dict__ else state

    @functools.wraps(set_)
    def setstate(self: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        set_(self, {key: value for key, value in state.items() if key != name})
        if name in state:
            restore(self, state[name])

    base.__getstate__, base.__setstate__ = getstate, setstate  # type: ignore[method-assign]  # on purpose


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Note that ``optimizer`` steps, for a scheduler that warns of an order in which it would come first.

    It has wrapped the step that the optimizer had when the scheduler was built.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]  # a private mark


def put_first_after_step(optimizer: torch.optim.Optimizer, handle: RemovableHandle) -> None:
    """Move a step post-hook before all others; torch can only append one."""
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]  # a plain dict in the stubs


def split_averages(kind_of: Callable[[torch.Tensor], Hashable]) -> None:
    """Let AveragedModel average tensors of different kinds apart, since an operator on a list takes tensors of one.

    It sorts its tensors by device and dtype into lists for such operators, by a private function of all optimizers.
    """
    module: Any = swa_utils
    sort = module._group_tensors_by_device_and_dtype

    @functools.wraps(sort)
    def sort_by_kind(lists: Sequence[list[torch.Tensor]]) -> dict[Any, Any]:
        parts: dict[Any, Any] = {}
        for (device, dtype), (columns, numbers) in sort(lists).items():
            kinds = [kind_of(tensor) for tensor in columns[0]]
            for kind in dict.fromkeys(kinds):
                these = [one == kind for one in kinds]
                part = [[*compress(column, these)] for column in columns]
                parts[device, (dtype, kind)] = part, [*compress(numbers, these)]
        return parts

    module._group_tensors_by_device_and_dtype = sort_by_kind
