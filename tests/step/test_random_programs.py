"""Whatever a training script does, in whatever order: it computes what a single process computes.

About a hundred programs in a usual run, always the same ones; ``pytest --long`` runs thousands of new ones.
"""

from __future__ import annotations

import functools

import pytest
from hypothesis import assume, given

from tests.support import api
from tests.support.oracle import assert_parity
from tests.support.pool import POOL
from tests.support.programs import RandomProgram, execute, programs

LIMIT_SECONDS = 60.0


def run_program(rank: int, world: int, program: RandomProgram) -> None:
    """Run a program three ways and compare."""
    against_torch = program.torch_takes_it
    run = functools.partial(execute, program)
    assert_parity(rank, world, program.case, program.setup, run, against_torch=against_torch)


@pytest.mark.parametrize("world", [1, 2, 3])
@given(program=programs())
def test_random_program(world, program):
    """See the module."""
    assume(program.torch_takes_it or api.name == "fsdp2")
    POOL.run(world, run_program, {"program": program}, LIMIT_SECONDS)
