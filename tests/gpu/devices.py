"""Running a test on every kind of device there is: on gloo processes of the pool, and on GPUs with NCCL.

    @on_devices(1, 2)
    def test_sum(rank, world, device):
        ...

is one test for each device and world size. The bodies are the same, so what they check of the logic is checked where
there is no GPU as well. Processes with GPUs, one for each rank, are started for each test and end with it: nothing that
a test does to a device outlives it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from tests.support.pool import POOL, RankError, as_test

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
PROCESS_ERRORS = (processes.ProcessRaisedException, processes.ProcessExitedException)
LIMIT_SECONDS = 120.0
"""How long one test may take."""


def places(*worlds: int) -> list[Any]:
    """Return the values of ("world", "device"): each world on CPUs, and on GPUs where there are enough of them."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    values = []
    for world in worlds:
        few = pytest.mark.skipif(found < world, reason=f"needs {world} CUDA devices, there are {found}")
        values += [(world, "cpu"), pytest.param(world, "cuda", marks=[pytest.mark.gpu, few])]
    return values


def on_devices(*worlds: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the function of ``(rank, world, device, ...)`` becomes a test for each of ``places``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(world: int, device: str, **kwargs: Any) -> None:
            if device == "cpu":
                POOL.run(world, function, {**kwargs, "device": device}, LIMIT_SECONDS)
            else:
                run_processes(world, function, {**kwargs, "device": device})

        test = as_test(function, run, (RankError, TimeoutError, *PROCESS_ERRORS))
        return pytest.mark.parametrize(("world", "device"), places(*worlds))(test)

    return decorate


def run_processes(world: int, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Run ``function(rank, world, **kwargs)`` in as many new processes, whose group suits ``kwargs["device"]``.

    Raises one of ``PROCESS_ERRORS`` with the traceback of a rank that failed, or TimeoutError.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (world, store.port, function.__module__, function.__qualname__, dict(kwargs))
    context = processes.spawn(_rank, arguments, nprocs=world, join=False)
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{function.__qualname__} took longer than {LIMIT_SECONDS:.0f} s on {world} processes"
                )
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _rank(rank: int, world: int, port: int, module: str, name: str, kwargs: dict[str, Any]) -> None:
    device, limit = torch.device(kwargs["device"], rank), timedelta(seconds=LIMIT_SECONDS)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(BACKENDS[device.type], store=store, rank=rank, world_size=world, timeout=limit)
    try:
        torch.manual_seed(0)
        getattr(importlib.import_module(module), name).rank_function(rank, world, **kwargs)
    finally:
        dist.destroy_process_group()
