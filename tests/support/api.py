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

IMPLEMENTATION_VARIABLE = "FSDP2_TESTS_IMPLEMENTATION"
IMPLEMENTATIONS = {"fsdp2": "fsdp2", "torch": "torch.distributed.fsdp"}

name = os.environ.get(IMPLEMENTATION_VARIABLE, "fsdp2")
theirs: ModuleType = importlib.import_module("torch.distributed.fsdp")
ours: ModuleType = importlib.import_module(IMPLEMENTATIONS[name])

fsdp2_only = pytest.mark.skipif(name != "fsdp2", reason="only fsdp2 promises this")
