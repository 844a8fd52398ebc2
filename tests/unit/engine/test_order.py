"""The recorded orders of groups: right advice when an order repeats, none when it does not."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from fsdp2.engine.order import BackwardOrder, ForwardOrder


class Group:
    """Stands for a group, and is equal to every other one: orders must go by identity."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Group)

    __hash__ = None


GROUPS = {name: Group(name) for name in "abcd"}

calls = st.text("abcd", max_size=8).map(list)


def visits(order: ForwardOrder[Group] | BackwardOrder[Group], names: Iterable[str]) -> list[str | None]:
    """Visit the groups of these names and return the names of those expected next."""
    advice = [order.visit(GROUPS[name]) for name in names]
    return [None if group is None else group.name for group in advice]


def forward(known: Iterable[str], names: Iterable[str]) -> list[str | None]:
    """Run one forward after one that ran ``known``; return the advice given at each call."""
    order = ForwardOrder([GROUPS[name] for name in known])
    advice = visits(order, names)
    assert [group.name for group in order.calls] == list(names)
    return advice


def recorded(names: Iterable[str]) -> BackwardOrder[Group]:
    """Return the order after these forward calls."""
    order: BackwardOrder[Group] = BackwardOrder()
    for name in names:
        order.record(GROUPS[name], 0)
    return order


@given(calls)
def test_the_first_forward_gets_no_advice(names: list[str]) -> None:
    assert forward("", names) == [None] * len(names)


@given(calls)
def test_a_repeated_forward_gets_the_next_call(names: list[str]) -> None:
    assert forward(names, names) == ([*names[1:], None] if names else [])


@given(calls, calls)
def test_advice_ends_where_the_forward_goes_another_way(known: list[str], names: list[str]) -> None:
    advice = forward(known, names)
    common = 0
    while common < min(len(known), len(names)) and known[common] == names[common]:
        common += 1
    assert advice[:common] == [known[i + 1] if i + 1 < len(known) else None for i in range(common)]
    assert advice[common:] == [None] * (len(names) - common)


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


def test_several_forwards_wait_for_their_backwards() -> None:
    assert visits(recorded("abab"), "baba") == ["a", "b", "a", None]


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
    order: BackwardOrder[Group] = BackwardOrder()
    groups = [Group("a"), Group("b")]
    for number in range(3 << 15):
        order.record(groups[number % 2], 0)
    assert len(order._calls) <= 1 << 16 and order.visit(groups[1]) is groups[0]
