"""The command on several processes, as a launcher starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.processes import loopback

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


def check(folder: Path, world: int, *arguments: str, defects: str = "", cuda: bool = False) -> Checked:
    """Run the command on so many processes; with one, without a launcher."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": loopback()}
    environment |= {} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *([str(PLANTED), defects] if defects else ["-m", "fsdp2", "check"]), *arguments]
    processes = []
    for rank in range(world):
        own = environment if world == 1 else {**environment, "RANK": str(rank), "WORLD_SIZE": str(world)}
        own = {**own, "LOCAL_RANK": str(rank)}
        with (folder / f"output-{rank}").open("w") as file:
            processes.append(subprocess.Popen(command, cwd=folder, env=own, stdout=file, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        statuses = [process.wait(max(deadline - time.monotonic(), 0.1)) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # it ends its worker
                process.wait()
    output = (folder / "output-0").read_text()
    report, markdown = folder / "fsdp2-check.json", folder / "fsdp2-check.md"
    assert report.exists(), output
    return Checked(statuses, output, json.loads(report.read_text()), markdown.read_text())
