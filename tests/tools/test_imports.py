"""What ``import fsdp2`` imports, and the documented imports of the forecast."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tests.support import ROOT


def imported(program: str) -> list[str]:
    """The modules that ``program`` leaves imported."""
    program += "\nimport sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_the_library_imports_no_tool():
    """Programs do not pay for tools that they do not use."""
    loaded = imported("import fsdp2")
    assert "fsdp2.engine.group" in loaded
    assert not [name for name in loaded if name.startswith(("fsdp2.tools", "fsdp2.forecasting"))]


def test_an_import_brings_only_what_sharding_and_training_need():
    """``import fsdp2`` took a tenth longer than torch's own: for torch's checkpoints,
    which few programs use, and for all that stands on the library."""
    loaded = imported("import fsdp2")
    others = ("torch.distributed.checkpoint", "fsdp2.weights.updates", "fsdp2.optim.whole")
    assert not [name for name in loaded if name.startswith(others)]
    assert "fsdp2.weights.updates.sender" in imported("from fsdp2 import WeightSender")
    assert "fsdp2.tools.forecast.run" in imported("from fsdp2 import *")


@pytest.mark.parametrize("name", ["comparing", "cost", "timeline"])
def test_documented_imports(name: str):
    """The pages import from ``fsdp2.forecasting``; these are the tool's own objects."""
    documented = importlib.import_module(f"fsdp2.forecasting.{name}")
    implemented = importlib.import_module(f"fsdp2.tools.forecast.{name}")
    assert documented.__all__
    for each in documented.__all__:
        assert getattr(documented, each) is getattr(implemented, each)
