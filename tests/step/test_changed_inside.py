"""Weights, units and ties that change while a forward runs, or between a forward and its backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from tests.support import api
from tests.support.counting import events
from tests.support.models import Three
from tests.support.parity import assert_gradients, beside_one_process, mesh_1d, step_alike
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

INPUTS = torch.ones(2, 8)


def loss_of(model: nn.Module) -> torch.Tensor:
    """Return the loss of the same rows on every rank."""
    return model(INPUTS).square().mean()


def train_both(module: Any, alone: Any, steps: int = 3) -> None:
    """Train both; expect equal losses, gradients, and results of evaluations between steps."""
    for step in range(steps):
        step_alike(module, alone, loss_of, f"step {step}")
        with torch.no_grad():
            torch.testing.assert_close(module(INPUTS), alone(INPUTS))


# ---- shards of the root that a forward writes ----


class Drifting(nn.Module):
    """Changes a weight of its own in some forward, when it has computed with it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.block = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
        self.written: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x * self.scale)
        with torch.no_grad():
            for weight in self.written:
                weight.mul_(0.5)
        return y


@on_ranks(1, 2)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("step", [0, 1])
def test_a_write_to_shards_of_the_root(rank, world, step, grad):
    """The root stays in memory behind a forward. Later ones computed with its old weights if the first one had written
    to its shards: these were looked at when the forward was over."""
    module, alone = beside_one_process(Drifting, lambda model: [model.block])
    shards = [model.scale for model in (module, alone)]
    for number in range(3):
        for model, shard in zip((module, alone), shards):
            model.written = [shard] if number == step else []
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(module(INPUTS), alone(INPUTS))


# ---- full parameters that a forward writes between two calls ----


class Rescaled(nn.Module):
    """Calls a block twice; between the calls, perhaps after a backward, it writes to the block's weight."""

    def __init__(self, *, backward: bool) -> None:
        super().__init__()
        self.first, self.block, self.backward = nn.Linear(8, 8), nn.Linear(8, 8), backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).detach().requires_grad_()
        y = self.block(x).tanh().sum()
        if self.backward:
            (force,) = torch.autograd.grad(y, x)
            x = x + force
        with torch.no_grad():
            self.block.weight.mul_(0.5)
        return self.block(x)


@on_ranks(1, 2)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    ("backward", "reshard"),
    [(True, None), (True, True), (True, False), (False, None), (False, True), (False, False)],
)
def test_a_write_between_two_calls(rank, world, backward, grad, reshard):
    """What is written to a full parameter, a copy that will be freed, is refused by name, or is in the weight for good.
    It must not count for one call and be lost after that."""
    build = partial(Rescaled, backward=backward)
    module, alone = beside_one_process(build, lambda m: [m.first, m.block], reshard_after_forward=reshard)

    def forward(model: nn.Module) -> torch.Tensor:
        with torch.set_grad_enabled(grad or backward):
            return model(INPUTS)

    try:
        outputs = [forward(model) for model in (module, alone)]
    except RuntimeError as error:
        assert "block.weight" in str(error), error
        return
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*[forward(model) for model in (module, alone)])
    if grad:
        module.reset_iter_state()
    module.reshard(), module.block.reshard()
    weight: Any = module.block.weight
    torch.testing.assert_close(weight.detach().full_tensor(), alone.block.weight.detach())


# ---- units that come while a forward runs ----


class Growing(nn.Module):
    """Makes a layer in its forward, where it is first needed, as lazy adapters do."""

    def __init__(self, *, place: int) -> None:
        super().__init__()
        self.layers, self.place = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), place
        self.grow: Callable[[nn.Module], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = 0
        while number < len(self.layers):
            if self.grow is not None and number == 1:
                torch.manual_seed(5)
                layer = nn.Linear(8, 8)
                self.grow(layer)
                self.layers.insert(self.place, layer)
                self.grow = None
            x = torch.tanh(self.layers[number](x))
            number += 1
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_a_unit_that_a_forward_inserts(rank, world, place, when, first):
    """It runs under the root that runs, from that forward on."""
    module, alone = beside_one_process(lambda: Growing(place=place), lambda m: [*m.layers])
    if when == "later":
        train_both(module, alone, 2)
    module.grow, alone.grow = partial(fsdp2.fully_shard, mesh=mesh_1d()), lambda layer: None
    if first == "evaluation":
        with torch.no_grad():
            torch.testing.assert_close(module(INPUTS), alone(INPUTS))
    train_both(module, alone)


# ---- slices of lists of modules, which are modules that come and go ----


class Sliced(nn.Module):
    """Goes through slices of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize("where", ["in the forward", "between", "kept for a while"])
def test_slices(rank, world, where):
    """A slice registers the layers once more, somewhere else. It is no change of the model: training goes on as before,
    and each unit is still gathered ahead."""
    module, alone = beside_one_process(Sliced, lambda m: [*m.layers], reshard_after_forward=True)
    for _ in range(2):
        if where == "between":
            _ = [module.layers[1:], module.layers[:1]]
        elif where == "kept for a while":
            module.front = module.layers[:2]
        train_both(module, alone, 1)
        if where == "kept for a while":
            del module.front
    train_both(module, alone, 1)
    seen = [one for one in events(lambda: module(INPUTS)) if one[0] in ("unshard", "pre_forward", "post_forward")]
    for number in range(1, 4):
        assert seen.index(("unshard", f"layers.{number}")) < seen.index(("post_forward", f"layers.{number - 1}"))


# ---- ties that are made between a forward and its backward ----


def tie(module: Any) -> None:
    """Tie the last layer to the first."""
    module.last.weight = module.first.weight


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("again", [True, False])
def test_a_tie_between_a_forward_and_its_backward(rank, world, reshard, again):
    """The backward of a forward from before the tie, perhaps after another forward. torch's fails with a raw
    "setStorage ... out of bounds"; here it is right, or refused by the name of a parameter, and training goes on."""
    module, alone = beside_one_process(Three, reshard_after_forward=reshard)
    losses = [model(INPUTS).square().mean() for model in (module, alone)]
    try:
        tie(module)
        if again:
            module(INPUTS)
        losses[0].backward()
    except RuntimeError as error:
        assert any(name in str(error) for name in ("first.weight", "last.weight")), error
        module.reset_iter_state()
        module.zero_grad()
    else:
        losses[1].backward()
        for unit in (*module.children(), module):
            unit.reshard()
        gradients = [model.first.weight.grad for model in (module, alone)]
        torch.testing.assert_close(gradients[0].full_tensor(), gradients[1])
        torch.testing.assert_close(module.middle.weight.grad.full_tensor(), alone.middle.weight.grad)
    tie(alone)
    for model in (module, alone):
        model.zero_grad()
    train_both(module, alone)


# ---- another forward between a forward and its backward ----


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("backward", ["of the first", "of the second", "of both"])
def test_replaced_between_two_forwards(rank, world, reshard, backward):
    """The backward of the first computed the gradients of the second one's weights, without a word: what a forward had
    computed with was known of the last one only. It raises, unless both are in memory, as one process has them."""
    module, alone = beside_one_process(Three, reshard_after_forward=reshard)
    losses = []
    for model in (module, alone):
        first = model(INPUTS).square().mean()
        with torch.no_grad():
            model.last.weight = nn.Parameter(model.last.weight * 2)
        second = model(INPUTS).square().mean()
        losses.append({"of the first": first, "of the second": second, "of both": first + second}[backward])
    try:
        losses[0].backward()
    except RuntimeError as error:
        assert backward != "of the second"
        assert "last.weight: replaced on its module between forward and backward" in str(error)
        module.reset_iter_state()
        module.zero_grad()
    else:
        assert backward == "of the second" or (reshard is False and world == 1)
        losses[1].backward()
        for unit in (*module.children(), module):
            unit.reshard()
        assert_gradients(module, alone)
    for model in (module, alone):
        model.zero_grad()
    train_both(module, alone)


@on_ranks(2)
def test_cast_between_two_forwards(rank, world):
    """autograd said that something was modified in place; the error names what was done."""
    module, _ = beside_one_process(Three)
    loss = module(INPUTS).mean()
    module.double()
    module(INPUTS.double())
    with pytest.raises(RuntimeError, match="last: its parameters were cast, moved or laid out anew between forward"):
        loss.backward()
    module.reset_iter_state()
    module(INPUTS.double()).mean().backward()
