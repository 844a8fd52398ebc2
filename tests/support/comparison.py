"""Runs reports against one implementation, each in processes of its own: ``python -m tests.support.comparison [NAME]``.

Prints a line of JSON for each report: its name, and what became of it as a cell of the comparison table. This process
imports everything once and forks the ranks; it never starts a process group or a thread itself. Another one serves
their store, as torchrun's agent does, and outlives ranks that die.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tests.support import api
from tests.support.report import Absent, Accepted, Report, Unhelpful, Wasteful, Wrong, all_reports
from tests.support.worker import die_with_parent

LIMIT_SECONDS, GRACE_SECONDS = 25.0, 6.0
"""How long a report may take, and how long other ranks may still run when one has failed."""
LENGTH = 140
"""Characters of an error's first line."""
fork = multiprocessing.get_context("fork")


def serve_store(listener: socket.socket) -> None:
    """Serve a store until killed."""
    die_with_parent()
    store = dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    while store:
        time.sleep(3600)


def run_rank(one: Report, rank: int, world: int, port: int, answer: Connection) -> None:
    """Run a report as one rank, send what became of it, and wait to be killed."""
    die_with_parent()
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"{one.name}{os.getppid()}", store), rank=rank, world_size=world
    )
    torch.manual_seed(0)
    try:
        one.program(rank, world, api.ours)
        answer.send("works")
    except Absent:
        answer.send("not offered")
    except Accepted as error:
        answer.send(str(error))
    except Wrong as error:
        answer.send(f"silently wrong: {error}")
    except Wasteful as error:
        answer.send(f"right, but {error}")
    except Unhelpful as error:
        answer.send(shown(*str(error).split(": ", 1)))
    except BaseException as error:
        answer.send(shown(type(error).__name__, str(error)))
    while True:
        time.sleep(3600)


def shown(kind: str, text: str) -> str:
    """Return an error as a cell: its type and first line, without what differs from run to run."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = re.sub(r"\[/\S*\] ?|0x[0-9a-f]+|\[?127\.0\.0\.1\]?:\d+", "", line)
    line = line if len(line) <= LENGTH else line[:LENGTH].rsplit(" ", 1)[0] + " …"
    return f"`{kind}`: {line}".replace("|", "\\|").replace("<", "&lt;")


def outcome(one: Report, port: int) -> str:
    """Run a report on the fewest ranks that show it, two if they do, and return its cell."""
    world = next((world for world in one.worlds if world > 1), one.worlds[0])
    answers: list[str | None] = [None] * world
    ranks: list[BaseProcess] = []
    waiting: dict[Any, int] = {}
    for rank in range(world):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=run_rank, args=(one, rank, world, port, theirs), daemon=True)
        process.start()
        theirs.close()
        ranks.append(process)
        waiting[ours] = rank
    deadline = time.monotonic() + LIMIT_SECONDS
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                answers[rank] = connection.recv()
            except EOFError:
                ranks[rank].join()
                died = "works" if rank in one.dying else f"dies ({ended(ranks[rank].exitcode)})"
                answers[rank] = died
            if answers[rank] != "works":
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for process in ranks:
        process.kill()
        process.join()
    return summary(answers)


def ended(code: int | None) -> str:
    """Return how a process ended."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"


def summary(answers: list[str | None]) -> str:
    """Return one cell for what the ranks answered; None is a rank that hangs."""
    said = [answer for answer in answers if answer not in (None, "works")]
    if None in answers:
        return f"hangs; on one rank {said[0]}" if said else "hangs"
    return str(said[0]) if said else "works"


def main(names: list[str]) -> None:
    """Run the named reports, or all."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    store = fork.Process(target=serve_store, args=(listener,), daemon=True)
    store.start()
    listener.close()
    for group in all_reports().values():
        for one in group:
            if not names or one.name in names:
                print(json.dumps([one.name, outcome(one, port)]), flush=True)
    store.kill()
    store.join()


if __name__ == "__main__":
    main(sys.argv[1:])
