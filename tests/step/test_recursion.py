"""Modules that call themselves, or are called by their own parts."""

from __future__ import annotations

import pytest
from torch import nn

from tests.support.parity import trains_like_one_process
from tests.support.pool import on_ranks


class Recursive(nn.Module):
    """Calls itself, before its own layer or after it, and then the layer below."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.layer, self.below, self.last = nn.Linear(8, 8), nn.Linear(8, 8), last

    def forward(self, x, times=2):
        if times == 0:
            return self.below(x)
        if self.last:
            return self(self.layer(x).tanh(), times - 1)
        return self.layer(self(x, times - 1).tanh())


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_module_that_calls_itself(rank, world, inside, last, reshard):
    """Backward through the inner call freed, and reduced, what the outer call's backward still needed: "out of bounds
    for storage of size 0". If the layer came after the inner call, forward found it freed (torch's has the latter)."""
    build = lambda: nn.Sequential(nn.Linear(8, 8), Recursive(last=last)) if inside else Recursive(last=last)
    trains_like_one_process(build, reshard_after_forward=reshard)


class Calling(nn.Module):
    """Its part calls it back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(8, 8), Part()

    def forward(self, x, back=True):
        return self.part(self.layer(x), lambda x: self(x, back=False)) if back else self.layer(x)


class Part(nn.Module):
    """Computes with what a function makes of its input, and with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, function):
        return self.layer(function(x).tanh()) + self.layer(x)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True])
def test_a_part_that_calls_the_whole(rank, world, reshard):
    """Trainers redirect a model's forward to a training step, which calls the model. The inner forward of the root
    took itself for a new iteration and, at its end, freed the units that the outer one was in."""
    trains_like_one_process(Calling, reshard_after_forward=reshard)
