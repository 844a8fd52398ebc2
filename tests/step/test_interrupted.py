"""A step that ends at any place, by an error or by Ctrl-C, alike on all ranks: ``reset_iter_state`` makes the model as
if it had never begun. What comes next is what a single process computes.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._trace import listening
from tests.support import api
from tests.support.counting import events
from tests.support.parity import assert_gradients, beside_one_process, mesh_2d, step_alike
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
    step_alike(module, alone, lambda model: model(INPUTS).square().mean(), where, lr=None)
    for unit in (*module.layers, module):
        unit.reshard()


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


def run(module: Any, what: str) -> None:
    """Run what is interrupted."""
    if what == "evaluation":
        with torch.no_grad():
            module(INPUTS)
        return
    module.set_manual_backward_finalization(what == "manual")
    for _ in range(2 if what == "micro-batches" else 1):
        module.set_requires_gradient_sync(what != "micro-batches")
        module(INPUTS).square().mean().backward()
    module.set_requires_gradient_sync(True)
    if what == "manual":
        module.finalize_backward()
    else:
        module.synchronize_gradients()


def interrupt_everywhere(rank: int, world: int, options: str, error: type[BaseException], what: str) -> None:
    """One rank of a case."""
    module, alone = beside_one_process(Net, lambda module: [*module.layers], **OPTIONS[options]())
    step(module, alone, "first")
    places = len(events(lambda: run(module, what)))
    module.reset_iter_state()
    for place in range(places):
        where = f"{place} of {places}"
        with listening(Interrupting(place, error)), contextlib.suppress(error):
            run(module, what)
        module.set_requires_gradient_sync(True)
        module.reset_iter_state()
        step(module, alone, where)


def folders(*names: str) -> tuple[str, ...]:
    """Return the paths of folders of the package."""
    return tuple(str(Path(fsdp2.__file__).parent / name) for name in names)


ENGINE = folders("engine", "autograd", "comm")


class AtLine:
    """What Python calls at each line: it raises KeyboardInterrupt at one ``inside`` these folders, before the n-th time
    that it runs, or without a line notes those that run."""

    def __init__(self, line: tuple[str, int] | None = None, times: int = 0, inside: tuple[str, ...] = ENGINE) -> None:
        self.line, self.left, self.inside = line, times, inside
        self.ran: list[tuple[str, int]] = []

    def __call__(self, frame: Any, event: str, argument: object) -> AtLine | None:
        """Hear of a line, or of the frame whose lines come next."""
        file = frame.f_code.co_filename
        waits = file.endswith("host_work.py")  # on each rank in other rounds
        if not file.startswith(self.inside) or waits:
            return None
        here = file, frame.f_lineno
        if event == "line" and self.line is None:
            self.ran.append(here)
        elif event == "line" and here == self.line:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return self

    @contextlib.contextmanager
    def traced(self) -> Iterator[AtLine]:
        """Hear of what runs in this block."""
        sys.settrace(self)
        try:
            yield self
        finally:
            sys.settrace(None)


def cases_at_lines() -> list[Any]:
    """Return what runs, on how many ranks."""
    found = []
    for options, what in itertools.product(OPTIONS, ("training", "evaluation", "micro-batches", "manual")):
        marks = [] if options == "by default" and what in ("training", "manual") else [pytest.mark.slow]
        world = 4 if options in ("pieces", "over replicas") else 2
        found.append(pytest.param(world, options, what, marks=marks, id=f"{options}, {what}"))
    return found


@pytest.mark.parametrize(("world", "options", "what"), cases_at_lines())
def test_at_any_line(world, options, what):
    """Ctrl-C may come between any two lines. A line in the wait for a gather let the next forward read memory that was
    freed, which ended the process; between two of ``finalize_backward``, gradients on their way were forgotten."""
    POOL.run(world, interrupt_at_lines, {"options": options, "what": what}, LIMIT_SECONDS)


def interrupted(
    call: Callable[[], None],
    most: int,
    known: Sequence[tuple[str, int]] = (),
    inside: tuple[str, ...] = ENGINE,
) -> Iterator[str]:
    """Interrupt ``call`` at up to so many lines that all ranks run as often and that are not ``known``; yield where."""
    with AtLine(inside=inside).traced() as noted:
        call()
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, Counter(noted.ran))
    common = {line for line, count in counts[0].items() if all(other[line] == count for other in counts)}
    draw, lines = random.Random(0), sorted(common.difference(known))
    lines = draw.sample(lines, min(most, len(lines)))
    places = [(line, draw.randrange(counts[0][line])) for line in lines]
    dist.broadcast_object_list(places)  # all ranks at the same ones
    for line, times in places:
        # On the way out of a block of torch.no_grad, Python does not come to its end, and gradients would stay off.
        with torch.enable_grad(), AtLine(line, times, inside).traced(), contextlib.suppress(KeyboardInterrupt):
            call()
        yield f"{line[0]}:{line[1]}, after {times} times"


def interrupt_at_lines(rank: int, world: int, options: str, what: str, most: int = 60) -> None:
    """Interrupt at some of the lines that run, and do not in training, each as probable as any other. Go on without
    recovery, which is right or refuses, and with it."""
    module, alone = beside_one_process(Net, lambda module: [*module.layers], **OPTIONS[options]())
    for where in ("first", "second"):
        step(module, alone, where)
    with AtLine().traced() as training:
        run(module, "training")
    known = () if what == "training" else training.ran
    for where in interrupted(lambda: run(module, what), most, known):
        module.set_requires_gradient_sync(True)
        with contextlib.suppress(RuntimeError):  # it was ended, or ranks have to recover, which comes next
            module.finalize_backward()
        with contextlib.suppress(RuntimeError):
            module.set_manual_backward_finalization(False)
        try:
            step(module, alone, f"{where}, without recovery")
        except RuntimeError as error:
            assert "reset_iter_state" in str(error), where
        module.reset_iter_state()
        module.set_manual_backward_finalization(False)
        step(module, alone, where)


@on_ranks(2)
@pytest.mark.parametrize("with_grads", [False, True])
def test_at_any_line_of_summon_full_params(rank, world, with_grads):
    """A block that was interrupted at its end still shows full parameters: ``reset_iter_state`` refused because of the
    block, or because parameters had been replaced, and a forward that nothing refused computed with them."""
    module, alone = beside_one_process(Net, lambda module: [*module.layers])
    step(module, alone, "first")

    def summon() -> None:
        with fsdp2.summon_full_params(module, with_grads=with_grads):
            pass

    files = (*folders("weights/summon.py"), *ENGINE)
    source, first = inspect.getsourcelines(inspect.unwrap(fsdp2.summon_full_params))
    ends = first + next(number for number, text in enumerate(source) if ".ending = True" in text)
    known = [(files[0], ends)]  # Python handles no signal at this line, or on the way to it
    for where in interrupted(summon, 40, known, files):
        try:
            step(module, alone, f"{where}, without recovery")
        except RuntimeError as error:
            assert "reset_iter_state" in str(error), where
        module.reset_iter_state()
        step(module, alone, where)
        summon()


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


@on_ranks(2)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("options", ["by default", "kept"])
@pytest.mark.parametrize("resets", [True, False])
def test_what_is_written_after_an_interrupt(rank, world, trains, options, resets):
    """Modules show full parameters then. A write to them was lost without a word when the next forward freed them. What
    the interrupt left is not taken for a call that is still under way: that forward is a new one, which gathers."""
    module, alone = beside_one_process(Net, lambda module: [*module.layers], **OPTIONS[options]())

    def interrupt(*unused: object) -> None:
        raise KeyboardInterrupt

    for at in (module.layers[2], module.layers[1]):
        handle = at.register_forward_pre_hook(interrupt)  # behind ours
        with pytest.raises(KeyboardInterrupt), torch.set_grad_enabled(trains):
            module(INPUTS)
        handle.remove()
        written = at.bias
        assert not isinstance(written, DTensor)
        with torch.no_grad():
            written.add_(1)
        with pytest.warns(UserWarning, match=r"layers.\d.bias: values were written .* They are lost"):
            if resets:
                module.reset_iter_state()
            step(module, alone, "after it")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*values were written")
            step(module, alone, "once more")
