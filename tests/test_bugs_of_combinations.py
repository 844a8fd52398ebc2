"""Bugs that combining fsdp2 with other tools brought to light; each test opens with the story of its bug."""

from __future__ import annotations

import pytest
import torch

from tests.support import api
from tests.support.models import children, mlp
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


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_parameters_looked_up_between_forward_and_backward(rank, world, reshard):
    """A zero-bubble pipeline asks the module for its parameters after forward and differentiates with respect to them,
    in two parts. Units that reshard after forward showed shards, which are not in the graph: their weights got no
    gradient at all, without a word (torch's fully_shard loses them still)."""
    torch.manual_seed(0)
    reference = mlp(4, 4, 4)
    torch.manual_seed(0)
    module = mlp(4, 4, 4)
    for unit in (*children(module), module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), reshard_after_forward=reshard)
    inputs = torch.arange(8.0).view(2, 4)
    losses = [module(inputs * scale).sum() for scale in (1, 2)]  # the second forward reshards again
    module.set_is_last_backward(False)
    for loss in losses:
        module.set_reshard_after_backward(False)
        parameters = list(module.parameters())
        grads = torch.autograd.grad(loss, parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module._get_fsdp_state()._root_post_backward_final_callback()
    (reference(inputs).sum() + reference(inputs * 2).sum()).backward()
    for mine, whole in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)
