"""Tensors that leave a forward as attributes of its modules: auxiliary losses, router logits, features.

Backward may enter a unit by such a tensor before it enters by the outputs, so it needs the same hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fsdp2.autograd import hooks

__all__ = ["SideOutputs"]

_NOT_OWN = frozenset(nn.Module().__dict__)
_PLAIN = frozenset({bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, MethodType})
_MOST_ITEMS = 64  # longer containers are vocabularies and the like, which must not be searched in each forward


class SideOutputs:
    """Finds what a forward left on the modules of one unit: a look at the few attributes that are not torch's own."""

    def __init__(self, tops: tuple[nn.Module, ...], ends: Callable[[nn.Module], bool], ours: set[str]) -> None:
        """All modules below ``tops`` are searched, without those below a module for which ``ends``.

        The attributes that are named in ``ours`` are no user's.
        """
        self._not_own = _NOT_OWN | ours
        self._tops = tops
        self._ends = ends
        self._attributes: list[dict[str, Any]] = []
        self._places: list[tuple[dict[str, Any], str]] = []
        self._size = self._registrations = -1

    def watch(self, since: int, starting: Callable[[], list[Callable[[torch.Tensor], None]]]) -> bool:
        """Whether there are tensors that take part in autograd and were computed since the node with this number.

        If so, what ``starting`` returns is called before backward enters by any of them.
        """
        left = [t for t in self._find() if hooks.is_made_since(t.grad_fn, since)]
        if not left:
            return False
        # By weak references: a module that holds a tensor that holds the module is a cycle Python cannot see through.
        entered = [weakref.WeakMethod(method) for method in starting()]
        return hooks.watch_outputs(left, lambda grad: _call(entered, grad), since)[0]

    def _find(self) -> list[torch.Tensor]:
        if self._registrations != hooks.registrations or self._size != sum(map(len, self._attributes)):
            self._look_through()
        found = []
        for attributes, name in self._places:
            if name not in attributes or type(value := attributes[name]) in _PLAIN:
                continue
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
                items = value.values() if isinstance(value, dict) else value
                found += [i for i in items if type(i) not in _PLAIN and isinstance(i, torch.Tensor)]
        return found

    def _look_through(self) -> None:
        modules = list(self._modules())
        self._attributes = [module.__dict__ for module in modules]
        self._places = [(module.__dict__, name) for module in modules for name in self._own_names(module)]
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
        if type(module).__module__.startswith("torch.nn."):  # its numbers are sizes, no losses yet to come
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
