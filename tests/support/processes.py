"""New processes from a warm fork server: it has imported torch and what tests have in common, so that a process costs
milliseconds where importing costs seconds.

The server starts no thread and no process group, and ends with the process that uses it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOADED = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.testing",
    "tests.support.worker",
    "tests.support.fuzz",
    "tests.support.report",
    "tests.support.settled",
)


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def start(
    target: Callable[..., None],
    *arguments: Any,
    log: str,
    daemon: bool = True,
    environment: Mapping[str, str] = NO_GPU,
) -> ForkServerProcess:
    """Start a process that runs ``target`` with picklable arguments and writes to the file ``log``.

    It has the variables of ``environment``, by default no GPU. One that starts others is not a daemon.
    """
    context: ForkServerContext = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    process = context.Process(target=_run, args=(target, arguments, log, dict(environment)), daemon=daemon)
    process.start()
    return process


def ended(program: str) -> tuple[int | None, str]:
    """Run a program's text in a process of its own; return its exit status and what it wrote.

    It ends as Python's do: an error that nobody catches is known to functions that run at exit.
    """
    with tempfile.NamedTemporaryFile("r") as log:
        process = start(_execute, program, log=log.name)
        process.join(120)
        process.kill()
        return process.exitcode, log.read()


def _execute(program: str) -> None:
    status = 0
    try:
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
    except Exception as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()  # which processes of multiprocessing skip
    os._exit(status)


def _run(target: Callable[..., None], arguments: tuple[Any, ...], log: str, environment: Mapping[str, str]) -> None:
    # The server ends when nobody holds this descriptor any longer: it is pytest's alone.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.stdout = sys.stderr = os.fdopen(file, "w", buffering=1)
    os.environ.update(GLOO_SOCKET_IFNAME=loopback(), **environment)
    import torch

    torch.set_num_threads(1)
    target(*arguments)


def free_port() -> int:
    """Return a port of this machine that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def loopback() -> str:
    """Return the name of the interface of 127.0.0.1."""
    return "lo0" if sys.platform == "darwin" else "lo"
