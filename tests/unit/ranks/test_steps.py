"""The steps of passes, and those that are expected: what is followed, what is left, what comes next in a loop."""

from __future__ import annotations

import pytest

from fsdp2.engine.observer import Step
from fsdp2.ranks.steps import StepLog

A, B, C, D = (Step("gather", name) for name in "abcd")
ITERATION = (("forward", [A, B, C]), ("backward", [C, B, A]))


def run(log: StepLog, kind: str, steps: list[Step]) -> bool:
    """One pass; whether all its steps were expected, and it was."""
    known = log.follows(kind)
    log.begin(kind)
    for step in steps:
        if not log.follow(step):
            known = False
            if log.expected is not None:
                log.deviate(step)
            else:
                log.take(step)
    log.end()
    return known


def learned(*passes: tuple[str, list[Step]], times: int = 2) -> StepLog:
    """A log that has seen these passes so often."""
    log = StepLog()
    for _ in range(times):
        for kind, steps in passes:
            run(log, kind, steps)
    return log


def test_an_iteration_that_is_repeated_is_followed() -> None:
    log = learned(*ITERATION, times=1)
    assert not log.follows("forward")  # what comes after a first backward nobody knows
    log = learned(*ITERATION)
    assert [run(log, kind, steps) for kind, steps in ITERATION] == [True, True]
    assert log.knows("forward") and not log.knows("evaluation") and not log.follows("evaluation")


def test_a_pass_of_a_new_kind_is_open() -> None:
    log = StepLog()
    log.begin("forward")
    assert log.open and log.expected is None and not log.follow(A) and log.steps == []
    log.take(A)
    assert log.steps == [A] and not log.follows("backward")  # one runs


def test_a_step_that_is_not_next_changes_nothing() -> None:
    log = learned(*ITERATION)
    log.begin("forward")
    assert log.follow(A) and not log.follow(C) and log.steps == [A] and not log.open
    assert log.expected == B and log.rest == [C]
    assert log.expects_later(C) and not log.expects_later(A) and not log.expects_later(B)


def test_a_guess_is_followed_but_says_nothing_of_later_steps() -> None:
    log = StepLog()
    log.begin("forward", [A, B, C])
    assert log.guessed and not log.open and not log.expects_later(B)
    assert log.follow(A) and log.follow(B) and not log.follow(D)


def test_who_leaves_a_way_goes_on_along_a_known_one() -> None:
    log = learned(("forward", [A, B, C]), ("forward", [A, C, D]))
    log.begin("forward")
    assert log.follow(A)
    other = C if log.expected == B else B
    log.deviate(other)
    assert not log.open and log.deviations == 1 and log.follow(D if other == C else C)


@pytest.mark.parametrize("guess", [None, [D]])
def test_who_leaves_all_known_ways_is_on_an_open_one_or_guesses(guess: list[Step] | None) -> None:
    log = learned(*ITERATION)
    log.begin("forward")
    assert log.follow(A)
    log.deviate(C, guess)
    assert log.open is (guess is None) and log.guessed and log.follow(D) is (guess is not None)


def test_a_step_that_was_decided_is_next_and_the_last_known() -> None:
    log = learned(*ITERATION)
    log.begin("forward")
    log.decide(D)
    assert log.expected == D and log.rest == []
    log.take(D)
    assert log.expected is None and log.steps == [D]


def test_places_in_a_loop_are_told_apart_by_what_came_before() -> None:
    loop = (("forward", [A]), ("backward", [A]), ("forward", [A, B]), ("backward, last", [B, A]))
    log = learned(*loop, times=4)
    assert [run(log, kind, steps) for kind, steps in loop] == [True] * 4


def test_nothing_is_expected_after_a_pass_was_aborted() -> None:
    log = learned(*ITERATION)
    log.begin("forward")
    log.abandon()
    assert not log.follows("forward") and log.kind == "" and log.steps == []
    log.forget()
    log.begin("forward")
    assert log.open


def test_earlier_passes_are_found_by_their_place_since_the_ranks_met() -> None:
    log = learned(*ITERATION, times=3)
    assert log.position == (0, 5)
    assert log.find(0, 4) == ("forward", [A, B, C]) and log.find(0, 6) is None and log.find(1, 0) is None
    same = [log.find(0, number) for number in (0, 2, 4)]
    assert len({id(steps) for _, steps in filter(None, same)}) == 1  # repeated iterations cost no memory
    log.met()
    run(log, "forward", [A])
    assert log.position == (1, 0) and log.find(1, 0) == ("forward", [A])
