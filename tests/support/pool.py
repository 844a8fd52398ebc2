"""A persistent pool of gloo processes, and the decorator that turns a function of ``(rank, world)`` into pytest tests.

    @on_ranks(2, 4)
    def test_sum(rank, world):
        ...

runs on every rank of a default process group of exactly 2, then 4, processes, which serve one test after the other and
every world size: ranks 0..world-1 take part. A test that fails on one rank while others wait, or that lasts longer than
its limit, costs the pool its processes: each writes its stacks and ends, and the next test gets new ones. The processes
talk over 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection
from multiprocessing.process import BaseProcess
from typing import IO, Any

import pytest
import torch.distributed as dist

from tests.support import processes, worker
from tests.support.worker import Job, Outcome

LIMIT_SECONDS = 120.0
"""How long one test may take, unless ``on_ranks`` is told otherwise."""
GRACE_SECONDS = 2.0
"""How long other ranks may still run after one rank has failed."""
END_SECONDS = 10.0
"""How long an idle process may take to end."""


class RankError(AssertionError):
    """A test failed on some rank; the text holds every rank's traceback or stacks."""


@dataclass
class Rank:
    """One process of the pool as its parent sees it."""

    process: BaseProcess
    connection: connection.Connection
    log: IO[bytes]
    read_from: int = 0

    def output(self) -> str:
        """Return what the process wrote to stdout and stderr during its present job."""
        self.log.seek(self.read_from)
        return self.log.read().decode(errors="replace").strip()


@dataclass
class Pool:
    """The processes, started when first needed.

    ``backend`` is that of their default group, ``environment`` returns the variables of a rank.
    """

    ranks: list[Rank] = field(default_factory=list)
    generation: int = 0
    world: int = 0
    store: Any = None
    grace: float = GRACE_SECONDS
    longest: float = math.inf
    backend: str = "gloo"
    environment: Callable[[int], Mapping[str, str]] = lambda rank: processes.NO_GPU

    def run(self, world: int, function: Callable[..., Any], kwargs: Mapping[str, Any], limit: float) -> list[Any]:
        """Run ``function(rank, world, **kwargs)`` on ``world`` ranks and return their values in rank order.

        Raises ``RankError`` when a rank fails, hangs or dies, and ``pytest.skip`` when the ranks agree on skipping.
        """
        outcomes = self.outcomes(world, function, kwargs, limit)
        if any(outcome is None or outcome.traceback for outcome in outcomes):
            raise RankError(self.recover(outcomes))
        if skipped := next((outcome.skipped for outcome in outcomes if outcome and outcome.skipped), ""):
            pytest.skip(skipped)
        if len({outcome.groups for outcome in outcomes if outcome}) > 1:
            # One rank made a group alone. torch names some after how many there are, and a group with other names on
            # other ranks is waited for without end: the next job gets a new default group.
            self.world = 0
        return [outcome.value for outcome in outcomes if outcome]

    def outcomes(
        self, world: int, function: Callable[..., Any], kwargs: Mapping[str, Any], limit: float
    ) -> list[Outcome | None]:
        """Run ``function`` as ``run`` does and return what each rank answered; ``None`` stands for one that hung or
        died, after which only ``recover`` or ``close`` may follow."""
        limit = min(limit, self.longest)
        if world != self.world:
            self.generation += 1
            self.world = world
        while len(self.ranks) < world:
            self.ranks.append(self.start(len(self.ranks)))
        job = Job(function.__module__, function.__qualname__, dict(kwargs), world, self.generation, limit)
        for rank in self.ranks[:world]:
            rank.log.seek(0, os.SEEK_END)
            rank.read_from = rank.log.tell()
            with contextlib.suppress(BrokenPipeError):  # a dead process is noticed below
                rank.connection.send_bytes(pickle.dumps(job))
        return self.collect(self.ranks[:world], limit)

    def collect(self, ranks: list[Rank], limit: float) -> list[Outcome | None]:
        """Wait for every rank's outcome; ``None`` stands for a rank that hung or died."""
        outcomes: list[Outcome | None] = [None] * len(ranks)
        waiting = {rank.connection: index for index, rank in enumerate(ranks)}
        deadline = time.monotonic() + limit
        while waiting:
            ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return outcomes
            for one in ready:
                assert isinstance(one, connection.Connection)
                index = waiting.pop(one)
                with contextlib.suppress(EOFError, ConnectionResetError):
                    outcomes[index] = pickle.loads(one.recv_bytes())
                if (outcome := outcomes[index]) is None or outcome.traceback:
                    deadline = min(deadline, time.monotonic() + self.grace)
        return outcomes

    def recover(self, outcomes: list[Outcome | None]) -> str:
        """Describe a failure and make the pool usable again: a new group, and new processes if any rank hung."""
        ranks = self.ranks[: len(outcomes)]
        for rank, outcome in zip(ranks, outcomes, strict=True):
            if outcome is None and rank.process.is_alive() and rank.process.pid:
                with contextlib.suppress(ProcessLookupError):  # it has just ended, but its parent has not noticed yet
                    os.kill(rank.process.pid, signal.SIGUSR1)
        if any(outcome is None for outcome in outcomes):
            self.stop()
        lines = []
        for index, (rank, outcome) in enumerate(zip(ranks, outcomes, strict=True)):
            what = "no answer: hung or died; its stacks" if outcome is None else outcome.traceback or "finished"
            lines += [f"--- rank {index} of {len(outcomes)}: {what}", rank.output()]
        self.generation += 1
        return "\n".join(line for line in lines if line)

    def start(self, index: int) -> Rank:
        """Start the process of one rank."""
        if self.store is None:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            self.store = dist.TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        parent_end, worker_end = Pipe()
        log = tempfile.NamedTemporaryFile()  # noqa: SIM115 (open as long as the process)
        arguments = (index, worker_end, self.store.port, self.backend)
        process = processes.start(worker.main, *arguments, log=log.name, environment=self.environment(index))
        worker_end.close()
        return Rank(process, parent_end, log)

    def stop(self, patience: float = END_SECONDS) -> None:
        """End every process: an idle one leaves when its connection closes, a busy one is given some seconds."""
        for rank in self.ranks:
            rank.connection.close()
        for rank in self.ranks:
            rank.process.join(patience)
            if rank.process.is_alive():
                rank.process.kill()
                rank.process.join()
        self.ranks = []
        self.world = 0

    def close(self, patience: float = END_SECONDS) -> None:
        """End every process and the store; the pool can be used again."""
        self.stop(patience)
        self.store = None


POOL = Pool()
"""The pool of this pytest run; ``tests/conftest.py`` closes it."""


def on_ranks(*worlds: Any, limit: float = LIMIT_SECONDS) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator: the function of ``(rank, world, ...)`` becomes one pytest test for each world size, or each
    ``pytest.param`` of one.

    Further arguments come from ``pytest.mark.parametrize`` or fixtures and must be picklable.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(world: int, **kwargs: Any) -> None:
            POOL.run(world, function, kwargs, limit)

        return pytest.mark.parametrize("world", worlds)(as_test(function, run))

    return decorate


def as_test(
    function: Callable[..., Any], run: Callable[..., None], errors: tuple[type[Exception], ...] = (RankError,)
) -> Callable[..., Any]:
    """Return the test that lets ``run`` call ``function`` on its ranks, with ``function``'s arguments but ``rank``.

    One of ``errors`` is a failure of which pytest shows the text alone, as it has the tracebacks of the ranks.
    """

    @functools.wraps(function)
    def test(**kwargs: Any) -> None:
        problem = ""
        try:
            run(**kwargs)
        except errors as error:
            problem = str(error)
        if problem:
            pytest.fail(problem, pytrace=False)

    visible = [parameter for name, parameter in inspect.signature(function).parameters.items() if name != "rank"]
    test.__signature__ = inspect.Signature(visible)
    test.rank_function = function
    return test
