"""Libraries that import torch's ``fully_shard`` themselves train the same with fsdp2 installed."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from tests.ecosystem.launching import launch
from tests.support import ROOT, api
from tests.support.packages import needs


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
}


@api.fsdp2_only
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(*CLIENTS[name].libraries)) for name in CLIENTS])
def test_training_loop(name):
    """Losses equal those with torch's own, and ours was at work."""
    client = CLIENTS[name]
    settings = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    theirs, ours = (launch(client.program, *client.arguments, *how, **settings) for how in ((), ("--fsdp2",)))
    for result, home in ((ours, "fsdp2."), (theirs, "torch.")):
        assert len(result["units"]) >= 3 and all(unit.startswith(home) for unit in result["units"]), result
    assert len(ours["losses"]) == 4 and ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert len(set(ours["losses"])) == 4


def test_the_page_has_the_versions_that_are_pinned():
    """Results that a page reports are those of the versions that ``make test-clients`` installs."""
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M))
    page = " ".join((ROOT / "docs" / "clients.md").read_text().split())
    sentence = page.partition("results are from ")[2].partition(". `make test-clients`")[0]
    named = re.findall(r"(\w+) (\d+\.\d+)", sentence)
    assert len(named) == 8
    for name, version in named:
        assert f"{pins[name.lower()]}.".startswith(f"{version}."), (
            f"{name} {version}, but {pins[name.lower()]} is pinned"
        )
