"""A step that ends at any place, by an error or by Ctrl-C, alike on all ranks: ``reset_iter_state`` makes the model as
if it had never begun. What comes next is what a single process computes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2._trace import listening
from tests.support import api
from tests.support.counting import events
from tests.support.parity import assert_gradients, beside_one_process, mesh_2d
from tests.support.pool import LIMIT_SECONDS, POOL, on_ranks

pytestmark = api.fsdp2_only

INPUTS = torch.ones(2, 8)


class Interrupted(Exception):
    """What ends a step."""


class Interrupting:
    """A listener that raises ``error`` at the event of a number."""

    def __init__(self, place: int, error: type[BaseException]) -> None:
        self.left, self.error = place, error

    def __call__(self, event: str, name: str) -> None:
        """Hear of an event."""
        self.left -= 1
        if self.left == -1:
            raise self.error


class Block(nn.Module):
    """A layer below its unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """Layers, one of them recomputed in backward, one called twice, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x))
        x = checkpoint(self.layers[1], x, use_reentrant=False)
        x = self.layers[2](torch.tanh(self.layers[2](x)))
        return x * self.scale


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "by default": dict,
    "kept": lambda: {"reshard_after_forward": False},
    "pieces": lambda: {"reshard_after_forward": 2},
    "over replicas": lambda: {"mesh": mesh_2d(), "shard_over_replicas": True},
}


def step(module: Any, alone: Any, where: object) -> None:
    """Assert that both compute the same, without gradients and with them."""
    for model in (module, alone):
        model.zero_grad()
    with torch.no_grad():
        torch.testing.assert_close(module(INPUTS), alone(INPUTS), msg=lambda text: f"{where}, evaluation: {text}")
    losses = [model(INPUTS).square().mean() for model in (module, alone)]
    torch.testing.assert_close(*losses, msg=lambda text: f"{where}, loss: {text}")
    for loss in losses:
        loss.backward()
    for unit in (*module.layers, module):
        unit.reshard()
    assert_gradients(module, alone, where)


def cases() -> list[Any]:
    """Return what runs, on how many ranks."""
    found = []
    for options, error, what in itertools.product(
        OPTIONS, (KeyboardInterrupt, Interrupted), ("training", "evaluation", "micro-batches")
    ):
        quick = error is KeyboardInterrupt and options in ("by default", "over replicas")
        world = 4 if options in ("pieces", "over replicas") else 2
        marks = [] if quick else [pytest.mark.slow]
        found.append(pytest.param(world, options, error, what, marks=marks, id=f"{options}, {error.__name__}, {what}"))
    return found


@pytest.mark.parametrize(("world", "options", "error", "what"), cases())
def test_between_any_two_events(world, options, error, what):
    """At each thing that the engine does in a step, it is interrupted there."""
    POOL.run(world, interrupt_everywhere, {"options": options, "error": error, "what": what}, LIMIT_SECONDS)


def interrupt_everywhere(rank: int, world: int, options: str, error: type[BaseException], what: str) -> None:
    """One rank of a case."""
    module, alone = beside_one_process(Net, lambda module: [*module.layers], **OPTIONS[options]())

    def run() -> None:
        if what == "evaluation":
            with torch.no_grad():
                module(INPUTS)
            return
        for _ in range(2 if what == "micro-batches" else 1):
            module.set_requires_gradient_sync(what == "training")
            module(INPUTS).square().mean().backward()
        module.set_requires_gradient_sync(True)
        module.synchronize_gradients()

    step(module, alone, "first")
    places = len(events(run))
    module.reset_iter_state()
    for place in range(places):
        where = f"{place} of {places}"
        with listening(Interrupting(place, error)), contextlib.suppress(error):
            run()
        module.set_requires_gradient_sync(True)
        module.reset_iter_state()
        step(module, alone, where)


def at_pre_forward(module: Any, error: Callable[[], None]) -> Any:
    return module.layers[1].register_forward_pre_hook(lambda *_: error())


def at_post_forward(module: Any, error: Callable[[], None]) -> Any:
    return module.layers[1].register_forward_hook(lambda *_: error())


def at_root_post_forward(module: Any, error: Callable[[], None]) -> Any:
    return module.register_forward_hook(lambda *_: error())


def at_full_backward(module: Any, error: Callable[[], None]) -> Any:
    return module.layers[0].register_full_backward_hook(lambda *_: error())


def at_full_backward_pre(module: Any, error: Callable[[], None]) -> Any:
    return module.layers[0].register_full_backward_pre_hook(lambda *_: error())


def at_gradient(module: Any, error: Callable[[], None]) -> Any:
    return module.layers[0].weight.register_hook(lambda _: error())


def at_accumulated(module: Any, error: Callable[[], None]) -> Any:
    return module.layers[2].weight.register_post_accumulate_grad_hook(lambda _: error())


def at_output(module: Any, error: Callable[[], None]) -> Any:
    def hook(inner: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: error())

    return module.layers[2].register_forward_hook(hook)


PLACES = {
    place.__name__: place
    for place in (
        at_pre_forward,
        at_post_forward,
        at_root_post_forward,
        at_full_backward,
        at_full_backward_pre,
        at_gradient,
        at_accumulated,
        at_output,
    )
}


@on_ranks(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("options", ["by default", "kept"])
def test_in_a_hook_of_the_user(rank, world, place, error, options):
    """Hooks of modules, tensors and parameters run between those of the engine."""
    module, alone = beside_one_process(Net, lambda module: [*module.layers], **OPTIONS[options]())
    step(module, alone, "first")
    armed = [False]

    def interrupt() -> None:
        if armed[0]:
            raise error

    handle = PLACES[place](module, interrupt)
    for _ in range(2):
        armed[0] = True
        with pytest.raises(error):
            module(INPUTS).square().mean().backward()
        armed[0] = False
        module.reset_iter_state()
        step(module, alone, place)
    handle.remove()


@on_ranks(2)
@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
def test_micro_batches_that_are_given_up(rank, world, error):
    """The second forward is interrupted in a unit; the loop drops all gradients and goes on. What the first micro-batch
    had left in that unit was taken for in use, stayed, and was added to the gradients of the next iteration."""
    module, alone = beside_one_process(lambda: nn.Sequential(*[Block() for _ in range(3)]), lambda module: [*module])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def interrupt(*unused: object) -> None:
        raise error

    module.set_requires_gradient_sync(False)
    module(INPUTS * 5).square().mean().backward()
    handle = module[1].inner.register_forward_pre_hook(interrupt)
    with pytest.raises(error):
        module(INPUTS)
    handle.remove()
    with pytest.raises(RuntimeError, match="6 parameters whose gradients are not reduced"):
        optimizer.step()
    optimizer.zero_grad()
    module.set_requires_gradient_sync(True)
    for model in (module, alone):
        model(INPUTS).square().mean().backward()
    assert_gradients(module, alone)
