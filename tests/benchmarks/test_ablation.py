"""What `benchmarks/ablation.py` switches off changes how a step is done, never what it computes."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.support import ROOT, api
from tests.support.parity import mesh_of
from tests.support.pool import on_ranks
from tests.support.remembered import remembered

sys.path.append(str(ROOT / "benchmarks"))
ideas: Any = importlib.import_module("_ideas")
models: Any = importlib.import_module("_models")

WIDTH, LAYERS, LENGTH, STEPS = 256, 2, 8, 4  # a chunk of gradients is large enough for gloo to exchange it
BY_TITLE = {idea.title: idea for idea in (ideas.WHOLE, *ideas.IDEAS)}


def train(rank: int, world: int, title: str) -> list[torch.Tensor]:
    """Return this rank's shards of the parameters after some steps, every transfer as it would be at full size."""
    idea = BY_TITLE[title]
    torch.manual_seed(0)
    model = models.GPT(WIDTH, LAYERS, LENGTH, heads=2)
    data = torch.randint(256, (STEPS, world, 2, LENGTH + 1))[:, rank]
    with idea.off():
        for module in (*model.layers, model):
            api.ours.fully_shard(module, mesh=mesh_of(world))
            module.set_transfer_sizes(direct_param_bytes=1, direct_group_bytes=1, chunk_bytes=1, recurse=False)
            if idea.change is not None:
                idea.change(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for tokens in data:
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.to_local().clone() for parameter in model.parameters()]


TITLES = [title for title in BY_TITLE if title != ideas.WHOLE.title]


@api.fsdp2_only
@pytest.mark.parametrize("title", TITLES)
@on_ranks(2)
def test_same_result_without_it(rank, world, title):
    """Parameters agree with those that are trained with everything on."""
    whole = remembered(("ablation", rank, world), lambda: train(rank, world, ideas.WHOLE.title))
    assert_close(train(rank, world, title), whole, rtol=1e-5, atol=1e-6)
