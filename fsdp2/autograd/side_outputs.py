"""Side outputs: tensors that a forward leaves as attributes of its modules (auxiliary losses, router logits, features).

Backward may enter a unit through such a tensor before it enters through the outputs, so it needs the same hooks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fsdp2._torch.autograd import is_made_since
from fsdp2._torch.modules import cached_parametrizations
from fsdp2.autograd import hooks
from fsdp2.autograd.trees import LEFT_LEVELS, PLAIN, Tree

__all__ = ["SideOutputs"]

_NOT_OWN = frozenset(nn.Module().__dict__)
_PLAIN = PLAIN | {BuiltinFunctionType, MethodType}
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)

Attribute = tuple[dict[str, Any], str]
"""A module's ``__dict__``, and a name in it."""


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
        self._searched: list[Attribute] = []
        self._size = self._registrations = -1

    def watch(
        self,
        since: int,
        device: torch.device,
        starting: Callable[[], list[Callable[[torch.Tensor], None]]],
        outlasting: Callable[[list[torch.Tensor]], list[torch.Tensor]],
    ) -> bool:
        """Watch side outputs that were computed at or after the node number ``since``; return True if there are any.

        The methods that ``starting`` returns are called before backward enters through one of them: ``device`` is that
        of the modules. ``outlasting`` returns tensors with copies of those whose memory is freed.
        """
        found = self._find()
        left = self._made_since(since, found, outlasting) if found else []
        # Other modules compute with a weight that ``parametrize.cached()`` keeps.
        left += [t for t in cached_parametrizations() if t is not None and is_made_since(t.grad_fn, since)]
        if not left:
            return False
        # Weak references: the module holds the tensor, and the hook would hold the module: Python cannot free that
        # cycle.
        entered = [weakref.WeakMethod(method) for method in starting()]
        return hooks.watch_outputs(left, lambda grad: _call(entered, grad), since, device)[0]

    @staticmethod
    def _made_since(
        since: int, found: list[Attribute], outlasting: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Return tensors in ``found`` that are not older than ``since``, after setting copies that outlast the call."""
        tree = Tree([attributes[name] for attributes, name in found], results=True, left=True)
        new = [tensor for tensor in tree.tensors if is_made_since(tensor.grad_fn, since)]
        kept = outlasting(new)
        copies = {id(old): copy for old, copy in zip(new, kept) if copy is not old}
        if copies:
            tree.tensors = [copies.get(id(tensor), tensor) for tensor in tree.tensors]
            for (attributes, name), value in zip(found, tree.rebuilt(in_place=True)):
                attributes[name] = value
        return kept

    def _find(self) -> list[Attribute]:
        """Return the attributes of the modules that may contain tensors."""
        if self._registrations != hooks.registrations or self._size != sum(map(len, self._attributes)):
            self._list_attributes()
        found = []
        for attributes, name in self._searched:
            if name not in attributes:  # one of another name may have replaced it, so that their number is the same
                self._list_attributes()
                return self._find()
            value = attributes[name]
            if type(value) not in _PLAIN and (isinstance(value, torch.Tensor) or _may_hold(value, LEFT_LEVELS)):
                found.append((attributes, name))
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
        # Numbers on torch's own modules are sizes; only attributes of users' modules may become a loss later.
        if type(module).__module__.startswith("torch.nn."):
            names = [name for name in names if not _is_size(module.__dict__[name])]
        return names


def _is_size(value: object) -> bool:
    if isinstance(value, tuple):
        return all([type(item) in _PLAIN for item in value])
    return value is not None and type(value) in _PLAIN


def _may_hold(value: Any, levels: int) -> bool:
    """Return whether ``Tree`` has to search ``value`` for tensors, so many ``levels`` deep.

    Most attributes are settings, lists of settings or objects with settings. Each forward asks, so this is a cheap
    test.
    """
    kind = type(value)
    items: Iterable[Any]
    if kind is FunctionType:
        return value.__closure__ is not None
    if isinstance(value, _CONTAINERS):  # named tuples, ordered dicts and outputs of models too, and their attributes
        items = (*(value.values() if isinstance(value, dict) else value), *getattr(value, "__dict__", {}).values())
        if getattr(kind, "__slots__", ()):
            return True
    elif isinstance(value, nn.Module) or (levels < LEFT_LEVELS and not is_dataclass(kind)):
        return isinstance(value, torch.Tensor)  # objects inside others may lead anywhere
    elif getattr(kind, "__slots__", ()):
        return True
    else:
        items = getattr(value, "__dict__", {}).values()
    return levels > 0 and any(
        [type(item) not in _PLAIN and _may_hold(item, levels - 1) for item in (*items,)]  # at once, for other threads
    )


def _call(methods: list[weakref.WeakMethod[Callable[[torch.Tensor], None]]], grad: torch.Tensor) -> None:
    for reference in methods:
        method = reference()
        if method is not None:
            method(grad)
