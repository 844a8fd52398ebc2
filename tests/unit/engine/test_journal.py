"""The journal knows what all ranks expect, as long as passes repeat, and that nobody knows once they do not."""

from __future__ import annotations

from fsdp2.engine.agreement import _choose
from fsdp2.engine.journal import Journal, Step

END: Step = ("end", None, ())


def steps(*names: str) -> list[Step]:
    """Gathers of groups that are mere names here."""
    return [("gather", name, ()) for name in names]


def run(journal: Journal, kind: str, taken: list[Step]) -> list[bool]:
    """Take ``taken`` and the end in a pass of ``kind``, asking whenever it is not expected; where it was expected."""
    expected = [journal.follows(kind)]
    journal.begin(kind)
    for step in [*taken, END]:
        expected.append(journal.expected == step)
        if journal.expected != step:
            journal.decide(step)
        journal.took(step)
    journal.end()
    return expected


def test_the_first_pass_is_asked_for_and_the_next_is_expected():
    journal = Journal()
    assert run(journal, "forward", steps("a", "b")) == [False] * 4
    run(journal, "backward", steps("b", "a"))
    assert run(journal, "forward", steps("a", "b")) == [False, True, True, True]
    run(journal, "backward", steps("b", "a"))
    assert run(journal, "forward", steps("a", "b")) == [True] * 4


def test_a_step_is_followed_where_it_is_expected_and_nowhere_else():
    journal = Journal()
    a, b = steps("a", "b")
    assert not journal.follow(a)  # between passes
    run(journal, "forward", [a, b])
    run(journal, "forward", [a, b])
    journal.begin("forward")
    before = journal.index
    assert not journal.follow(b) and journal.index == before and journal.expected == a
    assert journal.follow(a) and journal.index == before + 1 and journal.expected == b
    assert journal.recent()[1][-1] == ("forward", a)
    assert journal.follow(b) and journal.follow(END) and not journal.follow(END)
    journal.end()
    assert run(journal, "forward", [a, b])[1:] == [True] * 3


def test_after_another_step_nothing_is_expected_until_the_pass_ends():
    journal = Journal()
    run(journal, "forward", steps("a", "b", "c"))
    assert run(journal, "forward", steps("a", "c"))[1:] == [True, False, False]
    assert run(journal, "forward", steps("a", "c"))[1:] == [True, True, True]


def test_kinds_have_tracks_of_their_own_and_follow_what_went_before():
    journal = Journal()
    for _ in range(3):
        run(journal, "forward", steps("a"))
        run(journal, "backward without reduction", steps("a"))
        run(journal, "forward", steps("a"))
        seen = run(journal, "backward", [("reduce", "a", (0,))])
    assert seen[1:] == [True, True]
    assert run(journal, "evaluation", steps("a")) == [False, False, False]


def test_a_pass_is_expected_to_do_what_the_last_one_in_its_place_did():
    """The second forward of an iteration finds gathered what the first one kept."""
    journal = Journal()
    first, second, backward = steps("a", "b", "root"), steps("a", "b"), steps("b", "a")
    for _ in range(3):
        seen = run(journal, "forward", first), run(journal, "forward", second), run(journal, "backward", backward)
    assert all(all(expected) for expected in seen)
    run(journal, "evaluation", first)
    assert run(journal, "forward", second)[1:] == [True] * 3  # a place that is new: as the last of its kind


def test_a_step_that_comes_later_is_told_from_one_that_never_comes():
    journal = Journal()
    a, b, c = steps("a", "b", "c")
    run(journal, "forward", [a, b, c])
    journal.begin("forward")
    assert journal.expected == a and journal.expects_later(b) and not journal.expects_later(a)
    assert not journal.expects_later(("gather", "d", ()))
    journal.leave()
    assert journal.expected is None and not journal.on_track and not journal.expects_later(b)


def test_steps_that_were_forgotten_are_decided_anew_by_the_next_pass_and_not_by_the_one_that_runs():
    journal = Journal()
    a, b = steps("a", "b")
    run(journal, "forward", [a, b])
    journal.begin("forward")
    journal.forget_steps()
    assert journal.follow(a) and journal.follow(b) and journal.follow(END)
    journal.end()
    assert run(journal, "forward", [a, b])[1:] == [True, True, True]
    journal.forget_steps()
    journal.begin("forward")
    assert journal.expected is None and not journal.follow(a)


def test_steps_are_counted_over_all_passes_and_the_latest_are_kept():
    journal = Journal()
    for _ in range(600):
        run(journal, "forward", steps("a"))
    first, taken = journal.recent()
    assert journal.index == 1800 and len(taken) == 1024 and first == 1800 - 1024
    assert taken[-1] == ("forward", END) and taken[-2] == ("forward", ("gather", "a", ()))


def test_a_pass_that_broke_off_teaches_nothing():
    journal = Journal()
    run(journal, "forward", steps("a", "b"))
    journal.begin("forward")
    journal.took(steps("a")[0])
    journal.abandon()
    assert not journal.kind and not journal.follows("forward")
    assert run(journal, "forward", steps("a", "b"))[1:] == [True, True, True]


def want(text: str, order: int = 0, optional: bool = False) -> dict:
    """What a rank wants."""
    return {"step": ["gather", order, []], "text": text, "optional": optional, "order": order}


def test_what_all_want_is_chosen_and_else_the_first_unit_that_others_can_take_part_in():
    same = want("gather 'a'")
    assert _choose({0: same, 1: dict(same)}) == same
    assert _choose({0: want("c", 2, True), 1: want("b", 1, True)})["text"] == "b"
    assert _choose({0: want("c", 1, False), 1: want("b", 2, True)})["text"] == "b"


def test_a_refusal_says_what_each_rank_wants():
    refusal = _choose({0: want("gather 'b'", 1), 1: want("gather 'c'", 2), 2: want("gather 'b'", 1)})
    assert "rank 0, 2: gather 'b'; rank 1: gather 'c'. Expected: every rank must run the same units" in refusal
