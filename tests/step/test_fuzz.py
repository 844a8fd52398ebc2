"""Random programs on random models with random options compute what a single process computes.

A few dozen in a usual run, always the same ones; ``pytest --long`` runs thousands of new ones.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings

from tests.support import api, fuzz
from tests.support.pool import POOL

LIMIT_SECONDS = 60.0


@api.fsdp2_only
@pytest.mark.parametrize("world", [2, 4])
@settings(max_examples=settings().max_examples // 2)
@given(program=fuzz.programs())
def test_random_program(world, program):
    """See the module."""
    assume(all(POOL.run(world, fuzz.run, {"program": program}, LIMIT_SECONDS)))
