"""What saving and loading need on top of the model, in bytes, on real processes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fsdp2
from fsdp2.tools.check.strict import LiveBytes
from tests.fsdp1.state_dict.kinds import save, using
from tests.support import api
from tests.support.parity import on_one_axis
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
LAYERS, WIDTH = 6, 512  # a weight is the smallest default bucket, 1 MiB
WEIGHT = 4 * WIDTH * WIDTH
"""Bytes of the largest parameter."""
UNIT = 2 * WEIGHT
"""Bytes of a layer."""
SLACK = 64 << 10
"""Biases and step counters."""


class Layer(nn.Module):
    """One unit of two equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def sharded(rows: int = WIDTH) -> nn.Sequential:
    """Return layers that are units."""
    module = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    if rows != WIDTH:
        for layer in module:
            layer.up = nn.Linear(WIDTH, rows)
    on_one_axis(module, fsdp2)
    return module


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a state dict."""
    return [value for value in pytree.tree_leaves(tree) if isinstance(value, Tensor)]


def peak(known: Iterable[Tensor], action: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many bytes were alive at most beside ``known``, and what the action returns."""
    gc.collect()
    with LiveBytes(known) as live:
        before = live.now
        result = action()
    return live.peak - before, result


def least(known: Iterable[Tensor], action: Callable[[], Any]) -> int:
    """Return the least ``peak`` of three runs: gloo's threads hold the tensors of a finished collective until they run
    again."""
    known = [*known]
    return min(peak(known, action)[0] for _ in range(3))


@on_ranks(2, 4)
@pytest.mark.parametrize("rows", [WIDTH, WIDTH - 1])
def test_full_state_dict(rank, world, rows):
    """One unit, and the result where it was asked for: a parameter, and the one before it if the backend has not let go
    of it yet; uneven ones send a padded copy of this rank's piece."""
    module = sharded(rows)
    total = sum(p.numel() * 4 for p in module.parameters())
    extra = UNIT + SLACK + (UNIT // world if rows != WIDTH else 0)
    used, state = peak(module.parameters(), lambda: save(module, "full"))
    assert total <= used <= total + extra
    assert len(state) == 4 * LAYERS
    del state
    used, _ = peak(module.parameters(), lambda: save(module, "full_on_rank0"))
    assert (WEIGHT if rank else total) <= used <= (0 if rank else total) + extra


@on_ranks(2)
def test_other_state_dicts_cost_nothing(rank, world):
    """Sharded and local ones share memory with the model, unless they are asked to be on the CPU: then they are copies,
    of the shards alone."""
    module = sharded()
    for kind in ("sharded", "local"):
        assert peak(module.parameters(), lambda kind=kind: save(module, kind))[0] <= SLACK
    shards = sum(p.to_local().numel() * 4 for p in module.parameters())
    for kind in ("sharded_on_cpu", "local_on_cpu"):
        assert shards <= peak(module.parameters(), lambda kind=kind: save(module, kind))[0] <= shards + SLACK


@on_ranks(2, 4)
@pytest.mark.parametrize("assign", [False, True])
def test_loading_whole_tensors(rank, world, assign):
    """Slices are views, so copying needs nothing. Assigning makes new shards; ``LiveBytes`` counts them twice, since
    storages of their own lie in the unit's buffer, and a unit's once more while they move there."""
    module = sharded()
    values = {name: torch.ones(parameter.shape) for name, parameter in module.named_parameters()}
    used, _ = peak([*module.parameters(), *values.values()], lambda: module.load_state_dict(values, assign=assign))
    shards = sum(p.numel() * 4 for p in module.parameters()) // world
    assert used <= (2 * shards + UNIT // world if assign else 0) + SLACK


@on_ranks(2, 4)
def test_optimizer_state(rank, world):
    """Gathering and loading an optimizer's state is bounded by one tensor of it, and what is kept."""
    module = sharded()
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    total = 2 * sum(p.numel() * 4 for p in module.parameters())
    with using(module, "full_on_rank0"):
        held = [*module.parameters(), *tensors_in(optimizer.state_dict())]
        used = least(held, lambda: fsdp2.optim_state_dict(module, optimizer))
        assert used <= (0 if rank else total) + UNIT + SLACK
        state = fsdp2.optim_state_dict(module, optimizer)
        held += tensors_in(state)
        used = least(held, lambda: fsdp2.optim_state_dict_to_load(module, optimizer, state))
        assert used <= total // world + 2 * UNIT + SLACK
