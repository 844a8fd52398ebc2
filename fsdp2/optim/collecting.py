"""Collecting a group's tensors for a step again, once torch's optimizer has shown how it does that.

torch asks a parameter and its gradient a dozen things each time, and each costs several times more on a DTensor. The
answers stay the same as long as the group has the same parameters, options and gradients to work with.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["Collecting"]

_PER_STEP = ("params", "lr")  # of a group's options: schedulers change lr, and collecting looks at its type alone


@dataclass(frozen=True)
class _Group:
    """How the lists of one group were filled: state keys of the lists behind gradients (None: it stays empty)."""

    params: list[torch.Tensor]
    used: list[bool]
    options: dict[str, Any]
    keys: list[Any]
    found: Any


class Collecting:
    """What is known of the groups of one optimizer."""

    def __init__(self) -> None:
        self._known: dict[int, _Group] = {}

    def again(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], lists: tuple[list[Any], ...]) -> Any:
        """Fill ``lists`` as last time and return a pair of True and what torch returned then; else (False, None)."""
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
        """Remember how torch has just filled ``lists``, if that can be found out and all parameters are DTensors."""
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
    """Whether a group has the options it had, none of which was a tensor."""
    now = {key: value for key, value in group.items() if key not in _PER_STEP}
    if any(isinstance(value, torch.Tensor) for value in (*now.values(), group.get("lr"))):
        return False
    return now == known
