"""One process among the ranks: whether there is anything to compare, and what it does while it has nothing to do."""

from __future__ import annotations

import queue
from threading import Lock
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp2.ranks import process
from tests.unit.meshes import gloo_mesh


def test_a_process_that_is_alone_is_not_compared() -> None:
    """Nor one without a process group."""
    assert process._this_process() is None
    with gloo_mesh():
        assert process._this_process() is None


def test_the_end_of_a_process_is_that_of_its_latest_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited at its end for the readers of a store that was gone with the process group before."""
    monkeypatch.setattr(process, "_make_process", lambda world: mock.Mock())
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    worlds, found = [], []
    for _ in range(2):
        with gloo_mesh():
            worlds.append(dist.group.WORLD)
            found.append(process._this_process())
    first, second = found
    assert first.ends.cancel.called and not second.ends.cancel.called
    for world in worlds:
        del process._processes[world]


def test_a_thread_without_a_job_looks_what_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_LOOK_SECONDS", 0.01)
    this: Any = process._Process.__new__(process._Process)
    this._jobs, this._lock, this._monitors = queue.SimpleQueue(), Lock(), [mock.Mock()]
    this._monitors[0].board.failure = None
    this._next(0)
    assert this._monitors[0].board.look.called
