"""``install()`` replaces torch's ``fully_shard``, for libraries that import it, until ``uninstall()``."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from fsdp2._torch.imports import WhenImported
from fsdp2._warn import warn
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.forward_methods import register_fsdp_forward_method
from fsdp2.fully_shard import fully_shard
from fsdp2.module import share_comm_ctx

__all__ = ["OURS", "THEIRS", "Installation", "install", "uninstall"]

logger = logging.getLogger("fsdp2")

OURS = {
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
THEIRS = {name: getattr(torch_fsdp, name) for name in OURS}
_PUBLIC = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
# Helpers of torch that patch the class of groups by name; torch's own replicate continues to use torch's class.
_GROUP_USERS = ("torch.testing._internal.common_fsdp", "torch.distributed._tools.fsdp2_mem_tracker")
_FROM_FSDP2 = re.compile(rf"\bfrom\s+fsdp2[\s.]|\bfsdp2\.({'|'.join(OURS)})\b")
_FROM_TORCH = re.compile(r"\btorch\.distributed\.(fsdp|_composable)\b")


class Installation:
    """The names that ``install()`` replaced. A context manager that restores them at the end of the outermost block."""

    def __init__(self) -> None:
        self.replaced: list[str] = []
        self.depth = 0  # the number of install() blocks that are open
        self._undo: list[tuple[ModuleType, str, Any, Any]] = []
        self._helpers = WhenImported(_GROUP_USERS, self.adopt)
        self._ours_before = set(_holders(OURS))

    def __str__(self) -> str:
        return "fsdp2 replaced " + ", ".join(self.replaced)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with _lock:
            self.depth -= 1
            if _installed is self and self.depth <= 0:
                uninstall()

    def set(self, owner: ModuleType, name: str, value: Any) -> None:
        """Replace ``owner.name`` and remember the old value."""
        before = getattr(owner, name, None)
        if before is value:
            return
        self._undo.append((owner, name, before, value))
        setattr(owner, name, value)
        self.replaced.append(f"{owner.__name__}.{name}")

    def adopt(self, module: ModuleType) -> None:
        """Replace torch's functions and classes in one of torch's modules that has imported them."""
        for name, theirs in THEIRS.items():
            if getattr(module, name, None) is theirs:
                self.set(module, name, OURS[name])
        group = getattr(module, "FSDPParamGroup", None) if module.__name__ in _GROUP_USERS else None
        if getattr(group, "__module__", "").startswith("torch."):
            self.set(module, "FSDPParamGroup", FSDPParamGroup)

    def undo(self) -> None:
        """Restore all names, except those that other code has replaced since."""
        self._helpers.stop()
        for module, name, before, value in self._undo:
            if getattr(module, name, None) is value:
                setattr(module, name, before)
        self._restore_imported()

    def _restore_imported(self) -> None:
        """Restore torch's functions in modules that have imported ours since ``install()``.

        Such a module may also have imported ours from fsdp2 on purpose, which only its source shows. If the source is
        not clear, the module keeps ours, and a warning names it.
        """
        unsure = []
        for module, attribute, function in set(_holders(OURS)) - self._ours_before:
            try:
                source = inspect.getsource(module)
            except (OSError, TypeError):
                source = ""
            from_torch, from_fsdp2 = _FROM_TORCH.search(source), _FROM_FSDP2.search(source)
            if from_torch and not from_fsdp2:
                setattr(module, attribute, THEIRS[function])
            elif not from_fsdp2 or from_torch:
                unsure.append(f"{module.__name__}.{attribute}")
        if unsure:
            warn(
                f"fsdp2.uninstall(): {', '.join(sorted(unsure))} were imported while fsdp2 was installed and stay "
                "fsdp2's, because their source does not show if they were imported from torch; import them again"
            )

    def start(self) -> None:
        """Replace torch's functions in modules that are imported already, and hook later imports.

        Those of ``_PUBLIC`` that are imported later take ours from ``torch.distributed.fsdp``.
        """
        for name, module in list(sys.modules.items()):
            if module is not None and (name in _PUBLIC or _is_test_helper(name)):
                self.adopt(module)
        self._helpers.start()


def _is_test_helper(name: str) -> bool:
    return name.startswith("torch.testing._internal.")


_installed: Installation | None = None
_lock = threading.RLock()


def install(*, rebind: bool = False) -> Installation:
    """Replace ``torch.distributed.fsdp.fully_shard`` (and that of ``torch.distributed._composable.fsdp``) by fsdp2's.

    Call it before you import libraries that use torch's function. A library that has already imported it keeps it, and
    a warning says so. ``isinstance`` tests with torch's ``FSDPModule`` and its policy classes work without this call.
    ``python -m fsdp2 script.py`` makes the call before a program that you do not want to edit.

    Args:
        rebind: Also replace torch's functions in modules that have already imported them. Copies elsewhere (in a
            dictionary, or as a default argument) stay torch's.

    Returns:
        An object that lists the replaced names, usable as a context manager. A second call replaces nothing more and
        returns the same object. Blocks may be nested; the end of the outermost restores torch's functions.

    Example:
        ```python
        import fsdp2

        fsdp2.install()
        import trl  # uses fsdp2's fully_shard from now on
        ```
    """
    global _installed
    with _lock:
        if _installed is None:
            installation = Installation()
            try:
                installation.start()
            except BaseException:
                installation.undo()
                raise
            _installed = installation
            logger.info("%s", _installed)
        _installed.depth += 1
        early = [holder for holder in _holders(THEIRS) if not _is_torchs_or_ours(holder[0])]
        if rebind:
            for module, attribute, function in early:
                _installed.set(module, attribute, OURS[function])
        elif early:
            names = ", ".join(sorted(f"{module.__name__}.{attribute}" for module, attribute, _ in early))
            warn(
                f"fsdp2.install(): {names} were imported from torch before and stay torch's own; call "
                "fsdp2.install() before importing these modules, or install(rebind=True)"
            )
        return _installed


def uninstall() -> None:
    """Restore torch's own functions, also in modules that have imported fsdp2's, and end open ``install`` blocks.

    Without an earlier ``install`` it does nothing.
    """
    global _installed
    with _lock:
        if _installed is not None:
            installation, _installed = _installed, None
            installation.undo()


def _is_torchs_or_ours(module: ModuleType) -> bool:
    return module.__name__.split(".")[0] in ("torch", "fsdp2")


def _holders(functions: Mapping[str, Any]) -> Iterator[tuple[ModuleType, str, str]]:
    """Yield each module that holds one of ``functions``, the name there, and the function's own name."""
    names = {id(function): name for name, function in functions.items()}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if id(value) in names:
                    yield module, attribute, names[id(value)]
