"""Replace DTensors by plain parameters, their proxies, during steps of optimizers that are not torch's own."""

from __future__ import annotations

import functools
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp2.autograd.hooks import after_steps, hook_next_step
from fsdp2.engine.param import lend_gradient, parameter_like, resemble, take_assigned
from fsdp2.optim.alike import is_counter, local_gradient, local_state, shown_state
from fsdp2.optim.leaves import map_leaves
from fsdp2.sharding.spec import on_this_rank

__all__ = ["proxy_of", "step_on_proxies"]


def step_on_proxies(optimizer: optim.Optimizer, unless: Callable[[], bool]) -> None:
    """Let ``optimizer.step`` compute with plain parameters, gradients and state; hooks and closures see DTensors.

    The DTensors are restored also if the step raises an error. If ``unless()`` returns True, the step is not changed.
    """
    proxies = _Proxies(optimizer)
    whole_step = optimizer.step
    after_steps(optimizer, proxies.remove)

    @functools.wraps(whole_step)
    def step(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if unless():
            return whole_step(*args, **kwargs)
        if args and callable(args[0]):
            args = (proxies.removed_for(args[0]), *args[1:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = proxies.removed_for(kwargs["closure"])
        handle = hook_next_step(optimizer, proxies.insert)
        try:
            return whole_step(*args, **kwargs)
        finally:
            handle.remove()
            proxies.remove()

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]  # of this one alone


class _Proxies:
    """The proxies of one optimizer's parameters, and the values that they replace while it steps."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._proxies: dict[torch.Tensor, tuple[torch.Tensor, nn.Parameter]] = {}
        self._groups: list[tuple[dict[str, Any], list[torch.Tensor], list[torch.Tensor]]] = []
        self._state: Any = None
        self._shown: dict[int, DTensor] = {}

    def removed_for(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure``, wrapped so that the optimizer holds its DTensors while it runs."""

        @functools.wraps(closure)
        def run() -> Any:
            inserted = self._state is not None
            self.remove()
            value = closure()
            if inserted:
                self.insert()
            return value

        return run

    def insert(self) -> None:
        """Replace the optimizer's DTensors by proxies."""
        self.remove()  # what an interrupt has left
        optimizer, known = self._optimizer, self._proxies
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self._proxies = {param: proxy_of(param, known.get(param)) for param in params if isinstance(param, DTensor)}
        state: Any = defaultdict(dict)
        shown: dict[int, DTensor] = {}
        for key, entry in optimizer.state.items():
            if key in self._proxies:
                state[self._proxies[key][1]] = _localize(entry, key, shown)
            else:
                state[key] = entry
        gradients = []
        for param, (_, proxy) in self._proxies.items():
            grad = None if param.grad is None else local_gradient(param.grad, param)
            gradients.append((proxy, grad))
        for proxy, grad in gradients:
            lend_gradient(proxy, grad)
        groups = []
        for group in optimizer.param_groups:
            lent = [self._proxies[param][1] if param in self._proxies else param for param in group["params"]]
            groups.append((group, group["params"], lent))
        # From here on ``remove`` has something to do, also if an interrupt comes before the next line.
        self._groups, self._shown, self._state, optimizer.state = groups, shown, optimizer.state, state
        for group, _, lent in groups:
            group["params"] = lent

    def remove(self) -> None:
        """Restore the optimizer's DTensors, with the state that the step has written.

        Another call does what an interrupt has left undone.
        """
        if self._state is None:
            return
        optimizer, lent_state, state = self._optimizer, self._optimizer.state, self._state
        for group, params, lent in self._groups:
            if group["params"] is lent:
                group["params"] = params
        owners: dict[Any, torch.Tensor] = {proxy: param for param, (_, proxy) in self._proxies.items()}
        found = {owners.get(key, key): entry for key, entry in lent_state.items()}
        for key in [key for key in state if key not in found]:
            del state[key]
        for key, entry in found.items():
            known = state.get(key)
            entry = self._show(entry, key) if key in self._proxies else entry
            if isinstance(known, dict) and isinstance(entry, dict):
                if known is not entry:
                    known.clear()
                    known.update(entry)
            else:
                state[key] = entry
        for local, proxy in self._proxies.values():
            take_assigned(proxy, local)
            lend_gradient(proxy, None)
        optimizer.state, self._state, self._groups, self._shown = state, None, [], {}

    def _show(self, entry: Any, param: torch.Tensor) -> Any:
        def shown(value: Any) -> Any:
            known = self._shown.get(id(value))
            return shown_state(value, param) if known is None else known

        if not isinstance(entry, dict):
            return map_leaves(shown, entry)
        return {k: v if is_counter(k) and id(v) not in self._shown else map_leaves(shown, v) for k, v in entry.items()}


def proxy_of(param: Any, known: tuple[torch.Tensor, nn.Parameter] | None) -> tuple[torch.Tensor, nn.Parameter]:
    """Return the local tensor of ``param`` and a plain parameter on the same memory: ``known`` if it still fits."""
    local = on_this_rank(param)
    if known is None or known[0] is not local:
        return local, parameter_like(param, local)
    resemble(known[1], param)
    return known


def _localize(entry: Any, param: Any, shown: dict[int, DTensor]) -> Any:
    """Return ``entry``, the state of ``param``, in local tensors; add the DTensor of each to ``shown`` by its id."""

    def localize(value: Any) -> Any:
        local = local_state(value, param, lambda: f"a parameter of shape {tuple(param.shape)}")
        if isinstance(value, DTensor):
            shown[id(local)] = value
        return local

    return map_leaves(localize, entry)
