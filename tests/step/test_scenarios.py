"""Everything that a training loop may do, in every setup, and what must hold in all of it: one table.

A scenario runs on one rank of eight, where nothing is sent, on streams that are simulated; each observer looks at the
same run. What results are is compared on real processes: ``test_random_programs.py`` and others.
"""

from __future__ import annotations

import gc
import itertools
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.support import api
from tests.support.cases import TRANSFERS
from tests.support.scenarios import (
    PROGRAMS,
    RANKS,
    SETUPS,
    Program,
    Training,
    can_run,
    captured,
    host_state,
    outside,
    replaced_in_forward,
    states,
    training,
    watched,
    whole_matrices,
)
from tests.support.streams import Launch

pytestmark = api.fsdp2_only


@dataclass(frozen=True)
class Seen:
    """What was seen of one rank."""

    mistakes: list[str]
    """What a stream, or the host, does too early, and what NCCL would refuse to launch."""
    waits: list[str]
    """What the host waits for, but events that it is told to wait for."""
    launched: list[Launch]
    left: int
    """Bytes that are alive at the end, beside shards and the optimizer's state."""


@cache
def seen(program: Program, setup: str, transfer: str) -> Seen:
    """Return what is seen of the first rank."""
    with watched(setup) as (mesh, device):
        run = Training(mesh, device, setup, transfer, Random(0))
        shards = device.live_bytes
        device.host_waits.clear()  # those of a new mesh
        program(run)
        run.optimizer.zero_grad()
        run.model.reshard(recurse=True)
        values = [value for entry in run.optimizer.state.values() for value in entry.values()]
        own = [value.to_local() if isinstance(value, DTensor) else value for value in values]
        known = shards + sum(value.nbytes for value in own if isinstance(value, Tensor))
        if device.live_bytes > known:
            gc.collect()  # copies of models
        left = device.live_bytes - known
    return Seen(device.mistakes, device.host_waits, device.launched, left)


def launched_by_another(program: Program, setup: str, transfer: str) -> list[Launch]:
    """Return what a rank launches that runs the branches of each layer in another order.

    It is one of the other replica, if there are any: then it has as many elements.
    """
    with watched(setup, RANKS // 2, watches=False) as (mesh, device):
        program(Training(mesh, device, setup, transfer, Random(1)))
        return device.launched


def scenarios() -> list[Any]:
    """Return a training in every setup, and every program in one setup in turn; as slow tests, in every setup.

    Sizes of transfers take turns among setups, so that a program is compared with a training that has run already.
    """
    cases, setups = [], itertools.cycle(SETUPS)
    for program in (training, *PROGRAMS):
        usual = [*SETUPS] if program is training else [next(s for s in setups if can_run(program, s))]
        for setup, transfer in itertools.product(SETUPS, TRANSFERS):
            if can_run(program, setup):
                often = setup in usual and transfer == [*TRANSFERS][[*SETUPS].index(setup) % 2]
                marks = [] if often else [pytest.mark.slow]
                name = f"{program.__name__}-{setup}-{transfer}"
                cases.append(pytest.param(program, setup, transfer, marks=marks, id=name))
    return cases


def test_a_unit_that_ran_by_itself_leaves_nothing_of_its_own() -> None:
    """Its root's context kept what compression makes, although the unit communicates on another one since."""
    assert seen(outside, "compressed", "packed").left <= seen(training, "compressed", "packed").left


LASTING = {"over replicas", "compressed", "copied from the host"}
"""Setups whose units keep memory for portions, for what is encoded, or for the last copy."""


WAITING = (states, host_state)
"""Programs in which the host reads numbers: whether ranks agree on what is loaded, and counters of steps."""
KEEPING = (captured, replaced_in_forward, whole_matrices)
"""Programs whose full parameters, or new ones, stay, and those that make a second model."""


@pytest.mark.parametrize(("program", "setup", "transfer"), scenarios())
def test_scenario(program: Program, setup: str, transfer: str) -> None:
    """Each observer is content: nothing runs too early, and no memory is used again too early; NCCL takes every launch
    as it is, or this raises; the host waits for nothing; all ranks launch the same, in whatever order autograd finishes
    their gradients; and nothing stays in memory."""
    found, usual = seen(program, setup, transfer), seen(training, setup, transfer)
    assert not found.mistakes
    assert not found.waits or program in WAITING
    assert found.launched
    other = launched_by_another(program, setup, transfer)
    if program is whole_matrices:  # each rank owns other matrices, so it sends and gets other numbers of elements
        alike = [[launch._replace(numel=0) for launch in launched] for launched in (found.launched, other)]
        assert alike[0] == alike[1]
    else:
        assert found.launched == other
    assert found.left <= usual.left or program in KEEPING
    assert usual.left <= 0 or setup.split(",")[0] in LASTING
