"""What ``import fsdp2`` imports, and the documented imports of the forecast."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tests.support import ROOT


def test_the_library_imports_no_tool():
    """Programs do not pay for tools that they do not use."""
    program = "import sys, fsdp2; print(*[name for name in sys.modules if name.startswith('fsdp2.')])"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "fsdp2.engine.group" in loaded
    assert not [name for name in loaded if name.startswith(("fsdp2.tools", "fsdp2.forecasting"))]


@pytest.mark.parametrize("name", ["comparing", "cost", "timeline"])
def test_documented_imports(name: str):
    """The pages import from ``fsdp2.forecasting``; these are the tool's own objects."""
    documented = importlib.import_module(f"fsdp2.forecasting.{name}")
    implemented = importlib.import_module(f"fsdp2.tools.forecast.{name}")
    assert documented.__all__
    for each in documented.__all__:
        assert getattr(documented, each) is getattr(implemented, each)
