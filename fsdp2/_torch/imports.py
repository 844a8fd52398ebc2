"""Modules of torch that are changed when a program imports them, so that fsdp2 need not import them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from itertools import dropwhile
from types import ModuleType
from typing import Any

__all__ = ["WhenImported"]

_Call = Callable[[ModuleType], None]


class WhenImported(importlib.abc.MetaPathFinder):
    """Calls ``call`` with each of the modules ``names``, from `start` to `stop`.

    A module that is imported already is passed at once, and another one when its import has executed it.
    """

    def __init__(self, names: Sequence[str], call: _Call) -> None:
        self._names, self._call = names, call
        self._stopped = False

    def start(self) -> None:
        """Pass the modules that are imported already, and wait for the others."""
        for name in self._names:
            if name in sys.modules:
                self._call(importlib.import_module(name))  # waits if another thread is importing it
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Pass no module any more, not even one whose import has begun."""
        self._stopped = True
        with contextlib.suppress(ValueError):  # other code has removed it
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the finders behind this one, with a loader that passes the module after its execution."""
        if fullname not in self._names:
            return None
        behind = [*dropwhile(lambda finder: finder is not self, sys.meta_path)][1:]
        specs = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._pass)
        return spec

    def _pass(self, module: ModuleType) -> None:
        if not self._stopped:
            self._call(module)


class _Loader(importlib.abc.Loader):
    """Another loader, which calls a function with the module that it has executed."""

    def __init__(self, loader: Any, call: _Call) -> None:
        self._loader, self._call = loader, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # what reads sources and data files

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._call(module)
