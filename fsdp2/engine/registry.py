"""The live objects of one kind, for all threads of the process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """A set of weak references. While a thread iterates over it, another may add to it; a WeakSet would raise then."""

    def __init__(self) -> None:
        self.added = 0  # the number of objects so far, including those that were freed
        self._found: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[T]:
        for reference in self._found.valuerefs():  # a list, made at once
            item = reference()
            if item is not None:
                yield item

    def __len__(self) -> int:
        return len(self._found)

    def add(self, item: T) -> None:
        """Add ``item``, which stays until it is freed."""
        self.added += id(item) not in self._found
        self._found[id(item)] = item

    def discard(self, item: T) -> None:
        """Remove ``item`` if it is in the registry."""
        self._found.pop(id(item), None)
