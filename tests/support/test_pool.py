"""The worker pool itself: what a test sees, and what a failure shows."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from multiprocessing import connection
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support import ROOT, api, worker
from tests.support import pool as pools
from tests.support.pool import Pool, RankError, on_ranks
from tests.support.worker import FREED_SECONDS


@pytest.fixture(scope="module")
def pool():
    """Return a pool of its own, so that the one that serves the other tests keeps its processes."""
    pool = Pool()
    yield pool
    pool.close()


@on_ranks(1, 2, 3, 4)
def test_default_group_has_exactly_the_world(rank, world):
    """Every rank takes part once, and nobody else does."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    total = torch.tensor(2.0**rank)
    dist.all_reduce(total)
    assert total.item() == 2.0**world - 1


@on_ranks(2)
@pytest.mark.parametrize("value", ["a", (1, None)])
def test_arguments_arrive(rank, world, value):
    """Parametrized arguments travel by pickle."""
    assert value in ("a", (1, None))


def value_of(rank, world, base):
    """Return something that depends on the rank."""
    return base + rank


def fail_on(rank, world, failing):
    """Fail on one rank while the others, which are here as well by then, wait for it."""
    dist.barrier()
    if rank == failing:
        raise ValueError("the reason")
    dist.barrier()


def hang_on(rank, world, hanging):
    """Never return on one rank, once all are here."""
    dist.barrier()
    while rank == hanging:
        time.sleep(0.01)


def die_on(rank, world, dying):
    """End the process of one rank without a word."""
    if rank == dying:
        os._exit(3)


LEAKED = []


def leak(rank, world):
    """Keep a sharded module alive beyond its test, in a process that does not wait for its end."""
    worker.FREED_SECONDS = 0.0
    LEAKED.append(api.theirs.fully_shard(torch.nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (world,))))


def forget(rank, world):
    """Drop what ``leak`` kept."""
    LEAKED.clear()
    worker.FREED_SECONDS = FREED_SECONDS


def test_values_come_back_in_rank_order(pool):
    """``run`` returns one value per rank."""
    assert pool.run(3, value_of, {"base": 10}, 30.0) == [10, 11, 12]


def test_failure_shows_every_rank_and_the_pool_recovers(pool):
    """The failing rank's traceback and the stacks of those that wait for it are in the message."""
    with pytest.raises(RankError) as caught:
        pool.run(2, fail_on, {"failing": 1}, 30.0)
    text = str(caught.value)
    assert "ValueError: the reason" in text and "rank 0 of 2: no answer" in text and text.count("in fail_on") == 2
    assert pool.run(2, value_of, {"base": 0}, 30.0) == [0, 1]


def test_hanging_rank_is_stopped_at_the_limit(pool, monkeypatch):
    """A test that never ends costs its limit, shows where it hung, and leaves no process.

    The limit is reached as soon as the other rank has answered, whatever the clock shows.
    """
    pool.run(2, value_of, {"base": 0}, 30.0)
    processes = [rank.process for rank in pool.ranks]

    def wait(ranks: list[connection.Connection], timeout: float) -> list[object]:
        return connection.wait(ranks, timeout) if len(ranks) > 1 else []

    monkeypatch.setattr(pools, "connection", SimpleNamespace(wait=wait, Connection=connection.Connection))
    with pytest.raises(RankError) as caught:
        pool.run(2, hang_on, {"hanging": 0}, 60.0)
    assert "in hang_on" in str(caught.value) and "--- rank 1 of 2: finished" in str(caught.value)
    assert all(not process.is_alive() for process in processes)


def test_dead_rank_is_reported(pool):
    """A process that dies is a failure of its test only."""
    with pytest.raises(RankError, match="rank 0 of 1: no answer"):
        pool.run(1, die_on, {"dying": 0}, 30.0)
    assert pool.run(1, value_of, {"base": 5}, 30.0) == [5]


def test_process_that_died_between_tests_is_replaced(pool):
    """A process that dies while idle costs one test."""
    pool.run(1, value_of, {"base": 0}, 30.0)
    pool.ranks[0].process.kill()
    pool.ranks[0].process.join()
    with pytest.raises(RankError, match="no answer"):
        pool.run(1, value_of, {"base": 0}, 30.0)
    assert pool.run(1, value_of, {"base": 1}, 30.0) == [1]


def test_module_that_outlives_its_test_is_a_failure(pool):
    """Every test must be able to free its model."""
    with pytest.raises(RankError, match="still alive after the test: .*FSDPLinear"):
        pool.run(1, leak, {}, 30.0)
    pool.run(1, forget, {}, 30.0)


PARENT = """
from tests.support import processes
from tests.support.pool import Pool
from tests.support.test_pool import hang_on, value_of
processes.PRELOADED = ("tests.support.worker",)  # all that two ranks need
pool = Pool()
pool.run(2, value_of, {"base": 0}, 30.0)
print(*[rank.process.pid for rank in pool.ranks], flush=True)
pool.run(2, hang_on, {"hanging": 0}, 60.0)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_processes_end_when_their_parent_is_killed():
    """Busy and idle processes alike end with a parent that had no chance to clean up."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    descriptors = [os.pidfd_open(pid) for pid in pids]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for pid, descriptor in zip(pids, descriptors, strict=True):
        assert ended(descriptor), f"process {pid} outlived its parent"
        os.close(descriptor)
    assert len(pids) == 2


def ended(descriptor: int) -> bool:
    """Wait for the end of a process that should be killed, at most 100 seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(100_000))
