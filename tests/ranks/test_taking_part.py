"""With ``set_reduce_scatter_unused_params`` a rank takes part in units that it skips in part, or uses less often."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.parity import assert_gradients, beside_one_process
from tests.support.pool import on_ranks

STREAMED = {"direct_param_bytes": 0, "direct_group_bytes": 0, "chunk_bytes": 1}
"""Transfer sizes with which each gradient is sent when it is there."""


class Choosing(nn.Module):
    """Uses one of its parts, or none: then its output needs no gradient. A frozen parameter keeps backward inside."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.order = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: torch.Tensor, part: int | None) -> torch.Tensor:
        return x if part is None else self.parts[part](x)[:, self.order]


class Outer(nn.Module):
    """A layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.choosing, self.last = Choosing(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, part: int | None) -> torch.Tensor:
        return self.last(self.choosing(x, part))


@on_ranks(2)
def test_a_part_of_a_unit_that_one_rank_uses(rank, world):
    """One rank has sent the gradients of the part it used and is inside of the unit until its backward ends; there it
    has to send what is left as soon as the other one, which never entered, sends all of it."""
    model, whole = beside_one_process(Outer, lambda model: (model.choosing,))
    model.set_reduce_scatter_unused_params(True)
    model.choosing.set_transfer_sizes(**STREAMED)
    for parts in ((1, None), (None, 0), (0, 1)):
        model(torch.ones(2, 8), parts[rank]).sum().backward()
        (sum(whole(torch.ones(2, 8), part).sum() for part in parts) / world).backward()
    assert_gradients(model, whole)


@on_ranks(2)
def test_a_unit_that_nobody_has_used_yet(rank, world):
    """Its zeros are sent although it was never gathered; later its gradients leave like any other's."""
    model, _ = beside_one_process(Outer, lambda model: model.choosing.parts)
    model.set_reduce_scatter_unused_params(True)
    model.set_transfer_sizes(**STREAMED)
    for step, part in enumerate((0, 1, 1)):
        model.zero_grad()
        model(torch.ones(2, 8), part).sum().backward()
        used = [bool(layer.weight.grad.full_tensor().any()) for layer in model.choosing.parts]
        assert used == [part == 0, part == 1], step


class Often(nn.Module):
    """Uses a layer and a frozen one so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.frozen(torch.tanh(self.first(x)))
        return self.last(x)


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_a_unit_that_others_use_several_times(rank, world, reshard):
    """They gather it again each time. A rank that skips it still held the first gather, and refused the second."""
    units = lambda model: (model.first, model.frozen)
    model, whole = beside_one_process(Often, units, reshard_after_forward=reshard)
    model.set_reduce_scatter_unused_params(True)
    times = (2, 0, 3, 1)[:world]
    sum(model(torch.ones(2, 8) + i, times[rank]).sum() for i in range(2)).backward()
    (sum(whole(torch.ones(2, 8) + i, n).sum() for n in times for i in range(2)) / world).backward()
    assert_gradients(model, whole)
