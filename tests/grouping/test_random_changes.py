"""Random changes of a sharded model between steps leave it computing what the same model in one process computes.

Layers come and go, are replaced, tied, parametrized, shared and copied, as people change models in a notebook.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fsdp2
from tests.support import api
from tests.support.parity import SEED, full, mesh_2d, mesh_of
from tests.support.pool import POOL
from tests.support.programs import drawn_anew

pytestmark = api.fsdp2_only

LIMIT_SECONDS = 60.0
WIDTH = 6


class Half(nn.Module):
    """A parametrization that can be undone."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2


class Block(nn.Module):
    """A layer, a parameter of its own, and what is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.added = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x)) * self.scale + x
        for one in self.added:
            y = y + torch.tanh(one(x)) / 4
        return y


class Model(nn.Module):
    """Some blocks, a parameter in front of them and a head behind. ``taken`` were blocks, or added to one."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.front, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.taken: list[list[nn.Module]] = [[], []]  # lists, so that these are no children

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.front
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- changes of a model, at two of its blocks ----

Shard = Callable[[nn.Module], nn.Module]
"""Makes a module a unit, in the model that is sharded."""


def linear(bias: bool = True) -> nn.Linear:
    """Return a new layer."""
    return nn.Linear(WIDTH, WIDTH, bias)


def tie(place: nn.Linear, block: Block) -> None:
    """Let a layer have the weight of a block."""
    if not any(parametrize.is_parametrized(one) for one in (place, block.layer)):
        place.weight = block.layer.weight


def untie(block: Block) -> None:
    """Give a block a weight of its own."""
    if not parametrize.is_parametrized(block.layer):
        weight = block.layer.weight
        block.layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)


def move(modules: Any, target: Any, number: int) -> None:
    """Take one of some modules, if there is more than one or it is an addition, and add it elsewhere."""
    if len(modules) > isinstance(next(iter(modules), None), Block):
        target.append(modules.pop(number % len(modules)))


def swap(model: Model, block: Block, other: Block) -> None:
    """Let two blocks change their places."""
    places = [[*model.blocks].index(one) for one in (block, other)]
    model.blocks[places[0]], model.blocks[places[1]] = other, block


def exchange(block: Block, other: Block) -> None:
    """Let two blocks change their layers."""
    block.layer, other.layer = other.layer, block.layer


def halve(model: Model, block: Block) -> None:
    """Parametrize a layer. torch's function swaps DTensors, which loses their gradients."""
    model.zero_grad()
    if not parametrize.is_parametrized(block.layer):
        parametrize.register_parametrization(block.layer, "weight", Half())


def unhalve(model: Model, block: Block, leave: bool) -> None:
    """Undo it."""
    model.zero_grad()
    if parametrize.is_parametrized(block.layer):
        parametrize.remove_parametrizations(block.layer, "weight", leave_parametrized=leave)


CHANGES: dict[str, Callable[[Any, Any, Any, int, Shard], object]] = {
    "adapt": lambda model, block, other, n, shard: block.added.append(nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6))),
    "adapt by a unit": lambda model, block, other, n, shard: block.added.append(shard(linear())),
    "drop": lambda model, block, other, n, shard: move(block.added, [], n),
    "take": lambda model, block, other, n, shard: move(block.added, model.taken[0], n),
    "give back": lambda model, block, other, n, shard: move(model.taken[0], block.added, n),
    "share": lambda model, block, other, n, shard: block.added.extend(other.added[:1]),
    "replace": lambda model, block, other, n, shard: setattr(block, "layer", linear(n % 2 == 0)),
    "renew": lambda model, block, other, n, shard: setattr(block, "scale", nn.Parameter(torch.randn(WIDTH))),
    "tie": lambda model, block, other, n, shard: tie(other.layer, block),
    "tie the head": lambda model, block, other, n, shard: tie(model.head, block),
    "untie": lambda model, block, other, n, shard: untie(block),
    "insert": lambda model, block, other, n, shard: model.blocks.insert(0, Block()),
    "insert a unit": lambda model, block, other, n, shard: model.blocks.insert(0, shard(Block())),
    "take a block": lambda model, block, other, n, shard: move(model.blocks, model.taken[1], n),
    "put back": lambda model, block, other, n, shard: model.blocks.extend(model.taken[1]) and model.taken[1].clear(),
    "repeat": lambda model, block, other, n, shard: model.blocks.append(block),
    "swap": lambda model, block, other, n, shard: swap(model, block, other),
    "exchange": lambda model, block, other, n, shard: exchange(block, other),
    "freeze": lambda model, block, other, n, shard: block.requires_grad_(n % 2 == 0),
    "halve": lambda model, block, other, n, shard: halve(model, block),
    "unhalve": lambda model, block, other, n, shard: unhalve(model, block, n % 3 == 0),
}


# ---- programs ----


@dataclass(frozen=True)
class Program:
    """So many ``blocks``, of which some are ``units``, and ``steps``: a name and two numbers."""

    blocks: int
    units: list[bool]
    hybrid: bool
    reshard: bool | None
    steps: list[tuple[str, int, int]]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program of few kinds of changes, so that these meet."""
    kinds = draw(st.lists(st.sampled_from([*CHANGES]), min_size=2, max_size=5, unique=True))
    between = ["train", "train", "step", "copy", "reload", "unshard"]
    names = st.one_of(st.sampled_from(kinds), st.sampled_from(between))
    return Program(
        draw(st.integers(1, 4)),
        draw(st.lists(st.booleans(), min_size=4, max_size=4)),
        draw(st.booleans()),
        draw(st.sampled_from([None, True, False])),
        draw(st.lists(st.tuples(names, st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=14)),
    )


class Execution:
    """A program beside the same in one process, which computes the rows of all ranks."""

    def __init__(self, rank: int, world: int, program: Program) -> None:
        self.rank, self.world = rank, world
        mesh = mesh_2d() if program.hybrid and world == 4 else mesh_of(world)
        self.options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": program.reshard}
        torch.manual_seed(SEED)
        alone = Model(program.blocks)
        self.models: list[Any] = [copy.deepcopy(alone), alone]
        for block, is_unit in zip(self.models[0].blocks, program.units):
            if is_unit:
                fsdp2.fully_shard(block, **self.options)
        fsdp2.fully_shard(self.models[0], **self.options)

    def losses(self, batch: int) -> list[Tensor]:
        """Return the loss on this rank's rows, and its mean over the rows of all ranks in the one process."""
        rows = [
            torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(9 * batch + r)) for r in range(self.world)
        ]
        loss = self.models[0](rows[self.rank]).square().mean()
        alone = torch.stack([self.models[1](one).square().mean() for one in rows]).mean()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / self.world, alone.detach())
        return [loss, alone]

    def train(self, batch: int, unused: int) -> None:
        """Forward and backward."""
        losses = self.losses(batch)
        for loss in losses if losses[1].requires_grad else ():
            loss.backward()
        self.free()

    def free(self) -> None:
        """Let all modules show shards."""
        for module in self.models[0].modules():
            if isinstance(module, fsdp2.FSDPModule):
                module.reshard()

    def step(self, *unused: int) -> None:
        """Compare gradients, and step with new optimizers."""
        named = [dict(model.named_parameters()) for model in self.models]
        gradients = [{n: p.grad for n, p in one.items() if p.grad is not None} for one in named]
        torch.testing.assert_close({n: full(gradient) for n, gradient in gradients[0].items()}, gradients[1])
        for model in self.models:
            torch.optim.SGD(model.parameters(), 0.05).step()
            model.zero_grad()

    def copy(self, *unused: int) -> None:
        """Go on with deep copies."""
        for model in self.models:
            model.zero_grad()
        self.models = [copy.deepcopy(model) for model in self.models]

    def reload(self, *unused: int) -> None:
        """Load the state of the one process."""
        state = self.models[1].state_dict()
        fsdp2.broadcast_from_rank0(self.models[0], state if self.rank == 0 else None)

    @torch.no_grad()
    def unshard(self, number: int, batch: int) -> None:
        """Gather a block by hand for an evaluation."""
        block = self.models[0].blocks[number % len(self.models[0].blocks)]
        if isinstance(block, fsdp2.FSDPModule):
            block.unshard()
        self.losses(batch)
        self.free()

    @torch.no_grad()
    def change(self, name: str, first: int, second: int) -> None:
        """Change both models alike. An evaluation lets both take it in: several changes at once may be refused."""
        for model, shard in zip(self.models, (lambda one: fsdp2.fully_shard(one, **self.options), lambda one: one)):
            torch.manual_seed(10 * first + second)
            block, other = (model.blocks[number % len(model.blocks)] for number in (first, second))
            CHANGES[name](model, block, other, second, shard)
        self.losses(second)


def run(rank: int, world: int, program: Program) -> None:
    """Execute a program, two steps and a comparison of all weights."""
    execution = Execution(rank, world, program)
    for name, first, second in [*program.steps, *(one for n in (1, 2) for one in (("train", n, 0), ("step", 0, 0)))]:
        if name in CHANGES:
            execution.change(name, first, second)
        else:
            getattr(execution, name)(first, second)
    states = [model.state_dict() for model in execution.models]
    torch.testing.assert_close({name: full(value) for name, value in states[0].items()}, dict(states[1]))


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@drawn_anew
@settings(max_examples=settings().max_examples // 2)
@given(program=programs())
def test_random_changes(world, program):
    """What each of them does alone is in ``test_added.py`` and ``test_sharing.py``."""
    POOL.run(world, run, {"program": program}, LIMIT_SECONDS)
