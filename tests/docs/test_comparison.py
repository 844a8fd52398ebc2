"""The comparison table: every report has a row in docs/comparison.md, and every row is a report."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from tests.support.docs import ROOT, script
from tests.support.report import all_reports

REPORTS = [one for group in all_reports().values() for one in group]


@pytest.fixture
def table() -> ModuleType:
    """Return docs/make_comparison.py as a module."""
    return script("make_comparison")


def test_every_report_has_a_row(table):
    """After a new report: ``python docs/make_comparison.py --only NAME``. All keep their promise."""
    rows = table.known_rows((ROOT / "docs" / "comparison.md").read_text())
    assert list(rows) == [one.title for one in REPORTS]
    broken = [one.title for one in REPORTS if rows[one.title][0] != one.promise]
    assert not broken


def test_reports_are_told_apart():
    """Titles and names are unique, and each opens with its story."""
    assert len({one.title for one in REPORTS}) == len({one.name for one in REPORTS}) == len(REPORTS)
    for one in REPORTS:
        story = one.program.__doc__ or ""
        assert len(re.findall(r"\.(?:\s|$)", story)) >= 1 and len(story) > 60, f"{one.name}: {story}"
        assert "|" not in one.title + one.promise and "[" not in one.title
