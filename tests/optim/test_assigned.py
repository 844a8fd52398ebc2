"""Optimizers that read and write attributes of parameters: ``data``, ``requires_grad``, and what users store there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from tests.optim.stepping import host_apart
from tests.support import api
from tests.support.parity import assert_weights, mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Assigns(torch.optim.Optimizer):
    """Gradient descent that gives each parameter another tensor."""

    def __init__(self, params: Iterable[Any], assign: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__(params, {})
        self.assign = assign

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.assign(param, param - 0.1 * param.grad)


def assign_data(param: Tensor, value: Tensor) -> None:
    """Assign as most programs do."""
    param.data = value


class Stacks(nn.Module):
    """A stack of matrices, a layer, and a stack that is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts, self.plain = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.randn(2, 4, 4))
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.experts.sum(0)) + (x @ self.plain.sum(0)).sum(-1, keepdim=True)


WAYS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "local": lambda optimizer: fsdp2.use_local_shards(optimizer, elementwise=True),
    "host": lambda optimizer: fsdp2.offload_optimizer_state(optimizer, elementwise=True),
    "full": lambda optimizer: fsdp2.use_full_params(optimizer, keep_full_params=True),
    "stacks": lambda optimizer: fsdp2.use_full_params(optimizer, stacked=lambda param: param.ndim == 3),
    "batches": lambda optimizer: fsdp2.use_full_params(optimizer, stacked=lambda param: param.ndim == 3, batched=True),
}


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("assign", [assign_data, Tensor.set_], ids=["data", "set_"])
def test_assigned_values_are_taken(rank, world, way, assign):
    """What stands for a parameter in a step got another tensor, and the shard kept its old values, silently."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))  # of all ranks
    one, module = Stacks(), Stacks()
    fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params={module.plain})
    with host_apart():
        optimizers = [Assigns(one.parameters(), assign), WAYS[way](Assigns(module.parameters(), assign))]
        for _ in range(2):
            for model, optimizer in zip((one, module), optimizers, strict=True):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_weights(module, one)


class Reads(torch.optim.Optimizer):
    """Gradient descent at a rate that each parameter names, of those that are not frozen."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.requires_grad:
                    param.sub_(param.grad, alpha=getattr(param, "rate", 0.1))


@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_set_on_a_parameter_later_is_read(rank, world, way):
    """What stands for a parameter in a step had the attributes that the parameter had at the first step; where whole
    parameters are stepped on, also its ``requires_grad``. So it was trained in spite of that, silently."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))  # of all ranks
    one, module = Stacks(), Stacks()
    fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params={module.plain})
    with host_apart():
        optimizers = [Reads(one.parameters()), WAYS[way](Reads(module.parameters()))]
        for step in range(4):
            for model, optimizer in zip((one, module), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if step == 1:
                    model.layer.weight.rate, model.experts.rate, model.plain.rate = 0.3, 0.2, 0.15
                for param in (model.layer.bias, model.experts, model.plain):
                    param.requires_grad_(step != 2)
                optimizer.step()
                model.requires_grad_(True)
    assert_weights(module, one)
