"""Remedies that need a device, tried on one that computes nothing."""

from __future__ import annotations

import pytest

from tests.docs import remedies_of_devices  # noqa: F401  # registers its cases
from tests.docs.remedies import on, try_case
from tests.nullgpu.programs import ranks


@pytest.mark.parametrize("text", on(None))
def test_goes_on(text):
    """The error is raised, with the remedy; done as written, it helps."""
    with ranks(2):
        try_case(text)
