"""Objects of one kind that are alive, for all threads of the process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """A set of weak references. Another thread may add to it while one iterates, where a WeakSet raises."""

    def __init__(self) -> None:
        self.added = 0  # objects so far, also those that are freed
        self._found: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def __iter__(self) -> Iterator[T]:
        for reference in self._found.valuerefs():  # a list, made at once
            item = reference()
            if item is not None:
                yield item

    def __len__(self) -> int:
        return len(self._found)

    def add(self, item: T) -> None:
        """Add ``item``, until it is freed."""
        self.added += id(item) not in self._found
        self._found[id(item)] = item

    def discard(self, item: T) -> None:
        """Forget ``item``, if it is there."""
        self._found.pop(id(item), None)
