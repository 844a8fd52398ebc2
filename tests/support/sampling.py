"""Which cases of a matrix run in a usual run; ``pytest --all`` runs every one.

A test on ranks multiplies its cases by world sizes. In a usual run the first set of parameters runs on the most ranks,
and on one rank where the test does: that is special. Of the others so many run that each value of each parameter runs
once: in turn on two ranks, which are the fewest that communicate, and on one; where a test does not have both, in turn
on all its sizes. Parameters that are given together count as one. A test without ranks runs whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any

ALL_VARIABLE = "FSDP2_TESTS_ALL"
"""What the processes of ranks know from ``pytest --all``."""

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
    if "world" not in cases[0]:
        return list(range(len(cases)))
    axes = list(_axes(cases))
    sets: dict[frozenset[tuple[int, ...]], dict[int, int]] = {}  # what is chosen of each axis: the case by world size
    for index, case in enumerate(cases):
        values = frozenset((place, *(case[name] for name in axis)) for place, axis in enumerate(axes))
        sets.setdefault(values, {})[case["world"]] = index
    first, *others = sets
    sizes = sorted(sets[first])
    turns = cycle([2, 1] if {1, 2} <= {*sizes} else sizes[::-1])
    found = [sets[first][size] for size in ({1} & {*sizes}) | {sizes[-1]}]
    missing = frozenset().union(*others) - first
    while missing:
        best = max(others, key=lambda values: len(values & missing))
        missing -= best
        found.append(sets[best].get(next(turns), max(sets[best].values())))
    return sorted(found)


def _axes(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Yield the parameters; those that are not multiplied by each other, since they were given together, as one."""
    names = [name for name in cases[0] if name != "world"]
    while names:
        axis = [names.pop(0)]
        for name in axis:
            together = [other for other in names if not _multiplied(cases, name, other)]
            axis += together
            names = [other for other in names if other not in together]
        yield axis


def _multiplied(cases: Sequence[Case], one: str, other: str) -> bool:
    """Whether each value of one parameter meets each of the other."""
    pairs = {(case[one], case[other]) for case in cases}
    return len(pairs) == len({first for first, _ in pairs}) * len({second for _, second in pairs})
