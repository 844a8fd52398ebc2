"""The itinerary: right advice when a route repeats, none when it does not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fsdp2.engine.itinerary import BackwardRoute, ForwardRoute, Itinerary


class Group:
    """Stands for a group, and is equal to every other one: orders must go by identity."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group)

    __hash__ = None


GROUPS = {name: Group(name) for name in "abcd"}

calls = st.text("abcd", max_size=8).map(list)


def visits(route: ForwardRoute[Group] | BackwardRoute[Group], names: Iterable[str]) -> list[str | None]:
    """Visit the groups of these names and return the names of those expected next."""
    advice = [route.visit(GROUPS[name]) for name in names]
    return [None if group is None else group.name for group in advice]


def visited(route: ForwardRoute[Group], names: Iterable[str]) -> ForwardRoute[Group]:
    """Visit the groups of these names and return the route."""
    visits(route, names)
    return route


def run(
    itinerary: Itinerary[Group], names: Iterable[str], kind: str = "forward", *, alone: bool = False, **end: Any
) -> list[str | None]:
    """Run one forward; return the advice given at each call."""
    route = itinerary.begin(kind, alone=alone)
    advice = visits(route, names)
    itinerary.end(route, **end)
    return advice


def train(itinerary: Itinerary[Group], names: Iterable[str]) -> list[str | None]:
    """Run a forward and a backward on it; return the advice given in the forward."""
    advice = run(itinerary, names, trains=True, ended_with=GROUPS[list(names)[-1]] if names else None)
    itinerary.end_backward(first_stays=True)
    return advice


def forward(known: Iterable[str], names: Iterable[str]) -> list[str | None]:
    """Run one forward after one that ran ``known``; return the advice given at each call."""
    itinerary: Itinerary[Group] = Itinerary()
    run(itinerary, known)
    return run(itinerary, names)


def following(names: list[str]) -> list[str | None]:
    """Return for each of ``names`` the one behind it."""
    return [*names[1:], None] if names else []


def recorded(names: Iterable[str]) -> BackwardRoute[Group]:
    """Return the route after these forward calls."""
    route: BackwardRoute[Group] = BackwardRoute()
    for name in names:
        route.record(GROUPS[name], 0)
    return route


@given(calls, calls, calls)
def test_advice_is_the_next_call_until_the_forward_goes_another_way(
    common: list[str], known: list[str], names: list[str]
) -> None:
    """The first forward gets none, and one that is repeated for each of its calls."""
    known, names = common + known, common + names
    advice = forward(known, names)
    alike = 0
    while alike < min(len(known), len(names)) and known[alike] == names[alike]:
        alike += 1
    assert advice[:alike] == following(known)[:alike]
    assert advice[alike:] == [None] * (len(names) - alike)


@given(st.lists(st.tuples(st.sampled_from(["forward", "evaluation"]), calls), min_size=1, max_size=5))
def test_a_pattern_of_forwards_that_repeats_finds_each_of_its_routes(pattern: list[tuple[str, list[str]]]) -> None:
    """An evaluation overwrote the order of training: where both alternated in different orders, neither was gathered
    ahead, for ever. Every forward of a pattern is known again after the pattern ran often enough to fill a context."""
    itinerary: Itinerary[Group] = Itinerary()
    for repeat in range(40):
        for number, (kind, names) in enumerate(pattern):
            advice = run(itinerary, names, kind)
            if repeat == 39:
                assert advice == following(names), number
        itinerary.end_backward(first_stays=True)  # ends the pattern, as an iteration ends


def test_the_last_of_fifteen_micro_batches_is_known() -> None:
    """Only the evaluation before them tells it from the others: that is 29 passes ago, of 32 that make a context."""
    itinerary: Itinerary[Group] = Itinerary()
    for repeat in range(3):
        run(itinerary, "ab", "evaluation")
        for number in range(15):
            names = ["a", "c" if number == 14 else "b"]
            advice = train(itinerary, names)
            if repeat == 2:
                assert advice == following(names), number


@given(calls, calls, calls)
def test_a_forward_of_one_rank_alone_changes_nothing_for_the_others(
    known: list[str], alone: list[str], names: list[str]
) -> None:
    """Other ranks know nothing of it, and must expect the same as the rank that ran it."""
    with_it, without = Itinerary[Group](), Itinerary[Group]()
    for itinerary in (with_it, without):
        run(itinerary, known, "evaluation")
    run(with_it, alone, "evaluation", alone=True)
    assert run(with_it, alone, "evaluation", alone=True) == following(alone)
    assert run(with_it, names, "evaluation") == run(without, names, "evaluation")


passes = st.lists(
    st.tuples(st.sampled_from(["forward", "evaluation", "backward"]), calls, st.booleans()), min_size=1, max_size=12
)


@given(passes)
def test_ranks_that_ran_other_passes_which_are_not_remembered_expect_the_same(ran: list[tuple[str, Any, bool]]) -> None:
    """Micro-batches on parameters that stay in memory, of which each rank may have its own number."""
    with_all, without = Itinerary[Group](), Itinerary[Group]()
    for kind, names, remembered in [*ran, ("forward", "abc", True)]:
        expected = []
        for itinerary in (with_all, without) if remembered else (with_all,):
            if kind == "backward":
                itinerary.end_backward(first_stays=True, remembered=remembered)
                continue
            route = itinerary.begin(kind)
            expected.append((visits(route, names), route.needed_first and route.needed_first.name))
            ended_with = GROUPS[names[-1]] if names else None
            itinerary.end(route, remembered=remembered, trains=kind == "forward", ended_with=ended_with)
        assert len(expected) < 2 or expected[0] == expected[1]


def test_the_first_evaluation_follows_training() -> None:
    itinerary: Itinerary[Group] = Itinerary()
    train(itinerary, "abc")
    assert run(itinerary, "abc", "evaluation") == ["b", "c", None]


def test_a_use_whose_weights_may_be_written_first_is_not_gathered_ahead() -> None:
    """A teacher that the forward updates runs without gradients; shards that were found written are as good as that."""
    itinerary: Itinerary[Group] = Itinerary()
    for _ in range(2):
        route, advice = itinerary.begin("forward"), []
        for name, quiet, late in [("a", False, False), ("b", True, False), ("c", True, False), ("d", False, True)]:
            following = route.visit(GROUPS[name], quiet=quiet, late=late)
            advice.append(None if following is None else following.name)
        itinerary.end(route)
    assert advice == [None, "c", None, None]
    assert [name for name in "abcd" if itinerary.begin("forward").comes_late(GROUPS[name])] == ["b", "c", "d"]


def test_a_late_stop_stays_late() -> None:
    """Not gathered ahead, it cannot be found late again, and in every second forward one gather was made in vain."""
    itinerary: Itinerary[Group] = Itinerary()
    ahead = []
    for number in range(4):
        route = itinerary.begin("forward")
        ahead.append(route.visit(GROUPS["a"]))
        route.visit(GROUPS["b"], late=number == 1)  # found by the gather that the first forward made possible
        itinerary.end(route)
    assert ahead == [None, GROUPS["b"], None, None]


def test_what_backward_needs_first_is_known_once_one_has_begun() -> None:
    """And not in a forward that no backward follows, as a frozen teacher's."""
    itinerary: Itinerary[Group] = Itinerary()
    for _ in range(2):
        route = itinerary.begin("forward")
        assert route.needed_first is None
        itinerary.end(visited(route, "ab"), trains=True, ended_with=GROUPS["b"])
    itinerary.end_backward(first_stays=True)
    route = itinerary.begin("forward")
    assert route.needed_first is GROUPS["b"]
    itinerary.end(visited(route, "ab"), trains=True, ended_with=GROUPS["b"])
    itinerary.end_backward(first_stays=False)
    assert itinerary.begin("forward").needed_first is None


def test_a_repeated_iteration_takes_no_memory() -> None:
    itinerary: Itinerary[Group] = Itinerary()
    for _ in range(100):
        train(itinerary, "abc")
        run(itinerary, "ab", "evaluation")
    assert len({id(trip.stops) for trip in itinerary._known.values()}) == 2


# ---- backward ----


@given(calls)
def test_backward_meets_the_calls_in_reverse(names: list[str]) -> None:
    backward = names[::-1]
    assert visits(recorded(names), backward) == ([*backward[1:], None] if names else [])


@given(calls)
def test_every_call_has_one_backward(names: list[str]) -> None:
    order = recorded(names)
    visits(order, names[::-1])
    assert visits(order, "abcd") == [None] * 4


def test_backwards_in_the_order_of_the_forwards_find_their_own_calls() -> None:
    """Group a ran twice, then both backwards run: the latest call's first."""
    assert visits(recorded("abac"), "ca") == ["a", "b"]


def test_a_call_whose_backward_is_over_is_not_expected_again() -> None:
    """With ``set_is_last_backward(False)`` the calls of earlier micro-batches stay recorded. The last unit of one
    backward was told to gather the first of the backward before, which nobody used."""
    order = recorded("ab")
    assert visits(order, "ba") == ["a", None]
    for name in "ab":
        order.record(GROUPS[name], 1)
    assert visits(order, "ba") == ["a", None]


def test_a_group_that_backward_skips_does_not_mislead_the_others() -> None:
    assert visits(recorded("abc"), "ca") == ["b", None]


def test_a_group_that_was_not_recorded_gets_no_advice() -> None:
    assert visits(recorded("a"), "b") == [None]


def test_forwards_that_no_backward_follows():
    """Each of their calls was recorded for ever."""
    order: BackwardRoute[Group] = BackwardRoute()
    groups = [Group("a"), Group("b")]
    for number in range(3 << 15):
        order.record(groups[number % 2], 0)
    assert len(order._calls) <= 1 << 16 and order.visit(groups[1]) is groups[0]
