"""The store of a process group, of whatever kind, as ranks use it to write to each other."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Connections", "Keys", "StoreEnded"]


class StoreEnded(RuntimeError):
    """The process that hosts the store ended."""


class Connections:
    """A connection to ``store`` for each thread.

    A thread that waits for a key blocks its connection for all others until the key is there or the time is over.
    """

    def __init__(self, store: dist.Store) -> None:
        self._own = threading.local()
        self._unread: dict[str, str] = {}
        self.clones = True
        try:
            # Not the store itself: where this process hosts it, its port is free when the process group is destroyed.
            self._store: Any = store.clone()  # type: ignore[attr-defined]  # not in the stubs
        except (AttributeError, NotImplementedError, RuntimeError):
            self._store, self.clones = store, False  # written in Python: it looks after its connections itself
        self._own.store = self._store

    @property
    def own(self) -> Any:
        """The connection of this thread."""
        if not hasattr(self._own, "store"):
            self._own.store = self._store.clone() if self.clones else self._store
        return self._own.store

    @property
    def lacks(self) -> str:
        """The operation that the store does not have although ranks need it to compare themselves; empty if none."""
        if self.clones:  # it is one of torch's own stores, which have all of them
            return ""
        probe = f"fsdp2/probe/{dist.get_rank()}"
        operations = {"compare_set": (probe, "", "here"), "check": ([probe],), "delete_key": (probe,)}
        for name, arguments in operations.items():
            try:
                getattr(self._store, name)(*arguments)
            except (AttributeError, NotImplementedError, RuntimeError):
                return name
        return ""

    def note(self, prefix: str, path: str | None) -> None:
        """The last thing that this rank told the ranks which share ``prefix``: ``path`` is there until all know it."""
        if path is None:
            self._unread.pop(prefix, None)
        else:
            self._unread[prefix] = path

    def wait_for_readers(self, seconds: float) -> None:
        """Wait until other ranks know what this one told them last, but no longer than so many seconds.

        This process may host the store, which they would lose before they have read it.
        """
        end = time.monotonic() + seconds
        for path in list(self._unread.values()):
            while self.own.check([path]) and time.monotonic() < end:
                time.sleep(0.01)


class Keys:
    """The keys below ``prefix/name``. Each method raises StoreEnded where the process that hosts the store ended."""

    def __init__(self, connections: Connections, prefix: str, name: str) -> None:
        self._connections = connections
        self._group, self._prefix = prefix, f"{prefix}/{name}"

    def _do(self, operation: str, key: str, *values: object) -> Any:
        try:
            return getattr(self._connections.own, operation)(f"{self._prefix}/{key}", *values)
        except dist.DistNetworkError as error:
            raise _ended(error) from error

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 if the key is not there; the sum."""
        return self._do("add", key, amount)

    def set(self, key: str, value: str) -> None:
        """Write."""
        self._do("set", key, value)

    def get(self, key: str) -> str:
        """Read a key that is there."""
        return self._do("get", key).decode()

    def compare_set(self, key: str, expected: str, wanted: str) -> str:
        """Write if the value is the expected one, "" standing for none; the value after it."""
        return self._do("compare_set", key, expected, wanted).decode()

    def delete(self, key: str) -> None:
        """Delete."""
        self._do("delete_key", key)

    def note(self, key: str | None) -> None:
        """All ranks that meet by these keys know what this rank told them last when ``key`` is gone; None: they do."""
        self._connections.note(self._group, None if key is None else f"{self._prefix}/{key}")

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        store = self._connections.own
        try:
            return store.check([f"{self._prefix}/{key}"])
        except dist.DistNetworkError as error:
            raise _ended(error) from error

    def get_within(self, key: str, seconds: float) -> str | None:
        """Read a key as soon as it is there; None if it does not come within so many seconds."""
        store, path = self._connections.own, f"{self._prefix}/{key}"
        limit = timedelta(seconds=max(seconds, 0.001))  # 0 would be no limit
        began = time.monotonic()
        try:
            if self._connections.clones:
                store.set_timeout(limit)  # on a connection of this thread alone
            else:
                store.wait([path], limit)
            return store.get(path).decode()
        except dist.DistNetworkError as error:
            raise _ended(error) from error
        except Exception:
            # The end of the time is a DistStoreError in a TCP store, a plain RuntimeError in a file, and any exception
            # in a store that is written in Python. An error that comes sooner is something else.
            if time.monotonic() - began < seconds / 2:
                raise
            return None


def _ended(error: dist.DistNetworkError) -> StoreEnded:
    return StoreEnded(
        "the process that hosts the store of the process group (rank 0, or the launcher) ended while this rank still "
        f"needed it; its output may say why it ended ({error})"
    )
