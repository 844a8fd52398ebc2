"""Options, order and clean-up of the whole test run."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, max_examples=40, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("long", deadline=None, max_examples=2000, suppress_health_check=list(HealthCheck))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of this test suite."""
    parser.addoption(
        "--implementation",
        default="fsdp2",
        choices=("fsdp2", "torch"),
        help="what the tests judge; 'torch' checks the expectations themselves",
    )
    parser.addoption("--long", action="store_true", help="run thousands of random programs, with a random seed")


def pytest_configure(config: pytest.Config) -> None:
    """Hand the options on; worker processes inherit the environment."""
    os.environ["FSDP2_TESTS_IMPLEMENTATION"] = config.getoption("--implementation")
    settings.load_profile("long" if config.getoption("--long") else "ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests of one world size together: the pool makes a new process group whenever the size changes."""

    def world(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        return callspec.params.get("world", 0) if callspec else 0

    items.sort(key=world)


def pytest_sessionfinish() -> None:
    """Leave no process behind."""
    if pool := sys.modules.get("tests.support.pool"):
        pool.POOL.close()
