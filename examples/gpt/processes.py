"""Start processes, find the rank of each, and end all of them with one clear line on an error."""

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
    """An error that the user can correct. It is shown as one line, without a traceback."""


@dataclass(frozen=True)
class Place:
    """The rank of this process, the number of ranks, and the device of this rank."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def first(self) -> bool:
        """True on rank 0, which prints and writes small files."""
        return self.rank == 0

    @property
    def backend(self) -> str:
        """The backend of the tensors' collectives: "nccl" on GPUs, else "gloo"."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    @property
    def fast_bfloat16(self) -> bool:
        """True if the device has instructions for bfloat16. Without them it is slower than float32."""
        if self.device.type == "cuda":
            return torch.cuda.is_bf16_supported(including_emulation=False)
        return any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)

    def say(self, text: str = "") -> None:
        """Print `text` on rank 0 only."""
        if self.first:
            print(text, flush=True)


def started_by_torchrun() -> bool:
    """Return True in a process that torchrun or `launch` started, False in one that the user started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def require(*modules: str) -> None:
    """Raise a UserError with the name of a module that is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"no module named {module}; use `make demo`, or pip install -e '.[demo]' first")


def run_rank(program: str, parse: Callable[[], T], train: Callable[[T, Place], None]) -> NoReturn:
    """Run one rank and exit with 0, or with BAD_INPUT after printing one line on stderr. It never returns.

    `parse` returns the options, which have a `device`, and `train` gets them.
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
    """Run `script` on `ranks` processes of this machine with torchrun's engine, and return the exit status.

    Unlike the `torchrun` command, it prints no report of its own when the script fails.
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
        # A rank that had not ended yet when another failed was ended by a signal, so its status is negative.
        return max(1, *(failure.exitcode for failure in error.failures.values()))
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


def join() -> None:
    """Join the process group that torchrun's environment variables describe.

    On GPUs the group has two backends: the small objects of `together` are sent by gloo, without a GPU.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, also while it waits for another
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backends, timeout=timedelta(minutes=10))


def leave(status: int) -> NoReturn:
    """Leave the group and exit with `status`. Call this only after a run that ended without an exception.

    It skips the interpreter's shutdown: torch's caches of DTensor operations outlive the group and keep its gloo
    threads running, and such a thread can abort the process during the shutdown ("terminate called").
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def take_place(device: str) -> Place:
    """Return this process's place in the group; `device` is "auto", "cpu" or "cuda".

    If a host has more ranks than GPUs, raise a UserError on every rank.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return Place(rank, ranks, torch.device("cpu"))
    together(lambda: _check_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    local = int(os.environ.get("LOCAL_RANK", rank))
    torch.cuda.set_device(local)
    return Place(rank, ranks, torch.device("cuda", local))


def together(action: Callable[[], T]) -> T:
    """Run `action` and return its result. If it raises a UserError on any rank, raise the first of these on all ranks.

    So bad input never hangs: no rank continues to a collective that another rank does not reach.
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
    """Run `action` on rank 0, and return its result on every rank. Every rank raises its UserError."""
    box: list[T | None] = [None]

    def decide() -> None:
        if dist.get_rank() == 0:
            box[0] = action()

    together(decide)
    dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def complain(error: UserError, program: str) -> int:
    """Print the error in one line on stderr, and return BAD_INPUT. In a group rank 0 prints, and the others wait."""
    grouped = dist.is_initialized()
    if not grouped or dist.get_rank() == 0:
        print(f"{program}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    if grouped:
        # Without this wait another rank could exit first, and torchrun would kill rank 0 before it has printed.
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
    """Let gloo and NCCL use the loopback interface, because the host name may resolve to another one."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
        os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback[0])
