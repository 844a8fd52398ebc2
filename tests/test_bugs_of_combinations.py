"""Bugs that combining fsdp2 with other tools brought to light; each test opens with the story of its bug."""

from __future__ import annotations

import torch

from tests.support import api
from tests.support.models import mlp
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


@on_ranks(2)
def test_gradients_asked_of_autograd_itself(rank, world):
    """``torch.autograd.grad`` with respect to full parameters died inside a hook: the engine will not say of a leaf
    that it was asked for whether it will be reached."""
    torch.manual_seed(0)
    reference = mlp(4, 4, 4)
    torch.manual_seed(0)
    module = api.ours.fully_shard(mlp(4, 4, 4), mesh=cpu_mesh(world), reshard_after_forward=False)
    inputs = torch.full((2, 4), rank + 1.0)
    got = torch.autograd.grad(module(inputs).sum(), list(module.parameters()))
    expected = torch.autograd.grad(reference(inputs).sum(), list(reference.parameters()))
    for mine, whole in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, whole)
    assert all(parameter.grad is None for parameter in module.parameters())
