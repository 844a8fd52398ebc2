"""The work for one unit does not grow with the number of units, which mixtures of experts have by the thousand."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2

pytestmark = pytest.mark.usefixtures("mesh")
FEW, MANY = 8, 128


def sharded(units: int) -> Any:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(units)))
    for unit in module:
        fsdp2.fully_shard(unit)
    fsdp2.fully_shard(module)
    return module


def first_forward(module: Any) -> None:
    module(torch.ones(1, 4))


def first_forward_of_a_copy(module: Any) -> Callable[[], object]:
    clone = copy.deepcopy(module)
    return lambda: first_forward(clone)


def weights_of_each(module: Any) -> Callable[[], object]:
    first_forward(module)

    def use() -> None:
        for unit in module:
            with fsdp2.use_weights(unit), torch.no_grad():
                pass

    return use


def full_parameters_of_each(module: Any) -> Callable[[], object]:
    first_forward(module)

    def use() -> None:
        for unit in module:
            with fsdp2.summon_full_params(unit):
                pass

    return use


def a_setter(module: Any) -> Callable[[], object]:
    first_forward(module)
    return lambda: module.set_reduce_scatter_max_input_buffers(2)


def calls(work: Callable[[], object]) -> int:
    """Return the number of Python calls of ``work``; each item that a generator yields counts as one."""
    count = 0

    def note(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    "prepared",
    [
        lambda module: lambda: first_forward(module),
        first_forward_of_a_copy,
        weights_of_each,
        full_parameters_of_each,
        a_setter,
    ],
    ids=["first forward", "of a copy", "use_weights", "summon_full_params", "setter"],
)
def test_work_is_linear_in_the_number_of_units(prepared):
    """The first forward searched all parameters of the process for each of them: half a minute for 1,000 units of nine
    parameters. ``use_weights`` and ``summon_full_params`` listed all of them, and a setter told each unit of all."""
    few, many = (calls(prepared(sharded(units))) / units for units in (FEW, MANY))
    assert many < 1.25 * few
