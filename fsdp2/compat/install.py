"""``install()``: libraries that import torch's ``fully_shard`` themselves get ours, until ``uninstall()``."""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.forward_methods import register_fsdp_forward_method
from fsdp2.fully_shard import fully_shard
from fsdp2.module import share_comm_ctx

__all__ = ["Installation", "install", "uninstall"]

logger = logging.getLogger("fsdp2")

_OURS = {
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
_THEIRS = {name: getattr(torch_fsdp, name) for name in _OURS}
_PUBLIC = ("torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard", "torch.distributed._composable.fsdp")
# Helpers of torch that patch the class of groups by name; torch's own replicate goes on using torch's class.
_GROUP_USERS = ("torch.testing._internal.common_fsdp", "torch.distributed._tools.fsdp2_mem_tracker")


class Installation:
    """What an ``install()`` replaced; as a context manager it undoes that at the end of the block."""

    def __init__(self) -> None:
        self.replaced: list[str] = []
        self._undo: list[tuple[ModuleType | type, str, Any]] = []
        self._finder = _Finder(self)

    def __str__(self) -> str:
        return "fsdp2 replaced " + ", ".join(self.replaced)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        uninstall()

    def set(self, owner: ModuleType | type, name: str, value: Any) -> None:
        """Replace ``owner.name`` and remember what it was."""
        if getattr(owner, name, None) is value:
            return
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
        self.replaced.append(f"{owner.__name__}.{name}")

    def adopt(self, module: ModuleType) -> None:
        """Replace in one of torch's modules whatever of torch's own it imported."""
        for name, theirs in _THEIRS.items():
            if getattr(module, name, None) is theirs:
                self.set(module, name, _OURS[name])
        group = getattr(module, "FSDPParamGroup", None) if module.__name__ in _GROUP_USERS else None
        if getattr(group, "__module__", "").startswith("torch."):
            self.set(module, "FSDPParamGroup", FSDPParamGroup)

    def undo(self) -> None:
        """Put everything back, latest first."""
        sys.meta_path.remove(self._finder)
        for module, name, value in reversed(self._undo):
            setattr(module, name, value)
        self._undo.clear()

    def start(self) -> None:
        """Replace torch's names where they are already, and where they will be imported."""
        for name in _PUBLIC:
            importlib.import_module(name)
        for name, module in list(sys.modules.items()):
            if module is not None and (name in _PUBLIC or name in _GROUP_USERS or _is_test_helper(name)):
                self.adopt(module)
        sys.meta_path.insert(0, self._finder)


def _is_test_helper(name: str) -> bool:
    return name.startswith("torch.testing._internal.")


class _Finder(importlib.abc.MetaPathFinder):
    """Adopts torch's helper modules when they are imported later."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec others find, with a loader that adopts the module once it has run."""
        if self._searching or fullname not in _GROUP_USERS:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _AdoptingLoader(spec.loader, self._installation)
        return spec


class _AdoptingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, installation: Installation) -> None:
        self._loader, self._installation = loader, installation

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._installation.adopt(module)


_installed: Installation | None = None


def install(*, rebind: bool = False) -> Installation:
    """Replace ``torch.distributed.fsdp.fully_shard`` (and that of ``torch.distributed._composable.fsdp``) by fsdp2's.

    Call it before importing libraries that use torch's: one that has already imported torch's function keeps it, with a
    warning. ``isinstance`` with torch's ``FSDPModule`` and its policy classes works without it. ``python -m fsdp2
    script.py`` calls it before a program that you do not want to edit.

    Args:
        rebind: Also replace torch's functions in modules that have already imported them. Copies elsewhere (in a
            dictionary, or as a default argument) stay torch's.

    Returns:
        What was replaced, by name; usable as a context manager. A second call has no effect.
    """
    global _installed
    if _installed is None:
        _installed = Installation()
        _installed.start()
        logger.info("%s", _installed)
    early = list(_early_importers())
    if rebind:
        for module, name in early:
            _installed.set(module, name, _OURS[name])
    elif early:
        names = ", ".join(sorted(f"{module.__name__}.{name}" for module, name in early))
        warnings.warn(
            f"fsdp2.install(): {names} were imported from torch before and stay torch's own; call "
            "fsdp2.install() before importing these modules, or install(rebind=True)",
            stacklevel=2,
        )
    return _installed


def uninstall() -> None:
    """Restore torch's own functions; does nothing if ``install`` was not called."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


def _early_importers() -> Iterator[tuple[ModuleType, str]]:
    """Modules outside torch and fsdp2 that hold one of torch's functions under its own name, and which."""
    for name, module in list(sys.modules.items()):
        if module is None or name.split(".")[0] in ("torch", "fsdp2"):
            continue
        for attribute, theirs in _THEIRS.items():
            if getattr(module, "__dict__", {}).get(attribute) is theirs:
                yield module, attribute
