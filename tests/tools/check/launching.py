"""The command on several processes, as a launcher starts it."""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support import ROOT
from tests.support.processes import NO_GPU, loopback, start

LIMIT_SECONDS = 400.0
PLANTED = Path(__file__).with_name("planted.py")


@dataclass(frozen=True)
class Checked:
    """What came of it: exit statuses by rank, what rank 0 printed, and its report."""

    statuses: list[int]
    output: str
    report: dict[str, Any]
    markdown: str

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdicts by the names of checks."""
        return {row["name"]: row["verdict"] for row in self.report["right"]}

    def row(self, name: str) -> dict[str, Any]:
        """Return the row of a check."""
        return next(row for row in self.report["right"] if row["name"] == name)


def check(
    folder: Path, world: int, *arguments: str, each: Callable[[int], Mapping[str, str]] = lambda rank: NO_GPU
) -> Checked:
    """Run the command on so many processes; with one, without a launcher. ``each`` has the variables of a rank."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": loopback()}
    command = [sys.executable, "-m", "fsdp2", "check", *arguments]
    processes = []
    for rank, own in enumerate(_environments(world)):
        own |= each(rank)
        with (folder / f"output-{rank}").open("w") as file:
            processes.append(
                subprocess.Popen(command, cwd=folder, env=environment | own, stdout=file, stderr=subprocess.STDOUT)
            )
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        statuses = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # it ends its worker
                process.wait()
    return _checked(folder, statuses)


def check_planted(folder: Path, world: int, *arguments: str, defects: str) -> Checked:
    """Run the command with ``defects`` (see ``planted.py``) on so many processes, which have imported torch already.

    Their workers are spawned as usual.
    """
    processes = [
        start(_planted, str(folder), own, [defects, *arguments], log=str(folder / f"output-{rank}"), daemon=False)
        for rank, own in enumerate(_environments(world))
    ]
    deadline = time.monotonic() + LIMIT_SECONDS
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.terminate()  # it ends its worker
            process.join()
    return _checked(folder, statuses)


def _planted(folder: str, environment: dict[str, str], arguments: Sequence[str]) -> None:
    """Be ``python planted.py``: what a worker imports again is the file of the main module, with its arguments."""
    os.chdir(folder)
    os.environ.update(environment)
    sys.argv[:] = [str(PLANTED), *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(PLANTED)
    runpy.run_path(str(PLANTED), run_name="__main__")


def _environments(world: int) -> list[dict[str, str]]:
    """Return what a launcher tells each rank."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    every = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    if world == 1:
        return [{**every, "LOCAL_RANK": "0"}]
    place = lambda rank: {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    return [every | place(rank) for rank in range(world)]


def _checked(folder: Path, statuses: list[Any]) -> Checked:
    output = (folder / "output-0").read_text()
    report, markdown = folder / "fsdp2-check.json", folder / "fsdp2-check.md"
    assert report.exists(), output
    return Checked(statuses, output, json.loads(report.read_text()), markdown.read_text())
