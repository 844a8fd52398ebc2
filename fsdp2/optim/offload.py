"""``offload_optimizer_state`` keeps the state of an optimizer on the host, and lets the step run on the device.

A step goes over the parameters in parts. While the optimizer's own step computes one part, the state of the next one is
copied to the device, and that of the one before back to the host.
"""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor

from fsdp2._torch.optimizers import carry_attribute
from fsdp2.autograd.hooks import around_loading_once
from fsdp2.comm.streams import ComputeLane
from fsdp2.engine.param import lend_gradient, take_assigned
from fsdp2.optim.alike import STEPS_ON_WHOLE, is_counter, local_gradient
from fsdp2.optim.host_state import HOST_STATE, HostState, is_moment
from fsdp2.optim.local.local_step import is_known_elementwise, refuse_not_elementwise, use_local_shards
from fsdp2.optim.local.proxies import proxy_of
from fsdp2.optim.partial import PartialGroups, replace_step, step_of
from fsdp2.optim.prebuilt import repair
from fsdp2.sharding.packing import bucket_bytes
from fsdp2.sharding.spec import on_this_rank

__all__ = ["offload_optimizer_state"]

_OPTIONS = "_fsdp2_offloaded_state"
"""An attribute of optimizers: what ``offload_optimizer_state`` was called with. Copies carry it."""
_carries = False


def offload_optimizer_state(
    optimizer: optim.Optimizer,
    *,
    device_budget_bytes: int = 0,
    bucket_mb: float = 64.0,
    pin_memory: bool = True,
    elementwise: bool = False,
) -> optim.Optimizer:
    """Keep the state of ``optimizer`` in memory of the host, let steps run on the device, and return ``optimizer``.

    Between steps the device has no moments. A step copies them in buckets: while one bucket is computed, the next one
    arrives and the one before leaves, so a step takes about as long as its copies, and the device has three buckets at
    most. Values are those of the step without it, bit for bit if the same implementation runs. Parameters, gradients
    and numbers (counts of steps) stay where they are. ``optimizer.state`` shows DTensors, or tensors, on the CPU, and
    ``state_dict``, ``load_state_dict``, hooks, schedulers, clipping and gradient scalers work as before; loading puts
    nothing on the device. The host waits at the end of a step for the last copies. State of parameters on the CPU, with
    ``CPUOffloadPolicy`` or without an accelerator, is on the host in any case, and is left there.

    The steps compute with local tensors, as after ``use_local_shards``. For an optimizer of whole matrices, call
    ``use_full_params`` first. Copies of the optimizer offload their state too.

    Args:
        optimizer: One of torch's elementwise optimizers (those that ``use_local_shards`` lists), or one that was passed
            to ``use_full_params``.
        device_budget_bytes: Bytes of moments, on the rank with most, that stay on the device. The first parameters
            whose moments fit are chosen, the same on all ranks; moments made of other tensors are counted on each rank
            by itself. State dicts have copies of them on the CPU.
        bucket_mb: MiB of moments that are on the device at a time, three times: those of one parameter may exceed it.
        pin_memory: Keep them in page-locked memory, which copies beside kernels need. torch rounds each bucket up to a
            power of two.
        elementwise: True declares that an optimizer of another class is elementwise, as for ``use_local_shards``.

    Raises:
        TypeError: ``optimizer`` is not a torch.optim.Optimizer.
        ValueError: ``optimizer`` is not elementwise, or its class is unknown and ``elementwise`` is False; or an option
            is out of range. A step raises it in a group that is ``differentiable``.
        RuntimeError: A step is captured in a CUDA graph.

    Example:
        ```python
        optimizer = fsdp2.offload_optimizer_state(torch.optim.AdamW(model.parameters(), lr=1e-3))
        ```
    """
    if not isinstance(optimizer, optim.Optimizer):
        raise TypeError(
            f"offload_optimizer_state: expected a torch.optim.Optimizer, got {type(optimizer).__name__}; pass the "
            "optimizer that a wrapper holds"
        )
    options = _Options(device_budget_bytes, bucket_mb, pin_memory, elementwise)
    options.check()
    limit = bucket_bytes("offload_optimizer_state", bucket_mb)
    if HOST_STATE in optimizer.__dict__:
        return optimizer
    whole = STEPS_ON_WHOLE in optimizer.__dict__
    if not whole:
        refuse_not_elementwise("offload_optimizer_state", optimizer, elementwise=elementwise)
        use_local_shards(optimizer, elementwise=elementwise)
    host = HostState(budget_bytes=device_budget_bytes, bucket_bytes=limit, pin=pin_memory, whole=whole)
    optimizer.__dict__[HOST_STATE] = host
    if not whole:
        _Offloaded(optimizer, host).take_over()
        _carry(optimizer, options)
    return optimizer


@dataclass(frozen=True)
class _Options:
    """The arguments of ``offload_optimizer_state``."""

    device_budget_bytes: int
    bucket_mb: float
    pin_memory: bool
    elementwise: bool

    def check(self) -> None:
        """Raise ValueError if one is out of range."""
        budget = self.device_budget_bytes
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise ValueError(
                f"offload_optimizer_state: device_budget_bytes must be a number of bytes >= 0, got {budget!r}"
            )


def _carry(optimizer: optim.Optimizer, options: _Options) -> None:
    global _carries
    if not _carries:
        _carries = True
        carry_attribute(_OPTIONS, lambda copy, options: offload_optimizer_state(copy, **options))
    optimizer.__dict__[_OPTIONS] = asdict(options)


class _Offloaded:
    """The replaced step of one optimizer, and its state dicts."""

    def __init__(self, optimizer: optim.Optimizer, host: HostState) -> None:
        self._optimizer, self._host = optimizer, host
        self._known = is_known_elementwise(optimizer)
        self._step_of_class = step_of(optimizer)
        self._proxies: dict[torch.Tensor, tuple[torch.Tensor, nn.Parameter]] = {}

    def take_over(self) -> None:
        """Replace the methods, and move the state that there is."""
        optimizer = self._optimizer
        replace_step(optimizer, self._step)
        optimizer.state_dict = types.MethodType(self._state_dict, optimizer)  # type: ignore[method-assign]  # of this one alone
        optimizer.load_state_dict = types.MethodType(self._load_state_dict, optimizer)  # type: ignore[method-assign]  # likewise
        self._settle(loaded=True)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self._optimizer.param_groups for param in group["params"]]

    @torch.no_grad()
    def _settle(self, *, loaded: bool = False) -> None:
        repair(self._optimizer)
        self._host.settle(self._params(), self._optimizer.state, loaded=loaded)

    # ---- a step ----

    def _step(self, optimizer: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        devices = {on_this_rank(param).device for param in self._params()}
        self._refuse(devices)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        host = self._host
        if self._known and not any(map(host.moves_from, devices)):
            self._step_of_class(optimizer)  # as use_local_shards does it
            return loss
        self._settle()
        params = self._params()
        self._proxies = {param: self._proxies[param] for param in params if param in self._proxies}
        turns = host.turns(params, skip=self._known)
        groups = PartialGroups(optimizer)
        host.begin(turns)
        try:
            for turn in turns:
                self._take_turn(turn, groups)
        finally:
            host.end()
        return loss

    def _take_turn(self, params: list[torch.Tensor], groups: PartialGroups) -> None:
        """Run the optimizer's own step on some parameters."""
        kept, host = self._optimizer.state, self._host
        seen = {param: self._lend(param) for param in params}
        state: Any = defaultdict(dict)
        state.update({key: entry for key, entry in kept.items() if not isinstance(key, torch.Tensor)})
        state.update({seen[param]: entry for param, entry in host.lend(params, kept).items()})
        try:
            with groups.only({param: (proxy,) for param, proxy in seen.items()}, state):
                self._step_of_class(self._optimizer)
        finally:
            for param, proxy in seen.items():
                if proxy is not param:
                    take_assigned(proxy, on_this_rank(param))
                    lend_gradient(proxy, None)
        left = {param: state.pop(proxy) for param, proxy in seen.items() if proxy in state}
        with torch.no_grad():
            host.take_back(params, left, kept)
        kept.update(state)

    def _lend(self, param: Any) -> torch.Tensor:
        """Return the plain parameter that stands for ``param`` in a step, with its gradient."""
        if not isinstance(param, DTensor):
            return param  # type: ignore[no-any-return]  # a tensor
        known = self._proxies[param] = proxy_of(param, self._proxies.get(param))
        proxy = known[1]
        lend_gradient(proxy, None if param.grad is None else local_gradient(param.grad, param))
        return proxy

    def _refuse(self, devices: Iterable[torch.device]) -> None:
        """Raise an error if this step cannot run in parts.

        Raises:
            ValueError: A group is differentiable.
            RuntimeError: The step is captured in a graph.
        """
        kind = type(self._optimizer).__name__
        for number, group in enumerate(self._optimizer.param_groups):
            if group.get("differentiable"):
                raise ValueError(
                    f"offload_optimizer_state: {kind}.step: group {number} has differentiable=True, expected False: "
                    "autograd would need the state of all parameters on the device. Build the optimizer with "
                    "differentiable=False, or leave offload_optimizer_state out"
                )
        for device in devices:
            if ComputeLane(device).captured:
                raise RuntimeError(
                    f"offload_optimizer_state: {kind}.step is captured in a CUDA graph, expected a step outside of "
                    "one: the host waits for copies of the state. Capture forward and backward, and call step() after "
                    "the replay, or leave offload_optimizer_state out"
                )

    # ---- state dicts ----

    def _state_dict(self, optimizer: optim.Optimizer) -> dict[str, Any]:
        """Return the state dict, with all moments on the host."""
        found = type(optimizer).state_dict(optimizer)
        return {**found, "state": {key: self._host.saved(entry) for key, entry in found["state"].items()}}

    def _load_state_dict(self, optimizer: optim.Optimizer, state_dict: dict[str, Any]) -> None:
        load = type(optimizer).load_state_dict
        if not self._known:
            load(optimizer, state_dict)
        else:  # torch would copy all of it to the device
            try:
                with around_loading_once(optimizer, _hide, self._reveal):
                    load(optimizer, state_dict)
            finally:
                self._reveal()  # what an interrupt has left
        self._settle(loaded=True)

    def _reveal(self) -> None:
        """Put back what ``_hide`` has hidden, in the dtypes that torch gives it."""
        for param, entry in self._optimizer.state.items():
            if isinstance(entry, dict):
                dtype = param.dtype if param.is_floating_point() else None
                for name, value in entry.items():
                    if isinstance(value, _Hidden):
                        entry[name] = value.tensor if dtype is None else value.tensor.to(dtype)


@dataclass(frozen=True)
class _Hidden:
    """A tensor that torch does not see, and so leaves where it is."""

    tensor: torch.Tensor


def _hide(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return ``state_dict`` with the moments in it hidden."""

    def hidden(name: Any, value: Any) -> Any:
        return _Hidden(value) if is_moment(value) and not is_counter(name) else value

    state = {
        key: {name: hidden(name, value) for name, value in entry.items()} if isinstance(entry, dict) else entry
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
