"""``python -m fsdp2``: programs that import torch's ``fully_shard`` run with fsdp2's, unedited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp2.__main__ import main
from tests.support import ROOT, api
from tests.support.processes import ended, loopback

pytestmark = api.fsdp2_only

PROGRAM = """
import sys
from pathlib import Path
import helper
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

if __name__ == "__main__":
    model = fully_shard(nn.Linear(2, 2))
    path = Path(__file__)
    assert not any(name.startswith("fsdp2.tools.check") for name in sys.modules)  # imported where it is asked for
    print(type(model).__mro__[1].__module__, isinstance(model, FSDPModule), path.name, helper.HERE, *sys.argv[1:])
    path.with_name(f"done{model.weight.device_mesh.get_rank()}").touch()
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program and a module that it imports from beside it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helper.py").write_text("HERE = 'helped'")
    return tmp_path


def run(folder: Path, *command: str, where: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": where, "GLOO_SOCKET_IFNAME": loopback(), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # without torchrun
    full = [sys.executable, "-m", *command]
    return subprocess.run(full, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_a_script_under_torchrun(folder):
    """Each rank's process is the script: its name, arguments, folder and exit status."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fsdp2")
    done = run(folder, *torchrun, str(folder / "program.py"), "0", "--help", "-m", where=str(ROOT))
    assert "fsdp2.module True program.py helped 0 --help -m" in done.stdout, done.stdout + done.stderr
    assert all((folder / f"done{rank}").exists() for rank in (0, 1))


def test_a_module(folder):
    """A module, which is found as ``python -m`` finds it, and what it exits with."""
    done = run(folder, "fsdp2", "-m", "program", "3", "-m", where=f"{ROOT}{os.pathsep}{folder}")
    assert done.stdout.split() == ["fsdp2.module", "True", "program.py", "helped", "3", "-m"], done.stderr
    assert done.returncode == 3
    assert "python -m fsdp2: 0 units of fsdp2 ran, of 1 that were made" in done.stderr


SHOWS = "import sys\nprint([path for path in sys.path if {folder!r} in path])"


@pytest.mark.parametrize("kind", ["link", "folder", "safe path"])
def test_modules_are_found_as_with_plain_python(tmp_path, kind):
    """Beside a script, and not beside a link to it; in a folder that is a program, and not beside that. With ``-P`` or
    PYTHONSAFEPATH no folder had been put first, so an entry of the user's was lost."""
    if kind == "safe path" and sys.version_info < (3, 11):
        pytest.skip("Python has it since 3.11")
    for name in ("real", "links", "mine"):
        (tmp_path / name).mkdir()
    program = tmp_path / "real" / ("__main__.py" if kind == "folder" else "program.py")
    program.write_text(SHOWS.format(folder=str(tmp_path)))
    given = tmp_path / "links" / "program.py" if kind == "link" else program.parent if kind == "folder" else program
    if kind == "link":
        given.symlink_to(program)
    safe = {"PYTHONSAFEPATH": "1"} if kind == "safe path" else {}
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'mine'}{os.pathsep}{ROOT}", **safe}
    written = [
        subprocess.run(
            [sys.executable, *how, str(given)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for how in ([], ["-m", "fsdp2"])
    ]
    assert written[1] == written[0] and str(tmp_path / "mine") in written[0]


@pytest.mark.parametrize("given", [["--", "--lr", "1"], ["--lr", "--", "1", "--"], ["--help"], ["-m", "--"]])
def test_arguments_are_those_of_plain_python(tmp_path, given):
    """argparse took the first "--" behind the program away. At its end a program learns that fsdp2 did nothing: a
    Trainer on a CPU trained with DDP, and nobody saw it."""
    (tmp_path / "shows.py").write_text("import sys\nprint(sys.argv[1:])")
    arguments = ["fsdp2", str(tmp_path / "shows.py"), *given]
    as_module = "runpy.run_module('fsdp2', run_name='__main__')"
    status, written = ended(f"import runpy, sys\nsys.argv = {arguments}\n{as_module}")
    first, *others = written.splitlines()
    assert first == str(given) and status == 0
    assert any("fsdp2 did nothing: this process never called fully_shard" in line for line in others)
    assert "fsdp_version 2" in written and max(map(len, others)) <= 100 + len("python -m fsdp2: ")


@pytest.mark.slow
def test_units_that_ran_are_counted(tmp_path):
    """Units that are freed count; every other rank is silent, and so is a program that fails before it shards."""
    (tmp_path / "trains.py").write_text(
        "import torch\nfrom torch import nn\nfrom torch.distributed.fsdp import fully_shard\n"
        "def train():\n    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2)))\n"
        "    model(torch.ones(1, 2)).sum().backward()\ntrain()\n"
    )
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fsdp2")
    done = run(tmp_path, *torchrun, str(tmp_path / "trains.py"), where=str(ROOT))
    assert done.stderr.count("python -m fsdp2: 2 units of fsdp2 ran\n") == 1, done.stderr
    (tmp_path / "fails.py").write_text("import sys\nsys.exit('no data')")
    done = run(tmp_path, "fsdp2", "fails.py", where=str(ROOT))
    assert done.stderr == "no data\n" and done.returncode == 1


def test_help_and_what_does_not_exist(capsys):
    """The help says what it is for and how it is called; a file that is not there is named."""
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and "torchrun --nproc-per-node 8 -m fsdp2 train.py" in text
    with pytest.raises(SystemExit) as left:
        main(["no/such/file.py"])
    said = "'no/such/file.py': no such file or command; the commands are forecast and check, and -m runs a module"
    assert left.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["-m", "no_such_package.train"])
    assert left.value.code == 2 and "No module named 'no_such_package.train'" in capsys.readouterr().err
