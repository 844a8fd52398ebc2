"""The wheel holds the whole package and nothing else, and a model trains with what it installs."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.processes import loopback

PROGRAM = """
import importlib, pkgutil, sys
import torch, torch.distributed as dist
import fsdp2

assert fsdp2.__file__.startswith(sys.argv[1]), fsdp2.__file__
for module in pkgutil.walk_packages(fsdp2.__path__, "fsdp2."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = fsdp2.fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
assert model.weight.grad is not None
"""


@pytest.mark.slow
def test_the_wheel_trains(tmp_path: Path) -> None:
    """It is built from a copy, as a build leaves files behind, and its files come before those of the repository."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    package = [name for name in files if name.startswith("fsdp2/")]
    for name in (*package, "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    call(tmp_path, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "source")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = archive.namelist()
    assert {name for name in held if ".dist-info/" not in name} == set(package)
    assert any(name.endswith("licenses/LICENSE") for name in held)
    call(tmp_path, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", "installed", str(wheel))
    call(tmp_path, "-c", PROGRAM, str(tmp_path / "installed"), PYTHONPATH=str(tmp_path / "installed"))


def call(folder: Path, *arguments: str, **environment: str) -> None:
    """Run Python in a folder; an error shows all it printed."""
    variables = {**os.environ, "GLOO_SOCKET_IFNAME": loopback(), **environment}
    ended = subprocess.run([sys.executable, *arguments], cwd=folder, env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
