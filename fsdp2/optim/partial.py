"""Steps of an optimizer that go over some of its parameters at a time, as if they were one step."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from operator import setitem
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch.hooks import outside_dynamo
from fsdp2._torch.optimizers import note_step

__all__ = ["PartialGroups", "replace_step", "step_of"]


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Let ``optimizer.step`` call ``step(optimizer, ...)`` and the hooks of the optimizer, outside of Dynamo.

    A scheduler that was built before finds its mark on the step, and that the optimizer steps.
    """
    noted = outside_dynamo(note_step)  # it sets an attribute, which Dynamo of torch 2.11 cannot trace
    hooked = torch.optim.Optimizer.profile_hook_step(outside_dynamo(step))

    @functools.wraps(optimizer.step)  # schedulers mark the step that they have wrapped
    def replaced(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        noted(self)
        return hooked(self, *args, **kwargs)

    optimizer.step = types.MethodType(replaced, optimizer)  # type: ignore[method-assign]  # of this one alone


def step_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return the step of the optimizer's class without its hooks, which run once a step, not once a part."""
    step = type(optimizer).step
    return getattr(step, "__wrapped__", step)


class PartialGroups:
    """The parameter groups of an optimizer during one step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._params = [(group, group["params"]) for group in optimizer.param_groups]
        self._index = {param: index for index, (_, params) in enumerate(self._params) for param in params}
        # Counters and decays in a group's options must change once a step: each part begins with the same options.
        self._options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self.changed: dict[int, dict[str, Any]] = {}
        """Options that the step has changed, by the index of the group."""
        self.plain = [param for param in self._index if not isinstance(param, DTensor)]

    def group_of(self, param: torch.Tensor) -> int:
        """Return the number of the group that has ``param``."""
        return self._index[param]

    def of_groups_without(self, used: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the parameters of groups that have neither one of ``used`` nor a plain one."""
        busy = {self._index[param] for param in (*used, *self.plain)}
        return [param for param, index in self._index.items() if index not in busy]

    @contextmanager
    def only(self, lent: Mapping[torch.Tensor, Sequence[torch.Tensor]], state: Any) -> Iterator[None]:
        """Let the optimizer have ``state``, and of the parameters those in ``lent``, as tensors that stand for them."""
        optimizer = self._optimizer
        kept, groups = optimizer.state, optimizer.param_groups
        restored = starmap(setitem, [(group, "params", params) for group, params in self._params])
        try:
            optimizer.state, optimizer.param_groups = state, self._seen(lent)
            yield
        finally:  # An interrupt must not leave what is lent: Python handles none before the one call in C is over.
            optimizer.state, optimizer.param_groups = kept, groups
            list(restored)
            for i, (group, _) in enumerate(self._params):
                changed = {k: v for k, v in group.items() if k != "params" and v is not self._options[i].get(k)}
                if changed:
                    self.changed[i] = changed

    def _seen(self, lent: Mapping[torch.Tensor, Sequence[torch.Tensor]]) -> list[dict[str, Any]]:
        """Return the groups that have parameters in ``lent``, with the tensors that stand for these."""
        seen: dict[int, list[torch.Tensor]] = {}
        for param, parts in lent.items():
            seen.setdefault(self._index[param], []).extend(parts)
        found = []
        for index, of_group in sorted(seen.items()):
            group, options = self._params[index][0], self._options[index]
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            group.update(options, params=of_group)
            found.append(group)
        return found
