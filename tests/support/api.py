"""The two implementations under test, behind one switch.

``ours`` is the implementation that the tests judge and ``theirs`` is torch's. ``pytest --implementation torch`` makes
``ours`` torch's as well: the expectations of the tests are then checked themselves, and everything that only fsdp2
promises (marked ``fsdp2_only``) is skipped.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch

IMPLEMENTATION_VARIABLE = "FSDP2_TESTS_IMPLEMENTATION"
IMPLEMENTATIONS = {"fsdp2": "fsdp2", "torch": "torch.distributed.fsdp"}

name = os.environ.get(IMPLEMENTATION_VARIABLE, "fsdp2")
theirs: ModuleType = importlib.import_module("torch.distributed.fsdp")
ours: ModuleType = importlib.import_module(IMPLEMENTATIONS[name])

fsdp2_only = pytest.mark.skipif(name != "fsdp2", reason="only fsdp2 promises this")


def torch_since(version: str) -> bool:
    """Return whether the installed torch is ``version`` or newer: the first whose own ``fully_shard`` can do something.

    fsdp2 can do all of it on every torch it runs on; comparisons with torch's are for where there is one.
    """
    installed = torch.__version__.split("+")[0].split(".")
    return [int(part) for part in installed[:2]] >= [int(part) for part in version.split(".")]


def against(version: str) -> tuple[str, ...]:
    """Return what ``assert_parity`` compares with where torch's own can do it since ``version``."""
    return ("torch", "alone") if torch_since(version) else ("alone",)


def both(version: str) -> tuple[ModuleType, ...]:
    """Return the implementations that must do the same: torch's as well since ``version``."""
    return (ours, theirs) if torch_since(version) else (ours,)
