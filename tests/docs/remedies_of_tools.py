"""Remedies of forecasts, and of errors before there is a process group: tried in one process, without ranks.

``remedies.py`` says what a case is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import forecast, fully_shard
from fsdp2.tools.forecast import command, comparing, saving
from tests.docs.remedies import Call, layers, remedy
from tests.docs.remedies_of_setups import environment
from tests.support.fake import fake_mesh

MESH = {"shard": 8}


def build(mesh: Any, sharding: Any = None) -> nn.Module:
    """Shard layers, with a name of this module by default."""
    module = layers()
    (sharding or fully_shard)(module, mesh=mesh)
    return module


def builds_with_width(mesh: Any, width: int = 8) -> nn.Module:
    """Take an argument more."""
    module = layers(width=width)
    fully_shard(module, mesh=mesh)
    return module


def step(module: Any, optimizer: Any) -> None:
    """Train once."""
    module(torch.ones(2, module[0].in_features)).sum().backward()


@remedy("forecast: build returned", ranks=0)
def build_returns_nothing(rank: int) -> Iterator[Call]:
    """A module."""
    yield lambda: forecast(lambda mesh: None, step, mesh=MESH)
    assert forecast(build, step, mesh=MESH).peak_bytes > 0


@remedy("build takes no argument", ranks=0)
def a_setting_that_build_lacks(rank: int) -> Iterator[Call]:
    """It is added."""
    yield lambda: comparing.compare(build, step, [MESH], {"width": [8, 16]})
    cases = comparing.compare(builds_with_width, step, [MESH], {"width": [8, 16]})
    assert [case.raised for case in cases] == [None, None]


@remedy("; call it by its name in a module (fsdp2.fully_shard, or imported at the top of a file),", ranks=0)
def a_function_in_a_partial(rank: int) -> Iterator[Call]:
    """It is called by its name."""
    yield lambda: forecast(partial(build, sharding=partial(fully_shard)), step, mesh=MESH, beside="torch")
    forecast(build, step, mesh=MESH, beside="torch")
    forecast(partial(build, sharding=None), step, mesh=MESH, beside="torch")


@remedy('module and calls its functions; put the rest of a script under if __name__ == "__main__"', ranks=0)
def a_script_that_trains_when_it_is_imported(rank: int) -> Iterator[Call]:
    """The rest is put there."""
    names = "from tests.docs.remedies_of_tools import build, step\n"
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        Path(folder, "trains_at_once.py").write_text(f"{names}build(None)\nraise OSError('no data')\n")
        Path(folder, "trains_later.py").write_text(f"{names}if __name__ == '__main__':\n    raise OSError('no data')\n")
        yield lambda: command._functions("trains_at_once:build", "step")
        assert command._functions("trains_later:build", "step") == (build, step)


@remedy("matplotlib, which is not installed; pip install matplotlib, or save as .html", ranks=0)
def without_matplotlib(rank: int) -> Iterator[Call]:
    """A page."""
    result = forecast(build, step, mesh=MESH)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(saving, "find_spec", lambda name: None):
        yield lambda: result.save(Path(folder, "step.png"))
        result.save(Path(folder, "step.html"))
        assert Path(folder, "step.html").stat().st_size > 0


@remedy("process group, and torch cannot start one (", ranks=0)
def without_a_process_group(rank: int) -> Iterator[Call]:
    """It is started first."""
    module = layers()
    with environment(RANK=None, WORLD_SIZE=None, MASTER_ADDR=None, MASTER_PORT=None):
        yield lambda: fully_shard(module)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            fully_shard(module)
            module(torch.ones(2, 8)).sum().backward()
            assert all(param.grad is not None for param in module.parameters())
        finally:
            dist.destroy_process_group()


@remedy("shard_over_replicas, whose pieces for the shard dimension stay in memory anyway; pass", ranks=0)
def pieces_over_replicas(rank: int) -> Iterator[Call]:
    """True, and False; on eight ranks, which a mesh needs that has neighbours in the shard dimension and replicas."""
    with fake_mesh(2, 4, names=("replicate", "shard")) as mesh:
        shards: Any = partial(fully_shard, mesh=mesh, shard_over_replicas=True)
        yield lambda: shards(layers(), reshard_after_forward=2)
        for reshard in (True, False):
            module = layers()
            shards(module, reshard_after_forward=reshard)
            module(torch.ones(2, 8)).sum().backward()
            assert all(param.grad is not None for param in module.parameters())
