"""Results of runs that are equal whenever they are made: what a single process computes for one model and program."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
_RESULTS: dict[Hashable, Any] = {}


def remembered(key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
    """Return what ``make`` returns, made once in this process for each key.

    A function in the key that was made in another function may see other variables each time: then nothing is
    remembered.
    """
    if not all(_global(one) for one in key):
        return make()
    if key not in _RESULTS:
        _RESULTS[key] = make()
    return _RESULTS[key]


def _global(one: Hashable) -> bool:
    return not callable(one) or "<locals>" not in getattr(one, "__qualname__", "<locals>")
