"""The programs of docs/weight_sync.md run as they are printed, and its snippets do what the text says."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import torch

import fsdp2
from tests.docs.test_pages import DOCS, blocks, script
from tests.docs.test_prints import assert_alike
from tests.ecosystem.launching import SETTINGS
from tests.support import api
from tests.support.models import Transformer
from tests.support.parity import mesh_of
from tests.support.pool import on_ranks
from tests.support.processes import free_port, start

pytestmark = api.fsdp2_only
PAGE = "weight_sync.md"
SHOWN = re.compile(r"^<!-- shown: (\S+) -->\n```\n(.*?)^```$", re.M | re.S)


def run(folder: Path, name: str, environment: dict[str, str]) -> None:
    """Be ``python NAME`` in a folder, or one rank of ``torchrun NAME``, in a process that has imported torch."""
    os.chdir(folder)
    os.environ.update(environment)
    runpy.run_path(name, run_name="__main__")


def test_a_trainer_and_an_engine(tmp_path):
    """Two programs that know of each other only an address: they print what the page shows, and the engine ends with
    the trainer's weights bit for bit."""
    address = f"127.0.0.1:{free_port()}"
    for name in ("engine.py", "train.py"):
        text = script(PAGE, name)
        assert text.count("127.0.0.1:29600") == 1
        (tmp_path / name).write_text(text.replace("127.0.0.1:29600", address))
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    programs = [("engine.py", SETTINGS), *(("train.py", {**SETTINGS, **rank}) for rank in ranks)]
    logs = [tmp_path / f"log-{number}" for number in range(3)]
    started = [
        start(run, tmp_path, name, environment, log=str(log)) for (name, environment), log in zip(programs, logs)
    ]
    for process in started:
        process.join(120)
        process.kill()
    printed = [log.read_text() for log in logs]
    assert [process.exitcode for process in started] == [0, 0, 0], printed
    assert not printed[2]
    shown = dict(SHOWN.findall((DOCS / PAGE).read_text()))
    for got, expected in ((printed[1], shown["train.py"]), (printed[0], shown["engine.py"])):
        assert len(got.splitlines()) == len(expected.splitlines()) > 0
        for line, wanted in zip(got.splitlines(), expected.splitlines()):
            bytes_of_changes = re.compile(r"(changed: )\d+")
            assert_alike(bytes_of_changes.sub(r"\1#", line), bytes_of_changes.sub(r"\1#", wanted), measured=True)
    trained, received = torch.load(tmp_path / "trainer.pt"), torch.load(tmp_path / "engine-4.pt")
    names = {"0.weight": "up_proj.weight", "0.bias": "up_proj.bias", "2.weight": "down_proj.weight"}
    assert len(received) == len(trained) == 4
    for name, other in names.items():
        assert torch.equal(trained[name].view(torch.int16), received[other].view(torch.int16)), name


@on_ranks(1, 2)
def test_snippets(rank, world):
    """One after the other, in one namespace."""
    model = Transformer()
    for unit in (*model.blocks, model):
        fsdp2.fully_shard(unit, mesh=mesh_of(world))
    names = {"model": model}
    snippets = blocks(DOCS / PAGE)
    assert len(snippets) == 4
    received = {}
    for number, snippet in enumerate(snippets):
        if number == 2:
            names["engine"] = received = dict(names["engine"])
        exec(compile(snippet, PAGE, "exec"), names)
        if number < 2:
            expected = dict(fsdp2.iter_full_params(model, dtype=torch.bfloat16))
            engine = names["engine"]
            assert engine.keys() == (expected.keys() if rank == 0 else set())
            assert all(torch.equal(engine[name], expected[name]) for name in engine)
    assert rank or received.keys() == names["receiver"].tensors.keys()
    buckets: list[fsdp2.WeightBucket] = []
    names["sender"].send(buckets.append)
    dtypes = {name: dtype for bucket in buckets for name, dtype in zip(bucket.names, bucket.dtypes)}
    assert rank or {dtype for name, dtype in dtypes.items() if "norm" in name} == {torch.float32}
    assert rank or {dtype for name, dtype in dtypes.items() if "norm" not in name} == {torch.bfloat16}
    assert rank or any(name.startswith("model.layers.0.") for name in dtypes)
