"""Which streams a device has, and which backend a process group counts as.

By default torch answers both. A simulation, or a device that torch does not know, installs its own answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Platform", "device_of", "platform", "simulated", "using"]


def device_of(kind: str) -> torch.device:
    """Return this process's device of a kind such as "cuda"."""
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _streams_of_torch(device: torch.device) -> Any:
    return None if device.type == "cpu" else torch.get_device_module(device)


def _backend_of_torch(group: dist.ProcessGroup, device_type: str) -> str:
    config = dist.get_backend_config(group)  # such as "gloo" or "cpu:gloo,cuda:nccl"
    by_device = dict(part.split(":") for part in config.split(",") if ":" in part)
    return by_device.get(device_type, config)


@dataclass(frozen=True)
class Platform:
    """What devices and process groups count as, by default as torch describes them.

    ``streams(device)`` returns the module that makes the device's streams and events (``torch.cuda`` for a GPU), or
    None if it has no streams. ``backend(group, device_type)`` returns the name of the backend that the group counts as.
    With "gloo", the host waits for collectives, which run concurrently. With any other backend, collectives run on
    streams, in order, and several gathers are one launch. Only "nccl" uses what NCCL alone has. Memory of the host is
    that of the device ``host``.
    """

    streams: Callable[[torch.device], Any] = _streams_of_torch
    backend: Callable[[dist.ProcessGroup, str], str] = _backend_of_torch
    host: str = "cpu"


def simulated(name: str, module: Any = None, host: str = "cpu") -> Platform:
    """Return a platform whose process groups count as ``name`` and whose devices have the streams of ``module``."""
    return Platform(lambda device: module, lambda group, device_type: name, host)


_platforms = [Platform()]


def platform() -> Platform:
    """Return the platform of the innermost ``using`` block, or torch's own."""
    return _platforms[-1]


@contextmanager
def using(new: Platform) -> Iterator[None]:
    """Let ``new`` answer for devices and process groups inside a ``with`` block. Models keep what they were made with.

    Example:
        ```python
        with using(simulated("nccl", module_with_streams)):
            model = fsdp2.fully_shard(model, mesh=mesh)
        ```
    """
    _platforms.append(new)
    try:
        yield
    finally:
        _platforms.pop()
