"""Random programs: a small model, how it is sharded, and a list of things that a training script may do with it.

A program is plain data, so it travels to the worker processes and hypothesis can shrink it. ``execute`` runs it on any
of the three runs of ``tests.support.oracle``; what only concerns sharding does nothing in a single process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.models import Case, Tied, Unit, mlp, rows
from tests.support.oracle import TRANSFERS, Run, Setup
from tests.support.shapes import Wraps, first_tensor, loss_of

WIDTH = 6
LIMIT_PENDING = 3


class Twice(nn.Module):
    """Calls its layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x))))


class Doubling(nn.Module):
    """Has an own parameter around a nested unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(WIDTH, 3, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


UNITS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "uneven": lambda: mlp(WIDTH, 5, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "tied": Tied,
    "twice": Twice,
    "nested": Doubling,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dict": lambda: Wraps("dict"),
    "empty": nn.Tanh,
}


class Chain(nn.Module):
    """Units in a row with residual connections, and a last layer that belongs to the root."""

    def __init__(self, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.units = nn.ModuleList(UNITS[kind]() for kind in kinds)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = x + torch.tanh(first_tensor(unit(x)))
        return self.last(x)


@dataclass(frozen=True)
class RandomProgram:
    """``kinds`` are keys of ``UNITS``; unit i is sharded by itself if ``sharded[i]``, else with the root; the first
    two units are grouped if ``grouped``. ``steps`` are the name of an operation below and its arguments."""

    kinds: tuple[str, ...]
    sharded: tuple[bool, ...]
    grouped: bool
    reshard_after_forward: bool | None
    transfer: str
    input_needs_grad: bool
    steps: tuple[tuple[Any, ...], ...] = field(default=())

    @property
    def case(self) -> Case:
        """The model as a case."""
        return Case(lambda: Chain(self.kinds), rows(WIDTH, grad=self.input_needs_grad), self.units)

    def units(self, model: Chain) -> list[Unit]:
        """Return what is sharded below the root, innermost first."""
        found: list[Unit] = []
        chosen = [unit for unit, sharded in zip(model.units, self.sharded, strict=True) if sharded]
        for unit in chosen:
            if isinstance(unit, Doubling):
                found.append(unit.inner)
        if self.grouped and len(chosen) > 1:
            return [*found, chosen[:2], *chosen[2:]]
        return [*found, *chosen]

    @property
    def setup(self) -> Setup:
        """How it is sharded."""
        return Setup(self.reshard_after_forward, transfer=self.transfer)

    @property
    def torch_takes_it(self) -> bool:
        """Whether torch's fully_shard does this right: no inference mode, no step or load over full parameters."""
        wrong = ("evaluate", "inference"), ("update", False)
        return not any(step in wrong or (step[0] == "unshard" and step[2]) for step in self.steps)


def programs() -> st.SearchStrategy[RandomProgram]:
    """Return a strategy for programs of up to a dozen steps."""
    number, truth = st.integers(0, 3), st.booleans()
    step = st.one_of(
        st.tuples(st.just("forward"), number),
        st.tuples(st.just("backward"), number, truth),
        st.tuples(st.just("backward"), number, truth),
        st.tuples(st.just("train"), number),
        st.tuples(st.just("evaluate"), st.sampled_from(["no_grad", "inference"])),
        st.tuples(st.just("sync"), truth),
        st.tuples(st.just("after_forward"), truth),
        st.tuples(st.just("after_backward"), truth),
        st.tuples(st.just("unshard"), number, truth),
        st.tuples(st.just("reshard"), number),
        st.tuples(st.just("freeze"), number, truth),
        st.tuples(st.just("state_dict")),
        st.tuples(st.just("reload")),
        st.tuples(st.just("update"), truth),
    )

    def build(kinds: list[str]) -> st.SearchStrategy[RandomProgram]:
        return st.builds(
            RandomProgram,
            kinds=st.just(tuple(kinds)),
            sharded=st.tuples(*(st.booleans() for _ in kinds)),
            grouped=st.booleans(),
            reshard_after_forward=st.sampled_from([None, True, False]),
            transfer=st.sampled_from(sorted(TRANSFERS)),
            input_needs_grad=st.booleans(),
            steps=st.lists(step, min_size=1, max_size=12).map(tuple),
        )

    return st.lists(st.sampled_from(sorted(UNITS)), min_size=1, max_size=4).flatmap(build)


class Execution:
    """The steps of a program on one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.pending: list[Tensor] = []
        self.batch = 0
        self.synced = True
        self.unreduced = False
        self.scale = 1.0

    def forward(self, batch: int) -> None:
        """Compute a loss and keep it for a later backward."""
        if len(self.pending) < LIMIT_PENDING:
            self.pending.append(self.run.loss(batch))

    def backward(self, index: int, retain: bool) -> None:
        """Go back from one of the kept losses, which may be used again if ``retain``."""
        if self.pending:
            index %= len(self.pending)
            loss = self.pending[index] if retain else self.pending.pop(index)
            loss.backward(retain_graph=retain)
            self.unreduced = not self.synced

    def train(self, batch: int) -> None:
        """Forward and backward at once."""
        self.run.loss(batch).backward()
        self.unreduced = not self.synced

    def evaluate(self, mode: str) -> None:
        """Forward without gradients."""
        self.run.module.eval()
        with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
            self.run.loss(7)
        self.run.module.train()

    def sync(self, value: bool) -> None:
        """Communicate gradients from now on, or not."""
        self.synced = value
        for root in self.run.root:
            root.set_requires_gradient_sync(value)

    def after_forward(self, value: bool) -> None:
        """Reshard after forward from now on, or not."""
        for root in self.run.root:
            root.set_reshard_after_forward(value)

    def after_backward(self, value: bool) -> None:
        """Reshard after backward from now on, or not."""
        for root in self.run.root:
            root.set_reshard_after_backward(value)

    def unshard(self, index: int, async_op: bool) -> None:
        """Gather one unit by hand."""
        if self.run.units:
            self.run.units[index % len(self.run.units)].unshard(async_op=async_op)

    def reshard(self, index: int) -> None:
        """Free one unit by hand."""
        if self.run.units:
            self.run.units[index % len(self.run.units)].reshard()

    def freeze(self, index: int, value: bool) -> None:
        """Freeze one unit, or train it, from the next iteration on."""
        self.update(True)
        units = self.run.module.units
        units[index % len(units)].requires_grad_(value)

    def state_dict(self) -> None:
        """Take a state dict and look at it."""
        total = sum(value.numel() for value in self.run.module.state_dict().values())
        self.run.trace.losses.append(float(total))

    def reload(self) -> None:
        """Load twice the present state, and the next time half of it, after which earlier losses are not to be used.

        Weights that only grew would let losses grow until the order of summation alone tells the runs apart.
        """
        self.update(True)
        self.scale = 2 / self.scale
        state = self.run.module.state_dict()
        self.run.module.load_state_dict({name: value * self.scale for name, value in state.items()})

    def update(self, tidy: bool) -> None:
        """Step, after one more backward if some gradients were not reduced; ``tidy`` reshards everything first."""
        if self.unreduced:
            self.sync(True)
            self.train(5)
        self.pending.clear()
        if tidy:
            self.run.update()
        else:
            self.run.optimizer.step()
            self.run.optimizer.zero_grad()


def execute(program: RandomProgram, run: Run) -> None:
    """Run the steps of a program, and finish with a step of the optimizer."""
    execution = Execution(run)
    for name, *arguments in program.steps:
        getattr(execution, name)(*arguments)
    execution.train(9)
    execution.update(True)
    run.trace.losses.append(loss_of(run.forward(3)).item())
