"""Ctrl-C between any two lines of an optimizer's step or load: the optimizer still holds the shards, and goes on."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fsdp2
from fsdp2.optim import partial
from tests.optim.stepping import Model, batch, host_apart
from tests.optim.test_proxies import Signs
from tests.step.test_interrupted import folders, interrupted
from tests.support import api
from tests.support.parity import full, mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
FILES = folders("optim")
BUCKET = 64 / 2**20  # of several parameters

Wrap = Callable[[torch.optim.Optimizer], torch.optim.Optimizer]


def adamw(groups: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two moments and a counter."""
    return torch.optim.AdamW(groups, lr=0.1)


def sgd(groups: Any) -> torch.optim.Optimizer:
    """Return one of torch's that writes its state itself."""
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def whole(**options: Any) -> Wrap:
    """Return what lets an optimizer step on whole parameters."""
    return lambda optimizer: fsdp2.use_full_params(optimizer, bucket_mb=BUCKET, **options)


def offloaded(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Keep the optimizer's state on the host."""
    return fsdp2.offload_optimizer_state(optimizer, bucket_mb=BUCKET, elementwise=True)


WAYS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Wrap]] = {
    "local": (adamw, fsdp2.use_local_shards),
    "local SGD": (sgd, fsdp2.use_local_shards),
    "proxies": (Signs, lambda optimizer: fsdp2.use_local_shards(optimizer, elementwise=True)),
    "host": (adamw, offloaded),
    "host, own": (Signs, offloaded),
    "whole": (adamw, whole(overlap_backward=True, keep_full_params=True)),
    "batches": (Signs, whole(batched=True)),
    "whole on the host": (adamw, lambda optimizer: offloaded(whole()(optimizer))),
}


class Trained:
    """A model of two units and a parameter that is left out, and its optimizer of two groups."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(3)
        self.model: Any = Model()
        self.model.plain = torch.nn.Parameter(torch.ones(6))
        for unit in (self.model.one, self.model):
            fsdp2.fully_shard(unit, mesh=mesh_1d(), ignored_params={self.model.plain})
        make, wrap = WAYS[way]
        params = [*self.model.parameters()]
        self.rest = {"params": [param for param in params if param.ndim != 2]}
        self.optimizer = wrap(make([{"params": [param for param in params if param.ndim == 2]}, self.rest]))

    def backward(self, step: int) -> None:
        """Compute gradients of one step."""
        for param in self.model.parameters():
            param.grad = None
        (self.model(batch(step), rare=True) * self.model.plain).square().mean().backward()

    def step(self, number: int) -> None:
        """Train."""
        self.backward(number)
        self.optimizer.step()

    def values(self) -> dict[str, Any]:
        """Return copies of the whole parameters."""
        return {name: full(param).clone() for name, param in self.model.named_parameters()}


def step(trained: Trained, saved: dict[str, Any]) -> None:
    trained.optimizer.step()


def load(trained: Trained, saved: dict[str, Any]) -> None:
    trained.optimizer.load_state_dict(copy.deepcopy(saved))


def add_group(trained: Trained, saved: dict[str, Any]) -> None:
    """Leave a group out of a step: owners may change."""
    rest = trained.optimizer.param_groups.pop()
    try:
        trained.optimizer.step()
    finally:
        trained.optimizer.param_groups.append(rest)
    trained.optimizer.step()


def restored() -> list[tuple[str, int]]:
    """Return the lines at which Python handles no signal before the one call in C there is over."""
    source, first = inspect.getsourcelines(partial.PartialGroups.only)
    number = next(i for i, text in enumerate(source) if "list(restored)" in text)
    return [(partial.__file__, first + number - 1), (partial.__file__, first + number)]


@on_ranks(1)  # on several, they would be interrupted on different sides of a collective
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [step, load, add_group])
def test_at_any_line(rank, world, way, call):
    """An interrupt left an optimizer with the tensors that it steps on, so that it never trained the model again, or
    with new owners and the state of the old ones, which no loading repaired."""
    with host_apart():
        trained = Trained(way)
        for number in range(2):
            trained.step(number)
        model, optimizer = copy.deepcopy(trained.model.state_dict()), copy.deepcopy(trained.optimizer.state_dict())
        trained.step(2)
        expected = trained.values()
        shards = {id(param) for param in trained.model.parameters()}
        trained.backward(3)
        for where in interrupted(lambda: call(trained, optimizer), 30, restored(), FILES):
            torch.set_grad_enabled(True)  # an interrupt before the end of a ``with torch.no_grad()`` leaves it
            held = [param for group in trained.optimizer.param_groups for param in group["params"]]
            assert {id(param) for param in held} == shards, where
            before = trained.values()
            trained.step(5)
            left = [name for name, value in trained.values().items() if torch.equal(value, before[name])]
            assert left == ["frozen"], where
            assert trained.optimizer.state_dict()["state"].keys() == optimizer["state"].keys(), where
            trained.model.load_state_dict(model)
            load(trained, optimizer)
            trained.step(2)
            for name, value in trained.values().items():
                torch.testing.assert_close(value, expected[name], msg=lambda text, w=where: f"{w}: {text}")
            trained.backward(3)
