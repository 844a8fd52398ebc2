"""The arguments and results of a forward: trees of containers, which are walked once, by one rule.

* Lists, tuples, dicts, deques, their subclasses (named tuples) with the attributes that these have, dataclasses, and
  the nodes that are registered with torch's pytree are *looked into*, 64 levels deep. If a tensor inside is replaced,
  the containers around it are copied, as the same type; everything else stays the same object.
* Sets, closures and the attributes of other objects are *searched*, eight levels deep. In arguments, tensors in them
  are hidden: they are found, but not replaced. The module may write to such an object (a cache), so it gets the object
  itself. A module does not write to its results any more, so there, tensors in sets and objects are replaced, in
  copies.
* Modules, classes, iterators and other callables are left alone. Iterators and callables, functions with a closure
  included, are *opaque*: nobody can see the tensors that they will compute.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, deque
from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from fsdp2._torch.tensors import pytree

__all__ = ["LEFT_LEVELS", "PLAIN", "Tree"]

PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_LEAVES = (*PLAIN, type, ModuleType, nn.Module, BuiltinFunctionType)
_LEVELS = 64
_SEARCHED_LEVELS = 8  # attributes of attributes may lead anywhere
LEFT_LEVELS = 3  # for attributes of modules, all of which each forward looks at
_LEFT_ITEMS = 64  # larger containers among them are not walked: vocabularies, for instance

Parts = dict[Any, Any]


class Tree:
    """Arguments or results of a forward. ``found`` are the tensors in them, each once, in order.

    ``tensors`` are the same at first. If it is set to other tensors, one for each, ``rebuilt`` returns the values with
    these in them.
    """

    __slots__ = (
        *("_left", "_nodes", "_places", "_results", "_searches", "_seen", "_values"),
        *("copies", "found", "hidden", "opaque", "tensors", "writable"),
    )

    def __init__(
        self, values: Sequence[Any], *, results: bool = False, left: bool = False, search: bool = True
    ) -> None:
        """Walk over ``values``. With ``search``, also search sets, closures and objects.

        ``results``: they are results of a module. ``left``: they are attributes of modules, so the walk is shallow.

        Raises:
            RuntimeError: containers are nested deeper than 64 levels.
        """
        self._values = values
        self.tensors: list[torch.Tensor]
        self._nodes: dict[int, int | _Node] | None = None  # by position: values in which something can be replaced
        self.copies: list[tuple[_Node, Any, Parts]] = []  # a container, its copy, and the parts that the copy was given
        self.hidden: list[torch.Tensor] = []
        self.writable: list[Any] = []  # the outermost containers and objects that a module may write to
        self.opaque = False
        if values and not values[1:] and isinstance(values[0], torch.Tensor):  # most units take and return one tensor
            self.tensors = self.found = [values[0]]
            return
        self.tensors = self.found = []
        self._results, self._searches = results, search
        self._places: dict[int, int] = {}
        # Each visited object by its id. It is kept alive, or another one could get the id.
        self._seen: dict[int, tuple[Any, _Node]] = {}
        self._nodes = {}
        self._left = left
        for position, value in enumerate(values):
            if type(value) not in PLAIN:
                found = self._look(value, LEFT_LEVELS if left else _LEVELS, searching=False, written=False)
                if found is not None:
                    self._nodes[position] = found

    def _look(self, value: Any, levels: int, *, searching: bool, written: bool) -> int | _Node | None:
        """Return a tensor's index in ``tensors``, or a container's node; None if nothing in ``value`` can be replaced.

        ``searching``: it is inside a value that is searched. ``written``: it is inside a value in ``writable``.
        """
        if isinstance(value, torch.Tensor):
            if searching and not self._results:
                self.hidden.append(value)
                return None
            place = self._places.setdefault(id(value), len(self.tensors))
            if place == len(self.tensors):
                self.tensors.append(value)
            return place
        if isinstance(value, _LEAVES) or (type(value) is FunctionType and not value.__closure__):
            return None
        if id(value) in self._seen:
            return self._seen[id(value)][1]
        kind = _kind_of(value)
        if kind is None or kind is _Closure:
            self.opaque = self.opaque or not searching
            if kind is None or not self._results:
                return None
        if levels == 0 and not searching and not self._left:
            raise RuntimeError(f"forward's inputs or outputs are nested deeper than {_LEVELS} levels ({type(value)})")
        if levels == 0 or (self._left and searching and kind is _Object):
            return None
        if kind.searched and not searching:
            if not self._searches:
                return None
            searching, levels = True, levels if self._left else _SEARCHED_LEVELS
        if (kind.writable or kind is _Registered) and not written:
            self.writable.append(value)
            written = True
        node = _Node(value, kind, kind.parts(value))
        self._seen[id(value)] = (value, node)
        if not self._left or len(node.parts) <= _LEFT_ITEMS:
            for key, part in node.parts.items():
                if type(part) not in PLAIN:
                    found = self._look(part, levels - 1, searching=searching, written=written)
                    if found is not None:
                        node.inner[key] = found
        return node

    def rebuilt(self, *, in_place: bool = False) -> Sequence[Any]:
        """Return the values with ``tensors`` instead of those that were found.

        Values without a replaced tensor stay the same objects. Containers with one are copied, and ``carry_back`` will
        use these ``copies``. With ``in_place``, containers and objects are written to instead.
        """
        if self.tensors is self.found:
            return self._values
        if self._nodes is None:
            return self.tensors
        values: list[Any] = [*self._values]
        done: dict[int, Any] = {}
        for position, found in self._nodes.items():
            values[position] = self._build(found, done, in_place)
        return values

    def _build(self, found: int | _Node, done: dict[int, Any], in_place: bool) -> Any:
        if isinstance(found, int):
            return self.tensors[found]
        if id(found) in done:
            return done[id(found)]
        value, kind, parts = found.value, found.kind, found.parts
        done[id(found)] = value  # a cycle ends here
        changed = {}
        for key, inner in found.inner.items():
            new = self._build(inner, done, in_place)
            if new is not parts[key]:
                changed[key] = new
        if not changed:
            return value
        after = {**parts, **changed}
        if in_place and kind.writable:
            kind.write(value, after)
            return value
        built = done[id(found)] = kind.copy(value, after, changed)
        if kind is _Registered:
            self._note_attributes(value, built, _Attributes)
        elif kind.writable:
            self.copies.append((found, built, after))
        return built

    def _note_attributes(self, value: Any, built: Any, kind: type[_Kind]) -> None:
        """Note a copied pytree node's attributes and containers in them: torch can build nodes, not change them."""
        before, after = kind.parts(value), kind.parts(built)
        if before.keys() == after.keys():
            self.copies.append((_Node(value, kind, before), built, after))
            for key, part in before.items():
                if part is not after[key] and type(part) is type(after[key]) in (list, dict):
                    self._note_attributes(part, after[key], _EXACT[type(part)])

    def carry_back(self) -> None:
        """Make in the originals the changes that the module has made to their copies."""
        for node, copied, after in self.copies:
            now = node.kind.parts(copied)
            if now.keys() == after.keys() and all([now[key] is part for key, part in after.items()]):
                continue
            originals = {id(after[key]): part for key, part in node.parts.items()}
            node.kind.write(node.value, {key: originals.get(id(value), value) for key, value in now.items()})


class _Node:
    """A container or object, its parts, and ``inner``: what can be replaced in these, by key."""

    __slots__ = ("inner", "kind", "parts", "value")

    def __init__(self, value: Any, kind: type[_Kind], parts: Parts) -> None:
        self.value, self.kind, self.parts = value, kind, parts
        self.inner: dict[Any, int | _Node] = {}


# ---- kinds of containers ----


class _Kind:
    """How to read the parts of a value of one kind, by key, and how to copy the value or write to it."""

    searched = False  # or looked into
    writable = False

    @staticmethod
    def parts(value: Any) -> Parts:
        """Return the parts of ``value``."""
        raise NotImplementedError

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        """Return a copy of ``value`` with other ``parts``, of which these are ``changed``."""
        raise NotImplementedError

    @staticmethod
    def write(value: Any, parts: Parts) -> None:
        """Make these the parts of a ``writable`` value."""
        raise NotImplementedError


class _Tuple(_Kind):
    @staticmethod
    def parts(value: Any) -> Parts:
        return dict(enumerate(value))

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        kind, items = type(value), list(parts.values())
        if kind is tuple:
            return tuple(items)
        try:
            new = tuple.__new__(kind, items)  # not kind(items): a subclass may take other arguments
        except TypeError:  # the result types of torch.max and similar are built in C
            return kind(items)
        if hasattr(value, "__dict__"):
            new.__dict__.update(value.__dict__)
        return new


class _Packed(_Kind):
    """Packed sequences. Their batch sizes are no part: they must stay as they are, on the CPU."""

    @staticmethod
    def parts(value: Any) -> Parts:
        return {name: getattr(value, name) for name in ("data", "sorted_indices", "unsorted_indices")}

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        return PackedSequence(batch_sizes=value.batch_sizes, **parts)


class _Sequence(_Kind):
    """Lists and deques."""

    writable = True
    parts = staticmethod(_Tuple.parts)

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        new = copy.copy(value)
        for position, item in changed.items():
            new[position] = item
        return new

    @staticmethod
    def write(value: Any, parts: Parts) -> None:
        value.clear()
        value.extend(parts.values())


class _Dict(_Kind):
    writable = True

    @staticmethod
    def parts(value: Any) -> Parts:
        return dict(value)

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        if type(value) is dict:
            return dict(parts)
        new = copy.copy(value)
        if _is_its_attributes(value):
            new.__dict__ = new
        for key, item in changed.items():
            new[key] = item
        return new

    @staticmethod
    def write(value: Any, parts: Parts) -> None:
        kind = type(value)
        if dataclasses.is_dataclass(kind):  # outputs of Hugging Face refuse to lose items
            kind = OrderedDict if issubclass(kind, OrderedDict) else dict
        for key in [key for key in value if key not in parts]:
            kind.__delitem__(value, key)
        for key, item in parts.items():
            if key not in value or value[key] is not item:
                value[key] = item


class _Attributes(_Kind):
    """Dataclasses; also the attributes of pytree nodes and of objects, to which a module may write."""

    writable = True

    @staticmethod
    def parts(value: Any) -> Parts:
        return {**getattr(value, "__dict__", {}), **_slots(value)}

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        new = copy.copy(value)  # without running __init__ again
        for name, part in changed.items():
            object.__setattr__(new, name, part)  # works for frozen dataclasses too
        return new

    @staticmethod
    def write(value: Any, parts: Parts) -> None:
        now = _Attributes.parts(value)
        for name in now.keys() - parts.keys():
            object.__delattr__(value, name)
        for name, part in parts.items():
            if name not in now or now[name] is not part:
                object.__setattr__(value, name, part)


class _Object(_Kind):
    """Objects of other classes."""

    searched = writable = True
    parts, copy, write = _Attributes.parts, _Attributes.copy, _Attributes.write


class _Record(_Kind):
    """Containers whose class lets them have attributes: items, and attributes, such as those of a model's output."""

    writable = True
    items: type[_Kind]

    @classmethod
    def parts(cls, value: Any) -> Parts:
        parts = {("item", key): item for key, item in cls.items.parts(value).items()}
        if not _is_its_attributes(value):
            parts |= {("attribute", name): part for name, part in _Attributes.parts(value).items()}
        return parts

    @classmethod
    def copy(cls, value: Any, parts: Parts, changed: Parts) -> Any:
        new = cls.items.copy(value, _of(parts, "item"), _of(changed, "item"))
        for name, part in _of(changed, "attribute").items():
            object.__setattr__(new, name, part)
        return new

    @classmethod
    def write(cls, value: Any, parts: Parts) -> None:
        if cls.items.writable:
            cls.items.write(value, _of(parts, "item"))
        if not _is_its_attributes(value):
            _Attributes.write(value, _of(parts, "attribute"))


def _of(parts: Parts, sort: str) -> Parts:
    return {key: part for (kind, key), part in parts.items() if kind == sort}


def _is_its_attributes(value: Any) -> bool:
    """Return whether a dict is its own ``__dict__``, as many that give their items as attributes are."""
    return getattr(value, "__dict__", None) is value


class _TupleRecord(_Record):
    items = _Tuple


class _SequenceRecord(_Record):
    items = _Sequence


class _DictRecord(_Record):
    items = _Dict


class _Registered(_Kind):
    """Nodes that are registered with torch's pytree."""

    @staticmethod
    def parts(value: Any) -> Parts:
        return dict(enumerate(_take_apart_once(value)[0]))

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        return pytree.tree_unflatten(list(parts.values()), _take_apart_once(value)[1])


class _Set(_Kind):
    searched = True

    @staticmethod
    def parts(value: Any) -> Parts:
        return {item: item for item in (*value,)}  # copied at once: another thread may change a set that a module keeps

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        return type(value)(parts.values())


class _Closure(_Kind):
    """Functions: the contents of their closures. The enclosing function shares the cells, so they are never set."""

    searched = True

    @staticmethod
    def parts(value: Any) -> Parts:
        found = {}
        for name, cell in zip(value.__code__.co_freevars, value.__closure__):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # the cell is still empty
                continue
        return found

    @staticmethod
    def copy(value: Any, parts: Parts, changed: Parts) -> Any:
        return value


_EXACT: dict[type, type[_Kind]] = {list: _Sequence, tuple: _Tuple, dict: _Dict}


def _kind_of(value: Any) -> type[_Kind] | None:
    """Return the kind of a value that is not a leaf; None if nothing can look into it."""
    cls = type(value)
    if cls in _EXACT:
        return _EXACT[cls]
    if isinstance(value, PackedSequence):
        return _Packed
    if isinstance(value, tuple):
        return _TupleRecord if _may_have_attributes(value) else _Tuple
    if isinstance(value, (list, deque)):
        return _SequenceRecord if _may_have_attributes(value) else _Sequence
    if isinstance(value, dict):
        return _DictRecord if _may_have_attributes(value) else _Dict
    if dataclasses.is_dataclass(value):
        return _Attributes
    if cls in pytree.SUPPORTED_NODES:
        return _Registered
    if isinstance(value, (set, frozenset)):
        return _Set
    if cls is FunctionType:
        return _Closure
    lazy = callable(value) or any([hasattr(cls, name) for name in ("__next__", "__anext__", "__await__")])
    return None if lazy else _Object


def _may_have_attributes(value: Any) -> bool:
    return hasattr(value, "__dict__") or any([cls.__dict__.get("__slots__") for cls in type(value).__mro__])


def _take_apart_once(value: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(value, is_leaf=lambda node: node is not value)


def _slots(value: Any) -> Parts:
    """Return the attributes that ``value`` has in ``__slots__``, by the names under which they are stored."""
    found = {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            stored = f"_{cls.__name__.lstrip('_')}{name}" if private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, stored):
                found[stored] = getattr(value, stored)
    return found
