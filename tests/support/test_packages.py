"""A test that needs a package is skipped without it, and under ``--clients`` nothing is skipped."""

from __future__ import annotations

from pathlib import Path

from tests.support import ROOT
from tests.support.processes import ended

TESTS = """
import pytest
from tests.support.packages import needs

def test_that_needs_nothing():
    pass

@needs("pytest")
def test_of_what_is_installed():
    pass

@needs("no_such_client")
def test_of_what_is_not():
    import no_such_client

@needs("pytest")
def test_that_skips_itself():
    pytest.importorskip("no_such_client")
"""
RUN = """
import pytest
pytest.main(["-p", "tests.conftest", "-p", "no:warnings", "-p", "no:cacheprovider", "-c", {settings!r}, {arguments}])
"""


def outcomes(folder: Path, *arguments: str) -> str:
    """Return what pytest writes about the tests above."""
    (folder / "test_some.py").write_text(TESTS)
    given = ", ".join(map(repr, [str(folder), *arguments]))
    return ended(RUN.format(settings=str(ROOT / "pyproject.toml"), arguments=given))[1]


def test_a_package_that_is_not_installed(tmp_path):
    """The test that needs it is skipped, and the reason names the package."""
    text = outcomes(tmp_path)
    assert "2 passed, 2 skipped" in text and "not installed: no_such_client" in text, text


def test_no_client_is_skipped(tmp_path):
    """Only tests that need packages run. One whose package is missing fails, and so does one that skips itself."""
    text = outcomes(tmp_path, "--clients")
    assert "1 failed, 1 passed, 1 deselected, 1 error" in text, text
    assert text.count("skipped under --clients") >= 2 and "not installed: no_such_client" in text, text
