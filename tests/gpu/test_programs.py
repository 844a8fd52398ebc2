"""Random programs on GPUs with NCCL, whose streams are late at random; on CPUs a few of them, to try the test."""

from __future__ import annotations

import contextlib

import pytest

from tests.gpu.delays import delays
from tests.gpu.devices import on_devices
from tests.support import api, fuzz
from tests.support.parity import on_device
from tests.support.programs import drawn

pytestmark = api.fsdp2_only
PROGRAMS = 8


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
@on_devices(2, 4)
def test_random_programs(rank, world, device, number):
    """They show what a single process shows."""
    for index, program in enumerate(drawn(1000 * world + number, PROGRAMS if device == "cuda" else 1)):
        late = delays(rank + index, layers=not program.plan.compiled) if device == "cuda" else contextlib.nullcontext()
        try:
            with on_device(device), late:
                fuzz.run(rank, world, program)
        except BaseException as error:
            error.add_note(f"in {program}")
            raise
