"""Options, order and clean-up of the whole test run."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.packages import fail_if_skipped, missing, needed
from tests.support.sampling import ALL_VARIABLE, numbered, sample

settings.register_profile(
    "ci", derandomize=True, max_examples=24, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("all", deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
settings.register_profile("long", deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this test suite."""
    parser.addoption(
        "--implementation",
        default="fsdp2",
        choices=("fsdp2", "torch"),
        help="what the tests judge; 'torch' checks the expectations themselves",
    )
    parser.addoption("--all", action="store_true", help="run slow tests too, and every case of every matrix")
    parser.addoption("--clients", action="store_true", help="run the tests that need other packages, and skip none")
    parser.addoption("--limit", type=float, help="seconds after which any test counts as hanging")
    parser.addoption("--most-ranks", type=int, metavar="N", help="leave out tests on more ranks")
    parser.addoption("--least-ranks", type=int, metavar="N", help="leave out tests on fewer ranks")
    parser.addoption("--long", action="store_true", help="run thousands of random programs, with a random seed")


def pytest_configure(config: pytest.Config) -> None:
    """Hand the options on; worker processes inherit the environment, and each computes on one thread."""
    gc.disable()  # what is imported and collected stays: looking for garbage in it took a quarter of the time
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported, which no plugin has done yet
    os.environ["FSDP2_TESTS_IMPLEMENTATION"] = config.getoption("--implementation")
    os.environ[ALL_VARIABLE] = "1" if config.getoption("--all") else ""
    if limit := config.getoption("--limit"):
        from tests.support.pool import POOL  # imports what the variable above chooses

        POOL.longest = limit


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Have the properties of the next file tested as asked: torch's test helpers load a profile of their own."""
    settings.load_profile(next((name for name in ("long", "all") if collector.config.getoption(f"--{name}")), "ci"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what a usual run leaves out, and run tests of one world size together: the pool makes a new process
    group whenever the size changes.

    Each worker begins with an equal part of them, in this order: the slow ones on more than two ranks come first, then
    the many quick ones, then those on two. So more than two ranks are started, and warmed up, by the first worker
    alone; and the last tests, which workers take from each other, are short and need what all of them have.
    """
    if config.getoption("--clients"):
        config.hook.pytest_deselected(items=[item for item in items if not needed(item)])
        items[:] = [item for item in items if needed(item)]
    named = any("::" in argument for argument in config.args)
    if not config.getoption("--all") and not named:
        usual = _usual(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in usual])
        items[:] = [item for item in items if item in usual]
    if (most := config.getoption("--most-ranks")) is not None:
        items[:] = [item for item in items if _params(item).get("world", 0) <= most]
    if (least := config.getoption("--least-ranks")) is not None:
        items[:] = [item for item in items if _params(item).get("world", 0) >= least]
    items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Look for garbage again, but not in what stays."""
    gc.freeze()
    gc.enable()


def _place(item: pytest.Item) -> int:
    """Return when a test runs, as ``pytest_collection_modifyitems`` says."""
    world = _params(item).get("world")
    if world is None:
        return 1 if item.nodeid.startswith("tests/unit/") else 2
    return {1: 0, 2: 3}.get(world, -world)


def _params(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def _usual(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return what is not slow, and of each test on ranks the cases that stand for the others."""
    matrices: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            name, gpu = item.nodeid.split("[")[0], item.get_closest_marker("gpu") is not None
            matrices.setdefault((name, gpu), []).append(item)
    return {
        cases[index] for cases in matrices.values() for index in sample(numbered([_params(case) for case in cases]))
    }


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose packages are not installed."""
    if absent := missing(*needed(item)):
        pytest.skip(f"not installed: {', '.join(absent)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Let no test be skipped under ``--clients``."""
    report = yield
    if item.config.getoption("--clients"):
        fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """End a test that runs in this process and hangs; the pool does so with ranks."""
    limit = item.config.getoption("--limit")
    if not limit or "world" in _params(item):
        return (yield)

    def hangs(*unused: object) -> None:
        raise TimeoutError(f"the test takes more than {limit:.0f} seconds")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_REAL, limit, 5)  # again: hypothesis runs what fails once more
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(params=["fake", "nccl"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test marked ``too_with_nccl`` a second time, where process groups are as strict as NCCL."""
    from tests.support.nccl import strict_nccl  # imports what plugins of pytest want to see imported later

    if request.param == "fake":
        yield "fake"
        return
    with strict_nccl():
        yield "nccl"


def pytest_sessionfinish() -> None:
    """Leave no process behind."""
    if pool := sys.modules.get("tests.support.pool"):
        pool.POOL.close()
