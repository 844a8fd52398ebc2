"""A plugin of pytest that lists the tests that take most: seconds of processors, of ranks too, and seconds that pass.

    python -m pytest -p tests.support.spent tests/step

On a busy machine the seconds of processors are what can be compared. On Linux, and without ``--numprocesses``.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST = 40
_spent: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])


def processor_seconds(process: str | int) -> float:
    """Return what a process has taken, with those that it started and that have ended, or still run."""
    ticks, children = 0.0, list[str]()
    try:
        # User and system time of its own, then of its children that have ended; the name before may have spaces.
        ticks = sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]))
        for task in Path(f"/proc/{process}/task").iterdir():
            children += (task / "children").read_text().split()
    except OSError:
        pass  # it has just ended
    return ticks / os.sysconf("SC_CLK_TCK") + sum(map(processor_seconds, children))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Add a case to its test."""
    begin, before = time.monotonic(), processor_seconds(os.getpid())
    try:
        return (yield)
    finally:
        took = 1, processor_seconds(os.getpid()) - before, time.monotonic() - begin
        name = item.nodeid.split("[")[0]
        _spent[name] = [known + new for known, new in zip(_spent[name], took)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the list."""
    total = [sum(column) for column in zip(*_spent.values())] or [0, 0.0, 0.0]
    terminalreporter.section("what tests took: cases, seconds of processors, seconds")
    for name, row in [*sorted(_spent.items(), key=lambda one: -one[1][1])[:MOST], ("all", total)]:
        terminalreporter.write_line(f"{row[0]:5.0f} {row[1]:8.2f} {row[2]:8.2f}  {name}")
