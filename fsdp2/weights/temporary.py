"""A temporary folder for incomplete files. Folders that killed processes left behind are removed."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, where nothing is removed
    fcntl = None

__all__ = ["temporary_folder"]

_LOCK = "lock"


@contextlib.contextmanager
def temporary_folder(folder: Path, stem: str) -> Iterator[Path]:
    """Create a folder in ``folder`` for the length of the block; remove those that killed processes left for ``stem``.

    A process holds a lock on its folder while it runs, so that no other process removes the folder of a running save.
    The system releases the lock however the process ends.
    """
    for old in folder.glob(f".{glob.escape(stem)}-*.partial"):
        _remove_if_left(old)
    with TemporaryDirectory(prefix=f".{stem}-", suffix=".partial", dir=folder) as name:
        lock = os.open(Path(name, "new"), os.O_CREAT | os.O_RDWR)
        try:
            _try_to_lock(lock)
            os.rename(Path(name, "new"), Path(name, _LOCK))  # so no process sees a lock file that is not locked yet
            yield Path(name)
        finally:
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    """Remove ``folder`` if the process that made it has ended.

    A folder without a lock file stays: its process may be about to create the file.
    """
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        if _try_to_lock(lock):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _try_to_lock(file: int) -> bool:
    """Lock ``file``; return False if another process holds the lock, or if the system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
