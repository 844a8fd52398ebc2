"""One rank of the worker pool.

A worker reads jobs from its connection, keeps the default process group that the job asks for, runs the test function
and answers with an ``Outcome``. It ends when the connection closes. The fork server ends with pytest, and
the kernel (Linux) kills a worker with the fork server. SIGUSR1 makes it write every thread's stack to stderr and end.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import fsdp2
from tests.support import api
from tests.support.processes import loopback

PR_SET_PDEATHSIG = 1
FREED_SECONDS = 20.0
"""How long a module may outlive its test: a thread that is looking at one may be late on a busy machine."""


@dataclass(frozen=True)
class Job:
    """A test function (by name, because functions of test modules are wrapped by decorators) and where it runs."""

    module: str
    function: str
    kwargs: dict[str, Any]
    world: int
    generation: int
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """What one rank answers: a value, or the text of an exception (``traceback`` is empty when there was none)."""

    value: Any = None
    traceback: str = ""
    skipped: str = ""
    groups: int = 0  # the process groups that the rank has


def rank_function(job: Job) -> Any:
    """Return the undecorated function of ``job``."""
    target: Any = importlib.import_module(job.module)
    for part in job.function.split("."):
        target = getattr(target, part)
    return getattr(target, "rank_function", target)


def live_modules() -> list[str]:
    """Return the class names of the sharded modules that are still alive after two collections.

    One is not always enough: a cycle through autograd's C++ graph is only found when its Python part has gone. What
    else is alive (imported modules, caches) is frozen, so that the next call need not look at it again.
    """
    for _ in range(2):
        gc.collect()
    kinds = (api.ours.FSDPModule, api.theirs.FSDPModule)
    found = sorted(type(one).__name__ for one in gc.get_objects() if issubclass(type(one), kinds))
    if not found:
        gc.freeze()
    return found


class Worker:
    """Serves jobs for one rank, one after the other."""

    def __init__(self, rank: int, connection: Connection, port: int, backend: str = "gloo") -> None:
        self.rank = rank
        self.backend = backend
        self.connection = connection
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        self.generation = -1

    def serve(self) -> None:
        """Answer jobs until the parent closes the connection."""
        while True:
            try:
                job: Job = pickle.loads(self.connection.recv_bytes())
            except EOFError:
                return
            self.connection.send_bytes(pickle.dumps(self.run(job)))

    def run(self, job: Job) -> Outcome:
        """Run one job; an exception becomes part of the outcome, and so does a module that outlives its test."""
        try:
            self.enter_process_group(job)
            torch.manual_seed(0)
            fsdp2.set_rank_checks(True)  # the test before may have switched them off
            function = rank_function(job)
            value = function(self.rank, job.world, **job.kwargs)
            del function
        except BaseException as error:
            if type(error).__name__ == "Skipped":
                return Outcome(skipped=str(error))
            return Outcome(traceback=traceback.format_exc())
        deadline = time.monotonic() + FREED_SECONDS
        while left := live_modules():  # the thread that answers other ranks may be looking at one
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            return Outcome(traceback=f"modules are still alive after the test: {left}")
        return Outcome(value, groups=len(distributed_c10d._world.pg_names))

    def enter_process_group(self, job: Job) -> None:
        """Make the default process group have exactly the job's world size."""
        if job.generation == self.generation and dist.is_initialized():
            return
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"generation{job.generation}", self.store),
            rank=self.rank,
            world_size=job.world,
            timeout=timedelta(seconds=2 * job.timeout),
        )
        self.generation = job.generation


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the parent's death (Linux; elsewhere the closed connection ends an idle worker)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def share_event_loop() -> None:
    """Let one event loop serve every gloo group of this process.

    Each group would have its own, which wakes up every 10 ms; tests leave many groups behind. Sharing one saved a tenth
    of the processor's time of tests on four ranks.
    """
    device = dist.ProcessGroupGloo.create_device(interface=loopback())
    original = dist.ProcessGroupGloo.__init__

    def init(
        self: dist.ProcessGroupGloo,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
        **others: Any,  # of later versions of torch
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [device], 2, timeout
        for name, value in others.items():
            setattr(options, name, value)
        original(self, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = init


def main(rank: int, connection: Connection, port: int, backend: str) -> None:
    """Set this process up and serve, with default process groups of this backend."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=True)
    if backend == "gloo":
        # torch's own asks for the seeds of devices that are not here, and writes down where from: milliseconds each
        # time.
        torch.manual_seed = torch.default_generator.manual_seed
    share_event_loop()
    worker = Worker(rank, connection, port, backend)
    live_modules()
    worker.serve()
    if dist.is_initialized():
        dist.destroy_process_group()
