"""Running a test on every kind of device there is: on gloo processes of the pool, and on GPUs with NCCL.

    @on_devices(1, 2)
    def test_sum(rank, world, device):
        ...

is one test for each device and world size. The bodies are the same, so what they check of the logic is checked where
there is no GPU as well. Processes with GPUs, one for each rank, are started for each test and end with it: nothing that
a test does to a device outlives it.

One GPU is enough for any number of ranks. NCCL takes no two ranks of one host on a GPU, but it believes what
``NCCL_HOSTID`` says: ranks that share a GPU name different hosts, and talk over the loopback interface. So all that
NCCL does is tested but its ways between GPUs; a collective is slow, as the kernels of ranks take turns. NCCL 2.28 on an
H100 takes ranks that share it. Where another NCCL refuses them, the test is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.support.pool import POOL, Pool, RankError, as_test
from tests.support.processes import loopback

BACKENDS = "cpu:gloo,cuda:nccl"
LIMIT_SECONDS = 240.0
"""How long one test may take."""


def visible() -> list[str]:
    """Return the GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` names them."""
    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]


def places(*worlds: int) -> list[Any]:
    """Return the values of ("world", "device"): each world on CPUs, and on GPUs if there is one."""
    missing = pytest.mark.skipif(not visible(), reason="needs a CUDA device")
    values: list[Any] = []
    for world in worlds:
        values += [(world, "cpu"), pytest.param(world, "cuda", marks=[pytest.mark.gpu, missing])]
    return values


def on_devices(*worlds: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the function of ``(rank, world, device, ...)`` becomes a test for each of ``places``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(world: int, device: str, **kwargs: Any) -> None:
            kwargs["device"] = device
            if device == "cpu":
                POOL.run(world, function, kwargs, LIMIT_SECONDS)
            else:
                on_gpus(world, function, kwargs)

        return pytest.mark.parametrize(("world", "device"), places(*worlds))(as_test(function, run))

    return decorate


def on_gpus(world: int, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Run ``function(rank, world, **kwargs)`` on as many new processes with GPUs, and return their values.

    Raises ``RankError`` with the traceback or the stacks of every rank.
    """
    pool = Pool(backend=BACKENDS, environment=environment)
    try:
        return pool.run(world, function, kwargs, LIMIT_SECONDS)
    except RankError as error:
        if len(visible()) < world and "Duplicate GPU detected" in str(error):
            pytest.skip(f"needs {world} CUDA devices: this NCCL takes no two ranks on one")
        raise
    finally:
        pool.close()


def environment(rank: int) -> dict[str, str]:
    """Return the variables of a rank: its GPU, the only one that it sees, and a host, which has each GPU once."""
    gpus = visible()
    host, place = divmod(rank, len(gpus))
    return {
        "CUDA_VISIBLE_DEVICES": gpus[place],
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"host{host}",
        "NCCL_SOCKET_IFNAME": loopback(),
        "NCCL_IB_DISABLE": "1",
    }
