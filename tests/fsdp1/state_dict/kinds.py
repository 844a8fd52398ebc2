"""What the tests of this folder share: the settings by name, and a model of every kind of part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

import fsdp2
from tests.support.models import Counting
from tests.support.parity import fulls, mesh_1d

FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)
KINDS: dict[str, tuple[Any, ...]] = {
    "full": (FULL,),
    "full_on_cpu": (FULL, FullStateDictConfig(offload_to_cpu=True), FullOptimStateDictConfig(offload_to_cpu=False)),
    "full_on_rank0": (
        FULL,
        FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True),
    ),
    "sharded": (SHARDED,),
    "sharded_on_cpu": (SHARDED, ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig()),
    "local": (LOCAL,),
    "local_on_cpu": (LOCAL, LocalStateDictConfig(offload_to_cpu=True)),
}


def using(module: nn.Module, kind: str) -> AbstractContextManager[None]:
    """Return the context in which ``module`` makes state dicts of a kind."""
    return fsdp2.state_dict_type(module, *KINDS[kind])


def save(module: nn.Module, kind: str, **options: Any) -> dict[str, Any]:
    """Return the state dict of a kind."""
    with using(module, kind):
        return module.state_dict(**options)


class Mixed(nn.Module):
    """Uneven layers, a norm with buffers, counters, ties and a frozen part; its input is eight wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 6))
        self.middle = Counting()
        self.last = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.last.weight
        self.last.weight.requires_grad_(True)
        self.first[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.last(self.middle(self.first(x)))))


def build(seed: int = 3) -> Mixed:
    """Return the model, equal on every rank and call."""
    torch.manual_seed(seed)
    return Mixed()


def shard(module: Any, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """Shard ``first`` and then the rest of a ``Mixed`` in place."""
    for unit in (module.first, module):
        fsdp2.fully_shard(unit, mesh=mesh or mesh_1d(), **options)
    return module


def rows(seed: int = 0) -> Tensor:
    """Return a small batch."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    """Run iterations on the same rows on every rank and return the losses."""
    losses = []
    for seed in steps:
        loss = module(rows(seed)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def trained(make: Callable[[Any], torch.optim.Optimizer] | None = None, **options: Any) -> tuple[Any, Any]:
    """Return a sharded model and its optimizer after two iterations."""
    module = shard(build(), **options)
    optimizer = (make or (lambda params: torch.optim.AdamW(params, lr=0.05)))(module.parameters())
    train(module, optimizer, range(2))
    return module, optimizer


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the full values by name."""
    return fulls(module.state_dict())


def assert_equal(got: dict[str, Any], expected: dict[str, Tensor]) -> None:
    """Assert that names, their order and plain values agree."""
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert type(got[name]) is Tensor and got[name].dtype == value.dtype and torch.equal(got[name], value), name
