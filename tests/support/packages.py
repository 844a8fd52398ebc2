"""Packages that only some tests need, such as libraries that call ``fully_shard``.

A test says which ones it imports: ``@needs("peft", "transformers")``. Where one is not installed, it is skipped.
``pytest --clients`` runs these tests and no others, and fails where one is skipped, for whatever reason.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark of a test that imports these packages."""
    return pytest.mark.needs(*packages)


def missing(*packages: str) -> list[str]:
    """Return those of the packages that are not installed."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


def needed(item: pytest.Item) -> list[str]:
    """Return the packages that a test needs."""
    return [name for mark in item.iter_markers("needs") for name in mark.args]


def fail_if_skipped(report: Any) -> None:
    """Turn the report of a skipped test into one of a test that failed."""
    if report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped under --clients, which promises to run it: {report.longrepr[-1]}"
