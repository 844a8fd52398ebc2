"""Random models under random strategies, policies and options train like a single process."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.grouping.models import nodes_mesh
from tests.support import api
from tests.support.parity import STEPS, Run, assert_parity, mesh_1d, mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Double(nn.Module):
    """Makes training deterministic enough to compare after several wild steps."""

    def forward(self, x):
        return x.double()


class Piece(nn.Module):
    """Holds other pieces, a weight of its own, and maybe a scalar; some call a part twice or under checkpointing."""

    def __init__(self, generator: random.Random, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(grow(generator, depth - 1) for _ in range(generator.randint(1, 3)))
        if generator.random() < 0.5:
            self.weight = nn.Parameter(torch.randn(generator.randint(1, 7), 8) / 4)
        if generator.random() < 0.3:
            self.scale = nn.Parameter(torch.tensor(0.5))
        self.twice, self.recompute = generator.random() < 0.2, generator.choice([None, None, False, True])

    def forward(self, x):
        x = x * getattr(self, "scale", 1)
        for part in [*self.parts, *self.parts[: 1 if self.twice else 0]]:
            recompute = self.recompute is not None and x.requires_grad
            y = checkpoint(part, x, use_reentrant=self.recompute) if recompute else part(x)
            x = x + torch.tanh(y)
        if hasattr(self, "weight"):
            x = x + torch.tanh(x @ self.weight.t()) @ self.weight
        return x


def grow(generator: random.Random, depth: int) -> nn.Module:
    """Return a random tree of modules from 8 columns to 8."""
    if depth > 0 and generator.random() < 0.6:
        return Piece(generator, depth)
    width = generator.choice([1, 3, 8, 13])
    layers = [nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8, bias=generator.random() < 0.5)]
    return generator.choice([nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential(*layers)])


def build(seed: int) -> nn.Module:
    """Return the model of a seed: parts may be shared, weights tied, parameters frozen."""
    generator = random.Random(seed)
    module = nn.Sequential(Double(), *(grow(generator, 3) for _ in range(3)), nn.Linear(8, 8))
    if generator.random() < 0.3:
        module.append(module[1])
    square = [part for part in module.modules() if isinstance(part, nn.Linear) and part.weight.shape == (8, 8)]
    if len(square) > 1 and generator.random() < 0.4:
        square[0].weight = square[-1].weight
    for parameter in module.parameters():
        parameter.requires_grad_(generator.random() < 0.8)
    module[4].weight.requires_grad_(True)
    return module.double()


def prepare(seed: int):
    """Return what shards the model of a seed."""

    def shard(module, fsdp):
        generator = random.Random(seed + 1)
        meshes = {"HYBRID_SHARD": nodes_mesh(), "_HYBRID_SHARD_ZERO2": nodes_mesh()}
        answers: dict[nn.Module, object] = {}
        for part in module.modules():
            name = generator.choice([*ShardingStrategy]).name
            own = {"strategy": ShardingStrategy[name], "mesh": meshes.get(name, mesh_1d())}
            if generator.random() < 0.2:
                own["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
            answers[part] = generator.choice([False, True, own, own])
        answers[module[4]] = True
        replicated = {parameter for parameter in module.parameters() if generator.random() < 0.2}
        reshard = generator.choice([None, True, False])
        mesh = generator.choice([mesh_1d(), nodes_mesh()])
        fsdp.fully_shard(
            module, policy=answers.get, mesh=mesh, replicated_params=replicated, reshard_after_forward=reshard
        )

    return shard


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("seed", range(0, 80, 10))
def test_training(rank, world, seed):
    """Gradients, losses and weights, with and without accumulation."""

    def program(run: Run) -> None:
        for step in range(STEPS):
            if step == 1:
                with fsdp2.no_sync(run.module):
                    run.backward(step + 5)
            run.backward(step)
            run.update()

    part = (rank, world) if world != 3 else (0, 1)  # eight rows are not three parts; every rank takes all
    assert_parity(
        prepare(seed), build=lambda: build(seed), program=program, against=("alone",), part=part, tolerance=1e-7
    )


@on_ranks(4)
@pytest.mark.parametrize("name", [strategy.name for strategy in ShardingStrategy])
@pytest.mark.parametrize("two", [False, True])
def test_strategies_over_tensor_parallelism(rank, world, name, two):
    """The mesh is the data-parallel part of a larger one, along one dimension or two."""
    mesh = mesh_of(1, 2, 2, names=("replicate", "shard", "tp")) if two else mesh_of(2, 2, names=("shard", "tp"))
    hybrid = name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    if hybrid != two and name != "NO_SHARD":
        mine = mesh["shard"] if two else mesh_of(1, 2, 2, names=("replicate", "shard", "tp"))["replicate", "shard"]
    else:
        mine = mesh["replicate", "shard"] if two else mesh["shard"]

    def shard(module, fsdp):
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        options = {"mesh": mine, "strategy": ShardingStrategy[name]}
        fsdp.fully_shard(module, policy={nn.Linear}, replicated_params={module[1].weight}, **options)

    layers = lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 8))
    run = assert_parity(shard, build=layers, part=(rank // 2, 2), against=("alone",))
    assert run.module[1].weight.placements[-1].dim == 1 and "tp" in run.module[1].weight.device_mesh.mesh_dim_names
