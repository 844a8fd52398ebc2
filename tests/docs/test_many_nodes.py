"""docs/many_nodes.md: its forecasts run, and a job of two hosts (examples/train.sbatch) survives a killed rank.
docs/replicas.md: one of two replicas (examples/train_fault_tolerant.py) survives the other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ecosystem.launching import SETTINGS
from tests.support import ROOT, api
from tests.support.docs import snippets
from tests.support.packages import needs
from tests.support.parity import losses_of_one_process
from tests.support.processes import loopback

pytestmark = [api.fsdp2_only, pytest.mark.slow]

SCONTROL = '#!/bin/bash\n[ "$1 $2 $3" = "show hostnames localhost,other" ] && printf "localhost\\nother\\n"\n'
SRUN = '#!/bin/bash\nshift\n"$@" &\nfirst=$!\n"$@" || exit 1\nwait $first\n'
"""SLURM's commands, for a job of two hosts that are both this machine."""
TORCHRUN = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
KILLED_ONCE = """
import os, signal
from pathlib import Path

complete = save

def save(folder, model, optimizer, loop, keep=2):
    complete(folder, model, optimizer, loop, keep)
    if rank == 1 and loop["step"] == 4 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)

train("checkpoints", until=8)
dist.barrier()
Path(f"ended-{rank}").write_text(os.environ["WORLD_SIZE"])
dist.destroy_process_group()
"""


def test_forecasts_of_three_meshes(capsys, tmp_path, monkeypatch):
    """The page's program, of a model with one layer, for one micro-batch and the slower network. Its model is in the
    ``train.py`` of the page on forecasts."""
    (tmp_path / "train.py").write_text(snippets("forecast.md")[0])
    monkeypatch.syspath_prepend(tmp_path)
    (block,) = snippets("many_nodes.md")
    large = "LAYERS, MICRO_BATCHES, NETWORKS = 32, 4, (400, 25)"
    assert block.count(large) == 1
    block = block.replace(large, "LAYERS, MICRO_BATCHES, NETWORKS = 1, 1, (25,)")
    try:
        exec(compile(block, "many_nodes.md", "exec"), {"__name__": "page"})
    finally:
        sys.modules.pop("train", None)
    assert "replicate 8 x shard 8" in capsys.readouterr().out


def test_a_job_on_two_hosts_survives_a_killed_rank(tmp_path):
    """The script for SLURM starts one torchrun for each host. A rank that is killed at step 4 makes both start their
    ranks again, and these go on from the checkpoint and end at step 8."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("torchrun", TORCHRUN)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    page = snippets("tutorials/loop.md")
    program = "\n".join(block for block in page if "SummaryWriter" not in block)
    calls = program.index('train("checkpoints", until=4)')
    (tmp_path / "loop.py").write_text(program[:calls] + KILLED_ONCE)
    slurm = {"SLURM_JOB_NODELIST": "localhost,other", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2"}
    environment = {**os.environ, **SETTINGS, **slurm, "RANKS_PER_NODE": "1", "GLOO_SOCKET_IFNAME": loopback()}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "examples" / "train.sbatch"), "loop.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True, **pipes)
    try:
        printed, _ = job.communicate(timeout=400)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGTERM)  # each torchrun ends its ranks
            job.communicate()
    assert job.returncode == 0, printed
    assert (tmp_path / "killed").exists()
    assert [Path(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert (tmp_path / "checkpoints" / "step-000008").is_dir()
    assert "step 3:" not in printed.split("step 5:")[1], "step 3 was trained again"


DIES, RETURNS, STEPS = 4, 8, 12
"""The step in which a replica dies, the one that waits until it is back, and how many there are."""
REPLICA = f"""
import os, signal, sys

import train_fault_tolerant as example

role, manage = sys.argv.pop(1), example.manage

def watched(model, optimizer):
    manager = manage(model, optimizer)
    average, quorum, averaged = manager.allreduce, manager.start_quorum, []

    def allreduce(tensor):
        averaged.append(manager.current_step())
        if role == "dies" and averaged.count({DIES}) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return average(tensor)

    def start_quorum():
        quorum()
        while not {DIES} <= manager.current_step() < {RETURNS} and manager.num_participants() < 2:
            quorum()

    manager.allreduce, manager.start_quorum = allreduce, start_quorum
    return manager

example.manage = watched
example.main()
"""
"""A replica runs the example. One kills its ranks in the middle of a backward, when the gradients of one unit have been
averaged; before and after, steps wait until both replicas take part."""


class Replica:
    """A torchrun with two ranks."""

    def __init__(self, role: str, folder: Path, lighthouse: str) -> None:
        self.log = folder / f"{role}.log"
        (folder / "replica.py").write_text(REPLICA)
        options = ["--standalone", "--nproc-per-node", "2", "--monitor-interval", "0.1"]
        program = [str(folder / "replica.py"), role, "--steps", str(STEPS)]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
        settings = {"TORCHFT_LIGHTHOUSE": lighthouse, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": loopback()}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *program],
                cwd=folder,
                env={**os.environ, **SETTINGS, **settings},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> None:
        """Wait for the end of the processes."""
        self.process.wait(300)

    def stop(self) -> None:
        """End the processes if they run; torchrun ends its ranks, which are no children of this process."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def lines(self) -> list[tuple[int, int, float]]:
        """Return the step, the number of replicas and the loss of each step that has succeeded."""
        found = re.findall(r"step (\d+), (\d+) replicas: loss (\S+)", self.log.read_text())
        return [(int(step), int(replicas), float(loss)) for step, replicas, loss in found]


def train_alone(example: Any) -> list[float]:
    """Return the losses of a single process."""
    model = example.build()
    loss = lambda step: (model(example.batch(step)) - example.batch(step)).square().mean()
    return losses_of_one_process(model, loss, STEPS, lr=0.01)


@needs("torchft")
def test_a_replica_dies_and_comes_back(tmp_path):
    """All ranks of a replica are killed in the middle of a backward. The other repeats the step alone and goes on. The
    replica starts again, gets its state from the memory of the other, and both go on. Every loss is that of a single
    process, and the ranks of a replica never differ."""
    from torchft.coordination import LighthouseServer

    import train_fault_tolerant

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000)
    replicas = [Replica(role, tmp_path, lighthouse.address()) for role in ("stays", "dies")]
    try:
        replicas[1].end()
        replicas.append(Replica("returns", tmp_path, lighthouse.address()))
        replicas[0].end()
        replicas[2].end()
    finally:
        for replica in replicas:
            replica.stop()
        lighthouse.shutdown()
    logs = "\n".join(replica.log.read_text() for replica in replicas)
    counts = [2] * DIES + [1] * (RETURNS - DIES) + [2] * (STEPS - RETURNS)
    expected = [*zip(range(STEPS), counts, train_alone(train_fault_tolerant))]
    for replica, part in zip(replicas, (expected, expected[:DIES], expected[RETURNS:])):
        assert [line[:2] for line in replica.lines()] == [line[:2] for line in part], logs
        losses = [torch.tensor([line[2] for line in lines]) for lines in (replica.lines(), part)]
        torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    assert "ranks do not do the same" not in logs
