"""Random programs with several models around parts that they share compute what a single process computes.

Each model is a root. One may ask another in the middle of its forward, and tie a parameter to it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.support import api
from tests.support.parity import SEED, full, mesh_2d, mesh_of
from tests.support.pool import POOL
from tests.support.programs import drawn_anew

pytestmark = api.fsdp2_only

LIMIT_SECONDS = 60.0
WIDTH = 6


class Part(nn.Module):
    """A layer that several models may have, recomputed in backward if it ``recomputes``."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.recomputes = recomputes

    def compute(self, x: Tensor) -> Tensor:
        """Return what forward returns."""
        return torch.tanh(self.layer(x)) * self.scale + x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False) if self.recomputes else self.compute(x)


class Model(nn.Module):
    """Some parts in a row and a head of its own. Before the part at ``asks_before`` it asks another model, if any."""

    def __init__(self, parts: Iterable[Part], asks: Model | None, asks_before: int, graph: bool) -> None:
        super().__init__()
        self.parts, self.head = nn.ModuleList(parts), nn.Linear(WIDTH, WIDTH)
        self.others, self.asks_before, self.graph = [asks], asks_before, graph  # a list, so that it is no child

    def forward(self, x: Tensor) -> Tensor:
        for index, part in enumerate(self.parts):
            if self.others[0] is not None and index == self.asks_before % len(self.parts):
                with torch.set_grad_enabled(self.graph and torch.is_grad_enabled()):
                    x = x + self.others[0](x)
            x = part(x)
        return self.head(x)


@dataclass(frozen=True)
class Program:
    """The ``pool`` has so many parts, of which ``units`` are units; those that several models have are in any case.

    ``models`` are the arguments of `Model`, by numbers: parts of the pool, an earlier model or None, and so on.
    ``tied`` models have the head of the first one.
    """

    pool: list[bool]
    units: list[bool]
    models: list[tuple[list[int], int | None, int, bool]]
    tied: bool
    hybrid: bool
    reshard: list[bool | None]
    lanes: bool
    steps: list[tuple[Any, ...]]

    def build(self) -> tuple[list[Part], list[Model]]:
        """Return the pool and the models."""
        torch.manual_seed(SEED)
        pool, models = [Part(recomputes) for recomputes in self.pool], list[Model]()
        for parts, asks, before, graph in self.models:
            other = models[asks % len(models)] if models and asks is not None else None
            own = dict.fromkeys(number % len(pool) for number in parts)
            models.append(Model((pool[number] for number in own), other, before, graph))
            if self.tied:
                models[-1].head.weight = models[0].head.weight
        return pool, models


NUMBERS, TRUTH = st.integers(0, 9), st.booleans()
STEP = st.one_of(
    st.tuples(st.just("train"), st.lists(NUMBERS, min_size=1, max_size=3), NUMBERS),
    st.tuples(st.just("forward"), NUMBERS, NUMBERS),
    st.tuples(st.sampled_from(["backward", "step", "states"])),
    st.tuples(st.sampled_from(["evaluate", "stumble"]), NUMBERS, NUMBERS),
    st.tuples(st.sampled_from(["unshard", "reshard", "ask_unit"]), NUMBERS),
    st.tuples(st.sampled_from(["sync", "keep"]), NUMBERS, TRUTH),
    st.tuples(st.just("freeze"), NUMBERS, TRUTH),
)
PROGRAMS = st.builds(
    Program,
    pool=st.lists(TRUTH, min_size=2, max_size=5),
    units=st.lists(TRUTH, min_size=5, max_size=5),
    models=st.lists(
        st.tuples(st.lists(NUMBERS, min_size=1, max_size=5), st.none() | NUMBERS, NUMBERS, TRUTH),
        min_size=2,
        max_size=3,
    ),
    tied=TRUTH,
    hybrid=TRUTH,
    reshard=st.lists(st.sampled_from([None, True, False]), min_size=8, max_size=8),
    lanes=TRUTH,
    steps=st.lists(STEP, min_size=2, max_size=12),
)


class Execution:
    """A program beside the same in one process, which computes the rows of all ranks."""

    def __init__(self, rank: int, world: int, program: Program) -> None:
        self.rank, self.world = rank, world
        self.pool, self.models = program.build()
        self.pool_alone, self.models_alone = copy.deepcopy((self.pool, self.models))
        mesh = mesh_2d() if program.hybrid and world == 4 else mesh_of(world)
        reshard = iter(program.reshard)
        for part, is_unit in zip(self.pool, program.units):
            if is_unit or sum(part in [*model.parts] for model in self.models) > 1:
                fsdp2.fully_shard(part, mesh=mesh, reshard_after_forward=next(reshard))
        for model in self.models:
            fsdp2.fully_shard(model, mesh=mesh, reshard_after_forward=next(reshard))
        if program.lanes:
            fsdp2.share_comm_ctx(self.models)
        self.units: list[Any] = [part for part in self.pool if isinstance(part, fsdp2.FSDPModule)]
        every = [nn.ModuleList(self.models), nn.ModuleList(self.models_alone)]
        self.parameters = [dict(module.named_parameters()) for module in every]
        self.optimizers = [torch.optim.SGD(module.parameters(), 0.05) for module in every]
        self.pending: list[tuple[Tensor, Tensor]] = []

    def losses(self, *modules: tuple[nn.Module, nn.Module], batch: int) -> tuple[Tensor, Tensor]:
        """Return the sum of losses on this rank's rows, and its mean over the rows of all ranks in the one process."""
        batches = [torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(9 * batch + r)) for r in range(4)]
        loss = sum(module(batches[self.rank]).square().mean() for module, _ in modules)
        alone = [sum(module(rows).square().mean() for _, module in modules) for rows in batches[: self.world]]
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / self.world, sum(alone) / self.world)
        return loss, sum(alone) / self.world

    def pair(self, number: int) -> tuple[Any, Any]:
        """Return a model and the same in one process."""
        number %= len(self.models)
        return self.models[number], self.models_alone[number]

    @staticmethod
    def back(losses: tuple[Tensor, Tensor]) -> None:
        """Go back from both, unless everything is frozen."""
        for loss in losses if losses[1].requires_grad else ():
            loss.backward()

    def train(self, numbers: list[int], batch: int) -> None:
        """Forward of some models, and a backward from the sum of their losses."""
        self.back(self.losses(*map(self.pair, numbers), batch=batch))

    def forward(self, number: int, batch: int) -> None:
        """Keep a loss."""
        if len(self.pending) < 2:
            self.pending.append(self.losses(self.pair(number), batch=batch))

    def backward(self) -> None:
        """Go back from the loss that was kept last."""
        if self.pending:
            self.back(self.pending.pop())

    @torch.no_grad()
    def evaluate(self, number: int, batch: int) -> None:
        """Forward without gradients."""
        self.losses(self.pair(number), batch=batch)

    def stumble(self, number: int, batch: int) -> None:
        """Catch an error from the last part of a forward, and go on."""
        for model in self.pair(number):
            handle = model.parts[-1].register_forward_pre_hook(lambda *unused: 1 / 0)
            with suppress(ZeroDivisionError):
                model(torch.full((3, WIDTH), float(batch)))
            handle.remove()

    def ask_unit(self, number: int) -> None:
        """Train a part that is a unit, by itself."""
        for unit in self.units[number % 5 :][:1]:
            self.back(self.losses((unit, self.pool_alone[self.pool.index(unit)]), batch=number))

    def unshard(self, number: int) -> None:
        """Gather a unit by hand."""
        for unit in self.units[number % 5 :][:1]:
            unit.unshard()

    def reshard(self, number: int) -> None:
        """Free a model."""
        self.pair(number)[0].reshard()

    def sync(self, number: int, value: bool) -> None:
        """Communicate the gradients of a model from now on, or not."""
        self.pair(number)[0].set_requires_gradient_sync(value)

    def keep(self, number: int, value: bool) -> None:
        """Keep a model after its forwards from now on, or not."""
        self.pair(number)[0].set_reshard_after_forward(not value)

    def freeze(self, number: int, value: bool) -> None:
        """Freeze a part, or let it train."""
        self.step()
        for pool in (self.pool, self.pool_alone):
            pool[number % len(pool)].requires_grad_(not value)

    def states(self) -> None:
        """Compare state dicts."""
        for model, alone in zip(self.models, self.models_alone):
            got = {name: full(value) for name, value in model.state_dict().items()}
            torch.testing.assert_close(got, dict(alone.state_dict()))

    def step(self) -> None:
        """Compare gradients after what was not reduced is, and step."""
        self.pending.clear()
        for model in self.models:
            model.set_requires_gradient_sync(True)
        for model in self.models:
            model.synchronize_gradients()
        gradients = [{n: p.grad for n, p in named.items() if p.grad is not None} for named in self.parameters]
        torch.testing.assert_close({n: full(gradient) for n, gradient in gradients[0].items()}, gradients[1])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def run(rank: int, world: int, program: Program) -> None:
    """Execute a program, a step and an evaluation of each model."""
    execution = Execution(rank, world, program)
    for name, *arguments in program.steps:
        getattr(execution, name)(*arguments)
    execution.step()
    for number in range(len(program.models)):
        execution.evaluate(number, 1)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@drawn_anew
@settings(max_examples=settings().max_examples // 2)
@given(program=PROGRAMS)
def test_random_program_with_several_roots(world, program):
    """Who computes with a shared or tied parameter was asked of one root's pass: see ``test_several_roots.py``."""
    POOL.run(world, run, {"program": program}, LIMIT_SECONDS)
