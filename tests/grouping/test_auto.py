"""``policy="auto"`` finds the blocks of models as people build them, and leaves the rest with the root."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp2
from tests.grouping.models import BLOCKS, Block, Net, names_of_units
from tests.support import api, models
from tests.support.models import mlp
from tests.support.parity import assert_parity, mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


def holding(**parts: nn.Module) -> nn.Module:
    """Return a module that has these parts."""
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def blocks(count: int) -> list[nn.Module]:
    """Return so many blocks."""
    return [Block() for _ in range(count)]


class Routed(nn.Module):
    """A block with a list of experts of which a batch may meet some."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.attention = nn.ModuleList(blocks(3)), nn.Linear(8, 8)

    def forward(self, x):
        return self.attention(self.experts[int(x.sum()) % 3](x))


class Stage(nn.Sequential):
    """A sequence that decides itself what it calls."""

    def forward(self, x):
        return self[0](x)


layer = lambda: nn.TransformerEncoderLayer(8, 2, 8)
MODELS = {
    "blocks in an attribute": (Net, BLOCKS),
    "tied": (lambda: models.Transformer(3), BLOCKS),
    "a list in a dict": (
        lambda: holding(
            model=nn.ModuleDict({"wte": nn.Embedding(5, 8), "h": nn.ModuleList(blocks(2)), "ln_f": nn.LayerNorm(8)}),
            lm_head=nn.Linear(8, 5),
        ),
        ["model.h.0", "model.h.1"],
    ),
    "sequential": (
        lambda: nn.Sequential(nn.Embedding(5, 8), *(layer() for _ in range(3)), nn.Linear(8, 5)),
        ["1", "2", "3"],
    ),
    "encoder": (
        lambda: holding(encoder=nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False), head=nn.Linear(8, 5)),
        ["encoder.layers.0", "encoder.layers.1"],
    ),
    "two towers": (
        lambda: holding(left=nn.Sequential(*blocks(2)), right=nn.Sequential(*blocks(2), nn.Linear(8, 8))),
        ["left.0", "left.1", "right.0", "right.1"],
    ),
    "stages that only call blocks": (
        lambda: nn.ModuleList([nn.Sequential(*blocks(2)), nn.Sequential(*blocks(2))]),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "lists of lists": (
        lambda: holding(stages=nn.ModuleList([nn.ModuleList(blocks(2)), nn.ModuleList(blocks(1))])),
        ["stages.0.0", "stages.0.1"],
    ),
    "stages that decide": (lambda: nn.ModuleList([Stage(*blocks(2)), Stage(*blocks(2))]), ["0", "1"]),
    "small sequences": (lambda: nn.Sequential(mlp(4, 5, 4), nn.Tanh(), mlp(4, 5, 4)), ["0", "2"]),
    "single layers": (lambda: mlp(4, 8, 8, 4), ["0", "2", "4"]),
    "single layers beside blocks": (lambda: holding(blocks=nn.ModuleList(blocks(2)), head=mlp(4, 5, 4)), BLOCKS[:2]),
    "experts in blocks": (lambda: holding(blocks=nn.ModuleList([Routed(), Routed()])), BLOCKS[:2]),
    "experts outside": (
        lambda: holding(blocks=nn.ModuleList(blocks(2)), experts=nn.ModuleList(blocks(4))),
        BLOCKS[:2],
    ),
    "one of another class": (lambda: holding(blocks=nn.ModuleList([*blocks(2), Routed()])), BLOCKS[:2]),
    "members without parameters": (
        lambda: nn.Sequential(nn.Dropout(), *blocks(2), nn.Dropout(), nn.LayerNorm(8)),
        ["1", "2"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks(name):
    """Blocks are the outermost modules that repeat; what is left is the root's."""
    build, expected = MODELS[name]
    module = build()
    plan = dict(fsdp2.plan_units(module))
    assert list(plan) == [*expected, ""]
    assert sum(plan.values()) == sum(parameter.numel() for parameter in module.parameters())


def test_what_is_sharded_or_ignored_already_counts_but_is_not_planned():
    """A part that is left alone is not planned anew."""
    module = Net()
    assert [name for name, _ in fsdp2.plan_units(module, ignored_modules=[module.blocks[1]])] == [
        "blocks.0",
        "blocks.2",
        "",
    ]


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("tied", [False, True])
def test_training(rank, world, tied):
    """A model sharded by itself trains like a single process."""
    prepare = lambda module, fsdp: fsdp.fully_shard(module, policy="auto", mesh=mesh_1d())
    run = assert_parity(prepare, build=lambda: Net(tied=tied), against=("alone",))
    assert names_of_units(run.module) == ["", *BLOCKS]


@on_ranks(2)
def test_a_head_that_is_read_and_not_called(rank, world):
    """A loss from ``head.weight`` and an embedding reused by function work, because the root keeps both."""

    class Reads(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(nn.functional.linear(x, self.stem.weight))
            return torch.cat([part @ self.head.weight.t() for part in x.chunk(2)]) + self.head.bias + self.stem.bias

    prepare = lambda module, fsdp: fsdp.fully_shard(module, policy="auto", mesh=mesh_1d())
    assert_parity(prepare, build=Reads, against=("alone",))
