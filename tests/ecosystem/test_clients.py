"""Libraries that import torch's ``fully_shard`` themselves train the same with fsdp2 installed.

Optional: ``pip install accelerate transformers trl lightning torchtitan``.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.ecosystem.launching import launch, missing
from tests.support import api


class Client(NamedTuple):
    """A program of this folder, its arguments, and the libraries it imports."""

    program: str
    arguments: tuple[str, ...]
    libraries: tuple[str, ...]


CLIENTS = {
    "accelerate": Client("accelerate_loop", (), ("accelerate", "transformers")),
    "transformers": Client("trainer_loop", ("trainer",), ("accelerate", "transformers")),
    "trl": Client("trainer_loop", ("trl",), ("accelerate", "transformers", "trl")),
    "lightning": Client("lightning_loop", (), ("lightning",)),
    "torchtitan": Client("titan_loop", (), ("torchtitan", "triton")),
}


@api.fsdp2_only
@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_training_loop(name):
    """Losses equal those with torch's own, and ours was at work."""
    client = CLIENTS[name]
    if absent := missing(*client.libraries):
        pytest.skip(f"not installed: {', '.join(absent)}")
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    theirs, ours = (launch(client.program, *client.arguments, *how, **settings) for how in ((), ("--fsdp2",)))
    for result, home in ((ours, "fsdp2."), (theirs, "torch.")):
        assert len(result["units"]) >= 3 and all(unit.startswith(home) for unit in result["units"]), result
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert len(set(ours["losses"])) == 4
