"""What ``import fsdp2`` imports, and the documented imports of the forecast."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tests.support import ROOT


def imported(*programs: str) -> list[list[str]]:
    """The modules that are imported after each of ``programs``, which run one after the other in one process."""
    program = "\n".join(f"{one}\nimport sys; print(*sys.modules)" for one in programs)
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return [line.split() for line in run.stdout.splitlines()]


def test_an_import_brings_only_what_sharding_and_training_need():
    """Programs do not pay for tools that they do not use. ``import fsdp2`` took a tenth longer than torch's own: for
    torch's checkpoints, which few programs use, and for all that stands on the library."""
    alone, updates, everything = imported("import fsdp2", "from fsdp2 import WeightSender", "from fsdp2 import *")
    others = (
        "torch.distributed.checkpoint",
        "fsdp2.weights.updates",
        "fsdp2.optim.whole",
        "fsdp2.tools",
        "fsdp2.forecasting",
    )
    assert "fsdp2.engine.group" in alone and not [name for name in alone if name.startswith(others)]
    assert "fsdp2.weights.updates.sender" in updates and "fsdp2.tools.forecast.run" in everything


@pytest.mark.parametrize("name", ["comparing", "cost", "timeline"])
def test_documented_imports(name: str):
    """The pages import from ``fsdp2.forecasting``; these are the tool's own objects."""
    documented = importlib.import_module(f"fsdp2.forecasting.{name}")
    implemented = importlib.import_module(f"fsdp2.tools.forecast.{name}")
    assert documented.__all__
    for each in documented.__all__:
        assert getattr(documented, each) is getattr(implemented, each)
