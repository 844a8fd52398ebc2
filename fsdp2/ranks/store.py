"""The store of a process group, of any kind, through which ranks write to each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["HOST_ENDED", "Connections", "Keys", "StoreEnded"]

HOST_ENDED = (
    "the process that hosts the store of the process group (rank 0, unless a launcher does) has ended (its own output "
    "may say why)"
)
_READ_SECONDS = 1.0  # to read a key that has just been seen, but may have been deleted since


class StoreEnded(RuntimeError):
    """The process that hosts the store has ended."""


@contextlib.contextmanager
def _on_host() -> Iterator[None]:
    """Raise StoreEnded if an operation of the store fails because the process that hosts it has ended."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise StoreEnded(
            f"{HOST_ENDED}, and this rank still needs it. Expected: it runs as long as every other rank ({error})"
        ) from error


class Connections:
    """A connection to ``store`` for each thread: a thread that waits for a key blocks its connection."""

    def __init__(self, store: dist.Store) -> None:
        self._own = threading.local()
        self._unread: dict[str, str] = {}  # by prefix: a key that exists until all ranks have read the last message
        self.clones = True  # one of torch's own stores, of which each thread has a clone
        with _on_host():
            try:
                # This connection fails at once if the host has ended. A new one is tried until the store's timeout.
                store.check(["fsdp2"])
                # Not the store itself: if this process hosts it, its port must be free after destroy_process_group().
                # No thread uses this clone. A new connection is given up after the timeout of the one that it is made
                # of, and a thread that waits for a key has a short one: a busy host does not answer within that.
                self._store: Any = store.clone()  # type: ignore[attr-defined]  # not in the stubs
            except dist.DistNetworkError:
                raise
            except (AttributeError, NotImplementedError, RuntimeError):
                self._store, self.clones = store, False  # a store in Python manages its connections itself
        self.timeout: timedelta = self._store.timeout

    @property
    def own(self) -> Any:
        """The connection of this thread."""
        if not hasattr(self._own, "store"):
            self._own.store = self._store.clone() if self.clones else self._store
        return self._own.store

    @property
    def lacks(self) -> str:
        """The name of an operation that the comparison of ranks needs and the store lacks, or ""."""
        if self.clones:  # torch's own stores have all of them
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
        """Note the last message to the ranks that share ``prefix``: the key ``path`` exists until all have read it."""
        if path is None:
            self._unread.pop(prefix, None)
        else:
            self._unread[prefix] = path

    def wait_for_readers(self, seconds: float) -> None:
        """Wait until other ranks have read this rank's last messages, but no longer than so many seconds.

        This process may host the store, which ends with it.
        """
        end = time.monotonic() + seconds
        for path in list(self._unread.values()):
            while self.own.check([path]) and time.monotonic() < end:
                time.sleep(0.01)


class Keys:
    """The keys below ``prefix/name``. Each method raises StoreEnded if the process that hosts the store has ended."""

    def __init__(self, connections: Connections, prefix: str, name: str) -> None:
        self._connections = connections
        self._group, self._prefix = prefix, f"{prefix}/{name}"

    def _do(self, operation: str, key: str, *values: object) -> Any:
        with _on_host():
            return getattr(self._connections.own, operation)(f"{self._prefix}/{key}", *values)

    def add(self, key: str, amount: int) -> int:
        """Add ``amount`` to a number, which is 0 if the key does not exist; return the sum."""
        return self._do("add", key, amount)

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._do("set", key, value)

    def get(self, key: str) -> str:
        """Read a key that exists."""
        return self._do("get", key).decode()

    def compare_set(self, key: str, expected: str, wanted: str) -> str:
        """Write ``wanted`` if the value is ``expected`` ("" for no value); return the value after this."""
        return self._do("compare_set", key, expected, wanted).decode()

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._do("delete_key", key)

    def note(self, key: str | None) -> None:
        """Note the ``key`` that is deleted when all ranks have read this rank's last message; None: they have."""
        self._connections.note(self._group, None if key is None else f"{self._prefix}/{key}")

    def has(self, key: str) -> bool:
        """Return True if the key exists."""
        with _on_host():
            return self._connections.own.check([f"{self._prefix}/{key}"])

    def poll(self, key: str, seconds: float, pause: float) -> str | None:
        """Look for a key at intervals of ``pause`` seconds and read it; return None as ``get_within`` does.

        It costs an operation per look, and may be interrupted. A wait in a TCP store costs one in all, but torch logs
        two lines when its time is over.
        """
        end = time.monotonic() + seconds
        while (value := self.read(key)) is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(pause, left))
        return value

    def read(self, key: str) -> str | None:
        """Read a key; return None if it does not exist."""
        return self.get_within(key, _READ_SECONDS) if self.has(key) else None

    def get_within(self, key: str, seconds: float) -> str | None:
        """Wait for a key and read it; return None if it does not exist within so many seconds."""
        with _on_host():
            # A key that is deleted between the wait for it and the read has an empty value. None of ours is empty.
            return self._get_within(f"{self._prefix}/{key}", seconds) or None

    def _get_within(self, path: str, seconds: float) -> str | None:
        store, clones = self._connections.own, self._connections.clones
        limit = timedelta(seconds=max(seconds, 0.001))  # 0 would mean no limit
        began = time.monotonic()
        try:
            if clones:
                store.set_timeout(limit)  # on a connection of this thread alone
            else:
                store.wait([path], limit)
            return store.get(path).decode()
        except dist.DistNetworkError:
            raise
        except Exception:
            # Only the time tells a timeout: it is a DistStoreError in a TCP store, a plain RuntimeError in a file
            # store, and any exception in a store that is written in Python. An earlier error has another cause.
            if time.monotonic() - began < seconds / 2:
                raise
            return None
        finally:
            if clones:
                store.set_timeout(self._connections.timeout)
