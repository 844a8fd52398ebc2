"""docs/api.md is what the code says: no name of torch's is missing, and each has a test on real processes."""

from __future__ import annotations

import ast
import inspect
import re
from types import ModuleType

import pytest
import torch

import fsdp2
from tests.support.docs import ROOT, script


@pytest.fixture
def table() -> ModuleType:
    """Return docs/make_api.py as a module."""
    return script("make_api")


def test_nothing_is_missing(table):
    """Every public name and parameter of the installed torch has a counterpart and a test."""
    assert table.problems() == []


def test_file_is_up_to_date(table):
    """The file is what the script writes; after a change: ``python docs/make_api.py``."""
    if not torch.__version__.startswith("2.13."):
        pytest.skip("the file is written with torch 2.13")
    assert (ROOT / "docs" / "api.md").read_text() == table.text()


def exercised(test: str) -> tuple[ast.FunctionDef, str]:
    """Return the function of a test and its file's text."""
    path, name = test.split("::")
    source = (ROOT / path).read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node, source
    pytest.fail(f"{test} does not exist")


def test_tests_exist_and_run_on_processes(table):
    """Each named test is there, runs on ranks of the pool, and its file names what it is said to exercise."""
    for key, test in table.TESTS.items():
        node, source = exercised(test)
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        assert any(decorator.startswith("on_ranks(") for decorator in decorators), test
        words = re.findall(r"[A-Za-z_]+", key)
        implied = {"module", "FSDPModule", "mp_policy", "OffloadPolicy", "UnshardHandle", "MixedPrecisionPolicy"}
        word = words[-1]
        aliases = {"FSDPModule": "FSDP", "UnshardHandle": "async_op", "OffloadPolicy": "CPUOffloadPolicy"}
        assert word in implied or aliases.get(word, word) in source, f"{test} never names {word}"


def test_new_names_are_noticed(table, monkeypatch):
    """A name, a method, a parameter or a default that a new torch brings makes the table fail."""

    def new_function(module): ...

    def new_method(self, flag: bool) -> None: ...

    def reshard(self, gently: bool = False) -> None: ...

    def unshard(self, async_op: bool = True) -> None: ...

    new_function.__wrapped__ = lambda module: None
    monkeypatch.setattr(table.theirs, "__all__", [*table.theirs.__all__, "new_function"])
    monkeypatch.setattr(table.theirs, "new_function", new_function, raising=False)
    monkeypatch.setattr(table.theirs.FSDPModule, "set_something_new", new_method, raising=False)
    monkeypatch.setattr(table.theirs.FSDPModule, "reshard", reshard)
    monkeypatch.setattr(table.theirs.FSDPModule, "unshard", unshard)
    found = "\n".join(table.problems())
    for name in (
        "new_function: torch has it",
        "FSDPModule.set_something_new: torch has it",
        "FSDPModule.set_something_new(flag): torch has it",
        "FSDPModule.reshard(gently): torch has it",
        "FSDPModule.unshard(async_op): torch has it",
        "FSDPModule.set_something_new: no test",
    ):
        assert name in found, name


def test_extras_are_noticed(table, monkeypatch):
    """What fsdp2 adds without saying so fails as well."""
    method = lambda self, module, quietly=False: None
    monkeypatch.setattr(fsdp2.FSDPModule, "set_is_last_backward", method)
    monkeypatch.setattr(fsdp2.FSDPModule, "surprise", method, raising=False)
    found = "\n".join(table.problems())
    assert "surprise: only in fsdp2" in found and "set_is_last_backward(quietly): only in fsdp2" in found
    assert inspect.isfunction(method)
