"""``python -m fsdp2 check --only streams`` notices waits that are left out, as it would on a GPU.

torch's stream sanitizer, which the check used before, noticed neither that at the end of backward nor that of the
root's forward: what it raises in a hook is lost, it forgets freed memory, and it knows first bytes only.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fsdp2.tools.check.on_streams import streams
from fsdp2.tools.check.place import Place
from tests.nullgpu.programs import ranks
from tests.nullgpu.test_ordered import ROWS, without


@pytest.fixture
def place() -> Iterator[Place]:
    """Rank 0 of eight."""
    with ranks(8):
        torch.set_default_device(None)
        yield Place(0, 8, 0, torch.device("cuda"), dist.HashStore())


def test_nothing_is_noticed_as_it_is(place):
    """The verdict is right."""
    outcome = streams(place)
    assert outcome.verdict == "right", outcome.text


@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_a_wait_that_is_left_out(place, row):
    """The verdict says which kernel does not wait for which."""
    with without(ROWS[row][0]) as skipped:
        outcome = streams(place)
    assert skipped and outcome.verdict == "wrong" and "does not wait for" in outcome.text, outcome
