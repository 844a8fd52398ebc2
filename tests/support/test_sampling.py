"""The cases that a usual run leaves out have no value that no other case has."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.sampling import numbered, sample


def kept(cases: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return the cases that run."""
    return [cases[index] for index in sample(numbered(cases))]


def matrix(**values: object) -> list[dict[str, object]]:
    """Return every combination of these values, as pytest makes them."""
    return [dict(zip(values, one)) for one in product(*values.values())]


@pytest.mark.parametrize("worlds", [(1, 2), (1, 2, 4), (1, 2, 3, 4), (2, 4), (1, 4), (4,)])
@pytest.mark.parametrize("others", [{}, {"reshard": (None, True, False)}, {"meta": (False, True), "when": "xyz"}])
def test_each_value_runs_and_the_first_set_on_one_and_the_most_ranks(worlds, others):
    """The others run in turn on two ranks and on one, where the test does, or else on all its sizes."""
    first = {1, worlds[-1]} & set(worlds)
    values = {"world": worlds, "kind": [f"kind {index}" for index in range(9)], **others}
    cases = kept(matrix(**values))
    assert len(cases) == len(first) + 8
    for name in values.keys() - {"world"}:
        assert {case[name] for case in cases} == set(values[name])
    assert [case["world"] for case in cases if case["kind"] == "kind 0"] == sorted(first)
    sizes = {case["world"] for case in cases if case["kind"] != "kind 0"}
    assert sizes == ({1, 2} if {1, 2} <= set(worlds) else set(worlds))


def test_what_is_given_together_with_its_world_stays():
    """No set of parameters is left without a case."""
    cases = [{"hidden": 2880 + index, "world": 16 << index} for index in range(6)]
    assert kept(cases) == cases


def test_parameters_given_together_count_as_one():
    """Their cases, which somebody chose, are kept one and all."""
    pairs = [("a", 1), ("a", 2), ("b", 1), ("c", 3), ("c", 4), ("d", 1), ("d", 5)]
    cases = [
        {"kind": kind, "reshard": reshard, "world": world, "size": size}
        for world in (1, 2)
        for reshard in (True, False)
        for kind, size in pairs
    ]
    found = kept(cases)
    assert len(found) == len(pairs) + 1 and {(case["kind"], case["size"]) for case in found} == set(pairs)
    assert {case["reshard"] for case in found} == {True, False}


def test_what_runs_without_ranks_runs_whole():
    """It costs little."""
    alone = matrix(kind="abcdefgh", way="xyz", when="uvw")
    assert kept(alone) == alone
