"""Replicas that each shard a model over ranks of their own, and die and come back while the others train."""

from __future__ import annotations

import json
import signal
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.replicas import DIES, RANKS, REPLICAS, RETURNS, STEPS, batch, build, main
from tests.support import api
from tests.support.parity import losses_of_one_process
from tests.support.processes import start

pytestmark = api.fsdp2_only
LIMIT = 120.0


def alone() -> list[float]:
    """Return the losses of a single process."""
    model = build(0)
    return losses_of_one_process(model, lambda step: (model(batch(step)) - batch(step)).square().mean(), STEPS, lr=0.01)


@pytest.mark.slow
def test_replicas_come_and_go(tmp_path: Path) -> None:
    """All ranks of a replica are killed in the middle of a backward. The others repeat the step and go on. The replica
    comes back with the state of another, and all go on. Every loss is that of a single process, and the comparison of
    ranks, which knows those of a replica only, finds no difference.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    everyone = list(range(REPLICAS))
    logs: dict[tuple[int, int, int], Path] = {}

    def launch(replica: int, attempt: int) -> list[ForkServerProcess]:
        processes = []
        for rank in range(RANKS):
            log = logs[replica, attempt, rank] = tmp_path / f"{replica}-{attempt}-{rank}.log"
            processes.append(start(main, replica, rank, attempt, str(tmp_path), store.port, log=str(log)))
        return processes

    running = {replica: launch(replica, 0) for replica in everyone}
    started = [process for processes in running.values() for process in processes]
    try:
        store.set("quorum/0", json.dumps(everyone))
        for process in running[1]:
            process.join(LIMIT)
            assert process.exitcode == -signal.SIGKILL
        store.set("quorum/1", json.dumps([0, 2]))
        running[1] = launch(1, 1)
        started += running[1]
        store.set("quorum/2", json.dumps(everyone))
        for process in started:
            process.join(LIMIT)
    finally:
        for process in started:
            process.kill()
    texts = {place: log.read_text().splitlines() for place, log in logs.items()}
    members = [everyone] * DIES + [[0, 2]] * (RETURNS - DIES) + [everyone] * (STEPS - RETURNS)
    losses = alone()
    for (replica, attempt, _), lines in texts.items():
        steps = range(STEPS) if replica != 1 else range(RETURNS, STEPS) if attempt else range(DIES)
        if replica != 1 or attempt:
            assert lines.pop() == "done", texts
        found = [json.loads(line) for line in lines]  # so nothing else was printed or logged
        assert [line[:2] for line in found] == [[step, members[step]] for step in steps]
        torch.testing.assert_close([line[2] for line in found], [losses[step] for step in steps], rtol=1e-4, atol=1e-6)
