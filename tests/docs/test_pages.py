"""Every Python block of the documentation runs as it is printed, and every page is in the navigation."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import fsdp2
from tests.ecosystem.launching import SETTINGS
from tests.support import ROOT, api
from tests.support.packages import missing, needs
from tests.support.pool import on_ranks
from tests.support.processes import loopback

pytestmark = api.fsdp2_only

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
OPTIONAL = re.compile(r"^<!-- optional: (\S+) -->\n(```python\n.*?^```$)", re.M | re.S)
LOOP = re.compile(r"^for step in range\(\d\d\):$", re.M)
"""A loop whose many steps show a reader that the loss falls; the tests run a few."""
SCRIPT = re.compile(r"^<!-- script: (\S+) -->\n```\w*\n(.*?)^```$", re.M | re.S)
ELSEWHERE = {
    "forecast.md",
    "full_parameters.md",
    "loading.md",
    "many_nodes.md",
    "migration.md",
    "state_dicts.md",
    "tutorials/finetune.md",
    "tutorials/loop.md",
    "weight_sync.md",
}
"""Pages whose blocks have tests of their own, here or beside this file."""
DOCS = ROOT / "docs"


def blocks(path: Path) -> list[str]:
    """Return the Python blocks of a page, except programs that run on their own, and what needs a missing package."""
    text = SCRIPT.sub("", path.read_text())
    return BLOCK.findall(OPTIONAL.sub(lambda found: "" if missing(found[1]) else found[2], text))


def script(page: str, name: str) -> str:
    """Return the program that a page shows under this name."""
    return dict(SCRIPT.findall((DOCS / page).read_text()))[name]


def packages(page: str) -> list[str]:
    """Return the packages that a page needs, as it says itself."""
    mark = re.search(r"<!-- needs: (.+) -->", (DOCS / page).read_text())
    return mark[1].split(", ") if mark else []


def pages(ranks: int) -> list[Any]:
    """Return the pages whose code runs on so many ranks, as pytest's parameters."""
    found: list[Any] = []
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).as_posix()
        mark = re.search(r"<!-- ranks: (\d+) -->", path.read_text())
        if name not in ELSEWHERE and blocks(path) and (int(mark[1]) if mark else 2) == ranks:
            found.append(pytest.param(name, marks=needs(*names) if (names := packages(name)) else ()))
    return found


def torchrun(*program: str, folder: Path, ranks: int, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a program on its own processes as a reader starts it, on this machine's CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program]
    environment = {**os.environ, **SETTINGS, "GLOO_SOCKET_IFNAME": loopback(), **settings}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def run(path: Path, folder: Path, then: Callable[[dict[str, Any]], None] = lambda names: None) -> None:
    """Run a page's blocks in order, in one namespace, in a folder that all ranks share; ``then`` gets the names."""
    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, str(ROOT / "examples"))  # where pages say that they are run
    names = {"__name__": "page"}
    try:
        # The ranks go on with other tests in the process group that a page's program ends.
        with mock.patch.object(torch.distributed, "destroy_process_group", lambda *unused: None):
            for block in blocks(path):
                exec(compile(LOOP.sub("for step in range(3):", block), path.name, "exec"), names)
        then(names)
    finally:
        os.chdir(before)
        sys.path.remove(str(ROOT / "examples"))
        names.clear()  # sharded classes are kept for the next call, and with them the globals of their methods


@on_ranks(2)
@pytest.mark.parametrize("page", pages(2))
def test_page_runs_on_two_ranks(rank, world, page, tmp_path):
    """As a reader who pastes all of it runs it."""
    run(DOCS / page, tmp_path)


@on_ranks(4)
@pytest.mark.parametrize("page", pages(4))
def test_page_runs_on_four_ranks(rank, world, page, tmp_path):
    """The same for meshes of two dimensions."""
    run(DOCS / page, tmp_path)


@pytest.mark.slow
def test_forecasts_run(tmp_path, monkeypatch):
    """In a process that is part of no job, as they are made; of a model with fewer layers."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks(DOCS / "forecast.md"):
        exec(compile(block.replace("layers=32", "layers=2"), "forecast.md", "exec"), names)
    assert "layers=32" in blocks(DOCS / "forecast.md")[0]
    assert "blocks.1" in (tmp_path / "step.html").read_text()


@on_ranks(2)
def test_the_complete_loop_resumes_bit_for_bit(rank, world, tmp_path):
    """A run of six steps ends with the weights that two runs of three end with; the newest two checkpoints of the page
    and the best are kept. The epoch ends in the second run, and the schedule and dropout go on."""
    run(DOCS / "tutorials" / "loop.md", tmp_path, lambda names: compare_runs(names, tmp_path))


def compare_runs(names: dict[str, Any], folder: Path) -> None:
    """Compare a third run of the loop, with one interruption, with one that has none."""
    names["train"](folder / "parts", 3, save_every=3)
    ended = names["train"](folder / "parts", 6, save_every=3)
    whole = names["train"](folder / "whole", 6, save_every=6)
    for one, other in zip(ended.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    best = torch.load(folder / "checkpoints" / "step-000008" / "loop.pt")["best"]
    assert kept == sorted({"step-000006", "step-000008", best})


@needs("tensorboard")
@on_ranks(2)
def test_the_loop_writes_to_tensorboard(rank, world, tmp_path):
    """The block that the page has for those who installed it. Everywhere else, the loop is tested without it."""
    run(DOCS / "tutorials" / "loop.md", tmp_path)
    assert len(list((tmp_path / "runs" / "first").glob("events.*"))) == 1


TRAINER_ON_A_CPU = """
import runpy
from accelerate import DistributedType, PartialState
from transformers import Trainer, TrainingArguments

original = Trainer.__init__

def init(self, model, args, **others):
    assert args.device.type == "cpu"  # accelerate offers FSDP on accelerators only, until it is told otherwise
    PartialState().distributed_type = DistributedType.MULTI_GPU
    original(self, model, args, **others)

Trainer.__init__ = init
modules = runpy.run_path("trainer.py", run_name="__main__")["trainer"].model_wrapped.modules()
import fsdp2
assert sum(isinstance(module, fsdp2.FSDPModule) for module in modules) >= 3
"""


@pytest.mark.slow
@needs(*packages("tutorials/finetune.md"))
def test_the_trainer_of_the_page_about_fine_tuning(tmp_path):
    """The program is unchanged; ``python -m fsdp2`` shards the layers and the model, and adapters alone
    are saved."""
    (tmp_path / "trainer.py").write_text(script("tutorials/finetune.md", "trainer.py"))
    (tmp_path / "on_a_cpu.py").write_text(TRAINER_ON_A_CPU)
    done = torchrun("-m", "fsdp2", "on_a_cpu.py", folder=tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "trained" / "adapter_model.safetensors").stat().st_size < 20_000


SMALL = {
    "hidden_size=4096": "hidden_size=64",
    "intermediate_size=11008": "intermediate_size=128",
    "num_hidden_layers=32": "num_hidden_layers=2",
    "num_attention_heads=32": "num_attention_heads=4",
    "ROWS, LENGTH, STEPS = 4, 4096, 1000": "ROWS, LENGTH, STEPS = 2, 16, 10",
    '    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n': "",
    "tokens.cuda()": "tokens",
}
"""What makes the program of 7 billion parameters one for two processes of a CPU."""
PRETRAINED = "import seven\nseven.AutoModelForCausalLM.from_config(seven.CONFIG).save_pretrained(seven.WEIGHTS)\n"


@pytest.mark.slow
@needs(*packages("tutorials/seven_billion.md"))
def test_the_program_of_seven_billion_parameters(tmp_path):
    """Of a small model: it forecasts, loads, trains and saves. That it has not run on GPUs, the page says."""
    page = "tutorials/seven_billion.md"
    program = script(page, "seven.py")
    for large, small in SMALL.items():
        assert program.count(large) == 1, large
        program = program.replace(large, small)
    (tmp_path / "seven.py").write_text(program)
    (tmp_path / "plan.py").write_text(script(page, "plan.py"))
    command = [sys.executable, "-m", "fsdp2", "forecast", "plan:build", "--mesh", "shard=8", "--compare", "rows=1,4"]
    for arguments in (command, [sys.executable, "-c", PRETRAINED]):
        environment = {**os.environ, **SETTINGS}
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    done = torchrun("seven.py", folder=tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("step 10: loss 10.")
    assert list((tmp_path / "exported").glob("*.safetensors")) and (tmp_path / "trained").is_dir()


@on_ranks(2)
def test_readme_runs(rank, world, tmp_path):
    """The twenty lines of the README, a few steps of them, but for the end of the process group, which belongs to the
    tests."""
    text = "\n".join(blocks(ROOT / "README.md")).replace("destroy_process_group()", "")
    text, loops = LOOP.subn("for step in range(3):", text)
    assert loops == 1
    names = {"__name__": "page"}
    exec(compile(text, "README.md", "exec"), names)
    names.clear()


@pytest.mark.slow
def test_the_forecast_of_the_readme(tmp_path):
    """``plan.py``, as it is printed, and the lines that its forecast begins with."""
    text = (ROOT / "README.md").read_text()
    (tmp_path / "plan.py").write_text(dict(SCRIPT.findall(text))["plan.py"])
    command = [sys.executable, "-m", "fsdp2", "forecast", "plan:build", "--mesh", "shard=64"]
    environment = {**os.environ, **SETTINGS}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = text.split("It begins with\n\n```\n")[1].split("```")[0]
    assert done.stdout.startswith(shown)


def test_every_page_is_in_the_navigation():
    """A page that nobody can find is not documentation."""
    listed = set(re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().split("nav:")[1]))
    assert listed == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_reference_names_everything_public():
    """The page of the API has every public name, once."""
    text = (DOCS / "reference.md").read_text()
    named = re.findall(r"^::: fsdp2\.(?:fully_shard\.)?(\w+)$", text, re.M) + re.findall(r"^### `(\w+)`$", text, re.M)
    assert sorted(named) == sorted(fsdp2.__all__)


def test_links_lead_somewhere():
    """Relative links of pages and of the README lead to files that exist."""
    broken = []
    for path in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "DESIGN.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            if not target.startswith("http") and not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert not broken


def test_code_fits():
    """A laptop's window shows 88 columns of code beside the two menus."""
    for path in (*DOCS.rglob("*.md"), ROOT / "README.md"):
        wide = [line for block in BLOCK.findall(path.read_text()) for line in block.splitlines() if len(line) > 88]
        assert not wide, f"{path.name}: {wide}"


def test_blocks_parse():
    """Also those that are executed elsewhere."""
    for path in DOCS.rglob("*.md"):
        for block in blocks(path):
            ast.parse(block)
