"""A plugin of pytest that notes which functions of the package each test enters that passes, and how long it takes.

    python -m pytest -p tests.support.entered --entered=FILE tests/unit

Only what runs in the process of the tests is seen, not what processes of ranks do.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

import fsdp2

PACKAGE = str(Path(fsdp2.__file__).parent) + "/"

_entered: set[str] = set()
_names: dict[CodeType, str] = {}
_tests: dict[str, tuple[float, list[str]]] = {}
_failed: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add where to write what was noted."""
    parser.addoption("--entered", required=True, metavar="FILE", help="where to write what each test enters")


def _enter(frame: FrameType, event: str, argument: object) -> None:
    code = frame.f_code
    if code not in _names:
        inside = code.co_filename.startswith(PACKAGE)
        # What is defined in a function is part of it.
        function = code.co_qualname.split(".<locals>")[0]
        _names[code] = f"fsdp2/{code.co_filename[len(PACKAGE) :]} {function}" if inside else ""
    _entered.add(_names[code])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Note what runs for one test, its fixtures included."""
    _entered.clear()
    start = time.monotonic()
    threading.settrace(_enter)
    sys.settrace(_enter)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]  # takes off what was set
        _tests[item.nodeid] = (round(time.monotonic() - start, 2), sorted(_entered - {""}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Leave out what does not pass."""
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was noted."""
    Path(session.config.getoption("--entered")).write_text(
        json.dumps({test: value for test, value in _tests.items() if test not in _failed})
    )
