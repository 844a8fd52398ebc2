"""One rank's passes as its monitor sees them; meetings with other ranks are counted only."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.engine.collective import END, Collective, PassKind
from fsdp2.ranks.monitor import RankMonitor
from fsdp2.ranks.start import Line
from tests.support.parity import shard_each, stack

FORWARD = PassKind("forward")


@pytest.fixture
def monitor(mesh: DeviceMesh) -> Any:
    """The monitor of a root above three units."""
    module: Any = stack()
    shard_each(module, fsdp2, mesh=mesh)
    made: Any = RankMonitor(mock.Mock(), module._get_fsdp_state().root, lambda job: job())
    made._root.all_states = [layer._get_fsdp_state() for layer in module]
    made._meet = mock.Mock()
    return made


def gathers(monitor: Any) -> list[Collective]:
    """Return the gathers of the units, in the order of the model."""
    return [Collective("gather", group, group.store.formats_digest) for group in monitor._root.groups]


def test_a_pass_that_leaves_a_guess_twice_is_compared_at_its_end(monitor: Any) -> None:
    """Each time costs a meeting, and what follows is as likely to be another way again."""
    monitor.begin(FORWARD, agrees=False)
    for gather in reversed(gathers(monitor)):
        monitor.before(gather)
    assert monitor._meet.call_count == 2 and monitor.log.unscheduled


def test_a_pass_inside_of_one_ends_without_it(monitor: Any) -> None:
    first, second, third = gathers(monitor)
    monitor.begin(FORWARD, agrees=False)
    monitor.before(first)
    monitor.begin(PassKind("backward"), agrees=False)
    monitor.before(second)
    monitor.before(END)
    monitor.end()
    assert monitor.log.kind == FORWARD and monitor.log.collectives == [first, second]
    monitor.before(third)
    monitor.end()
    assert monitor.log.kind is None


def test_the_order_of_a_forward_is_known_to_backward(monitor: Any) -> None:
    """If ranks want different units in a backward, all take the one that the forward used last."""
    monitor.begin(FORWARD, agrees=False)
    for gather in (*gathers(monitor), END):
        monitor.before(gather)
    monitor.end()
    assert monitor.history.words.forward_positions == {
        gather.group: number for number, gather in enumerate((*gathers(monitor), END))
    }


def test_nothing_is_learned_of_units_that_were_removed(monitor: Any) -> None:
    """They would never be freed."""
    monitor.agreement._apart.add(object())
    monitor.forget_units()
    assert not monitor.agreement._apart


@pytest.mark.parametrize("times", [1, 2])
def test_a_unit_that_some_ranks_skip_keeps_its_place_if_it_is_gathered_once(monitor: Any, times: int) -> None:
    """Without one, all ranks would choose together what to launch, in every pass."""
    agreement, gather = monitor.agreement, gathers(monitor)[0]
    agreement._apart.add(gather.group)
    monitor.log.collectives = times * [gather]
    agreement.end()
    assert (gather.group in agreement._irregular) == (times > 1)


@pytest.mark.parametrize("aborted", [True, False])
def test_what_a_rank_had_at_a_meeting_is_compared_when_it_is_past_it(monitor: Any, aborted: bool) -> None:
    """On streams the host goes on behind a meeting, and its thread looks at the board, where a rank that is slow to
    leave the meeting still showed what it had there: which parameters train, and that a pass was aborted. Compared with
    the collectives that this rank had launched by then, it was taken for one that differs."""
    log, history = monitor.log, monitor.history
    history.forget_units()  # the fixture has other units
    first, second, _ = gathers(monitor)
    if aborted:
        log.begin(FORWARD)
        log.abandon()
    log.begin(PassKind("backward"))
    state = history.at_meeting(first, trained=[Line("the root trains weight", "the root trains weight")])
    at = log.position
    log.met()
    log.add(first)
    log.add(second)
    assert history.digests(*at) == state.numbers and history.text(*at, 2) == state.text(*at, 2)
    assert history.position() != at and len(history.digests(*history.position())) == 3
    monitor.forget_units()
    assert history.digests(*at) is None


@pytest.mark.parametrize("aborted", [True, False])
def test_a_pass_that_meets_has_one_title_from_its_begin(monitor: Any, aborted: bool) -> None:
    """Between the begin of such a pass and its meeting a thread of a rank on streams may look at the board, where
    another rank already waits in this meeting, behind an aborted pass or a setter. It was taken for one that
    differs."""
    log, history = monitor.log, monitor.history
    history.forget_units()  # the fixture has other units
    if aborted:
        log.begin(FORWARD)
        log.abandon()
    log.begin(FORWARD, setters=() if aborted else ["set_reshard_after_forward"])
    begun = history.digests(*log.position)
    state = history.at_meeting(gathers(monitor)[0])
    assert history.digests(*log.position) == begun == state.numbers[:1]
    assert history.text(*log.position, 0) == state.text(*log.position, 0) and "forward after" in state.text(
        *log.position, 0
    )
    log.met()
    assert history.text(*log.position, 0) == "forward"  # behind the meeting, ranks compare the pass alone
