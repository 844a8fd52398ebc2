"""Every remedy that an error names is tried; those that need a device are in ``tests/nullgpu/test_remedies.py``."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.docs import (  # noqa: F401
    remedies_of_devices,
    remedies_of_meshes,
    remedies_of_ranks,
    remedies_of_setups,
    remedies_of_tools,
)
from tests.docs.remedies import CASES, on, try_case
from tests.support import ROOT, api
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

NAMES_A_REMEDY = re.compile(
    r"\b([Cc]all|[Pp]ass|[Uu]se|instead|[Ss]et|[Bb]uild|[Ss]hard|[Rr]emove|[Ll]oad|[Mm]ake|[Ll]eave|[Rr]egister|[Ww]rite"
    r"|[Pp]ut|[Tt]ake|[Ee]xport|[Kk]eep|[Rr]edistribute|[Mm]aterialize|[Rr]eplace|[Uu]ntie|[Aa]pply|[Ss]tart|pip) "
)


@functools.cache
def remedies() -> dict[str, str]:
    """Return the texts of all errors that say what to do, each with its place: what is raised, and what a constant has
    that is called a remedy."""
    found = {}
    for path in sorted((ROOT / "fsdp2").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("_REMEDY")
            value = node.exc if isinstance(node, ast.Raise) else node.value if called else None
            if value is not None:
                parts = [one.value for one in ast.walk(value) if isinstance(one, ast.Constant)]
                text = "\n".join(part for part in parts if isinstance(part, str))
                if called or NAMES_A_REMEDY.search(text):
                    found[text] = f"{path.relative_to(ROOT)}:{node.lineno}"
    return found


@on_ranks(2)
@pytest.mark.parametrize("text", on(2))
def test_goes_on(rank, world, text):
    """The error is raised, with the remedy; done as written, it helps."""
    try_case(text, rank)


@on_ranks(1)
@pytest.mark.parametrize("text", on(1))
def test_goes_on_on_one_rank(rank, world, text):
    """The same, of errors that only the rank raises that owns a matrix."""
    try_case(text, rank)


@on_ranks(4)
@pytest.mark.parametrize("text", on(4))
def test_goes_on_on_four_ranks(rank, world, text):
    """The same, of errors that fewer ranks do not see."""
    try_case(text, rank)


@pytest.mark.parametrize("text", on(0))
def test_goes_on_without_ranks(text):
    """The same, of errors that a process raises that is in no process group."""
    try_case(text)


def test_every_remedy_is_known():
    """A new one is tried."""
    unknown = [f"{where}: {text}" for text, where in remedies().items() if not any(piece in text for piece in CASES)]
    assert not unknown, "\n".join(unknown)


def test_what_is_listed_exists():
    """A text that has changed is found again."""
    texts = list(remedies())
    gone = [piece for piece in CASES if not any(piece in text for text in texts)]
    assert not gone
