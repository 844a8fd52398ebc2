"""The steps of passes, and those that are expected: what is followed, what is left, what comes next in a loop."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fsdp2.engine.collective import Collective, PassKind
from fsdp2.engine.itinerary import MOST_CONTEXTS
from fsdp2.ranks.log import PassLog, PastPass

A, B, C, D = (Collective("gather", SimpleNamespace(name=name)) for name in "abcd")
FORWARD, BACKWARD, EVALUATION = map(PassKind, ("forward", "backward", "evaluation"))
ITERATION = ((FORWARD, [A, B, C]), (BACKWARD, [C, B, A]))


def run(log: PassLog, kind: PassKind, collectives: list[Collective]) -> bool:
    """One pass; whether all its steps were expected, and it was."""
    known = log.follows(kind)
    log.begin(kind)
    for collective in collectives:
        if not log.follow(collective):
            known = False
            if log.expected is not None:
                log.deviate(collective)
            else:
                log.add(collective)
    log.end()
    return known


def learned(*passes: tuple[PassKind, list[Collective]], times: int = 2) -> PassLog:
    """A log that has seen these passes so often."""
    log = PassLog()
    for _ in range(times):
        for kind, collectives in passes:
            run(log, kind, collectives)
    return log


def test_an_iteration_that_is_repeated_is_followed() -> None:
    log = learned(*ITERATION, times=1)
    assert not log.follows(FORWARD)  # nothing is expected after a first backward
    log = learned(*ITERATION)
    assert [run(log, kind, collectives) for kind, collectives in ITERATION] == [True, True]
    assert log.has_schedule(FORWARD) and not log.has_schedule(EVALUATION) and not log.follows(EVALUATION)


def test_a_pass_of_a_new_kind_is_open() -> None:
    log = PassLog()
    log.begin(FORWARD)
    assert log.unscheduled and log.expected is None and not log.follow(A) and log.collectives == []
    log.add(A)
    assert log.collectives == [A] and not log.follows(BACKWARD)  # one runs


def test_a_step_that_is_not_next_changes_nothing() -> None:
    log = learned(*ITERATION)
    log.begin(FORWARD)
    assert log.follow(A) and not log.follow(C) and log.collectives == [A] and not log.unscheduled
    assert log.expected == B and log.after_next == [C]
    assert log.expects_later(C) and not log.expects_later(A) and not log.expects_later(B)


def test_a_guess_is_followed_but_says_nothing_of_later_steps() -> None:
    log = PassLog()
    log.begin(FORWARD, [A, B, C])
    assert log.guessed and not log.unscheduled and not log.expects_later(B)
    assert log.follow(A) and log.follow(B) and not log.follow(D)


def test_who_leaves_a_way_goes_on_along_a_known_one() -> None:
    log = learned((FORWARD, [A, B, C]), (FORWARD, [A, C, D]))
    log.begin(FORWARD)
    assert log.follow(A)
    other = C if log.expected == B else B
    log.deviate(other)
    assert not log.unscheduled and log.deviations == 1 and log.follow(D if other == C else C)


@pytest.mark.parametrize("guess", [None, [D]])
def test_who_leaves_all_known_ways_is_on_an_open_one_or_guesses(guess: list[Collective] | None) -> None:
    log = learned(*ITERATION)
    log.begin(FORWARD)
    assert log.follow(A)
    log.deviate(C, guess)
    assert log.unscheduled is (guess is None) and log.guessed is not log.unscheduled and log.follow(D) is log.guessed


def test_a_step_that_was_chosen_is_next_and_the_last_expected() -> None:
    log = learned(*ITERATION)
    log.begin(FORWARD)
    log.choose(D)
    assert log.chosen and log.expected == D and log.after_next == []
    log.add(D)
    assert not log.chosen and log.expected is None and log.collectives == [D]


def test_places_in_a_loop_are_told_apart_by_what_came_before() -> None:
    loop = ((FORWARD, [A]), (BACKWARD, [A]), (FORWARD, [A, B]), (PassKind(BACKWARD, "last"), [B, A]))
    log = learned(*loop, times=4)
    assert [run(log, kind, collectives) for kind, collectives in loop] == [True] * 4


def test_nothing_is_expected_after_a_pass_was_aborted() -> None:
    log = learned(*ITERATION)
    log.begin(FORWARD)
    log.abandon()
    assert not log.follows(FORWARD) and log.kind is None and log.collectives == []
    log.forget()
    log.begin(FORWARD)
    assert log.unscheduled
    log = PassLog(FORWARD)  # all ranks expect the very first pass, and none after one was aborted
    assert log.follows(FORWARD)
    log.begin(FORWARD)
    log.abandon()
    assert not log.follows(FORWARD)


def test_a_loop_without_a_pattern_is_forgotten_now_and_then() -> None:
    """Each pass of a new kind makes new contexts, which were kept for ever."""
    log = PassLog()
    for number in range(MOST_CONTEXTS // 2):
        run(log, PassKind("forward", str(number)), [A])
    assert max(len(log._next), len(log._known)) <= 1.2 * MOST_CONTEXTS


def test_earlier_passes_are_found_by_their_place_since_the_ranks_met() -> None:
    log = learned(*ITERATION, times=3)
    assert log.position == (0, 5)
    assert log.find(0, 4) == PastPass((0, 4), FORWARD, [], [A, B, C])
    assert log.find(0, 6) is None and log.find(1, 0) is None
    same = [log.find(0, number) for number in (0, 2, 4)]
    assert len({id(one.collectives) for one in filter(None, same)}) == 1  # repeated iterations cost no memory
    log.met()
    run(log, FORWARD, [A])
    assert log.position == (1, 0) and log.find(1, 0) == PastPass((1, 0), FORWARD, [], [A])
