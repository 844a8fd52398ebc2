"""The lifecycle of a group against tables of its own: every move is legal or raises and changes nothing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fsdp2.engine.lifecycle import Lifecycle, Phase, Residency

# Each line: from, step, to. Repeats that change nothing are lines as well.
MOVES = """
SHARDED    start_gather         GATHERING
GATHERING  start_gather         GATHERING
GATHERING  finish_gather        UNSHARDED
UNSHARDED  finish_gather        UNSHARDED
UNSHARDED  reshard              SHARDED
SHARDED    reshard              SHARDED
UNSHARDED  reshard_to_subgroup  SUBGROUP
SUBGROUP   reshard_to_subgroup  SUBGROUP
SUBGROUP   start_gather         GATHERING
SUBGROUP   reshard              SHARDED
GATHERING  abandon              SHARDED
SHARDED    summon               SUMMONED
UNSHARDED  summon               SUMMONED
SUBGROUP   summon               SUMMONED
"""
STEPS = """
IDLE      pre_forward    FORWARD
FORWARD   pre_forward    FORWARD
REDUCED   pre_forward    FORWARD
FORWARD   post_forward   IDLE
IDLE      post_forward   IDLE
IDLE      pre_backward   BACKWARD
BACKWARD  pre_backward   BACKWARD
REDUCED   pre_backward   BACKWARD
FORWARD   pre_backward   BACKWARD
BACKWARD  post_backward  REDUCED
FORWARD   post_backward  REDUCED
IDLE      post_backward  REDUCED
REDUCED   post_backward  REDUCED
IDLE      defer_backward  IDLE
FORWARD   defer_backward  IDLE
BACKWARD  defer_backward  IDLE
REDUCED   defer_backward  IDLE
REDUCED   end_backward   IDLE
IDLE      end_backward   IDLE
"""


def table(text: str) -> dict[tuple[str, str], str]:
    """Return {(from, step): to}."""
    rows = [line.split() for line in text.strip().splitlines()]
    return {(before, step): after for before, step, after in rows}


RESIDENCIES, PHASES = table(MOVES), table(STEPS)
MOVE_NAMES = sorted({step for _, step in RESIDENCIES})
STEP_NAMES = sorted({step for _, step in PHASES})


class LifecycleMachine(RuleBasedStateMachine):
    """Any sequence of steps, compared with the tables after each."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = Lifecycle("layers.0")
        self.residency, self.phase = "SHARDED", "IDLE"

    @rule(step=st.sampled_from(MOVE_NAMES))
    def move(self, step: str) -> None:
        """Take one step of the first table."""
        target = RESIDENCIES.get((self.residency, step))
        if target is None:
            with pytest.raises(RuntimeError, match=f"layers.0: {step} (out of order|while summon_full_params)"):
                self.lifecycle.move(step)
            return
        self.lifecycle.move(step)
        self.residency = target

    @rule(step=st.sampled_from(STEP_NAMES))
    def enter(self, step: str) -> None:
        """Take one step of the second table."""
        target = PHASES.get((self.phase, step))
        if target is None:
            with pytest.raises(RuntimeError, match=f"layers.0: {step} (out of order|while summon_full_params)"):
                self.lifecycle.enter(step)
            return
        self.lifecycle.enter(step)
        self.phase = target

    @rule()
    def reset(self) -> None:
        """Recover."""
        self.lifecycle.reset()
        self.residency, self.phase = "SHARDED", "IDLE"

    @invariant()
    def the_holder_agrees(self) -> None:
        """An illegal step changed nothing, a legal one changed one of the two."""
        assert self.lifecycle.residency is Residency[self.residency]
        assert self.lifecycle.phase is Phase[self.phase]


TestSequences = LifecycleMachine.TestCase


def at(residency: str = "SHARDED", phase: str = "IDLE") -> Lifecycle:
    """Return a lifecycle in this state."""
    lifecycle = Lifecycle("layers.0")
    lifecycle.residency, lifecycle.phase = Residency[residency], Phase[phase]
    return lifecycle


@pytest.mark.parametrize("before", [residency.name for residency in Residency])
@pytest.mark.parametrize("step", MOVE_NAMES)
def test_every_residency_and_step(before: str, step: str) -> None:
    lifecycle = at(residency=before)
    target = RESIDENCIES.get((before, step))
    if target is None:
        text = f"the group is {before.lower()}" if before != "SUMMONED" else "summon_full_params shows its parameters"
        with pytest.raises(RuntimeError, match=text):
            lifecycle.move(step)
    else:
        assert lifecycle.move(step) is (target != before)
    assert lifecycle.residency is Residency[target or before]
    assert lifecycle.phase is Phase.IDLE


@pytest.mark.parametrize("before", [phase.name for phase in Phase])
@pytest.mark.parametrize("step", STEP_NAMES)
def test_every_phase_and_step(before: str, step: str) -> None:
    lifecycle = at(phase=before)
    target = PHASES.get((before, step))
    if target is None:
        with pytest.raises(RuntimeError, match=f"the group is {before.lower()}"):
            lifecycle.enter(step)
    else:
        assert lifecycle.enter(step) is (target != before)
    assert lifecycle.phase is Phase[target or before]
    assert lifecycle.residency is Residency.SHARDED


@pytest.mark.parametrize("residency", [residency.name for residency in Residency])
@pytest.mark.parametrize("phase", [phase.name for phase in Phase])
def test_recovery_is_possible_from_anywhere(residency: str, phase: str) -> None:
    lifecycle = at(residency, phase)
    lifecycle.reset()
    assert (lifecycle.residency, lifecycle.phase) == (Residency.SHARDED, Phase.IDLE)


def test_a_refusal_says_who_what_where_and_what_to_do() -> None:
    with pytest.raises(RuntimeError) as caught:
        at(residency="GATHERING").move("reshard")
    text = str(caught.value)
    assert text.startswith("layers.0: reshard out of order; the group is gathering, expected one of: ")
    assert "sharded, subgroup, unsharded" in text
    assert "reset_iter_state()" in text


def test_a_group_without_a_name_is_the_root() -> None:
    with pytest.raises(RuntimeError, match="the root: finish_gather out of order"):
        Lifecycle().move("finish_gather")


@pytest.mark.parametrize(("method", "step"), [("move", "pre_forward"), ("enter", "reshard"), ("move", "")])
def test_a_step_of_the_other_table_changes_nothing(method: str, step: str) -> None:
    lifecycle = Lifecycle("layers.0")
    with pytest.raises(KeyError):
        getattr(lifecycle, method)(step)
    assert (lifecycle.residency, lifecycle.phase) == (Residency.SHARDED, Phase.IDLE)


def test_one_iteration() -> None:
    lifecycle = Lifecycle()
    for move, step in [
        ("start_gather", None),
        ("finish_gather", "pre_forward"),
        ("reshard", "post_forward"),
        ("start_gather", None),
        ("finish_gather", "pre_backward"),
        ("reshard", "post_backward"),
    ]:
        lifecycle.move(move)
        if step is not None:
            lifecycle.enter(step)
    lifecycle.enter("end_backward")
    assert (lifecycle.residency, lifecycle.phase) == (Residency.SHARDED, Phase.IDLE)


@pytest.mark.parametrize("before", ["SHARDED", "UNSHARDED", "SUBGROUP"])
def test_summoned_groups_are_as_before_afterwards(before: str) -> None:
    """Meanwhile every step is refused, for that reason."""
    lifecycle = at(residency=before)
    lifecycle.refuse_summoned("reshard")
    lifecycle.summon()
    lifecycle.summon()
    assert lifecycle.summoned and not lifecycle.changes("reshard")
    with pytest.raises(RuntimeError, match=r"layers\.0: reshard while summon_full_params shows its parameters"):
        lifecycle.refuse_summoned("reshard")
    lifecycle.dismiss()
    assert lifecycle.residency is Residency[before]


@pytest.mark.parametrize("before", [residency.name for residency in Residency])
@pytest.mark.parametrize("step", MOVE_NAMES)
def test_a_step_changes_what_it_leads_away_from(before: str, step: str) -> None:
    assert at(residency=before).changes(step) == (RESIDENCIES.get((before, step), before) != before)
