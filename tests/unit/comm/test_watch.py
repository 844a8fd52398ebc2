"""How the host waits for a collective: in slices, for as long as there is hope; what ranks tell is in tests/ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fsdp2.comm import watch
from fsdp2.comm.watch import HostWork


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
