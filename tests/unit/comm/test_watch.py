"""How the host waits for a collective, and for other ranks to decide; what ranks tell is in tests/ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fsdp2.comm import watch
from fsdp2.comm.watch import HostWork, Wants, Watch


class Collective:
    """Stands for a gloo work: each wait takes the next outcome, and it is completed from so many waits on."""

    def __init__(self, *outcomes: str, completed_after: int) -> None:
        self.outcomes, self.waits, self.completed_after = outcomes, 0, completed_after

    def is_completed(self) -> bool:
        return self.waits >= self.completed_after

    def wait(self, limit: timedelta) -> None:
        assert limit < timedelta(minutes=1)
        outcome = self.outcomes[min(self.waits, len(self.outcomes) - 1)]
        self.waits += 1
        if outcome:
            raise RuntimeError(outcome)


class Failed:
    """A watch of ranks that have parted."""

    def check(self) -> None:
        raise RuntimeError("rank 1 does something else")

    explain = check


@pytest.fixture
def parted(monkeypatch):
    """Let some rank have failed."""
    monkeypatch.setattr(watch, "_watches", lambda: [Failed()])


def test_a_collective_may_take_many_slices() -> None:
    work = Collective("timed out", "timed out", "timed out", "", completed_after=3)
    HostWork(work).wait()
    assert work.waits == 4


def test_a_collective_that_ends_as_its_slice_does_has_not_failed(parted) -> None:
    """The wait raised because its time was over, and by the time its state was asked for the data had arrived."""
    work = Collective("timed out", "", completed_after=1)
    HostWork(work).wait()
    assert work.waits == 2


def test_a_collective_that_failed_raises_what_it_failed_with() -> None:
    work = Collective("connection closed", completed_after=1)
    with pytest.raises(RuntimeError, match="connection closed"):
        HostWork(work).wait()
    assert work.waits == 2


def test_what_ranks_say_of_themselves_goes_first(parted) -> None:
    for work in (Collective("connection closed", completed_after=1), Collective("timed out", completed_after=9)):
        with pytest.raises(RuntimeError, match="rank 1 does something else"):
            HostWork(work).wait()


class Rank:
    """Stands for a process, with the store that all of them share; ``missing`` is asked late in each round."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        self.rank, self.store, self.watches = rank, store, set[Watch]()
        self.missing: Callable[..., str | None] = lambda ranks, seconds: None


class Slow(Watch):
    """A watch whose rank loses the processor at the worst moment: the others were looked at, and now ``meanwhile``."""

    meanwhile: Callable[[], Any] = staticmethod(lambda: None)

    def _sample(self, turn: int) -> list[int]:
        self.turns = turn
        return super()._sample(turn)

    def _taken(self, rank: int, index: int) -> Any:
        self.meanwhile()
        return super()._taken(rank, index)


def refuse(wants: Wants) -> str:
    return f"ranks part: {dict(sorted(wants.items()))}"


def agree(wants: Wants) -> Any:
    return {"all": next(iter(wants.values()))} if len(set(wants.values())) == 1 else refuse(wants)


def two_ranks() -> tuple[Slow, Watch, Rank]:
    store = dist.HashStore()
    slow, fast = Rank(0, store), Rank(1, store)
    return Slow(slow, (0, 1), refuse), Watch(fast, (0, 1), refuse), slow


class Steps:
    """What a rank says that it did: so far, ``taken``."""

    def __init__(self, *taken: str) -> None:
        self.taken = list(taken)

    def recent(self) -> tuple[int, list[str]]:
        return 0, self.taken


def test_a_rank_that_comes_while_it_is_asked_for_has_not_parted() -> None:
    """The other rank comes, decides, goes on and says so, all between two looks of this one."""
    slow, fast, _ = two_ranks()
    steps = Steps()
    fast.show(steps.recent)

    def arrive() -> None:
        if not steps.taken:
            steps.taken.append(fast.decide(0, "gather", agree)["all"])
            fast.patrol()

    slow.meanwhile = arrive
    assert slow.decide(0, "gather", agree) == {"all": "gather"}
    assert steps.taken == ["gather"] and slow.turns == 1


def test_a_rank_that_decides_and_ends_while_it_is_asked_for_is_not_missed() -> None:
    slow, fast, process = two_ranks()
    ended: list[Any] = []

    def end(ranks: list[int], seconds: float) -> str:
        assert ranks == [1]
        ended.append(fast.decide(0, "gather", agree))
        return "rank 1 ended"

    process.missing = end
    assert slow.decide(0, "gather", agree) == {"all": "gather"}
    assert ended == [{"all": "gather"}]


def test_a_rank_that_took_the_step_without_asking_has_parted() -> None:
    slow, fast, _ = two_ranks()
    steps = Steps("reduce")
    fast.show(steps.recent)
    slow.meanwhile = fast.patrol
    with pytest.raises(RuntimeError, match="ranks part: {0: 'gather', 1: 'reduce'}"):
        slow.decide(0, "gather", agree)


def test_a_rank_that_ends_before_it_comes_is_missed() -> None:
    slow, _, process = two_ranks()
    process.missing = lambda ranks, seconds: "rank 1 ended"
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        slow.decide(0, "gather", agree)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of other processes without their leave")
def test_a_process_that_ended_is_known_by_its_place() -> None:
    """Also while nobody has asked for its exit status; one that got its id later is another."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    born = watch._born(process.pid)
    assert int(born) >= int(watch._born(os.getpid())) and watch._host()
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is still there to be asked
    assert watch._born(process.pid) == ""
    process.wait()
    assert watch._born(process.pid) == ""
