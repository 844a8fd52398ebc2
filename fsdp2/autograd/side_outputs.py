"""Side outputs: tensors that a forward leaves as attributes of its modules (auxiliary losses, router logits, features).

Backward may enter a unit through such a tensor before it enters through the outputs, so it needs the same hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fsdp2._torch.modules import cached_parametrizations
from fsdp2.autograd import hooks
from fsdp2.autograd.reach import is_made_since

__all__ = ["SideOutputs"]

_NOT_OWN = frozenset(nn.Module().__dict__)
_PLAIN = frozenset({bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, MethodType})
_MOST_ITEMS = 64  # longer containers, such as vocabularies, would cost too much to search in each forward


class SideOutputs:
    """Finds side outputs on the modules of one unit, in the few attributes that are not torch's own."""

    def __init__(self, tops: tuple[nn.Module, ...], ends: Callable[[nn.Module], bool], ours: set[str]) -> None:
        """Search all modules below ``tops``, but none at or below a module for which ``ends`` returns True.

        ``ours`` are names of attributes that fsdp2 sets, which are skipped.
        """
        self._not_own = _NOT_OWN | ours
        self._tops = tops
        self._ends = ends
        self._attributes: list[dict[str, Any]] = []
        self._searched: list[tuple[dict[str, Any], str]] = []
        self._size = self._registrations = -1

    def watch(self, since: int, starting: Callable[[], list[Callable[[torch.Tensor], None]]]) -> bool:
        """Watch side outputs that were computed at or after the node number ``since``; return True if there are any.

        The methods that ``starting`` returns are called before backward enters through one of them.
        """
        left = [
            t for t in [*self._find(), *cached_parametrizations()] if t is not None and is_made_since(t.grad_fn, since)
        ]
        if not left:
            return False
        # Weak references: a module that holds a tensor whose hook holds the module is a cycle that Python cannot free.
        entered = [weakref.WeakMethod(method) for method in starting()]
        return hooks.watch_outputs(left, lambda grad: _call(entered, grad), since)[0]

    def _find(self) -> list[torch.Tensor]:
        if self._registrations != hooks.registrations or self._size != sum(map(len, self._attributes)):
            self._list_attributes()
        found = []
        for attributes, name in self._searched:
            if name not in attributes:  # perhaps there is one of another name instead, so that their number is the same
                self._list_attributes()
                return self._find()
            if type(value := attributes[name]) in _PLAIN:
                continue
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
                items = value.values() if isinstance(value, dict) else value
                found += [i for i in items if type(i) not in _PLAIN and isinstance(i, torch.Tensor)]
        return found

    def _list_attributes(self) -> None:
        modules = list(self._modules())
        self._attributes = [module.__dict__ for module in modules]
        self._searched = [(module.__dict__, name) for module in modules for name in self._own_names(module)]
        self._size, self._registrations = sum(map(len, self._attributes)), hooks.registrations

    def _modules(self) -> Iterator[nn.Module]:
        seen: set[nn.Module] = set()
        waiting = list(self._tops)
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                yield module
                waiting += [child for child in module.children() if not self._ends(child)]

    def _own_names(self, module: nn.Module) -> list[str]:
        names = [name for name in module.__dict__ if name not in self._not_own]
        # Numbers on torch's own modules are sizes, not attributes that get a loss later.
        if type(module).__module__.startswith("torch.nn."):
            names = [name for name in names if not _is_size(module.__dict__[name])]
        return names


def _is_size(value: object) -> bool:
    items = value if isinstance(value, tuple) else (value,)
    return value is not None and all(type(item) in _PLAIN for item in items)


def _call(methods: list[weakref.WeakMethod[Callable[[torch.Tensor], None]]], grad: torch.Tensor) -> None:
    for reference in methods:
        method = reference()
        if method is not None:
            method(grad)
