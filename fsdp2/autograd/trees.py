"""Find and replace the tensors inside the inputs and outputs of forward, in containers of any type.

Lists, tuples, named tuples, dicts, dataclasses and registered pytree nodes are rebuilt as the same type if anything in
them changes; otherwise they stay the same object. Sets and the attributes of plain objects are searched, but replaced
(in a copy) only on request, because a module may write to an object that it receives, such as a cache.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from fsdp2._torch.tensors import pytree

__all__ = ["PLAIN", "Copies", "find_tensors", "keys_in", "map_arguments", "map_leaves", "map_tensors", "take_apart"]

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = (*PLAIN, type, ModuleType, nn.Module, torch.dtype, torch.device, torch.Size)
_MAX_DEPTH = 64
_MAX_OBJECT_DEPTH = 8  # attributes of attributes may lead anywhere

Function = Callable[[torch.Tensor], torch.Tensor]


def map_tensors(function: Function, tree: Any, *, objects: bool = False) -> Any:
    """Return ``tree`` with every tensor replaced by ``function(tensor)``.

    Tensors in sets and in attributes of plain objects are replaced only with ``objects``, in copies of these.

    Raises:
        RuntimeError: ``tree`` is nested deeper than 64 levels.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if tree is None:
        return None
    return _Mapper(function, objects).map(tree, 0)


def map_arguments(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with every tensor replaced; fast if all arguments are tensors."""
    if kwargs or not all([isinstance(value, torch.Tensor) for value in args]):
        return map_tensors(function, (args, kwargs))
    return tuple([function(value) for value in args]), kwargs


def find_tensors(tree: Any, *, objects: bool = True) -> list[torch.Tensor]:
    """Return every tensor in ``tree``, in order; with ``objects``, also those in sets and plain objects."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, tree, objects=objects)
    return found


def take_apart(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Return the leaves of ``tree``, and a function that builds the same tree from other leaves.

    It is for saved data, not for arguments of forward: only torch's pytree containers are taken apart.
    """
    leaves, structure = pytree.tree_flatten(tree, is_leaf=is_leaf)
    return leaves, lambda others: pytree.tree_unflatten(list(others), structure)


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return ``tree`` with every leaf of ``take_apart`` replaced by ``function(leaf)``."""
    leaves, rebuild = take_apart(tree, is_leaf)
    return rebuild(map(function, leaves))


def keys_in(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[list[str]]:
    """Return the dictionary keys that lead to each leaf of ``take_apart``, outermost first; "" for other containers."""
    found, _ = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [[str(getattr(step, "key", "")) for step in path] for path, _ in found]


class Copies:
    """The lists, dicts and dataclasses that a module was given as copies, because tensors in them were replaced."""

    def __init__(self, given: Any, passed: Any) -> None:
        """``passed`` is the tree ``given`` with tensors replaced."""
        self._found: dict[int, tuple[Any, dict[Any, Any], Any, dict[Any, Any]]] = {}  # by the id of the first
        self._compare(given, passed)

    def _compare(self, given: Any, passed: Any) -> None:
        before, after = ({}, {}) if given is passed else (_items(given), _items(passed))
        if before.keys() != after.keys() or id(given) in self._found:
            return
        if before and not isinstance(given, tuple):
            self._found[id(given)] = (given, before, passed, after)
        for key, value in before.items():
            self._compare(value, after[key])

    def carry_back(self) -> list[Any]:
        """Make the changes that the module made to a copy in the original, too; return the new values."""
        new: list[Any] = []
        for given, before, passed, after in self._found.values():
            now = _items(passed)
            changed = {key: value for key, value in now.items() if key not in after or after[key] is not value}
            if not changed and now.keys() == after.keys():
                continue
            new += changed.values()
            if isinstance(given, list):
                originals = {id(after[key]): before[key] for key in before}
                given[:] = [originals.get(id(value), value) for value in passed]
            elif isinstance(given, dict):
                for key in after.keys() - now.keys():
                    given.pop(key, None)
                for key, value in changed.items():
                    given[key] = value
            else:
                for name, value in changed.items():
                    setattr(given, name, value)
        return new


def _items(tree: Any) -> dict[Any, Any]:
    """Return the items of a list, tuple or dict, or the attributes of a dataclass; nothing of other values."""
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if isinstance(tree, dict):
        return dict(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
        return {**fields, **getattr(tree, "__dict__", {})}
    return {}


class _Mapper:
    """One walk over one tree. Visited objects are remembered, so shared and cyclic ones are visited once."""

    def __init__(self, function: Function, objects: bool) -> None:
        self.function = function
        self.objects = objects
        # Each visited object and its result, by id. The object is kept alive, or another one could get its id.
        self.seen: dict[int, tuple[Any, Any]] = {}

    def map(self, tree: Any, depth: int) -> Any:
        if isinstance(tree, torch.Tensor):
            return self.function(tree)
        if isinstance(tree, _LEAVES):
            return tree
        if id(tree) in self.seen:
            return self.seen[id(tree)][1]
        if depth >= _MAX_DEPTH:
            raise RuntimeError(f"forward's inputs or outputs are nested deeper than {_MAX_DEPTH} levels ({type(tree)})")
        self.seen[id(tree)] = (tree, tree)
        result = self._rebuild(tree, depth + 1)
        self.seen[id(tree)] = (tree, result)
        return result

    def _rebuild(self, tree: Any, depth: int) -> Any:
        kind = type(tree)
        if isinstance(tree, PackedSequence):  # batch sizes stay unchanged, on the CPU
            names = ("data", "sorted_indices", "unsorted_indices")
            parts = {name: self.map(getattr(tree, name), depth) for name in names}
            if all(getattr(tree, name) is part for name, part in parts.items()):
                return tree
            return PackedSequence(batch_sizes=tree.batch_sizes, **parts)
        if isinstance(tree, (list, tuple)):
            new = [self.map(item, depth) for item in tree]
            return tree if all(a is b for a, b in zip(new, tree)) else _rebuild_sequence(tree, new)
        if isinstance(tree, dict):
            return self._rebuild_dict(tree, depth)
        if dataclasses.is_dataclass(tree):
            fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if hasattr(tree, f.name)}
            return self._rebuild_attributes(tree, fields, depth)
        if kind in pytree.SUPPORTED_NODES:
            leaves, spec = pytree.tree_flatten(tree, is_leaf=lambda node: node is not tree)
            new = [self.map(leaf, depth) for leaf in leaves]
            return tree if all(a is b for a, b in zip(new, leaves)) else pytree.tree_unflatten(new, spec)
        if not self.objects or callable(tree) or depth > _MAX_OBJECT_DEPTH:
            return tree
        if isinstance(tree, (set, frozenset)):
            parts = {item: self.map(item, depth) for item in tree}
            return tree if all(a is b for a, b in parts.items()) else kind(parts.values())
        return self._rebuild_attributes(tree, {**getattr(tree, "__dict__", {}), **_slots(tree)}, depth)

    def _rebuild_dict(self, tree: Any, depth: int) -> Any:
        originals = list(tree.values())
        items = {key: self.map(value, depth) for key, value in tree.items()}
        changed = any(items[key] is not value for key, value in tree.items())
        if type(tree) is dict:
            return items if changed else tree
        clone = tree
        if changed:
            clone = copy.copy(tree)
            for key, value in items.items():
                clone[key] = value
        if not dataclasses.is_dataclass(tree):
            return clone
        # A transformers ModelOutput has its items as fields too; other classes have fields that are not items.
        known = set(map(id, originals))
        fields = {f.name: getattr(tree, f.name, None) for f in dataclasses.fields(tree)}
        return self._rebuild_attributes(clone, {k: v for k, v in fields.items() if id(v) not in known}, depth)

    def _rebuild_attributes(self, tree: Any, attributes: dict[str, Any], depth: int) -> Any:
        """Return a copy with changed attributes, without running ``__init__`` again."""
        new = {name: self.map(value, depth) for name, value in attributes.items()}
        changed = {name: value for name, value in new.items() if value is not attributes[name]}
        if not changed:
            return tree
        clone = copy.copy(tree)
        for name, value in changed.items():
            object.__setattr__(clone, name, value)  # also where the dataclass is frozen
        return clone


def _slots(tree: Any) -> dict[str, Any]:
    """Return the attributes that ``tree`` has in ``__slots__``, by the names under which they are stored."""
    found = {}
    for cls in type(tree).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            stored = f"_{cls.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and hasattr(tree, stored):
                found[stored] = getattr(tree, stored)
    return found


def _rebuild_sequence(old: Any, new: list[Any]) -> Any:
    kind = type(old)
    if kind is list or kind is tuple:
        return kind(new)
    if isinstance(old, list):
        clone = copy.copy(old)
        clone[:] = new
        return clone
    try:
        clone = tuple.__new__(kind, new)  # not kind(new): a subclass may take other arguments
    except TypeError:  # the result types of torch.max and similar are built in C
        return kind(new)
    if hasattr(old, "__dict__"):
        clone.__dict__.update(old.__dict__)
    return clone
