"""Random programs on random models with random options compute what a single process computes, and torch's as well.

A few dozen in a usual run, always the same ones; ``pytest --all`` runs hundreds of new ones, ``--long`` thousands.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings

from tests.support import api, fuzz
from tests.support.pool import POOL

LIMIT_SECONDS = 120.0


@api.fsdp2_only
@settings(max_examples=settings().max_examples // 2)
@given(program=fuzz.programs())
def test_random_program(program):
    """Whatever fsdp2 can do, in any order."""
    assume(all(POOL.run(2, fuzz.run, {"program": program}, LIMIT_SECONDS)))


@api.fsdp2_only
@settings(max_examples=settings().max_examples // 4)
@given(program=fuzz.programs())
def test_random_program_on_four_ranks(program):
    """Which cost several times as much, and where both axes of a hybrid mesh have several ranks."""
    assume(all(POOL.run(4, fuzz.run, {"program": program}, LIMIT_SECONDS)))


@pytest.mark.parametrize("world", [1, 2])
@settings(max_examples=settings().max_examples // 2)
@given(program=fuzz.programs(ordinary=True))
def test_what_torch_does_as_well(world, program):
    """Torch's fully_shard shows the same."""
    assume(all(POOL.run(world, fuzz.run, {"program": program, "against_torch": True}, LIMIT_SECONDS)))


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 4)
@given(program=fuzz.programs(ordinary=True))
def test_what_torch_does_as_well_on_three_ranks(program):
    """Which divide hardly any size; other programs than the ones above."""
    assume(all(POOL.run(3, fuzz.run, {"program": program, "against_torch": True}, LIMIT_SECONDS)))
