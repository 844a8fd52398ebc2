"""A backward inside a forward: the gradient of an input (guidance, forces), with which the forward goes on."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.support import api
from tests.support.parity import WIDTH, assert_parity, mesh_1d, shard_each
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Guided(nn.Module):
    """Goes on with the gradient that a block's input gets; the head is the root's own, the last layer a unit after."""

    def __init__(self, *, differentiable: bool) -> None:
        super().__init__()
        self.block, self.between = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.differentiable = differentiable

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.between(x) if self.differentiable else self.between(x).detach().requires_grad_()
        energy = (self.block(x).tanh() * self.scale).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.differentiable)
        return self.last(force * self.scale + x)


def sharded(module: Any, fsdp: Any, **options: Any) -> None:
    """Make every layer a unit; the scale is the root's."""
    shard_each(module, fsdp, mesh=mesh_1d(), **options)


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("differentiable", [False, True])
def test_guidance(rank, world, differentiable, reshard):
    """The end of the inner backward freed the root's parameters, with which the forward was computing: "got mixed
    torch.Tensor and DTensor". It also forgot the forward, so that units after it were taken for roots."""
    build = partial(Guided, differentiable=differentiable)
    run = assert_parity(partial(sharded, reshard_after_forward=reshard), build=build, against=("alone",))
    assert run.module._get_fsdp_state().root.forward is None
    assert len(run.module._get_fsdp_state().root.known) == 4, "the order of the whole forward"
