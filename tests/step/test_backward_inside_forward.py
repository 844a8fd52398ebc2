"""A backward inside a forward: the gradient of an input (guidance, forces), with which the forward goes on."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import fsdp2
from tests.support import api
from tests.support.counting import Collectives
from tests.support.parity import WIDTH, assert_parity, mesh_of, on_one_axis, sharded
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


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("differentiable", [False, True])
def test_guidance(rank, world, differentiable, reshard):
    """The end of the inner backward freed the root's parameters, with which the forward was computing: "got mixed
    torch.Tensor and DTensor". It also forgot the forward, so that units after it were taken for roots."""
    build = partial(Guided, differentiable=differentiable)
    run = assert_parity(partial(on_one_axis, reshard_after_forward=reshard), build=build, against=("alone",))
    with fsdp2.summon_full_params(run.module):
        pass  # inside a forward it raises


class Forces(nn.Module):
    """Energies, and the forces that an evaluation computes by a backward inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return self.last(self.between(self.first(x)).tanh())
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.last(self.between(self.first(x)).tanh()).square().sum()
            return torch.autograd.grad(energy, x)[0]


@on_ranks(2)
def test_an_evaluation_with_forces_leaves_nothing_behind(rank, world):
    """Its calls were taken for those of a forward that trains: the next backwards gathered a unit that nobody used, and
    setters said that a backward is still to come."""
    module = sharded(Forces)
    x, evaluated, trained = torch.ones(2, WIDTH), set(), []
    for evaluates in (False, False, True, True, False):
        for _ in range(2 if evaluates else 0):
            with torch.no_grad(), Collectives() as collectives:
                module(x)
            evaluated.add(collectives.gathers)
        module.set_compression(None)
        module.set_manual_backward_finalization(True)
        module.set_manual_backward_finalization(False)
        with Collectives() as collectives:
            module(x).sum().backward()
        trained.append(collectives.gathers)
    assert len(evaluated) == 1 and len(set(trained[1:])) == 1  # the first step learns the order


@on_ranks(4)
def test_a_replica_evaluates_forces_alone(rank, world):
    """The backward inside its evaluation was compared with the forward that the other replica started next: "ranks do
    not do the same"."""
    module = sharded(Forces, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    x = torch.ones(2, WIDTH)
    for _ in range(3):
        module(x).sum().backward()
        if rank < 2:
            with torch.no_grad():
                module(x)
        module(x).sum().backward()
