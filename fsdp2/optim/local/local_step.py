"""``use_local_shards`` lets an elementwise optimizer step on plain local tensors.

An operator on DTensors costs several times as much as one on plain tensors. torch's own optimizers collect a group's
tensors in lists before they compute, and only in these lists are DTensors replaced by their local tensors. Parameters,
gradients and state stay DTensors for all other code. Other optimizers step on proxies (`proxies.py`).
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import optim

from fsdp2._torch.hooks import dynamo_is_tracing, outside_dynamo
from fsdp2._torch.optimizers import around_init_group, carry_attribute
from fsdp2._torch.tensors import DTensorSpec, dtensor_specs, local_tensors
from fsdp2.autograd.hooks import after_steps
from fsdp2.optim.alike import STEPS_ON_LOCAL, local_gradient, local_state, shown_state
from fsdp2.optim.local.collecting import Collecting
from fsdp2.optim.local.proxies import step_on_proxies
from fsdp2.sharding.spec import arrived, placed_alike

__all__ = ["is_known_elementwise", "refuse_not_elementwise", "use_local_shards"]

_ELEMENTWISE = {
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}
_ON_WHOLE = "Call fsdp2.use_full_params on it, which lets it step on whole parameters"
_NOT_ELEMENTWISE = {  # the reason and the remedy for errors
    optim.Adafactor: ("it averages over whole rows and columns of a parameter", _ON_WHOLE),
    optim.LBFGS: (
        "it takes products over all elements of all parameters",
        "Unchanged, it steps on DTensors if all ranks' pieces of each parameter have the same size",
    ),
    optim.Muon: ("it orthogonalizes whole matrices", _ON_WHOLE),
    optim.SparseAdam: (
        "it needs sparse gradients, and those of shards are dense",
        "Leave its parameters out of sharding (ignored_params of fully_shard), or use Adam",
    ),
}
_carries = False


def use_local_shards(optimizer: optim.Optimizer, *, elementwise: bool = False) -> optim.Optimizer:
    """Let the steps of ``optimizer`` compute with plain local tensors instead of DTensors, and return it.

    Its ``param_groups``, ``state``, ``state_dict`` and ``load_state_dict`` show DTensors as before, so schedulers,
    hooks and checkpoints work unchanged. Results match those of the step on DTensors, bit for bit if the same
    implementation runs. If you choose neither ``foreach`` nor ``fused``, torch uses a loop for DTensors but, on
    accelerators, ``foreach`` for plain tensors. Plain parameters may share a group with sharded ones. A step that
    torch.compile traces, or that is ``differentiable``, computes with DTensors as before. Copies of the optimizer step
    on local shards too.

    Args:
        optimizer: One of torch's elementwise optimizers: SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam,
            RMSprop, ASGD, Rprop.
        elementwise: True declares that an optimizer of another class (also one derived from those) is elementwise: no
            element's update depends on other elements or on the shape. Inside its ``step``, parameters, gradients and
            state are plain tensors. State tensors of a parameter's local shape, other than ``step``, become DTensors.

    Raises:
        TypeError: ``optimizer`` is not a torch.optim.Optimizer.
        ValueError: ``optimizer`` is not elementwise, or its class is unknown and ``elementwise`` is False.

    Example:
        ```python
        optimizer = fsdp2.use_local_shards(torch.optim.AdamW(model.parameters(), lr=1e-3))
        ```
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"use_local_shards: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the optimizer "
            "that a wrapper holds"
        )
    refuse_not_elementwise("use_local_shards", optimizer, elementwise=elementwise)
    if STEPS_ON_LOCAL not in optimizer.__dict__:
        global _carries
        if not _carries:
            _carries = True
            carry_attribute(STEPS_ON_LOCAL, lambda copy, elementwise: use_local_shards(copy, elementwise=elementwise))
        optimizer.__dict__[STEPS_ON_LOCAL] = elementwise
        if is_known_elementwise(optimizer):
            _step_on_local_lists(optimizer)
        else:
            step_on_proxies(optimizer, unless=dynamo_is_tracing)
    return optimizer


def is_known_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return True if ``optimizer`` is one of torch's elementwise ones."""
    return type(optimizer) in _ELEMENTWISE


def refuse_not_elementwise(function: str, optimizer: optim.Optimizer, *, elementwise: bool) -> None:
    """Raise ValueError unless ``optimizer`` is elementwise, or the caller of ``function`` declares that it is."""
    kind = type(optimizer)
    refused = next((why for known, why in _NOT_ELEMENTWISE.items() if isinstance(optimizer, known)), None)
    if refused is not None:
        reason, remedy = refused
        raise ValueError(
            f"{function}: {kind.__name__} cannot step on local shards, because {reason}; got {kind.__name__}, "
            f"expected an elementwise optimizer such as AdamW. {remedy}"
        )
    if kind not in _ELEMENTWISE and not elementwise:
        raise ValueError(
            f"{function}: it is not known whether {kind.__module__}.{kind.__qualname__} is elementwise; expected "
            "one of torch's elementwise optimizers, or elementwise=True. Pass elementwise=True if no element's update "
            "depends on other elements or on the shape"
        )


def _step_on_local_lists(optimizer: optim.Optimizer) -> None:
    lists = _LocalLists(optimizer)
    around_init_group(optimizer, lists.collect)
    if isinstance(optimizer, optim.SGD):
        after_steps(optimizer, lists.move_momentum)


class _LocalLists:
    """Puts local tensors into the lists that a step of one of torch's optimizers computes with."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._collecting = Collecting()
        # Specs that were found to agree, by group and list: comparing two lists of the same objects is fast.
        self._agreed: dict[tuple[int, int], tuple[list[DTensorSpec | None], list[DTensorSpec | None]]] = {}
        self._lent: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def collect(self, by_torch: Callable[[], Any], group: dict[str, Any], lists: tuple[list[Any], ...]) -> Any:
        """Fill ``lists`` (parameters, gradients, then one for each kind of state) with a group's local tensors.

        Raises:
            RuntimeError: The state of a parameter is not sharded like the parameter.
        """
        optimizer = self._optimizer()
        if optimizer is None or group.get("differentiable") or dynamo_is_tracing():
            return by_torch()
        known, found = self._collecting.again(optimizer, group, lists)
        if not known:
            found = by_torch()
            self._collecting.learn(optimizer, group, lists, found)
        self._localize(group, lists)
        return found

    def _localize(self, group: dict[str, Any], lists: tuple[list[Any], ...]) -> None:
        params = lists[0]
        specs = dtensor_specs(params)
        if not any(specs):
            return
        for i, tensors in enumerate(lists[1:], 1):
            if not tensors:
                continue
            key, own = (id(group["params"]), i), dtensor_specs(tensors)
            if self._agreed.get(key) == (specs, own):
                tensors[:] = local_tensors(tensors)
                continue
            if i == 1:
                plain = [a is b is None for a, b in zip(specs, own)]
                agree = all(map(operator.or_, plain, map(placed_alike, params, tensors)))
                tensors[:] = [local_gradient(grad, param) for grad, param in zip(tensors, params, strict=True)]
            else:
                names = [functools.partial(_name, group, param) for param in params]
                tensors[:] = [local_state(*entry) for entry in zip(tensors, params, names, strict=True)]
                agree = True
            if agree:
                self._agreed[key] = (specs, own)
        lists[1][:] = map(arrived, lists[1])
        shown, params[:] = list(params), local_tensors(params)
        if isinstance(self._optimizer(), optim.SGD) and group["momentum"] != 0:
            self._lent.append((list(params), shown))

    @outside_dynamo
    def move_momentum(self) -> None:
        """Move momentum that SGD has written into the state of local tensors to the state of their parameters."""
        optimizer = self._optimizer()
        while self._lent and optimizer is not None:
            locals_, params = self._lent[-1]
            for local, param in zip(locals_, params):
                written = None if local is param else optimizer.state.get(local)
                state = optimizer.state[param]
                if written is not None and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = shown_state(written["momentum_buffer"], param)
                if local is not param:
                    optimizer.state.pop(local, None)
            self._lent.pop()  # now: after an interrupt the next call goes on


def _name(group: dict[str, Any], param: torch.Tensor) -> str:
    """Return the name of a parameter of a group for an error."""
    index = next(i for i, p in enumerate(group["params"]) if p is param)
    names = group.get("param_names")
    return f"parameter {index} of its group" if names is None else names[index]
