"""Which cases of a matrix run in a usual run; ``pytest --all`` runs every one.

A test on ranks multiplies its cases by world sizes. Each set of parameters runs on one world size, in turn, so that
each value of a parameter meets each world size; the first set runs on all. Two ranks, the fewest that communicate, have
two turns. Where a test has one world size, the sizes of transfers take turns; on four ranks, which cost most, the
values of ``reshard``, or of a parameter of two values, or of the shorter one of two; and in a very large matrix such a
parameter beside world sizes.
Where three or more parameters are multiplied, only so many of these cases run that each value of one parameter meets
each value of each other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

ALL_VARIABLE = "FSDP2_TESTS_ALL"
"""What the processes of ranks know from ``pytest --all``."""
SMALL = 4
"""A matrix of up to so many cases runs whole."""
LARGE = 100
"""In a matrix of more cases than these, two parameters take turns."""

Case = Mapping[str, int]
"""Which value of each parameter a case has: the size itself of ``world``, and the number of any other."""


def numbered(cases: Sequence[Mapping[str, Any]]) -> list[Case]:
    """Return the number of each parameter's value in each case, in the order in which values are first seen; of
    ``world`` the value."""
    seen: dict[str, list[Any]] = {name: [] for name in cases[0]}

    def number(name: str, value: Any) -> int:
        if name == "world":
            return value
        for index, known in enumerate(seen[name]):
            if known is value:
                return index
        seen[name].append(value)
        return len(seen[name]) - 1

    return [{name: number(name, value) for name, value in case.items()} for case in cases]


def sample(cases: Sequence[Case]) -> list[int]:
    """Return the indices of the cases that run, in order."""
    if len(cases) <= SMALL:
        return list(range(len(cases)))
    several = [name for name in cases[0] if len({case[name] for case in cases}) > 1]
    turning = takes_turns(cases, several)
    names = [name for name in several if name not in turning]
    first = [index for index, case in enumerate(cases) if _same(case, cases[0], names)]
    others = [index for index in range(len(cases)) if index not in first]
    turn = {index: sum(cases[index][name] for name in names) for index in others}
    for name in turning if names else ():
        turns = list(dict.fromkeys(cases[index][name] for index in first))
        turns += [2] if name == "world" and 2 in turns else []
        others = [index for index in others if cases[index][name] == turns[turn[index] % len(turns)]]
        turn = {index: turn[index] // len(turns) for index in others}
    if len(names) > 2:
        others = paired(cases, others, first)
    return sorted(first + others)


def takes_turns(cases: Sequence[Case], several: Sequence[str]) -> list[str]:
    """Return the parameters of which each set of the others runs with one value."""
    costly = all(case.get("world", 0) >= 4 for case in cases)
    pairs = [name for name in several if len({case[name] for case in cases}) == 2]
    shorter = sorted(several, key=lambda name: len({case[name] for case in cases}))[: len(several) == 2]
    turning = ["reshard", *pairs[:1], *shorter] if costly else []
    found = _multiplied(cases, several, ["world", "transfer", *turning])[:1]
    if len(cases) > LARGE and len(several) == 3:
        found += _multiplied(cases, several, [name for name in pairs if name not in found])[:1]
    return found


def _multiplied(cases: Sequence[Case], several: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return those of the parameters named whose values each meet every set of the others."""
    found = []
    for name in names:
        sets = {tuple(case[other] for other in several if other != name) for case in cases}
        if name in several and len(sets) * len({case[name] for case in cases}) == len(cases):
            found.append(name)
    return found


def paired(cases: Sequence[Case], among: Sequence[int], already: Sequence[int]) -> list[int]:
    """Return some of the cases ``among``: with those ``already`` chosen, they hold each pair of values that ``among``
    holds. Which case comes next is the one with most new pairs."""
    pairs = {index: set(combinations(sorted(cases[index].items()), 2)) for index in (*among, *already)}
    missing = set().union(*(pairs[index] for index in among)) - set().union(*(pairs[index] for index in already))
    chosen = []
    while missing:
        best = max(among, key=lambda index: (len(pairs[index] & missing), -index))
        chosen.append(best)
        missing -= pairs[best]
    return chosen


def _same(one: Case, other: Case, names: Iterable[str]) -> bool:
    return all(one[name] == other[name] for name in names)
