"""A small model with a stem, blocks in a list, a norm and a head, with everything that may be odd about it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.support.parity import WIDTH, mesh_of

FROZEN: dict[str, Callable[[Any], list[nn.Module | nn.Parameter]]] = {
    "nothing": lambda net: [],
    "units": lambda net: [net.blocks[1]],
    "first units": lambda net: [net.stem, net.blocks[0]],
    "inside units": lambda net: [part for block in net.blocks for part in (block.norm, block.up.bias)],
    "both": lambda net: [net.blocks[0], net.blocks[1].down, net.blocks[2].norm.weight, net.head.bias],
}
"""What is frozen, by name."""


class Block(nn.Module):
    """A residual block, of uneven width unless it is asked for another."""

    def __init__(self, hidden: int = 11) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Calls its blocks ``repeat`` times over, under activation checkpointing if asked (``recompute``: reentrant)."""

    def __init__(
        self,
        *,
        count: int = 3,
        hidden: int = 11,
        repeat: int = 1,
        recompute: bool | None = None,
        frozen: str = "nothing",
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(count))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        if tied:
            self.head.weight = self.stem.weight
        self.repeat, self.recompute = repeat, recompute
        for part in FROZEN[frozen](self):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.repeat):
            for block in self.blocks:
                x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(self.norm(x))


class Shifted(nn.Linear):
    """A linear layer with a shift, once there is one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + getattr(self, "shift", 0.0)


BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def names_of_units(module: nn.Module) -> list[str]:
    """Return the names of the units in a module, the module itself as ""."""
    return [name for name, unit in module.named_modules() if isinstance(unit, fsdp2.FSDPModule)]


def nodes_mesh() -> DeviceMesh:
    """Return a mesh of (nodes, ranks of a node): two ranks to a node where that comes out even."""
    world = dist.get_world_size()
    local = 1 if world % 2 else 2
    return mesh_of(world // local, local, names=("replicate", "shard"))


def whole(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters of a module that is not sharded."""
    return {name: copy.deepcopy(parameter.detach()) for name, parameter in module.named_parameters()}
