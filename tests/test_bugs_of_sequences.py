"""Bugs that random programs brought to light; each test opens with the story of its bug."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support import api
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


class Empty(nn.Module):
    """Has an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


@on_ranks(1, 2)
def test_a_unit_of_empty_parameters(rank, world):
    """A single process has nothing to copy where all parameters of a unit are empty; torch's foreach copy refuses an
    empty list, with an error that names nothing."""
    module = nn.Sequential(nn.Linear(3, 3), Empty())
    for unit in (module[1], module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    module(torch.ones(1, 3)).sum().backward()
    assert module[0].weight.grad is not None
    assert module[1].weight.grad is not None and module[1].weight.grad.shape == (2, 0)
