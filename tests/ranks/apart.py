"""Processes that are expected to fail: started for one test, killed after it, their words and times kept."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from tests.support.processes import start as start_process

LIMIT_SECONDS = 120.0


@dataclass
class Ended:
    """How one rank ended: exit status (None: it hung and was killed), what it printed, seconds until it ended."""

    status: int | None
    output: str
    seconds: float

    @property
    def error(self) -> str:
        """The last line of its traceback."""
        lines = [line for line in self.output.splitlines() if line.startswith(("RuntimeError", "ValueError"))]
        return lines[-1] if lines else ""


def run_apart(program: Callable[[int, int], None], world: int) -> list[Ended]:
    """Run ``program(rank, world)`` in ``world`` gloo processes; how each of them ended."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{rank}.txt") for rank in range(world)]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        logs = enumerate(map(str, paths))
        processes = [start_process(_run, program, rank, world, store.port, log=log) for rank, log in logs]
        start = time.monotonic()
        seconds = [LIMIT_SECONDS] * world
        running = set(range(world))
        while running and time.monotonic() < start + LIMIT_SECONDS:
            for rank in [rank for rank in running if not processes[rank].is_alive()]:
                seconds[rank] = time.monotonic() - start
                running.remove(rank)
            time.sleep(0.02)
        for process in processes:
            process.kill() if process.is_alive() else None
            process.join()
        statuses = [None if rank in running else process.exitcode for rank, process in enumerate(processes)]
        return [Ended(s, path.read_text(), t) for s, path, t in zip(statuses, paths, seconds)]


def _run(program: Callable[[int, int], None], rank: int, world: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    status = 0
    try:
        program(rank, world)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    # Collectives that nobody will finish are still under way: leave without waiting for them.
    os._exit(status)
