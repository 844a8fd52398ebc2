"""Two equal sharded models, the optimizer of one of which steps on local shards, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2.optim.host_state import HOST_STATE
from tests.support.parity import mesh_1d

ROWS, WIDTH = 4, 6
BUCKET = 256 / 2**20
"""MiB that are a few parameters of the model, or one."""
Make = Callable[[Iterable[Any]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD with Nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
}


class Model(nn.Module):
    """Uneven matrices, one with fewer rows than ranks, a scalar, a frozen parameter and one that is rarely used."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.rare = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        x = self.two(torch.tanh(self.one(x))) * self.scale + self.row + self.frozen
        return x * self.rare if rare else x


def build(mesh: Any = None, **options: Any) -> Model:
    """Return a sharded model, equal for each call."""
    torch.manual_seed(3)
    module = Model()
    for unit in (module.one, module):
        fsdp2.fully_shard(unit, mesh=mesh or mesh_1d(), **options)
    return module


def batch(step: int) -> Tensor:
    """Return this rank's rows of a step."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int] = range(3)) -> None:
    """Take steps; the second uses the rare parameter."""
    for step in steps:
        module(batch(step), rare=step == 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def local(value: Any) -> Any:
    """Return the local tensor of a DTensor."""
    return value.to_local() if isinstance(value, DTensor) else value


def assert_equal(one: Any, other: Any) -> None:
    """Assert that two nested structures are equal bit for bit and have DTensors in the same places."""
    if isinstance(one, (list, tuple)):  # checkpoints make lists of tuples
        assert isinstance(other, (list, tuple)) and len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_equal(mine, theirs)
        return
    assert type(one) is type(other), (one, other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype and one.requires_grad == other.requires_grad
        if isinstance(one, DTensor):
            assert one.placements == other.placements and one.device_mesh == other.device_mesh
        assert torch.equal(local(one), local(other)), (one, other)
    else:
        assert one == other


def assert_same_training(modules: list[Any], optimizers: list[torch.optim.Optimizer]) -> None:
    """Assert that two models and their optimizers have come to the same, bit for bit."""
    assert_equal(modules[0].state_dict(), modules[1].state_dict())
    assert_equal(optimizers[0].state_dict(), optimizers[1].state_dict())


def pair(
    make: Make, mesh: Any = None, *, elementwise: bool = False, **options: Any
) -> tuple[list[Any], list[torch.optim.Optimizer]]:
    """Return two equal sharded models and their optimizers, the second of which steps on local shards."""
    modules = [build(mesh, **options) for _ in range(2)]
    optimizers = [make(module.parameters()) for module in modules]
    assert fsdp2.use_local_shards(optimizers[1], elementwise=elementwise) is optimizers[1]
    return modules, optimizers


@contextmanager
def host_apart(apart: bool = True) -> Iterator[None]:
    """Let memory of the host count as other memory than the device's, which is a CPU."""
    with mock.patch("fsdp2.optim.host_state.has_host", return_value=apart):
        yield


def on_host(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of moments that ``optimizer`` keeps on the host, on this rank, and check that they are shown."""
    held = optimizer.__dict__[HOST_STATE]._held
    for param, one in held.items():
        assert optimizer.state[param] is one.entry and one.is_in(one.entry)
    return sum(one.end - one.start for one in held.values())


def make(name: str, way: str = "plain") -> Make:
    """Return what builds an optimizer of a name in one of its implementations."""
    kind, options = OPTIMIZERS[name]
    chosen = {} if way == "plain" else {way: True}
    return lambda params: kind(params, **options, **chosen)


def driven_by_others(
    module: Any, optimizer: torch.optim.Optimizer, late: Callable[[torch.optim.Optimizer], object] | None
) -> list[str]:
    """Step three times by a closure, with a scheduler and hooks, behind which ``late`` changes how the optimizer steps.

    They find DTensors alone. Return what they saw.
    """
    seen: list[str] = []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def note(when: str, o: torch.optim.Optimizer) -> None:
        assert {type(p) for group in o.param_groups for p in group["params"]} | set(map(type, o.state)) == {DTensor}
        seen.append(f"{when} with {len(o.state)}")

    optimizer.register_step_pre_hook(lambda o, *_: note("before", o))
    optimizer.register_step_post_hook(lambda o, *_: note("after", o))
    if late is not None:
        late(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        note("inside", optimizer)
        loss = module(batch(0)).square().mean()
        loss.backward()
        return loss

    losses = []
    for step in (optimizer.step, optimizer.step, lambda closure: optimizer.step(closure=closure)):
        losses.append(step(closure).item())
        scheduler.step()
    assert len(set(losses)) == 3 and optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 8)
    return seen
