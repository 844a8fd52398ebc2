"""Ranks that part ways, or end, are found out and named, instead of being waited for until a timeout of hours.

What ranks tell each other here goes through the store that the process group was made with, beside all collectives.
Nothing is sent while every step is one that all ranks agreed on before (``ranks/journal.py``). Where one is not,
``Watch`` lets the ranks say what they want to do next. A thread per process tells twice a second that the process
lives, and once some rank has waited for a while, which steps its own took.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

from fsdp2._torch.collectives import default_store

__all__ = ["HostWork", "Watch", "attend"]

logger = logging.getLogger("fsdp2")

_TICK_SECONDS = 0.5
_SLICE = timedelta(seconds=1)  # how long the host waits for a collective before it looks whether that is any use
_ALARM_SECONDS = 0.3  # how long one waits for the others before it asks what they are doing
# A process whose end nobody saw is taken for dead when it was not heard of for so long: long, since C code that does
# not release the interpreter keeps the living silent too; not so long where a collective failed.
_LOST_SECONDS = 300.0
_LOST_AFTER_FAILURE = 4.0
_EXPLAIN_SECONDS = 8.0  # how long a collective that failed is held until it is known why
_SAMPLE = 16  # how many of the others are looked at in one round

Wants = dict[int, Any]


def _host() -> str:
    """Where process ids mean the same as here; empty if that cannot be told (not Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _born(pid: int) -> str:
    """When the process started, which tells it from a later one with its id; empty if it ended."""
    try:
        state, *_, born = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:20]
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else born


class _Process:
    """This process among the others of its default process group: it lives, it has ended, and why."""

    def __init__(self, store: dist.Store, world: dist.ProcessGroup) -> None:
        self._world = weakref.ref(world)
        self.rank = dist.get_rank()
        self.pid = os.getpid()
        self.store = dist.PrefixStore("fsdp2", store.clone())  # type: ignore[attr-defined]  # not in the stubs
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self.lost: str | None = None
        self._beats, self._since = 0, time.monotonic()
        self._patience = store.timeout.total_seconds()  # type: ignore[attr-defined]  # not in the stubs
        self._host = _host()
        self.store.set(f"place/{self.rank}", json.dumps([self._host, self.pid, _born(self.pid)]))
        self._beat()
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stop = Event()
        self._thread = Thread(target=self._patrol, name="fsdp2-watch", daemon=True)
        self._thread.start()
        atexit.register(self.leave)

    def _patrol(self) -> None:
        while not self._stop.wait(_TICK_SECONDS):
            try:
                self._tick()
            except Exception as error:  # whatever it was, the store is of no use any more
                self.lost = f"the store is out of reach, so the rank that hosts it (0, or the launcher) ended: {error}"
                break
            if self._world() is None:
                break
        atexit.unregister(self.leave)

    def _tick(self) -> None:  # a function, since a variable of the thread's loop would keep its last value alive
        self._beat()
        for watch in list(self.watches):
            watch.patrol()

    def _beat(self) -> None:
        self._beats += 1
        self.store.set(f"alive/{self.rank}", str(self._beats))

    def stop(self) -> None:
        """Be seen no more."""
        self._stop.set()

    def leave(self) -> None:
        """Tell the others that this process ends, and with which exception if there is one."""
        self._stop.set()
        if os.getpid() != self.pid:  # a fork of the process
            return
        self._thread.join(1.0)
        error = getattr(sys, "last_value", None)
        try:
            text = "" if error is None else f" with {type(error).__name__}: {error}"
            self.store.set(f"ended/{self.rank}", text)
        except Exception:
            pass

    def missing(self, ranks: Iterable[int], seconds: float) -> str | None:
        """Which of ``ranks`` has ended or has not been heard of for so many ``seconds``, in words."""
        return next((text for rank in ranks if rank != self.rank and (text := self._lost(rank, seconds))), None)

    def _lost(self, rank: int, seconds: float) -> str | None:
        now = time.monotonic()
        if not self.store.check([f"alive/{rank}"]):
            late = now - self._since > self._patience
            text = f"rank {rank} did not come to fully_shard in {now - self._since:.0f} s: its output may say why"
            return text if late else None
        gone = self._is_gone(rank)  # asked first: who ends by itself says so before
        if self.store.check([f"ended/{rank}"]):
            return f"rank {rank} ended{self.store.get(f'ended/{rank}').decode()}"
        if gone:
            return f"rank {rank} was killed: its process ended without a word; was it out of memory (dmesg)?"
        beat = self.store.get(f"alive/{rank}")
        known, since = self._seen.get(rank, (b"", now))
        if beat != known:
            self._seen[rank] = (beat, now)
        elif now - since > seconds:
            return f"rank {rank} was not heard of for {now - since:.0f} s: it was killed, or hangs outside Python"
        return None

    def _is_gone(self, rank: int) -> bool:
        """Whether the process of ``rank`` is known to have ended; nothing is known of other machines."""
        host, pid, born = json.loads(self.store.get(f"place/{rank}"))
        return bool(host) and host == self._host and _born(pid) != born


_processes: weakref.WeakKeyDictionary[Any, _Process | None] = weakref.WeakKeyDictionary()


def attend() -> _Process | None:
    """Be seen by the other processes from now on; None where there is no store to be seen in."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None
    if world not in _processes:
        for process in _processes.values():
            if process is not None:  # of a process group that is gone
                process.stop()
        backend = dist.get_backend_config(world)
        known = dist.get_world_size() > 1 and not any(name in backend for name in ("fake", "threaded"))
        store = default_store() if known else None
        _processes[world] = None if store is None else _Process(store, world)
    return _processes[world]


class Watch:
    """What ``ranks`` tell each other about the steps of one root; every one of them makes one, in the same order.

    ``refuse`` says of what ranks want why they cannot have it.
    """

    def __init__(self, process: _Process, ranks: tuple[int, ...], refuse: Callable[[Wants], str]) -> None:
        self.ranks = ranks
        self.rank = process.rank
        self._refuse = refuse
        self.failure: str | None = None
        self._process = process
        self._steps: Callable[[], Callable[[], Any] | None] = lambda: None
        name = "-".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}-{hash(ranks):x}"
        instance = process.store.add(f"{name}/{process.rank}", 1)
        self._store = dist.PrefixStore(f"{name}/{instance}", process.store)
        self._told = False
        self._last: str | None = None
        process.watches.add(self)

    def show(self, steps: Callable[[], tuple[int, list[Any]]]) -> None:
        """Let other ranks see ``steps()``, (index of the first, steps): the latest that this rank took, as JSON values.

        It is a bound method, whose object is not kept alive.
        """
        self._steps = weakref.WeakMethod(steps)

    def close(self) -> None:
        """Be asked no more: nobody waits for what this is about."""
        self._process.watches.discard(self)

    # ---- deciding ----

    def decide(self, index: int, want: Any, choose: Callable[[Wants], Any]) -> Any:
        """What all ranks do as step ``index``: the choice among what each wants (JSON values), the same on all.

        Raises:
            RuntimeError: on every rank, with what each of them does: ``choose`` returned a refusal (a str), or another
                rank took another step already, ended, or failed.
        """
        store, key = self._store, f"step/{index}"
        store.set(f"{key}/{self.rank}", json.dumps(want))
        if store.add(f"{key}/there", 1) == len(self.ranks):
            wants = {rank: json.loads(store.get(f"{key}/{rank}")) for rank in self.ranks}
            chosen = choose(wants)
            if isinstance(chosen, str):
                self.fail(chosen)
            store.set(f"{key}/go", json.dumps(chosen))
            self._forget(self._last)  # everybody is here, so nobody still reads the last one
        else:
            self._wait_for(key, index, want)
            chosen = json.loads(store.get(f"{key}/go"))
        self._last = key
        return chosen

    def _wait_for(self, key: str, index: int, want: Any) -> None:
        pause, start, looked = 0.0005, time.monotonic(), 0
        while not self._store.check([f"{key}/go"]):
            self.check()
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)
            if time.monotonic() - start < _ALARM_SECONDS * (looked + 1):
                continue
            looked += 1
            self._sound_alarm()
            self.refresh()
            others = [rank for rank in self._sample(looked) if not self._there(key, rank)]
            for rank in others:
                taken = self._taken(rank, index)
                if taken is not None and not self._there(key, rank):  # it may have come, and gone on, just now
                    self.fail(self._refuse({self.rank: want, rank: taken}))
            gone = self._process.missing(others, _LOST_SECONDS)
            if gone is not None and not self._store.check([f"{key}/go"]):
                self.fail(gone)

    def _there(self, key: str, rank: int) -> bool:
        """Whether ``rank`` said what it wants for the step ``key``; kept until every rank has come to a later one."""
        return self._store.check([f"{key}/{rank}"])

    def _sample(self, turn: int) -> list[int]:
        start = turn * _SAMPLE % len(self.ranks)
        return list(dict.fromkeys((self.ranks + self.ranks)[start : start + _SAMPLE]))

    def _taken(self, rank: int, index: int) -> Any:
        """What ``rank`` said it did as step ``index``, without asking anybody."""
        if rank == self.rank or not self._store.check([f"log/{rank}"]):
            return None
        first, steps = json.loads(self._store.get(f"log/{rank}"))
        return steps[index - first] if first <= index < first + len(steps) else None

    def _forget(self, key: str | None) -> None:
        for name in ("there", "go", *map(str, self.ranks)) if key is not None else ():
            self._store.delete_key(f"{key}/{name}")

    # ---- failing together ----

    def fail(self, text: str) -> None:
        """Raise RuntimeError here, and on every other rank as soon as it looks; the first text counts."""
        self._sound_alarm()
        self.failure = self._store.compare_set("failure", "", text).decode()
        self.check()

    def check(self) -> None:
        """Raise RuntimeError if some rank has failed."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def refresh(self) -> None:
        """Look whether some rank has failed."""
        if self.failure is None and self._store.check(["failure"]):
            self.failure = self._store.get("failure").decode()

    def explain(self) -> None:
        """Raise RuntimeError if it is known why a collective failed."""
        self.refresh()
        self.check()
        gone = self._process.lost or self._process.missing(self._sample(int(time.monotonic())), _LOST_AFTER_FAILURE)
        if gone is not None:
            self.fail(gone)

    def _sound_alarm(self) -> None:
        if not self._store.check(["alarm"]):
            self._store.set("alarm", "")

    def patrol(self) -> None:
        """Answer an alarm; called by the thread."""
        if self.failure is not None or not self._store.check(["alarm"]):
            return
        steps = self._steps()
        if steps is not None:
            self._store.set(f"log/{self.rank}", json.dumps(steps()))
        self.refresh()
        if self.failure is not None and not self._told:
            self._told = True  # the main thread may be somewhere it cannot raise
            logger.error("rank %d: %s", self.rank, self.failure)


def _watches() -> list[Watch]:
    return [watch for process in _processes.values() if process is not None for watch in process.watches]


class HostWork:
    """A collective that the host itself waits for, but no longer than until it is known that it will never end."""

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Return when the collective is done.

        Raises:
            RuntimeError: it failed, or another rank will not take part; says why as far as that can be found out.
        """
        while True:
            completed = self._work.is_completed()
            try:
                self._work.wait(_SLICE)
                return
            except RuntimeError as error:
                if completed:
                    _explain(error)
                    raise
            # The slice is over, or it failed in it, or it is done just now: where it is completed the next wait tells.
            if not self._work.is_completed():
                for watch in _watches():
                    watch.check()


def _explain(error: RuntimeError) -> None:
    """Raise what the ranks say of themselves in place of ``error``, if they do so within some seconds."""
    end = time.monotonic() + _EXPLAIN_SECONDS
    watches = _watches()
    while watches and time.monotonic() < end:
        for watch in watches:
            try:
                watch.explain()
            except RuntimeError as reason:
                raise reason from error
        time.sleep(0.1)
