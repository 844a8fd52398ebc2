"""The rules of tests/mutate.py find enough places, and what they make of them is Python."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests import mutate
from tests.support import ROOT

SOURCE = """
class Group:
    def end(self, chunks):
        if self.lane is not None and chunks:
            self.work.wait()
            self.buffer.free()
        for chunk in reversed(chunks):
            chunk.copy_(self.rows / self.ranks)
        self.plan = None
        self.launched = self.launched + 1
        self.notify()

    def check(self):
        self.work.wait()
"""
EXPECTED = {
    "a wait left out": "self.buffer.free()",
    "a skipped free": "self.work.wait()",
    "a write left out": "pass",
    "a call left out": "pass",
    "a wrong divisor": "self.rows / (self.ranks + 1)",
    "a swapped order": "self.buffer.free(); self.work.wait()",
    "a stale cache": "pass",
    "a condition turned round": "if (not (self.lane is not None and chunks)):",
    "and for or": "((self.lane is not None) or (chunks))",
    "off by one": "self.launched = (self.launched)",
}


def test_every_rule_breaks_what_it_says(tmp_path: Path) -> None:
    """One place of each rule, and none in a function that only checks."""
    path = tmp_path / "group.py"
    path.write_text(SOURCE)
    found = [*mutate.mutants_of(path, tmp_path)]
    assert {mutant.function for mutant in found} == {"Group.end"}
    assert {mutant.rule for mutant in found} == set(mutate.RULES) == set(EXPECTED)
    for mutant in found:
        broken = mutant.source(SOURCE)
        assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(SOURCE))
    for rule, text in EXPECTED.items():
        assert any(text in mutant.source(SOURCE) for mutant in found if mutant.rule == rule), rule
    (wait,) = (mutant for mutant in found if mutant.rule == "a wait left out")
    assert wait.source(SOURCE).count("self.work.wait()") == 1


@pytest.mark.slow
def test_the_package_is_broken_in_enough_places() -> None:
    """At least 60, by every rule, some in each folder, and each is another program."""
    places = mutate.places()
    assert Counter(mutant.folder for mutant in places).keys() == {*mutate.FOLDERS}
    assert all((ROOT / "fsdp2" / f"{path}.py").parent.is_dir() for path in mutate.DIAGNOSTIC)
    assert len(places) >= 60 and set(Counter(mutant.rule for mutant in places)) == set(mutate.RULES)
    assert len({mutant.key for mutant in places}) == len(places)
    for mutant in places:
        text = (ROOT / mutant.path).read_text()
        assert ast.dump(ast.parse(mutant.source(text))) != ast.dump(ast.parse(text)), mutant


def test_what_nothing_can_notice_is_there() -> None:
    """A reason is about the text that it was written for."""
    titles = {
        mutant.title
        for folder in mutate.FOLDERS
        for path in mutate.files_of(folder)
        for mutant in mutate.mutants_of(path)
    }
    assert set(mutate.EQUIVALENT) <= titles


def test_the_table_says_which_test_noticed_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs before others the next time, also where nothing else is known."""
    path = tmp_path / "fsdp2" / "engine" / "group.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    found = [*mutate.mutants_of(path, tmp_path)]
    monkeypatch.setattr(mutate, "TABLE", tmp_path / "mutation.md")
    assert mutate.named() == {}
    by = "tests/test_group.py::test[in two words]"
    mutate.TABLE.write_text(mutate.table(found, {mutant.key: {"noticed": True, "by": by} for mutant in found}))
    assert mutate.named() == {mutant.row: by for mutant in found}


def test_tests_that_enter_what_is_broken_run_first(tmp_path: Path) -> None:
    """That of the table, and then the first of each file, which enters little else, the quick ones first; a file about
    what is broken goes before others."""
    path = tmp_path / "fsdp2" / "engine" / "group.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    mutant = next(mutate.mutants_of(path, tmp_path))
    here = "fsdp2/engine/group.py Group.end"
    tests: mutate.Tests = {
        "a.py::wide": (1.0, [here, "other"]),
        "a.py::narrow": (1.0, [here]),
        "a.py::else": (0.1, ["other"]),
        "b.py::only": (0.5, [here]),
        "tests/unit/engine/test_group.py::near": (2.0, [here]),
    }
    near, only, narrow, wide = "tests/unit/engine/test_group.py::near", "b.py::only", "a.py::narrow", "a.py::wide"
    assert [*mutate.order(mutant, tests)] == [near, only, narrow, wide]
    assert [*mutate.order(mutant, tests, wide)] == [wide, near, only, narrow]
    assert next(iter(mutate.order(mutant, tests, "a.py::else"))) == "a.py::else"


def test_a_few_tests_run_before_many() -> None:
    """Each run may take three times as long as the one before; what takes longer has one for itself."""
    short, tests = mutate.RUN_SECONDS / 2, dict.fromkeys("abcdefgh", mutate.RUN_SECONDS / 2)
    assert [*mutate.batches(tests)] == [["a", "b"], ["c", "d", "e", "f", "g", "h"]]
    assert [*mutate.batches({"slow": 10.0 * mutate.RUN_SECONDS, "quick": short})] == [["slow"], ["quick"]]
    assert [*mutate.batches({})] == []


@pytest.mark.parametrize("hangs", [False, True])
def test_a_busy_machine_notices_nothing(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that ran out of time counts only if it does so again, in ten times as long as it takes without the
    mutant just then."""
    asked: list[tuple[str, float]] = []
    clock = iter(float(second) for second in range(0, 1000, 30))  # the test takes 30 seconds

    def first_failure(
        folder: Path, files: list[str], *options: str, limit: float = mutate.LIMIT_SECONDS
    ) -> mutate.Failure | None:
        asked.append((folder.name, limit))
        deselected = "--deselect=a.py::slow" in options
        fails = folder.name == "broken" and not deselected and (hangs or len(asked) == 1)
        return mutate.Failure("a.py::slow", late=True) if fails else None

    monkeypatch.setattr(mutate, "first_failure", first_failure)
    monkeypatch.setattr(mutate, "PASSING", {"a.py::slow"})
    monkeypatch.setattr(mutate, "FAILING", [])
    monkeypatch.setattr(mutate.time, "monotonic", lambda: next(clock))
    assert mutate.noticed_by(Path("broken"), Path("whole"), ["a.py"]) == ("a.py::slow" if hangs else "")
    limit = mutate.LIMIT_SECONDS
    assert asked[:3] == [("broken", limit), ("whole", mutate.STAGE_SECONDS / mutate.SLOWER), ("broken", 300)]
    assert mutate.FAILING == []
