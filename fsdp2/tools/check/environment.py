"""Versions, devices, their connections, free memory, and known problems."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import socket
import subprocess
from typing import Any

import torch

from fsdp2.tools.check.place import Outcome, Place

__all__ = ["environment", "known_problems"]

LIBRARIES = (
    "accelerate",
    "axolotl",
    "deepspeed",
    "lightning",
    "peft",
    "pytorch-optimizer",
    "torchao",
    "torchtitan",
    "torchtune",
    "transformers",
    "trl",
    "verl",
)
"""Libraries that call ``fully_shard``, or that are often installed with them."""
OLDEST, NEWEST = (2, 11), (2, 15)
GIB = 1 << 30


def environment(place: Place) -> Outcome:
    """machines, devices and versions"""
    facts: dict[str, str] = {"host": socket.gethostname(), "device": str(place.device)}
    if place.cuda:
        properties, (free, total) = torch.cuda.get_device_properties(place.device), torch.cuda.mem_get_info()
        facts["device"] = f"{properties.name} ({place.device})"
        facts["free memory"] = f"{free / GIB:.1f} of {total / GIB:.1f} GiB"
        facts["peer access"] = _peers(place.local_rank)
    else:
        facts["threads"] = str(torch.get_num_threads())
        facts["free memory"] = _host_memory()
    figures: dict[str, Any] = {"rank": facts}
    if place.rank == 0:
        figures |= {"job": _job(place), "links": _links() if place.cuda else ""}
    return Outcome("seen", figures=figures)


def _job(place: Place) -> dict[str, str]:
    found = {
        "fsdp2": _version("fsdp2") or "not installed, run from its folder",
        "torch": torch.__version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "ranks": f"{place.world} on {place.hosts} host{'s' if place.hosts > 1 else ''}",
        "backend": "nccl" if place.cuda else "gloo",
    }
    if place.cuda:
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    libraries = [f"{name} {version}" for name in LIBRARIES if (version := _version(name))]
    found["libraries"] = ", ".join(libraries) or "none of those that call fully_shard"
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _peers(device: int) -> str:
    others = [number for number in range(torch.cuda.device_count()) if number != device]
    reached = [number for number in others if torch.cuda.can_device_access_peer(device, number)]
    return f"to {len(reached)} of {len(others)} other GPUs" if others else "no other GPU here"


def _links() -> str:
    """Return the table of connections between the GPUs of this host, without colors."""
    return re.sub(r"\x1b\[[\d;]*m", "", _output("nvidia-smi", "topo", "-m")).strip()


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "not known: there is no nvidia-smi"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not known: {error}"
    return done.stdout if done.returncode == 0 else f"not known: {done.stderr.strip()[:200]}"


def _host_memory() -> str:
    try:
        with open("/proc/meminfo") as file:
            values = dict(line.split(":", 1) for line in file)
    except OSError:
        return "not known"
    free, total = (int(values[name].split()[0]) * 1024 / GIB for name in ("MemAvailable", "MemTotal"))
    return f"{free:.1f} of {total:.1f} GiB of the host"


def known_problems(torch_version: str, *, cuda: bool, gpus: int, ranks_here: int) -> list[str]:
    """Return the known problems of this combination."""
    found = []
    numbers = tuple(int(number) for number in re.findall(r"\d+", torch_version)[:2])
    if not OLDEST <= numbers <= NEWEST:
        found.append(
            f"torch {torch_version}: fsdp2 was tested with torch {'.'.join(map(str, OLDEST))} to "
            f"{'.'.join(map(str, NEWEST))} only"
        )
    if cuda:
        found.append(
            "fsdp2 has run on single GPUs so far, also with ranks that share one; between several GPUs its code has "
            "been tested on simulated devices only. Please send this report, whatever it says"
        )
    elif gpus and ranks_here > gpus:
        found.append(
            f"{ranks_here} ranks run on this host, which has {gpus} GPU{'s' * (gpus > 1)}; NCCL takes one rank for "
            f"each GPU, so CPUs are checked. To check GPUs, run with --nproc-per-node {gpus}"
        )
    elif not gpus:
        found.append("no GPU was found, so CPUs and gloo are checked; timings of a CPU say nothing about GPUs")
    if importlib.util.find_spec("numpy") is None:
        found.append(
            "numpy is not installed; torch needs it to save checkpoints and to send Python objects: pip install numpy"
        )
    return found
