"""Several processes on the null device, each one rank of a job with a device of its own.

    job = run(4, function, argument, ...)      function(rank, world, argument, ...) runs on every rank
    assert not job.errors and not job.differences

Processes come from a fork server that has imported torch, so that one costs milliseconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.nullgpu.matching import differences

__all__ = ["Job", "run"]

LIMIT_SECONDS = 150.0
PRELOADED = ["torch.distributed.tensor.parallel", "torch.distributed.pipelining", "fsdp2", "tests.nullgpu.jobs"]


@dataclass
class Job:
    """How a job ended: each rank's traceback, empty if it raised nothing, and where ranks called NCCL differently."""

    errors: list[str]
    differences: list[str]

    @property
    def right(self) -> bool:
        """Whether no rank raised, and all called alike."""
        return not any(self.errors) and not self.differences


def run(
    world: int,
    function: Callable[..., Any],
    *arguments: Any,
    host_waits_seconds: float = 30.0,
    hangs_seconds: float = 0.0,
    backend: str = "nccl",
) -> Job:
    """Run ``function(rank, world, *arguments)`` on so many ranks, and return how that ended.

    A host that waits for what never comes gets an error after ``hangs_seconds``, where a GPU would hang.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = (world, store.port, name, (host_waits_seconds, hangs_seconds), backend, function, arguments)
        processes = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(world)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + LIMIT_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        files = [folder / f"rank-{rank}" for rank in range(world)]
        errors = [path.read_text() if path.exists() else "it was killed: it hung, or crashed" for path in files]
        return Job(errors, differences(folder))


def _rank(
    rank: int,
    world: int,
    port: int,
    folder: str,
    waits: tuple[float, float],
    backend: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    limit, hangs = map(str, waits)
    os.environ |= {"NULLGPU_SHARED": folder, "NULLGPU_LIMIT": limit, "NULLGPU_HANGS": hangs, "LOCAL_RANK": str(rank)}
    error = ""
    try:
        torch.cuda.set_device(rank)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        timeout = timedelta(seconds=LIMIT_SECONDS)
        dist.init_process_group(backend, rank=rank, world_size=world, store=store, timeout=timeout)
        torch.manual_seed(0)
        function(rank, world, *arguments)
    except BaseException:
        error = traceback.format_exc()
    Path(folder, f"rank-{rank}").write_text(error)
    ctypes.CDLL(None).nullgpu_leave()
    os._exit(0)  # a process group whose ranks differ would wait here for what never comes
