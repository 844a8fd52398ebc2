"""Processes that are expected to fail: started for one test, killed after it, what they printed kept."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Literal

import torch.distributed as dist

from fsdp2._torch.collectives import default_store
from fsdp2.comm import host_work
from fsdp2.ranks import board, standstill
from tests.support.processes import start as start_process

LIMIT_SECONDS = 120.0
SOON = 0.25
"""Seconds that a rank waits before it looks what the others do; in use it is one or two, and here most come to that."""


@dataclass
class Ended:
    """How one rank ended: exit status (None: it hung and was killed), and what it printed."""

    status: int | None
    output: str

    @property
    def error(self) -> str:
        """The last line of its traceback."""
        lines = [line for line in self.output.splitlines() if line.startswith(("RuntimeError", "ValueError"))]
        return lines[-1] if lines else ""


Meeting = Literal["launcher", "rank 0", "file"]
"""Where the processes of a test meet: in a store that the test hosts, in one that rank 0 hosts, or in a file."""


def run_apart(program: Callable[[int, int], None], world: int, meeting: Meeting = "launcher") -> list[Ended]:
    """Run ``program(rank, world)`` in ``world`` gloo processes; how each of them ended."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        paths = [Path(folder, f"{rank}.txt") for rank in range(world)]
        port = listener.getsockname()[1]
        store = _host(listener.dup(), port) if meeting == "launcher" else None
        logs = enumerate(map(str, paths))
        given = lambda rank: (port, listener if meeting == "rank 0" and rank == 0 else None)
        file = str(Path(folder, "store")) if meeting == "file" else ""
        processes = [start_process(_run, program, rank, world, *given(rank), file, log=log) for rank, log in logs]
        listener.close()  # a process that hosts the store has its own copy
        running, deadline = {process.sentinel for process in processes}, time.monotonic() + LIMIT_SECONDS
        while running and (ended := wait(running, timeout=max(0.0, deadline - time.monotonic()))):
            running.difference_update(ended)
        statuses = [None if process.sentinel in running else process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        del store
        return [Ended(status, path.read_text()) for status, path in zip(statuses, paths)]


def _host(listener: socket.socket, port: int) -> dist.TCPStore:
    descriptor = listener.detach()
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _run(
    program: Callable[[int, int], None], rank: int, world: int, port: int, listener: socket.socket | None, file: str
) -> None:
    host_work._SLICE, board._LOOK_SECONDS = timedelta(seconds=SOON), (SOON, board._LOOK_SECONDS[1])
    standstill._LOOK_SECONDS, standstill._PATIENCE_SECONDS = SOON, 4 * SOON
    standstill._ANSWER_LOOKS = 80  # what answers late on a busy machine answers
    if file:
        store: dist.Store = dist.FileStore(file, world)
    elif listener is not None:
        store = _host(listener, port)
    else:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    status = 0
    try:
        program(rank, world)
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stderr.flush()
    if listener is not None:
        sys.exit(status)  # as a program ends: what it hosts may be needed by others for a moment
    # Collectives that nobody will finish are still under way: leave without waiting for them.
    os._exit(status)


class Awaits(logging.Handler):
    """Prints what this rank logs, and notes when a line comes that has ``pattern``.

    A busy rank may be asked before it has come to where it waits: then the others ask again. It goes on to answer.
    """

    def __init__(self, pattern: str, then: Callable[[], None]) -> None:
        super().__init__()
        self._pattern, self._then = pattern, then

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)
        if re.search(self._pattern, record.getMessage()):
            self._then()


def until_logged(pattern: str, ranks: range, then: Callable[[], None] = lambda: None) -> None:
    """End this process, after a last call, as soon as all of ``ranks`` have logged a line that has ``pattern``."""
    store, rank = default_store().clone(), dist.get_rank()

    def end() -> None:
        default_store().clone().wait([f"logged/{rank}" for rank in ranks])
        then()
        os._exit(0)

    logging.getLogger("fsdp2").addHandler(Awaits(pattern, lambda: store.set(f"logged/{rank}", "")))
    Thread(target=end, daemon=True).start()
