"""The process that runs the tasks of a rank. Its supervisor may end it at any time."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._torch.forecast import fake_tensors
from fsdp2.tools.check.place import Outcome, Place
from fsdp2.tools.check.tasks import TASKS

__all__ = ["Orders", "work"]


@dataclass(frozen=True)
class Orders:
    """The tasks of a worker, and its place.

    ``attempt`` counts the starts of workers, which have a process group each. Output goes to the file ``log``, and
    stacks, which a signal requests, to the file ``stacks``.
    """

    names: tuple[str, ...]
    attempt: int
    rank: int
    world: int
    local_rank: int
    hosts: int
    ranks_here: int
    device: str
    store: tuple[str, int]
    log: str
    stacks: str
    against_torch: bool = True
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)


def work(orders: Orders, pipe: Connection) -> None:
    """Run the tasks; send ("begin", task), ("doing", text), ("end", task, outcome) and ("ended",) through ``pipe``."""
    _become_quiet(orders)
    with fake_tensors():  # the first fake tensor imports much of torch, which on a busy machine would look like a hang
        torch.empty(1)
    place = _place(orders, pipe)
    apart = TASKS[orders.names[0]].rank0_only
    if not apart:
        pipe.send(("doing", "starting the process group"))
        dist.init_process_group(
            "nccl" if place.cuda else "gloo",
            store=place.store,
            rank=orders.rank,
            world_size=orders.world,
            timeout=timedelta(minutes=10),  # longer than the patience of the supervisor, which reports hangs
        )
    for name in orders.names:
        pipe.send(("begin", name))
        outcome = _run(name, place)
        place.earlier[name] = outcome.figures
        pipe.send(("end", name, outcome.to_json()))
        if outcome.verdict == "failed":
            break  # other ranks may wait in a collective that this rank has not started
    else:
        if not apart:
            pipe.send(("doing", "ending the process group"))
            place.meet("end")
            dist.destroy_process_group()
    pipe.send(("ended",))


def _run(name: str, place: Place) -> Outcome:
    began = time.monotonic()
    try:
        outcome = TASKS[name].run(place)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        outcome = Outcome("failed", text, figures={"traceback": traceback.format_exc()})
    return replace(outcome, seconds=time.monotonic() - began)


def _become_quiet(orders: Orders) -> None:
    """Redirect output to the log, end with the supervisor, and write stacks on a signal, also inside C code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor ends this process
    log = os.open(orders.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    faulthandler.enable()
    stacks = os.open(orders.stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _place(orders: Orders, pipe: Connection) -> Place:
    device = torch.device(orders.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif orders.ranks_here > 1:
        torch.set_num_threads(max((os.cpu_count() or 1) // orders.ranks_here, 1))
    host, port = orders.store
    store = dist.PrefixStore(f"worker/{orders.attempt}", dist.TCPStore(host, port, is_master=False))
    return Place(
        orders.rank,
        orders.world,
        orders.local_rank,
        device,
        store,
        orders.against_torch,
        hosts=orders.hosts,
        earlier=dict(orders.earlier),
        doing=lambda text: pipe.send(("doing", text)),
    )
