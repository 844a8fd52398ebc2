"""Other tensors in the place of the shards: for one call (``torch.func.functional_call``, ``use_weights``), or for good
(``m.weight = nn.Parameter(...)``). What the modules show is the truth, whatever comes next.

A call computes with what it was given, and never makes that the model's. An assignment is the parameter from then on,
for every function that reads parameters. In both cases a single process says what is right.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import fsdp2
from tests.support import api
from tests.support.counting import gathers
from tests.support.parity import assert_gradients, beside_one_process, full, mesh_of, stack, step_alike
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

INPUTS = torch.ones(2, 8)


def pair(**options: Any) -> tuple[Any, Any]:
    """Return three units and a root without parameters, and the same in one process."""
    return beside_one_process(stack, lambda module: [*module], **options)


def values(model: nn.Module) -> dict[str, Any]:
    """Return the whole weights."""
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def assert_values(module: nn.Module, expected: dict[str, Any]) -> None:
    """Assert that ``module`` has these whole weights, which are parameters."""
    got = values(module)
    assert list(got) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=lambda text, n=name: f"{n}: {text}")
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())


def doubled(model: nn.Module) -> dict[str, Any]:
    """Return other values, as an exponential average keeps them."""
    return {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}


def evaluate_others(model: nn.Module) -> torch.Tensor:
    """Evaluate ``model`` with other weights."""
    with torch.no_grad():
        return functional_call(model, doubled(model), (INPUTS,))


def step_on_both(module: Any, alone: Any, where: str = "") -> None:
    """Assert that a forward and a backward give the same loss and gradients in both."""
    for model in (module, alone):
        model.zero_grad()
    step_alike(module, alone, lambda model: model(INPUTS).square().mean(), where, lr=None)


# ---- weights of one call ----


@on_ranks(1, 2)
@pytest.mark.parametrize("trained", [False, True])
def test_a_deep_copy_after_an_evaluation_with_other_weights(rank, world, trained):
    """The copy, and the model itself, held the other weights."""
    module, alone = pair()
    if trained:
        step_on_both(module, alone)
    expected = values(alone)
    torch.testing.assert_close(evaluate_others(module), evaluate_others(alone))
    clone = copy.deepcopy(module)
    assert_values(clone, expected)
    assert_values(module, expected)
    step_on_both(module, alone)
    step_on_both(clone, copy.deepcopy(alone))


@on_ranks(2)
@pytest.mark.parametrize("setter", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_synchronization_after_an_evaluation_with_other_weights(rank, world, setter):
    """Gradients that micro-batches had left were not reduced, without a word."""
    module, alone = pair(mesh=mesh_of(world, 1, names=("replicate", "shard")))
    getattr(module, setter)(False)
    for model in (module, alone):
        for _ in range(2):
            model(INPUTS).square().mean().backward()
    evaluate_others(module)
    module.synchronize_gradients()
    assert_gradients(module, alone)


READERS: dict[str, Callable[[Any], object]] = {
    "state_dict": lambda module: module.state_dict(),
    "iter_full_params": lambda module: [None for _ in fsdp2.iter_full_params(module)],
    "summon_full_params": lambda module: fsdp2.summon_full_params(module).__enter__,
    "unshard, reshard": lambda module: (module[0].unshard(), module[0].reshard()),
    "zero_grad": lambda module: module.zero_grad(),
    "clip": lambda module: fsdp2.clip_grad_norm_(module.parameters(), 1e6),
    "to": lambda module: module.to(torch.float32),
    "double, float": lambda module: module.double().float(),
    "load": lambda module: module.load_state_dict(module.state_dict()),
    "reset": lambda module: module.reset_iter_state(),
    "synchronize": lambda module: module.synchronize_gradients(),
}


@on_ranks(2)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("backward", [False, True])
def test_everything_else_after_an_evaluation_with_other_weights(rank, world, reader, backward):
    """Whatever is called next sees the model's own weights and leaves them."""
    module, alone = pair()
    expected = values(alone)
    if backward:
        step_on_both(module, alone)
    evaluate_others(module)
    READERS[reader](module)
    assert_values(module, expected)
    step_on_both(module, alone)


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_target_between_forward_and_backward(rank, world, reshard):
    """A target network by ``functional_call`` under ``no_grad``, between a forward and its backward, perhaps behind one
    before that forward. It was refused with "use functional_call under torch.no_grad() only", which it was. Where the
    modules show full parameters for that backward it is refused, and what the error says to do helps: that failed
    likewise."""
    module, alone = pair(reshard_after_forward=reshard)
    for before in (False, True):
        losses = []
        for model in (module, alone):
            model.zero_grad()
            weights = doubled(model)
            targets = [evaluate_others(model)] if before else []
            output = model(INPUTS)
            if model is module and reshard is False:
                with torch.no_grad(), pytest.raises(RuntimeError, match=r"^0.weight: its module shows other.*reshard"):
                    functional_call(model, weights, (INPUTS,))
                model.reshard(recurse=True)
            targets.append(evaluate_others(model))
            losses.append(sum((output - target).square().mean() for target in targets))
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
        assert_gradients(module, alone)


@on_ranks(2)
def test_a_forward_after_an_evaluation_with_other_weights_keeps_its_own(rank, world):
    """Our own shards, which came back, were taken for others: what was gathered of them was freed after forward."""
    module, alone = pair(reshard_after_forward=False)
    for _ in range(2):
        module.reshard(recurse=True)
        evaluate_others(module)
        loss = module(INPUTS).square().mean()
        assert gathers(loss.backward) == 0
        module.zero_grad()
    step_on_both(module, alone)


class Fragile(nn.Sequential):
    """Layers; a batch of three rows is refused after the first of them, when the next is gathered ahead."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        if len(x) == 3:
            raise ValueError("a broken sample")
        for layer in self[1:]:
            x = layer(x)
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize("grad", [False, True])
def test_other_weights_after_a_forward_that_broke_off(rank, world, grad):
    """A gather ahead is on its way when a forward raises. Dropping it put the model's own shards over those that the
    next call was given, and that unit computed with the wrong ones."""
    module, alone = beside_one_process(lambda: Fragile(*[nn.Linear(8, 8) for _ in range(3)]), lambda module: [*module])
    for _ in range(2):
        step_on_both(module, alone)
    with pytest.raises(ValueError, match="a broken sample"), torch.set_grad_enabled(grad):
        module(torch.ones(3, 8))
    torch.testing.assert_close(evaluate_others(module), evaluate_others(alone))
    step_on_both(module, alone)


# ---- another parameter for good ----


def as_dtensor(weight: Any) -> nn.Parameter:
    """Another sharded weight."""
    return nn.Parameter(weight.detach() * 2)


def as_plain(weight: Any) -> nn.Parameter:
    """A whole weight, as on one process."""
    return nn.Parameter(full(weight) * 2)


def assign(module: Any, alone: Any, make: Callable[[Any], nn.Parameter]) -> None:
    """Assign another weight to the middle layer of both."""
    module[1].weight = make(module[1].weight)
    alone[1].weight = nn.Parameter(alone[1].weight.detach() * 2)


def see_whole(module: Any, alone: Any) -> None:
    with fsdp2.summon_full_params(module):
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.detach(), alone.get_parameter(name).detach())


def see_each(module: Any, alone: Any) -> None:
    for name, value in fsdp2.iter_full_params(module):
        torch.testing.assert_close(value, alone.get_parameter(name).detach())


def see_unsharded(module: Any, alone: Any) -> None:
    module[1].unshard()
    torch.testing.assert_close(module[1].weight.detach(), alone[1].weight.detach())
    module[1].reshard()


def see_copied(module: Any, alone: Any) -> None:
    assert_values(copy.deepcopy(module), values(alone))


def see_cast(module: Any, alone: Any) -> None:
    module.double()
    assert all(parameter.dtype == torch.float64 for parameter in module.parameters())
    module.float()


def see_used(module: Any, alone: Any) -> None:
    with torch.no_grad(), fsdp2.use_weights(module[1]):
        torch.testing.assert_close(module[1].weight.detach(), alone[1].weight.detach())


def see_reset(module: Any, alone: Any) -> None:
    module.reset_iter_state()


def see_synchronized(module: Any, alone: Any) -> None:
    module.synchronize_gradients()


def see_saved(module: Any, alone: Any) -> None:
    for name, value in module.state_dict().items():
        torch.testing.assert_close(full(value), alone.get_parameter(name).detach())


def see_forward(module: Any, alone: Any) -> None:
    torch.testing.assert_close(module(INPUTS), alone(INPUTS))


SEE = {
    see.__name__: see
    for see in (
        see_whole,
        see_each,
        see_unsharded,
        see_copied,
        see_cast,
        see_used,
        see_reset,
        see_synchronized,
        see_saved,
        see_forward,
    )
}


WHEN = ("new", "trained", "after a forward")


def assignments() -> list[Any]:
    """Return every case; those after a forward are slow."""
    found = []
    for make, when, see in itertools.product((as_dtensor, as_plain), WHEN, SEE):
        marks = [pytest.mark.slow] if when == "after a forward" else []
        found.append(pytest.param(make, when, see, marks=marks, id=f"{make.__name__}, {when}, {see}"))
    return found


@on_ranks(2)
@pytest.mark.parametrize(("make", "when", "see"), assignments())
def test_an_assigned_parameter(rank, world, make, when, see):
    """``m.weight = nn.Parameter(...)``: every function computes with it and keeps it."""
    module, alone = pair()
    if when == "trained":
        step_on_both(module, alone)
    elif when == "after a forward":
        module(INPUTS)
        module.reshard()
    assign(module, alone, make)
    assigned = module[1].weight
    SEE[see](module, alone)
    step_on_both(module, alone, "after it was assigned")
    assert isinstance(module[1].weight, DTensor) and (module[1].weight is assigned or make is as_plain)
    assert_values(module, values(alone))
