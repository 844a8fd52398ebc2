"""Starting processes, knowing one's place among them, and failing together with one clear line."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

T = TypeVar("T")

BAD_INPUT = 2  # the exit status of every rank after a UserError


class UserError(Exception):
    """Something that only the person at the keyboard can put right; shown as one line, without a traceback."""


@dataclass(frozen=True)
class Place:
    """Where this process stands: its rank, how many there are, and the device it computes on."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on rank 0, the one that speaks and writes small files."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        """The library that moves the tensors: "nccl" on GPUs, else "gloo"."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def fast_bfloat16(self) -> bool:
        """Whether the device has instructions for bfloat16; without them it is slower than float32."""
        if self.device.type == "cuda":
            return torch.cuda.is_bf16_supported(including_emulation=False)
        return any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)

    def say(self, text: str = "") -> None:
        """Print `text` once, not once a rank."""
        if self.first:
            print(text, flush=True)


def started_by_torchrun() -> bool:
    """True in a process that torchrun (or `launch`) started, False in the one a person started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def require(*modules: str) -> None:
    """Raise a UserError that names the module, if one is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"no module named {module}; use `make demo`, or pip install -e '.[demo]' first")


def run_rank(program: str, parse: Callable[[], T], train: Callable[[T, Place], None]) -> NoReturn:
    """Do one rank's part and exit with 0, or with BAD_INPUT after one line on stderr; never return.

    `parse` makes the options, which have a `device`; `train` does the work with them.
    """
    join()
    try:
        options = together(parse)
        train(options, take_place(options.device))  # type: ignore[attr-defined]  # every program's options have one
        status = 0
    except UserError as error:
        status = complain(error, program)
    leave(status)


def launch(script: Path, arguments: list[str], ranks: int) -> int:
    """The exit status of `script` run by torchrun's engine on `ranks` processes of this machine, over loopback.

    Unlike the `torchrun` command it adds no report of its own to what the script says when it fails.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _stay_on_loopback()
    logging.disable(logging.CRITICAL)  # in this process, which only waits for the others
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=script.stem,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-u", str(script), *arguments)
    except ChildFailedError as error:
        # A rank that was still leaving when another had failed was ended by a signal: its status is negative.
        return max(1, *(failure.exitcode for failure in error.failures.values()))
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


def join() -> None:
    """Join the process group that torchrun described to this process.

    On GPUs the group has two backends: the small objects of `together` travel over gloo and never touch a GPU.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, also while it waits for another
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backends, timeout=timedelta(minutes=10))


def leave(status: int) -> NoReturn:
    """Leave the group and exit with `status`. For a run that ended in order, not one that an exception cut short.

    The interpreter is not taken apart: torch's caches of DTensor operations outlive the group and keep its gloo
    threads running, and a thread that is caught in the tear-down aborts the process ("terminate called").
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def take_place(device: str) -> Place:
    """This process's place in the group; `device` is "auto", "cpu" or "cuda".

    Raises UserError on every rank when there are more ranks than GPUs to serve them.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return Place(rank, ranks, torch.device("cpu"))
    together(lambda: _check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    local = int(os.environ.get("LOCAL_RANK", rank))
    torch.cuda.set_device(local)
    return Place(rank, ranks, torch.device("cuda", local))


def together(action: Callable[[], T]) -> T:
    """What `action` returns on this rank; if it raised UserError on any rank, the first such error on all of them.

    This is why bad input never hangs: no rank goes on to a collective that another rank will not reach.
    """
    result: T | None = None
    problem: str | None = None
    try:
        result = action()
    except UserError as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise UserError(found)
    return result  # type: ignore[return-value]


def first_decides(action: Callable[[], T]) -> T:
    """What `action` returns on rank 0, on every rank; other ranks do not run it. Its UserError is raised on all."""
    box: list[T | None] = [None]

    def decide() -> None:
        if dist.get_rank() == 0:
            box[0] = action()

    together(decide)
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def complain(error: UserError, program: str) -> int:
    """BAD_INPUT, after one line on stderr that says what was wrong; in a group rank 0 speaks, and all wait for it."""
    grouped = dist.is_initialized()
    if not grouped or dist.get_rank() == 0:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if grouped:
        # Without this wait another rank could exit first, and torchrun would kill rank 0 before it has spoken.
        together(lambda: None)
    return BAD_INPUT


def _check_gpus(needed: int) -> None:
    if not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no GPU that torch can use; leave --device out to use the CPU")
    if needed > (gpus := torch.cuda.device_count()):
        raise UserError(
            f"{needed} processes need {needed} GPUs and this machine has {gpus}; start {gpus}, or pass --device cpu"
        )


def _stay_on_loopback() -> None:
    """Tell gloo and NCCL to use the loopback interface, whatever the machine's host name resolves to."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback[0])
