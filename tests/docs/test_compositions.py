"""docs/compositions.md is what the decorators of the tests say, and they say it of every test of the files listed."""

from __future__ import annotations

import ast
import functools
from types import ModuleType

import pytest

from tests.support.composition import FEATURES, composes, refuses
from tests.support.docs import ROOT, script

COMPOSING = (
    "tests/step/test_compile.py",
    "tests/step/test_experts.py",
    "tests/step/test_pipeline.py",
    "tests/step/test_recomputation.py",
    "tests/step/test_tensor_parallel.py",
    "tests/step/test_training_tools.py",
    "tests/weights/test_checkpoints.py",
)
"""The files that are about combinations alone."""


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """Return docs/make_compositions.py as a module, which reads all tests once."""
    module = script("make_compositions")
    module.everything = functools.cache(module.everything)
    return module


def test_file_is_up_to_date(table):
    """The file is what the script writes; after a change: ``python docs/make_compositions.py``."""
    assert (ROOT / "docs" / "compositions.md").read_text() == table.text()


def test_every_test_says_what_it_combines(table):
    """No test of the files listed is without a decorator, and no decorator on what does not run on processes."""
    assert all((ROOT / path).is_file() for path in COMPOSING)
    known = {(one.path, one.test) for one in table.everything()}
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            on_ranks = any(ast.unparse(decorator).startswith("on_ranks(") for decorator in node.decorator_list)
            tagged = (name, node.name) in known
            assert tagged <= on_ranks, f"{name}::{node.name} says what it combines and does not run on processes"
            here = name in COMPOSING
            assert tagged or not here or not on_ranks, f"{name}::{node.name} does not say what it combines"


def test_every_feature_is_exercised(table):
    """Each feature alone and with another; what torch alone refuses is exercised by us."""
    found = table.everything()
    works = [one.features for one in found if not one.by]
    assert {feature for features in works for feature in features} == set(FEATURES)
    for feature in FEATURES:
        assert any(feature in features and len(features) > 1 for features in works), feature
    for one in found:
        if one.by == "torch":
            assert any(one.features <= features for features in works), f"{table.named(one.features)}: who does it?"


def test_wrong_decorators_are_noticed():
    """Features that nobody explains, and refusals without a reason."""
    with pytest.raises(AssertionError, match="tensor paralel"):
        composes("tensor paralel", "uneven")
    with pytest.raises(AssertionError):
        refuses("uneven", by="fsdp2", reason="")
    with pytest.raises(AssertionError):
        refuses("uneven", by="somebody", reason="because")
