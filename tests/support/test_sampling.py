"""The cases that a usual run leaves out are covered, value by value, by those that it keeps."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.sampling import SMALL, numbered, sample


def matrix(**values: object) -> list[dict[str, object]]:
    """Return every combination of these values, as pytest makes them."""
    return [dict(zip(values, one)) for one in product(*values.values())]  # type: ignore[call-overload]


@pytest.mark.parametrize("worlds", [(1, 2), (1, 2, 4), (1, 2, 3, 4)])
@pytest.mark.parametrize("kinds", [5, 6, 12, 29])
def test_each_set_runs_on_one_world_and_the_first_on_all(kinds, worlds):
    """No world size is left with a small part."""
    cases = matrix(world=worlds, kind=[f"kind {index}" for index in range(kinds)])
    kept = [cases[index] for index in sample(numbered(cases))]
    assert len(kept) == (kinds + len(worlds) - 1 if len(cases) > SMALL else len(cases))
    assert {case["kind"] for case in kept} == {case["kind"] for case in cases}
    assert {case["world"] for case in kept if case["kind"] == "kind 0"} == set(worlds)
    for world in worlds:
        assert sum(case["world"] == world for case in kept) >= kinds // (len(worlds) + 1) * (2 if world == 2 else 1)


@pytest.mark.parametrize(
    "values",
    [
        {"world": (1, 2, 4), "reshard": (None, True, False), "kind": "abcd"},
        {"world": (2,), "reshard": (None, True, False), "kind": "abcd", "assign": (False, True)},
        {"world": (1, 2, 4), "reshard": (None, True, False), "kind": "abc", "assign": (False, True), "when": "xyz"},
        {"world": (2, 4), "meta": (False, True), "hybrid": (False, True), "pin": (False, True)},
    ],
)
def test_each_value_meets_each_value_of_another_parameter(values):
    """World sizes are values as well."""
    cases = matrix(**values)
    kept = [cases[index] for index in sample(numbered(cases))]
    assert len(kept) < len(cases)
    for one, other in combinations(values, 2):
        met = {(case[one], case[other]) for case in kept}
        if len(values) == 3 and "world" in (one, other):
            wide = max(len(values[name]) for name in values if name not in (one, other)) > len(values["world"])
            assert met == set(product(values[one], values[other])) or not wide
        else:
            assert met == set(product(values[one], values[other])), (one, other)


@pytest.mark.parametrize("world", [2, 4])
def test_transfers_take_turns_on_one_world(world):
    """And on four ranks the values of ``reshard``, where nothing else does."""
    transfers = matrix(world=(world,), transfer=("packed", "direct"), kind="abcdef")
    kept = [transfers[index] for index in sample(numbered(transfers))]
    assert len(kept) == 7 and {(case["kind"], case["transfer"]) for case in kept} >= {("b", "direct"), ("c", "packed")}
    reshard = matrix(world=(world,), reshard=(None, True, False), kind="abcdef")
    kept = [reshard[index] for index in sample(numbered(reshard))]
    assert len(kept) == (18 if world == 2 else 8) and {case["kind"] for case in kept} == set("abcdef")
    two = matrix(world=(world,), mesh=("line", "hybrid", "tp"), kind="abcd")
    kept = [two[index] for index in sample(numbered(two))]
    assert len(kept) == (12 if world == 2 else 6) and {case["kind"] for case in kept} == set("abcd")


def test_in_a_very_large_matrix_two_parameters_take_turns():
    """Each kind runs once, the first in every way, and no world size has one value of ``meta`` alone."""
    cases = matrix(world=(1, 2, 4), meta=(False, True), kind=[str(index) for index in range(29)])
    kept = [cases[index] for index in sample(numbered(cases))]
    assert len(kept) == 28 + 6 and {case["kind"] for case in kept} == {case["kind"] for case in cases}
    later = [(case["world"], case["meta"]) for case in kept if case["kind"] != "0"]
    assert min(later.count(one) for one in product((1, 2, 4), (False, True))) >= 3


def test_what_is_given_together_with_its_world_stays():
    """No set of parameters is left without a case."""
    cases = [{"hidden": 2880 + index, "world": 16 << index} for index in range(6)]
    assert len(sample(numbered(cases))) == len(cases)


def test_parameters_given_together_stay_together():
    """Cases of a joint parametrization are kept one and all."""
    pairs = [("a", 1), ("a", 2), ("b", 1), ("c", 3), ("c", 4), ("d", 1), ("d", 5)]
    cases = [{"world": world, "kind": kind, "size": size} for world in (1, 2) for kind, size in pairs]
    kept = [cases[index] for index in sample(numbered(cases))]
    assert {(case["kind"], case["size"]) for case in kept} == set(pairs)


def test_what_is_small_stays_whole_and_so_do_pairs_without_ranks():
    """There is nothing to save in the one, and nothing that may be left out of the other."""
    small, alone = matrix(world=(1, 2), kind="ab"), matrix(kind="abcdefgh", way="xyz")
    assert sample(numbered(small)) == list(range(4)) and sample(numbered(alone)) == list(range(24))
