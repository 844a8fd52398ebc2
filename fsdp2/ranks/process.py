"""This process among those of its process group: where its ranks write to each other, and what ends with it."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from multiprocessing.util import Finalize
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch.checkpoint import async_saves
from fsdp2._torch.collectives import default_store, group_timeout, without_modes
from fsdp2.comm.collectives import all_reduce_max
from fsdp2.comm.host_work import observe_waits
from fsdp2.engine.root import RootContext
from fsdp2.engine.steps import PassKind, observe_with
from fsdp2.ranks.board import Board
from fsdp2.ranks.monitor import RankMonitor
from fsdp2.ranks.start import compare
from fsdp2.ranks.store import Connections, Keys, StoreEnded
from fsdp2.sharding.mesh import DataParallelMesh, listed_ranks

__all__ = ["monitor_ranks", "set_rank_checks"]

logger = logging.getLogger("fsdp2")

_READERS_SECONDS = 5.0  # how long a process that ends waits for ranks that have not read what it told them
_LOOK_SECONDS = 2.0  # how often a rank whose host never waits looks whether others have parted from it
_SAVING = (
    "torch.distributed.checkpoint.async_save is still saving on a process group that the model trains on, and its "
    "collectives could be matched with those of the step. Expected: a gloo group of its own, made once on all ranks "
    "(process_group=torch.distributed.new_group(backend='gloo')), or a call of its result() before the next step"
)
_enabled = True


def set_rank_checks(enabled: bool) -> None:
    """Switch the comparison of ranks on (the default) or off, in the same way on all ranks, before the first forward.

    It costs three operations of the process group's store per rank when a model first runs and when all ranks deviate
    from earlier iterations, and nothing in a repeated iteration (with NCCL, whose collectives the host does not wait
    for, one look at the store every two seconds). Without it a rank that skips a unit makes the others hang until the
    process group's timeout or mixes up their data, different models are not detected, and
    ``set_reduce_scatter_unused_params`` does not let a rank reduce zeros for units that it skips.
    """
    global _enabled
    _enabled = enabled


class _Process:
    """What one default process group has to do with ranks that compare themselves. Several threads may come here."""

    def __init__(self, world: dist.ProcessGroup, connections: Connections) -> None:
        self.rank = dist.get_rank()
        self._world = weakref.ref(world)
        self._connections = connections
        # By the names of the groups that a root communicates on, not by its ranks: threads that train on groups of the
        # same ranks come here in another order on each rank.
        self._incarnations: dict[tuple[str, ...], str] = {}
        self._roots: Counter[tuple[str, ...]] = Counter()
        self._lock = Lock()  # for what follows; never held while this process waits for another one
        self._monitors: weakref.WeakSet[RankMonitor] = weakref.WeakSet()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: Thread | None = None
        # Not atexit: processes that multiprocessing started end without it. In a fork of this process it does nothing.
        self.ends = Finalize(None, self.leave, exitpriority=0)

    @property
    def monitors(self) -> list[RankMonitor]:
        """Those of all roots that are alive."""
        with self._lock:
            return list(self._monitors)

    def watch(self, monitor: RankMonitor) -> None:
        """Compare the ranks under its root wherever this process waits, as long as it is alive."""
        with self._lock:
            self._monitors.add(monitor)

    def board(self, ranks: tuple[int, ...], mesh: DataParallelMesh) -> Board:
        """A board for the next root on the process groups of ``mesh``, in the same order on all of its ``ranks``.

        Its keys belong to one incarnation of the job: torchrun keeps its store when it restarts the processes.
        """
        axes = [(axis, axis.group) for axis in (mesh.shard, mesh.replicate) if axis.group is not None]
        names = tuple(group.group_name for _, group in axes)
        if names not in self._incarnations:
            # Only what the process group itself carries is sure not to be left by an earlier one.
            number = torch.tensor([int.from_bytes(os.urandom(7), "big")], device=mesh.device)
            try:
                with without_modes():
                    for axis, _ in axes:
                        all_reduce_max(number, axis)
            except RuntimeError as error:
                text = "the first collective failed: a rank ended before it came to the first forward"
                raise RuntimeError(f"{text}; its output may say why ({error})") from error
            self._incarnations[names] = f"fsdp2/{int(number):x}"
        self._roots[names] += 1
        keys = Keys(self._connections, self._incarnations[names], str(self._roots[names]))
        # Not the timeout of the store, which the caller may have made for another purpose, and with less patience.
        patience = max(group_timeout(group, mesh.device) for _, group in axes)
        return Board(keys, self.rank, ranks, patience.total_seconds())

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job``, which waits for other ranks, in the background."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._work, name="fsdp2-ranks", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        for turn in itertools.count():
            if self._world() is None:
                return
            try:
                self._next(turn)
            except RuntimeError as error:  # the main thread raises it when it comes to the next pass, if it does
                logger.error("rank %d: %s", self.rank, error)

    def _next(self, turn: int) -> None:
        try:
            job = self._jobs.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            monitors = [monitor for monitor in self.monitors if monitor.board.failure is None]
            if monitors:
                monitor = monitors[turn % len(monitors)]
                try:
                    monitor.board.look(monitor, shows=False)
                except StoreEnded as error:  # perhaps the job is over there; who needs the store is told so
                    logger.debug("rank %d: %s", self.rank, error)
        else:
            job()

    def leave(self) -> None:
        """Let ranks that wait for this process know that it ended, and with which exception if there is one.

        Ranks that have still to read why a job failed, or that a meeting is over, may need the store of this process.
        """
        error = getattr(sys, "last_value", None)
        text = f"rank {self.rank} ended{'' if error is None else f' with {type(error).__name__}: {error}'}"
        try:
            for monitor in self.monitors:
                if monitor.board.failure is None:
                    monitor.board.end(text)
            self._connections.wait_for_readers(_READERS_SECONDS)
        except RuntimeError:
            return  # whoever hosts the store ended first


_processes: weakref.WeakKeyDictionary[dist.ProcessGroup, _Process | None] = weakref.WeakKeyDictionary()
_lock = Lock()  # for these


def _this_process() -> _Process | None:
    """This process in the default process group; None where there is nobody to compare with."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1:
        return None
    backend = dist.get_backend_config(world)
    if "fake" in backend or "threaded" in backend:
        return None
    with _lock:
        if world not in _processes:
            for process in _processes.values():  # of a process group that is gone
                if process is not None:
                    process.ends.cancel()
            _processes[world] = _make_process(world)
        return _processes[world]


def _make_process(world: dist.ProcessGroup) -> _Process | None:
    connections = Connections(default_store())
    if missing := connections.lacks:
        warnings.warn(
            f"the store of the process group has no {missing}, so ranks are not compared: a rank that skips a unit "
            "makes the others hang, and set_reduce_scatter_unused_params does not let it skip one. Expected: a store "
            "with compare_set, check and delete_key (deleteKey in a subclass of Store), such as TCPStore; to go on "
            "without, call fsdp2.set_rank_checks(False) on every rank",
            stacklevel=2,
        )
        return None
    return _Process(world, connections)


def monitor_ranks(root: RootContext, kind: PassKind, error: RuntimeError | None) -> RankMonitor | None:
    """The monitor of the ranks under ``root``, once they have the same units; None where there is one process.

    Raises:
        RuntimeError: on every rank: parameters or options differ, or some rank comes with an ``error``.
    """
    process, groups = _this_process() if _enabled else None, root.groups
    mesh = max((group.mesh for group in groups), key=lambda mesh: mesh.mesh.size(), default=None)
    if process is None or mesh is None or mesh.mesh.size() == 1:
        return None
    ranks = tuple(listed_ranks(mesh.mesh))
    # What lies on a smaller mesh (experts) is another thing elsewhere, in number, shape and values.
    shared = [group for group in groups if set(listed_ranks(group.mesh.mesh)) == set(ranks)]
    board = process.board(ranks, mesh)
    met = compare(board, root, shared, kind, error)
    if mesh.first.backend == "gloo":
        monitor = RankMonitor(board, root, _now, _conflicting_save)  # torch saves on gloo
    else:
        monitor = RankMonitor(board, root, process.run)
    monitor.log.epoch = met
    process.watch(monitor)
    return monitor


def _now(job: Callable[[], None]) -> None:
    job()


class _Waits:
    """Compares ranks while the host waits for a collective."""

    def waiting(self) -> None:
        for monitor in _monitors():
            try:
                monitor.board.look(monitor, shows=True)
            except StoreEnded as error:  # the collective may be the last one, and end all the same
                logger.debug("rank %d: %s", monitor.board.rank, error)

    def waited(self) -> None:
        for monitor in _monitors():
            monitor.board.leave()

    def failed(self, error: RuntimeError) -> None:
        for monitor in _monitors():
            try:
                monitor.board.explain(monitor)
            except RuntimeError as reason:
                raise reason from error


def _monitors() -> list[RankMonitor]:
    world = dist.group.WORLD if dist.is_initialized() else None
    process = None if world is None else _processes.get(world)
    return [] if process is None else process.monitors


observe_with(monitor_ranks)
observe_waits(_Waits())


def _conflicting_save(root: RootContext[Any]) -> str:
    """Why no pass may start under ``root`` while a thread saves a checkpoint; empty if one may.

    The collectives of two threads would pair on a process group that both use.
    """
    for save in async_saves():
        if save.get("no_dist") or not save.get("use_collectives", True):
            continue
        axes = [axis for g in root.groups for axis in (g.mesh.shard, g.mesh.replicate, g.gradients.axis)]
        if (save.get("process_group") or dist.group.WORLD) in [axis.group for axis in axes]:
            return _SAVING
    return ""
