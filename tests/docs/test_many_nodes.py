"""docs/many_nodes.md: its forecasts run, and a job of two hosts (examples/train.sbatch) survives a killed rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ecosystem.launching import SETTINGS
from tests.support import ROOT, api
from tests.support.docs import snippets
from tests.support.processes import loopback

pytestmark = api.fsdp2_only

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


@pytest.mark.slow
def test_forecasts_of_three_meshes(capsys):
    """The page's program, of a model with one layer, for one micro-batch and the slower network."""
    (block,) = snippets("many_nodes.md")
    for large, small in (("layers=32", "layers=1"), ("32000, 4", "32000, 1"), ("(400, 25)", "(25,)")):
        assert block.count(large) == 1
        block = block.replace(large, small)
    exec(compile(block, "many_nodes.md", "exec"), {"__name__": "page"})
    assert "replicate 8 x shard 8" in capsys.readouterr().out


@pytest.mark.slow
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
    job = {"SLURM_JOB_NODELIST": "localhost,other", "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2"}
    environment = {**os.environ, **SETTINGS, **job, "RANKS_PER_NODE": "1", "GLOO_SOCKET_IFNAME": loopback()}
    environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    command = ["bash", str(ROOT / "examples" / "train.sbatch"), "loop.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "killed").exists()
    assert [Path(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert (tmp_path / "checkpoints" / "step-000008").is_dir()
    assert "step 3:" not in done.stdout.split("step 5:")[1], "step 3 was trained again"
