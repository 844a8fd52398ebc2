"""Random programs on several ranks: whatever they do, all ranks call NCCL alike, and none waits for ever.

The device computes nothing, so no results are compared; ``tests/gpu/test_programs.py`` does that on a real one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.nullgpu.jobs import run
from tests.support import fuzz
from tests.support.parity import on_device
from tests.support.programs import drawn

BY_VALUE = ("send",)
"""Steps in which ranks do what values tell them, and so do losses that are scaled."""


def programs(rank: int, world: int, number: int, count: int) -> None:
    """Execute so many programs, of which nobody looks at the results."""
    nothing = mock.patch.object(fuzz, "assert_close_together", lambda *unused: None)
    with on_device("cuda"), nothing:
        for program in drawn(number, count):
            program = replace(program, scaled=False, steps=tuple(s for s in program.steps if s[0] not in BY_VALUE))
            try:
                fuzz.run(rank, world, program)
            except BaseException as error:
                error.add_note(f"in {program}")
                raise


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_call_alike(world: int, number: int) -> None:
    """No program raises, and no two ranks differ."""
    job: Any = run(world, programs, 100 * world + number, 8, backend="cpu:gloo,cuda:nccl")
    assert job.right, job
