"""This process in its default process group: its boards, its background thread, and its end."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize
from threading import Event, Lock, Thread
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch.checkpoint import async_saves
from fsdp2._torch.collectives import default_store, group_timeout, without_modes
from fsdp2._warn import warn
from fsdp2.comm.collectives import all_reduce_max
from fsdp2.comm.host_work import is_of_collective, observe_waits
from fsdp2.engine.collective import PassKind
from fsdp2.engine.observer import observe_with
from fsdp2.engine.registry import Registry
from fsdp2.engine.root import RootContext
from fsdp2.ranks.board import Board, latest
from fsdp2.ranks.history import Turns
from fsdp2.ranks.monitor import TRAINING, RankMonitor, no_conflict
from fsdp2.ranks.standstill import Standstill
from fsdp2.ranks.start import all_say, compare, shared_groups
from fsdp2.ranks.store import Connections, Keys, StoreEnded
from fsdp2.sharding.mesh import Axis, DataParallelMesh, listed_ranks

__all__ = ["monitor_ranks", "set_rank_checks", "watch_waits"]

logger = logging.getLogger("fsdp2")

_READERS_SECONDS = 5.0  # the time that a process waits at its end for ranks that have not read its last message
_MEETING_SECONDS = 10.0  # and for a meeting, in which the others may find that this rank has parted from them
_LOOK_SECONDS = 2.0  # the interval between looks at the board on a rank whose host never waits for collectives
_SAVING = (
    "torch.distributed.checkpoint.async_save is still saving on a process group that the model trains on, and its "
    "collectives could be matched with those of the step. Expected: a gloo group of its own, made once on all ranks "
    "(process_group=torch.distributed.new_group(backend='gloo')), or a call of its result() before the next step"
)
_enabled = True


def set_rank_checks(enabled: bool) -> None:
    """Switch the comparison of ranks on (the default) or off. Call it on all ranks before the first forward.

    The comparison costs three operations of the process group's store per rank (more with hybrid sharding) when a model
    first runs and when all ranks deviate from earlier iterations; a rank that then waits for more than two seconds also
    looks twice a second whether the others have come. It costs nothing in a repeated iteration, except one read of
    the store every five seconds, and with NCCL, whose collectives the host does not wait for, two reads every two
    seconds.

    Without the comparison, a rank that skips a unit makes the others hang until the process group's timeout or mixes up
    their data. Different models are not detected. ``set_reduce_scatter_unused_params`` does not let a rank skip a unit.

    Args:
        enabled: True compares ranks, False does not.
    """
    global _enabled
    _enabled = enabled
    for process in [] if enabled else [*_processes.values()]:
        if process is not None:
            process.end_watch()


class _Process:
    """The monitors and boards of one default process group. Several threads may use it."""

    def __init__(self, world: dist.ProcessGroup, connections: Connections) -> None:
        self.rank = dist.get_rank()
        self._world = weakref.ref(world)
        self._connections = connections
        # By the names of a root's process groups, not by their ranks: threads that train on groups of the same ranks
        # may make their boards in a different order on each rank.
        self._incarnations: dict[tuple[str, ...], str] = {}
        self._roots: Counter[tuple[str, ...]] = Counter()
        self._turns: defaultdict[tuple[str, ...], Turns] = defaultdict(Turns)
        self._monitors: Registry[RankMonitor] = Registry()
        self._lock = Lock()  # for the attributes below; never held while this process waits for another one
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: Thread | None = None
        self._standstill: Standstill | None = None
        # Not atexit, which processes of multiprocessing skip. In a fork of this process, Finalize does nothing.
        self.ends = Finalize(None, self.leave, exitpriority=0)

    @property
    def monitors(self) -> list[RankMonitor]:
        """The monitors of all existing roots, in the order in which they were made."""
        return list(self._monitors)

    def watch(self, monitor: RankMonitor) -> None:
        """Compare the ranks of this monitor whenever the process waits, as long as the monitor exists."""
        self._monitors.add(monitor)

    def board(self, ranks: tuple[int, ...], axes: Sequence[Axis], device: torch.device) -> tuple[Board, Turns, int]:
        """Return a board for the next root on the process groups of ``axes``, the same on all of their ``ranks``.

        Also return the turns of all roots there, and the number of the new root among them. The keys of the board
        contain the incarnation of the job, because torchrun keeps the store when it restarts the processes.
        """
        used = [(axis, axis.group) for axis in axes if axis.group is not None]
        names = tuple(group.group_name for _, group in used)
        if names not in self._incarnations:
            # A random number, agreed on in the process group: a key in the store could be from an earlier incarnation.
            number = torch.tensor([int.from_bytes(os.urandom(7), "big")], device=device)
            try:
                with without_modes():
                    for axis, _ in used:
                        all_reduce_max(number, axis)
            except RuntimeError as error:
                text = "the first collective failed: a rank ended before it came to the first forward"
                raise RuntimeError(f"{text}; its output may say why ({error})") from error
            self._incarnations[names] = f"fsdp2/{int(number):x}"
        self._roots[names] += 1
        keys = Keys(self._connections, self._incarnations[names], str(self._roots[names]))
        self.watch_waits(device)  # if fully_shard did not, because checks were off then, say
        # Not the timeout of the store, which the user may have made shorter for another purpose.
        timeout = max(group_timeout(group, device) for _, group in used)
        board = Board(keys, self.rank, ranks, timeout.total_seconds(), self.others, self._look_at_others)
        return board, self._turns[names], self._roots[names]

    def _look_at_others(self, board: Board) -> None:
        """Compare this process with the ranks of other roots than that of ``board``, at which it waits."""
        for monitor in self.monitors:
            if monitor.board is not board:
                monitor.board.look(monitor.history, shows=False)

    def watch_waits(self, device: torch.device) -> None:
        """From now on, log where this process, or its ``device``, waits for a long time, and where all other ranks are.

        The keys have no incarnation, which only a collective can agree on: it may be that very one in which ranks wait.
        """
        with self._lock:
            if self._standstill is not None:
                return
            world = dist.get_world_size()
            keys = Keys(self._connections, "fsdp2/standstill", str(world))
            on_devices = device.type != "cpu"
            self._standstill = Standstill(keys, self.rank, world, self._doing, on_devices=on_devices)
        self._standstill.start()

    def end_watch(self) -> None:
        """Stop logging where this process waits."""
        with self._lock:
            standstill, self._standstill = self._standstill, None
        if standstill is not None:
            standstill.stop()

    def others(self) -> str:
        """Return where other ranks are if this one has waited for them for a long time, otherwise ""."""
        return "" if self._standstill is None else self._standstill.others

    def _doing(self) -> str:
        """Return what this rank does in a pass, in words; "" between passes."""
        return next((latest(monitor.history) for monitor in self.monitors if monitor.log.kind is not None), "")

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job``, which waits for other ranks, in the background thread."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._work, name="fsdp2-ranks", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        for turn in itertools.count():
            if self._world() is None:  # the process group is gone, and this thread ends with it
                return
            try:
                self._next(turn)
            except Exception as error:  # a board keeps its failure, and the main thread's next pass raises it
                logger.error("rank %d: %s", self.rank, error)

    def _next(self, turn: int) -> None:
        try:
            job = self._jobs.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            monitors = [monitor for monitor in self.monitors if monitor.board.failure is None]
            if monitors:
                monitor = monitors[turn % len(monitors)]
                try:
                    monitor.board.look(monitor.history, shows=False)
                    monitor.board.refuse_ended(monitor.history)
                except StoreEnded as error:  # its host may just have finished; a meeting would raise an error
                    logger.debug("rank %d: %s", self.rank, error)
        else:
            job()

    def _end_meetings(self) -> None:
        """Wait a while for meetings of the background thread.

        The host has gone on, and another rank may not come to a meeting because it waits on its device for this one.
        """
        if self._thread is not None and self._thread.is_alive():
            over = Event()
            self._jobs.put(over.set)
            over.wait(_MEETING_SECONDS)

    def leave(self) -> None:
        """Tell ranks that wait for this process that it ends, with its exception if there is one.

        If there is an exception, ranks that wait raise one at once. If there is none, they may already have all that
        they need of this process. Then wait for ranks that have not yet read a failure or the end of a meeting: this
        process may host the store.
        """
        error = getattr(sys, "last_value", None)
        why = "" if error is None else f" with {type(error).__name__}: {error}"
        try:
            if is_of_collective(error):
                self._explain_end()
            if error is None:
                self._end_meetings()
            if self._standstill is not None:
                self._standstill.end(failed=is_of_collective(error))
            for monitor in self.monitors:
                if monitor.board.failure is None:
                    did = latest(monitor.history)
                    text = f"rank {self.rank} ended{why or (did and f', after {did}')}"
                    monitor.board.end(text, monitor.history, None if error is None else monitor.log.epoch)
            self._connections.wait_for_readers(_READERS_SECONDS)
        except RuntimeError:
            return  # the process that hosts the store ended first

    def _explain_end(self) -> None:
        """Log which rank had ended when a collective failed that no pass waited for, such as a barrier."""
        text = "rank %d failed in a collective, which all ranks must call: %s"
        try:
            boards = [monitor.board for monitor in self.monitors]
            ended = next((ended for board in boards if board.failure is None and (ended := board.ended())), "")
        except StoreEnded as gone:
            logger.error(text, self.rank, gone)
            raise
        if ended:
            logger.error(text, self.rank, ended)


_processes: weakref.WeakKeyDictionary[dist.ProcessGroup, _Process | None] = weakref.WeakKeyDictionary()
_lock = Lock()  # for _processes


def _this_process() -> _Process | None:
    """Return this process in the default process group, or None if there are no ranks to compare."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1:
        return None
    backend = dist.get_backend_config(world)
    if "fake" in backend or "threaded" in backend:  # no other rank exists, or all are threads of this process
        return None
    with _lock:
        if world not in _processes:
            for process in _processes.values():  # their process group was destroyed
                if process is not None:
                    process.ends.cancel()
            _processes[world] = _make_process(world)
        return _processes[world]


def _make_process(world: dist.ProcessGroup) -> _Process | None:
    connections = Connections(default_store())
    if missing := connections.lacks:
        warn(
            f"the store of the process group has no {missing}, so ranks are not compared: a rank that skips a unit "
            "makes the others hang, and set_reduce_scatter_unused_params does not let it skip one. Expected: a store "
            "with compare_set, check and delete_key (deleteKey in a subclass of Store), such as TCPStore. To "
            "continue without the comparison, call fsdp2.set_rank_checks(False) on every rank"
        )
        return None
    return _Process(world, connections)


def watch_waits(mesh: DataParallelMesh) -> None:
    """Log where this process waits for a long time, from the first unit on.

    The first forward is too late: before it, one rank may load or gather what it alone is told to.
    """
    process = _this_process() if _enabled and mesh.mesh.size() > 1 else None
    if process is not None:
        try:
            process.watch_waits(mesh.device)
        except StoreEnded as error:
            logger.debug("rank %d does not look where others are: %s", process.rank, error)


def monitor_ranks(
    root: RootContext, kind: PassKind, error: Exception | None, within_replica: bool
) -> RankMonitor | None:
    """Compare the units of ``root`` on its ranks, and return the monitor; None if nothing is compared.

    It is that of all ranks, or, ``within_replica``, that of the passes which one replica may run alone.

    Raises:
        RuntimeError: Parameters or options differ, or another rank passes an ``error``. Every rank raises it.
        Exception: The ``error`` of this rank.
    """
    meshes = [group.mesh for group in root.groups]
    # Parameters that are whole on every rank may lie on as many ranks as others, without a shard axis.
    mesh = max(meshes, key=lambda mesh: (mesh.mesh.size(), mesh.shard.size), default=None)
    if not _enabled or mesh is None or mesh.mesh.size() == 1:
        return None
    # By the mesh alone: what may differ between ranks, as options do, is compared only in the meeting that follows.
    if within_replica and 1 in (mesh.shard.size, mesh.replicate.size):
        return None
    process = _this_process()  # not before: it connects to the store, whose host may have ended
    if process is None:
        return None
    make = _monitor_replica if within_replica else _monitor_all
    monitor = make(process, root, mesh, kind, error)
    if monitor is not None:
        process.watch(monitor)
    return monitor


def _monitor_all(
    process: _Process, root: RootContext, mesh: DataParallelMesh, kind: PassKind, error: Exception | None
) -> RankMonitor:
    ranks = tuple(listed_ranks(mesh.mesh))
    board, turns, number = process.board(ranks, [mesh.shard, mesh.replicate], mesh.device)
    met = compare(board, root, shared_groups(root, ranks), kind, error)
    run, conflict = _on(process, mesh, within_replica=False)
    within = root.observer_within_replica
    replica = within if isinstance(within, RankMonitor) else None
    return RankMonitor(board, root, run, conflict, met, turns, number, replica)


def _monitor_replica(
    process: _Process, root: RootContext, mesh: DataParallelMesh, kind: PassKind, error: Exception | None
) -> RankMonitor | None:
    ranks = tuple(dist.get_process_group_ranks(mesh.shard.group))
    board, turns, number = process.board(ranks, [mesh.shard], mesh.device)
    gathered = [group for group in root.groups if group.mesh.shard.size > 1]
    on_axis = [group for group in gathered if group.mesh.shard == mesh.shard]
    # Units only if no other meeting compares them now, in which all replicas learn of a difference.
    met = compare(board, root, on_axis if root.runs_alone else [], kind, error, with_values=False)
    # Experts may lie on a smaller axis, and only some ranks may have some.
    if not all_say(board, met, on_axis == gathered):
        return None
    run, conflict = _on(process, mesh, within_replica=True)
    return RankMonitor(board, root, run, conflict, met + 1, turns, number, first=TRAINING)


def _on(
    process: _Process, mesh: DataParallelMesh, *, within_replica: bool
) -> tuple[Callable[[Callable[[], None]], None], Callable[[RootContext[Any]], str]]:
    """Return where a monitor meets other ranks, and what tells it of conflicts: torch saves on gloo."""
    if mesh.first_axis.backend == "gloo":
        return _now, partial(_conflicting_save, within_replica)
    return process.run, no_conflict


def _now(job: Callable[[], None]) -> None:
    job()


class _Waits:
    """Compares ranks while the host waits for a collective."""

    def waiting(self) -> None:
        for monitor in _monitors():
            try:
                monitor.board.look(monitor.history, shows=True)
            except StoreEnded as error:  # this may be the last collective, which will still complete
                logger.debug("rank %d: %s", monitor.board.rank, error)

    def waited(self) -> None:
        for monitor in _monitors():
            monitor.board.leave()

    def failed(self, error: RuntimeError) -> None:
        # The widest board first, as on all other ranks: two that asked on different boards would not answer each other.
        for monitor in sorted(_monitors(), key=lambda monitor: -len(monitor.board.ranks)):
            try:
                monitor.board.explain(monitor.history)
            except RuntimeError as reason:
                raise reason from error


def _monitors() -> list[RankMonitor]:
    world = dist.group.WORLD if dist.is_initialized() else None
    process = None if world is None else _processes.get(world)
    return [] if process is None else process.monitors


observe_with(monitor_ranks)
observe_waits(_Waits())


def _conflicting_save(within_replica: bool, root: RootContext[Any]) -> str:
    """Return an error text if a thread saves a checkpoint on a process group of ``root``, else "".

    Passes ``within_replica`` use those of shard axes alone.

    The collectives of the save and of a pass could be matched with each other.
    """
    for save in async_saves():
        if save.get("no_dist") or not save.get("use_collectives", True):
            continue
        axes = [g.mesh.shard for g in root.groups]
        if not within_replica:
            axes += [axis for g in root.groups for axis in (g.mesh.replicate, g.gradients.axis)]
        if (save.get("process_group") or dist.group.WORLD) in [axis.group for axis in axes]:
            return _SAVING
    return ""
