"""The comparison table: every report has a row in docs/comparison.md, and every row is a report."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.report import PENDING, all_reports

ROOT = Path(__file__).resolve().parents[2]
REPORTS = [one for group in all_reports().values() for one in group]


@pytest.fixture
def script() -> ModuleType:
    """Return docs/make_comparison.py as a module."""
    spec = importlib.util.spec_from_file_location("make_comparison", ROOT / "docs" / "make_comparison.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_report_has_a_row(script):
    """After a new report: ``python docs/make_comparison.py --only NAME``. What is not pending keeps its promise."""
    rows = script.known_rows((ROOT / "docs" / "comparison.md").read_text())
    assert list(rows) == [one.title for one in REPORTS]
    broken = [one.title for one in REPORTS if one.name not in PENDING and rows[one.title][0] != one.promise]
    assert not broken


def test_readme_has_the_same_table(script):
    """Where the README has the table it is the same."""
    readme = (ROOT / "README.md").read_text()
    if script.START in readme:
        assert script.known_rows(readme) == script.known_rows((ROOT / "docs" / "comparison.md").read_text())


def test_reports_are_told_apart():
    """Titles and names are unique, and each opens with its story."""
    assert len({one.title for one in REPORTS}) == len({one.name for one in REPORTS}) == len(REPORTS)
    for one in REPORTS:
        story = one.program.__doc__ or ""
        assert len(re.findall(r"\.(?:\s|$)", story)) >= 1 and len(story) > 60, f"{one.name}: {story}"
        assert "|" not in one.title + one.promise and "[" not in one.title


def test_pending_names_exist():
    """Nothing is pending that does not exist."""
    assert set(PENDING) <= {one.name for one in REPORTS}
