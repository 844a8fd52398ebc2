"""Bugs that libraries which use ``fully_shard`` brought to light; each test opens with the story of its bug."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support import api
from tests.support.models import children, mlp
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


def sharded(world: int, **options) -> nn.Module:
    torch.manual_seed(0)
    module = mlp(4, 4, 4)
    for unit in (*children(module)[:-1], module):  # the root has parameters of its own
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), **options)
    return module


@api.fsdp2_only
@on_ranks(4)
@pytest.mark.parametrize("reshard", [None, False, 2])
def test_an_optimizer_built_after_an_evaluation(rank, world, reshard):
    """A Trainer evaluates before it trains. The units that keep their parameters after forward then show full ones, so
    an optimizer built now held tensors that are freed at the next backward, and trained nothing, without a word (torch
    has the same)."""
    module, reference = sharded(world, reshard_after_forward=reshard), sharded(world)
    with torch.no_grad():
        module(torch.ones(2, 4))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (module, reference)]
    for step in range(3):
        losses = []
        for m, optimizer in zip((module, reference), optimizers):
            loss = m(torch.full((2, 4), rank + step + 1.0)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for optimizer in optimizers:
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert all(parameter.grad is None for parameter in module.parameters())


@on_ranks(2)
def test_shards_after_a_registered_method(rank, world):
    """``generate``, registered as a forward method, calls ``forward`` for each token; torch's root shows shards after
    it. Ours went on showing full parameters, so what was made from them next, an optimizer or a copy of the weights for
    an inference engine, was made from tensors that are no DTensors."""
    module = sharded(world)

    def generate(inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            inputs = module(inputs)
        return inputs

    module.generate = generate
    api.ours.register_fsdp_forward_method(module, "generate")
    with torch.no_grad():
        expected = module(module(torch.ones(2, 4)))
        torch.testing.assert_close(module.generate(torch.ones(2, 4)), expected)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    module.generate(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in module.parameters())
