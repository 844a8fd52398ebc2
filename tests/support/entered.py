"""A plugin of pytest that notes which functions of the package each test enters that passes, and how long it takes.

    python -m pytest -p tests.support.entered --entered=FILE tests/unit

What the ranks of the pool and other processes of the fork server enter is seen too, but not what programs do that a
test starts with ``subprocess``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import IO, Any

import pytest

import fsdp2
from tests.support import processes

PACKAGE = str(Path(fsdp2.__file__).parent) + "/"

_entered: set[str] = set()
_names: dict[CodeType, str] = {}
_tests: dict[str, tuple[float, list[str]]] = {}
_failed: set[str] = set()
_folder = ""
"""Where the processes of the present test write what they enter."""
_file: IO[str] | None = None
"""Where this process writes it, if it is one of them: at once, since many end without notice."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add where to write what was noted."""
    parser.addoption("--entered", required=True, metavar="FILE", help="where to write what each test enters")


def pytest_configure() -> None:
    """Have processes that are started from now on, and each job of the pool, note what they enter."""
    from tests.support.pool import Pool

    start, outcomes = processes.start, Pool.outcomes

    @wraps(start)
    def start_noting(target: Callable[..., None], *arguments: Any, **options: Any) -> Any:
        return start(_noting, _folder, target, *arguments, **options)

    @wraps(outcomes)
    def outcomes_noting(self: Pool, world: int, function: Callable[..., Any], kwargs: Any, limit: float) -> Any:
        job = (_folder, function.__module__, function.__qualname__)
        return outcomes(self, world, on_rank, {"noting": job, **kwargs}, limit)

    processes.start, Pool.outcomes = start_noting, outcomes_noting


def on_rank(rank: int, world: int, noting: tuple[str, str, str], **kwargs: Any) -> Any:
    """Run a function of a test on one rank of the pool, and note what it enters."""
    from tests.support.worker import Job, rank_function

    folder, module, name = noting
    _note_in(folder)
    return rank_function(Job(module, name, {}, world, 0, 0))(rank, world, **kwargs)


def _noting(folder: str, target: Callable[..., None], *arguments: Any) -> None:
    _note_in(folder)
    target(*arguments)


def _note_in(folder: str) -> None:
    global _file
    if folder:
        _entered.clear()
        _file = open(f"{folder}/{os.getpid()}", "a", buffering=1)  # noqa: SIM115 (open as long as the process)
        threading.settrace(_enter)
        sys.settrace(_enter)


def _enter(frame: FrameType, event: str, argument: object) -> None:
    code = frame.f_code
    if code not in _names:
        inside = code.co_filename.startswith(PACKAGE)
        # What is defined in a function is part of it.
        function = code.co_qualname.split(".<locals>")[0]
        _names[code] = f"fsdp2/{code.co_filename[len(PACKAGE) :]} {function}" if inside else ""
    name = _names[code]
    if name not in _entered:
        _entered.add(name)
        if _file is not None:
            _file.write(f"{name}\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Note what runs for one test, its fixtures included."""
    global _folder
    _entered.clear()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as _folder:
        threading.settrace(_enter)
        sys.settrace(_enter)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            took = round(time.monotonic() - start, 2)
            _entered.update(name for path in Path(_folder).iterdir() for name in path.read_text().splitlines())
            _tests[item.nodeid], _folder = (took, sorted(_entered - {""})), ""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Leave out what does not pass."""
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what was noted."""
    Path(session.config.getoption("--entered")).write_text(
        json.dumps({test: value for test, value in _tests.items() if test not in _failed})
    )
