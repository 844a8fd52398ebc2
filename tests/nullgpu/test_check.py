"""``python -m fsdp2 check --only streams`` notices waits that are left out, as it would on a GPU.

torch's stream sanitizer, which the check used before, noticed neither that at the end of backward nor that of the
root's forward: what it raises in a hook is lost, it forgets freed memory, and it knows first bytes only.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fsdp2.tools.check.place import Place
from fsdp2.tools.check.strict import streams
from tests.nullgpu.programs import ranks
from tests.nullgpu.test_ordered import ROWS, without

UNSEEN = {
    ("gather", "by_hand._start"),  # gathers by hand
    ("gather", "Residency._take_in_replaced"),  # other parameters
    ("gather", "FSDPParamGroup.pre_forward"),  # teachers
    ("compute", "Portions.end_pass"),  # units that an evaluation leaves out
    ("replicate, hook", "reduce.reduce_chunk"),  # hooks
    ("compute", "Reductions.abandon"),  # errors
    ("compute", "GroupExtensions.decode"),  # tensor subclasses
    ("gather", "GroupExtensions.decode"),
    ("compute", "GroupGradients._arrives"),  # nodes of another stream
    ("compute", "Retained.drop"),  # more than a small model sends
    ("pack", "Retained.drop_encoded"),
    ("copy", "HostCopies.start_copy"),  # streams that write shards on the host
    ("inward", "Staging.begin"),  # state that compute wrote just before a step
}
"""The waits for what the check does not do: it trains and evaluates a small model with each option."""
SEEN = [row for row in ROWS if row not in UNSEEN]


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


@pytest.mark.parametrize("row", SEEN, ids=" ".join)
def test_a_wait_that_is_left_out(place, row):
    """The verdict says which kernel does not wait for which."""
    with without(ROWS[row][0]) as skipped:
        outcome = streams(place)
    assert skipped and outcome.verdict == "wrong" and "does not wait for" in outcome.text, outcome
