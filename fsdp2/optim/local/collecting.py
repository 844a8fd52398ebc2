"""Collect a group's tensors for a step the way torch's optimizer did in an earlier step.

torch checks a dozen properties of each parameter and gradient in every step, and each check costs several times more on
a DTensor. The results stay the same as long as the group has the same parameters and options, and gradients for the
same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Collecting"]

_PER_STEP = (
    "params",
    "lr",
)  # options that may change: schedulers change lr, and torch checks only its type while it collects


@dataclass(frozen=True)
class _Group:
    """A record of how torch filled the lists of one group.

    ``keys`` are the state keys of the lists after parameters and gradients; a key is None if its list stays empty.
    ``found`` is the value that torch returned.
    """

    params: list[torch.Tensor]
    used: list[bool]
    options: dict[str, Any]
    keys: list[Any]
    found: Any


class Collecting:
    """Remembers how torch filled the lists of one optimizer's groups."""

    def __init__(self) -> None:
        self._known: dict[int, _Group] = {}

    def again(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], lists: tuple[list[Any], ...]) -> Any:
        """Fill ``lists`` as torch did last time; return True and the value that torch returned, or (False, None)."""
        if len(self._known) > len(optimizer.param_groups):  # a group was removed: let go of its parameters
            lists_held = {id(held["params"]) for held in optimizer.param_groups}
            self._known = {key: known for key, known in self._known.items() if key in lists_held}
        known, params = self._known.get(id(group["params"])), group["params"]
        if known is None or len(known.params) != len(params) or not all(map(is_, known.params, params)):
            return False, None
        grads = [param.grad for param in params]
        if [grad is not None for grad in grads] != known.used or not _same_options(known.options, group):
            return False, None
        used = [param for param, use in zip(params, known.used) if use]
        try:
            states = [optimizer.state[param] for param in used] if any(known.keys) else []
            values = [[] if key is None else [state[key] for state in states] for key in known.keys]
        except KeyError:
            return False, None
        lists[0].extend(used)
        lists[1].extend(grad for grad in grads if grad is not None)
        for into, found in zip(lists[2:], values, strict=True):
            into.extend(found)
        return True, known.found

    def learn(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], lists: tuple[list[Any], ...], found: Any
    ) -> None:
        """Remember how torch has just filled ``lists``, if each list has one key and all parameters are DTensors."""
        params = group["params"]
        self._known.pop(id(params), None)
        if not lists[0] or not all(isinstance(param, DTensor) for param in params):
            return  # gradients of plain parameters may become sparse
        keys = []
        for values in lists[2:]:
            states = [optimizer.state.get(param, {}) for param in lists[0]] if values else []
            candidates = [key for key, value in states[0].items() if value is values[0]] if states else [None]
            if len(candidates) != 1 or any(s.get(candidates[0]) is not v for s, v in zip(states, values)):
                return
            keys.append(candidates[0])
        used = [param.grad is not None for param in params]
        options = {key: value for key, value in group.items() if key not in _PER_STEP}
        if not any(isinstance(value, torch.Tensor) for value in (*options.values(), group.get("lr"))):
            self._known[id(params)] = _Group(list(params), used, options, keys, found)


def _same_options(known: dict[str, Any], group: dict[str, Any]) -> bool:
    """Return True if the group has the same options as before, and none of them is a tensor."""
    now = {key: value for key, value in group.items() if key not in _PER_STEP}
    if any(isinstance(value, torch.Tensor) for value in (*now.values(), group.get("lr"))):
        return False
    return now == known
