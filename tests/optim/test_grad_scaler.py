"""Loss scaling: every rank steps or every rank skips, whichever rank and parameter the infinity is in."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy

import fsdp2
from tests.grouping.models import Block, Net, nodes_mesh
from tests.optim.stepping import host_apart
from tests.support import api
from tests.support.parity import assert_parity, full, mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Small(nn.Module):
    """Its weights have fewer rows than there are ranks, so that some have no piece of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.up, self.down = nn.Linear(8, 1), nn.Linear(1, 3)

    def forward(self, x):
        return self.down(self.up(x)) * self.scale


def small(kind: str) -> nn.Module:
    """Return a sharded ``Small``."""
    torch.manual_seed(3)
    module = Small()
    if kind == "replicated first":
        fsdp2.fully_shard(module.up, strategy=ShardingStrategy.NO_SHARD)
        fsdp2.fully_shard(module, replicated_params={module.scale})
    elif kind == "two meshes":
        fsdp2.fully_shard(module.up, mesh=nodes_mesh())
        fsdp2.fully_shard(module, mesh=mesh_1d())
    elif kind == "half":
        fsdp2.fully_shard(module.to(torch.float16), mesh=mesh_1d())
    else:
        fsdp2.fully_shard(module, mesh=mesh_1d())
    return module


def one_step(module, scaler, spoil) -> bool:
    """Go through a step with gradients spoiled by ``spoil``; whether the optimizer stepped on this rank."""
    optimizer, steps = torch.optim.SGD(module.parameters(), lr=0.0), []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    dtype = module.scale.dtype
    scaler.scale(module(torch.ones(2, 8, dtype=dtype)).float().sum()).backward()
    spoil(list(module.parameters()))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return bool(steps)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["sharded", "replicated first", "two meshes", "half"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_found_inf_agrees(rank, world, kind, value):
    """One element on one rank is enough, in any parameter; then all skip and back off, else all step and grow."""
    module = small(kind)
    scaler = fsdp2.ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1)
    expected = 8.0
    for index, parameter in enumerate(module.parameters()):
        for culprit in range(world):
            here = rank == culprit and parameter.to_local().numel() > 0

            def spoil(parameters, index=index, here=here):
                if here:
                    parameters[index].grad.to_local().view(-1)[0] = value

            spoiled = torch.tensor(float(here))
            torch.distributed.all_reduce(spoiled)
            assert one_step(module, scaler, spoil) == (not spoiled)
            expected *= 0.5 if spoiled else 2
            assert scaler.get_scale() == expected, (index, culprit)
            if expected > 64:
                scaler.update(expected := 8.0)


@on_ranks(2)
def test_torchs_own_agrees_where_the_first_gradient_is_sharded(rank, world):
    """``torch.amp.GradScaler`` takes part in the decision with ranks that have no local shard."""
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(8, 1), nn.Linear(1, 3))
    fsdp2.fully_shard(module, mesh=mesh_1d())
    module.scale = module[0].weight
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert module[0].weight.to_local().numel() == (8 if rank == 0 else 0)

    def spoil(parameters):
        if rank == 0:
            parameters[0].grad.to_local()[0] = float("inf")

    assert not one_step(module, scaler, spoil) and scaler.get_scale() == 4.0


@on_ranks(2)
def test_a_rank_without_gradients_waits_for_nobody(rank, world):
    """A rank whose optimizer has nothing to unscale still hears of the others' infinity."""
    weight = nn.Parameter(torch.ones(3))
    scaler = fsdp2.ShardedGradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    loss = scaler.scale((weight * float("inf")).sum())
    if rank == 1:
        loss.backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.ones(3)) and scaler.get_scale() == 4.0


@on_ranks(2, 4)
@pytest.mark.parametrize("unscale", [False, True])
def test_training(rank, world, unscale):
    """Scaled training, with clipping between, equals training without a scale."""

    def program(run):
        scaler = fsdp2.ShardedGradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=run.fsdp is not None)
        for step in range(4):
            scaler.scale(run.loss(step)).backward()
            if unscale:
                scaler.unscale_(run.optimizer)
                run.seen[f"norm {step}"] = full(torch.nn.utils.clip_grad_norm_(run.module.parameters(), 0.5))
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()

    def prepare(module, fsdp):
        fsdp.fully_shard(module, policy={Block}, replicated_params={module.stem.weight}, mesh=mesh_1d())

    assert_parity(prepare, build=Net, program=program, against=("alone",), tolerance=1e-4)


@on_ranks(1, 4)
@pytest.mark.parametrize("use", [fsdp2.use_local_shards, fsdp2.offload_optimizer_state])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_fused_steps_are_skipped(rank, world, name, use):
    """A fused step looks itself whether to skip, and does so where it is told 1.

    It was told on how many ranks a gradient was infinite, so it stepped where that were several, and parameters became
    NaN.
    """
    module = small("sharded")
    optimizer = use(getattr(torch.optim, name)(module.parameters(), lr=0.1, fused=True))
    scaler = fsdp2.ShardedGradScaler("cpu", init_scale=8.0)
    for factor in (float("inf"), 1.0):
        before = [full(parameter) for parameter in module.parameters()]
        scaler.scale(module(torch.ones(2, 8)).sum() * factor).backward()
        with host_apart():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [full(parameter) for parameter in module.parameters()]
        assert all(torch.equal(one, other) is (factor > 1) for one, other in zip(before, after, strict=True))
        assert all(value.isfinite().all() for value in after) and scaler.get_scale() == 4.0


@on_ranks(2)
def test_float16(rank, world):
    """A scale that overflows float16 backs off on every rank until gradients are finite."""
    module = Net()
    policy = MixedPrecisionPolicy(torch.float16, torch.float16, torch.float32)
    fsdp2.fully_shard(module, policy={Block}, mp_policy=policy)
    scaler = fsdp2.ShardedGradScaler("cpu", init_scale=2.0**24)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    scales = []
    for _ in range(24):
        scaler.scale(module(torch.full((2, 8), rank + 1.0)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[0] == 2.0**23 and scales[-1] == scales[-2]
    assert all(torch.isfinite(parameter.to_local()).all() for parameter in module.parameters())


def test_without_processes():
    """It is ``torch.amp.GradScaler`` in a single process, sparse gradients included."""
    for sparse in (False, True):
        steps = []
        for cls in (torch.amp.GradScaler, fsdp2.ShardedGradScaler):
            torch.manual_seed(0)
            table = nn.Embedding(5, 3, sparse=sparse)
            scaler, optimizer = cls("cpu", init_scale=4.0), torch.optim.SGD(table.parameters(), lr=1.0)
            for factor in (1.0, float("inf"), 2.0):
                scaler.scale((table(torch.tensor([1, 1, 2])) * factor).sum()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            steps.append((table.weight.detach(), scaler.get_scale()))
        torch.testing.assert_close(steps[0][0], steps[1][0])
        assert steps[0][1] == steps[1][1] == 2.0
    assert not fsdp2.ShardedGradScaler("cpu", enabled=False).is_enabled()
