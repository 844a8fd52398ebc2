"""Stores of other kinds than the pool's, in which the ranks of a test may compare themselves."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fsdp2.comm import host_work
from fsdp2.ranks import board, process

LIMIT = timedelta(seconds=100)  # a busy machine needs long to start the processes that are waited for
STORES = ("file", "python")
"""A file, and a store that is written in Python."""
SLICE_SECONDS = 0.05
"""How soon ranks that wait look at the others; in use a second and more."""


class Written(dist.Store):
    """A store that is written in Python: it forwards operations to a real one, and cannot be cloned."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: str) -> None:
        """Forward."""
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        """Forward."""
        return self.store.get(key)

    def add(self, key: str, amount: int) -> int:
        """Forward."""
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Forward."""
        return self.store.check(keys)

    def wait(self, keys: list[str], limit: timedelta = LIMIT) -> None:
        """Forward; what it raises is its own business."""
        try:
            self.store.wait(keys, limit)
        except dist.DistStoreError as error:
            raise LookupError("no such keys") from error


class Complete(Written):
    """It can do all that ranks need to compare themselves."""

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Forward."""
        return self.store.compare_set(key, expected, wanted)

    def deleteKey(self, key: str) -> bool:
        """Forward."""
        return self.store.delete_key(key)

    delete_key = deleteKey


@contextlib.contextmanager
def meeting_in(kind: str) -> Iterator[None]:
    """Let models that run for the first time in the block compare their ranks in a store of this kind, or the pool's.

    All ranks enter the block and leave it together.
    """
    look, slice_, own = board._LOOK_SECONDS, host_work._SLICE, process.default_store
    board._LOOK_SECONDS, host_work._SLICE = (SLICE_SECONDS, SLICE_SECONDS), timedelta(seconds=SLICE_SECONDS)
    _forget_store()
    # No folder of its own: a FileStore that the collector frees while its folder is being removed waits for minutes for
    # the folder to come back. The last one of a file removes the file.
    shared = [str(Path(tempfile.gettempdir(), f"fsdp2-store-{uuid.uuid4()}"))]
    dist.broadcast_object_list(shared)
    world = dist.get_world_size()
    make = {
        "pool": own,
        "file": lambda: dist.FileStore(shared[0], world),
        "python": lambda: Complete(own().clone()),
    }
    process.default_store = make[kind]
    try:
        yield
        dist.barrier()  # none leaves while another still compares itself
    finally:
        process.default_store = own
        board._LOOK_SECONDS, host_work._SLICE = look, slice_
        _forget_store()


def _forget_store() -> None:
    known = process._processes.pop(dist.group.WORLD, None)
    if known is not None:
        known.ends.cancel()
        known.end_watch()  # or its thread would look at a store of the past, one more for each program
