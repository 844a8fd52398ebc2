"""The process that starts a rank's worker, watches it, and starts another if it hangs, dies or raises an error.

All supervisors do the same in the same order. They communicate only through a store, so none can hang with its worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp2.tools.check.place import Outcome
from fsdp2.tools.check.stacks import Stuck, describe, innermost
from fsdp2.tools.check.tasks import Task
from fsdp2.tools.check.worker import Orders, work

__all__ = ["Job", "Supervisor"]

TICK_SECONDS, GRACE_SECONDS, ANSWER_SECONDS, START_SECONDS = 0.2, 3.0, 10.0, 120.0
"""The interval between looks at the store; the time for other ranks to finish after one has failed; the time for a rank
to report its last step; and the time for a worker to import torch."""
LINES_OF_LOG, MUCH_OUTPUT = 15, 20_000


@dataclass(frozen=True)
class Job:
    """This rank's place among all ranks, found without using a device."""

    rank: int
    world: int
    local_rank: int
    store: dist.Store
    address: tuple[str, int]
    hosts: int = 1
    ranks_here: int = 1
    device: str = "cpu"

    @classmethod
    def found(cls, wanted: str | None) -> Job:
        """Return the place of this process from the launcher's variables; without a launcher it is the only rank."""
        try:
            store, rank, world = next(iter(dist.rendezvous("env://")))
        except ValueError:  # there is no launcher
            store, rank, world = dist.TCPStore("127.0.0.1", 0, 1, is_master=True), 0, 1
        store.set_timeout(timedelta(seconds=300))
        lowest = store
        while isinstance(lowest, dist.PrefixStore):
            lowest = lowest.underlying_store
        assert isinstance(lowest, dist.TCPStore)
        local_rank = dist.get_node_local_rank(fallback_rank=0)
        job = cls(rank, world, local_rank, dist.PrefixStore("fsdp2-check", store), (lowest.host, lowest.port))
        return job._placed(wanted)

    def _placed(self, wanted: str | None) -> Job:
        """Return the job with its hosts, and with a device that every rank has."""
        gpu = torch.cuda.is_available() and self.local_rank < torch.cuda.device_count() and wanted != "cpu"
        here = {"host": socket.gethostname(), "gpu": gpu}
        every = self.shared("place", here)
        names = [one["host"] for one in every]
        device = f"cuda:{self.local_rank}" if all(one["gpu"] for one in every) else "cpu"
        return replace(self, hosts=len(set(names)), ranks_here=names.count(here["host"]), device=device)

    def shared(self, key: str, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self.store.get(f"{key}/{rank}")) for rank in range(self.world)]

    @property
    def gpus_here(self) -> int:
        """The number of GPUs of this host."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


@dataclass
class _Worker:
    """A running worker, with its last messages."""

    process: Any
    pipe: connection.Connection
    task: str = ""
    doing: str = "starting"
    last: float = field(default_factory=time.monotonic)
    heard: bool = False
    begun: bool = False
    ended: bool = False

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.pipe.close()


class Supervisor:
    """Runs tasks on this rank. ``outcomes`` are this rank's results by the names of tasks."""

    def __init__(
        self,
        job: Job,
        tasks: Sequence[Task],
        *,
        patience: float,
        against_torch: bool = True,
        progress: Callable[[str, Outcome | None], object] = lambda task, outcome: None,
    ) -> None:
        self.job, self.tasks, self.patience, self.against_torch = job, list(tasks), patience, against_torch
        self.progress = progress
        self.outcomes: dict[str, Outcome] = {}
        self._attempt = 0
        self._worker: _Worker | None = None

    def run(self) -> None:
        """Run all tasks, in as many workers as necessary."""
        with tempfile.TemporaryDirectory(prefix="fsdp2-check-") as folder:
            try:
                rest = self.tasks
                while rest:
                    count = 1 if rest[0].apart else next((i for i, t in enumerate(rest) if t.apart), len(rest))
                    failed = self._start(rest[:count], Path(folder))
                    done = count if failed is None else [task.name for task in rest].index(failed) + 1
                    failure, rest = self._failure(), rest[done:]
                    self._attempt += 1
                    # The workers could not start, and would not start the next time either.
                    if failure is not None and not failure["begun"]:
                        self._leave_out(rest)
                        rest = []
            finally:
                if self._worker is not None:
                    self._worker.kill()

    def _leave_out(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self.outcomes[task.name] = Outcome("not run", "the processes of the ranks could not start")

    def collect(self) -> dict[str, list[Outcome | None]]:
        """Return on rank 0, which waits for the others, the outcomes of all ranks by task; {} on other ranks."""
        key, mine = "outcomes", {name: outcome.to_json() for name, outcome in self.outcomes.items()}
        self.job.store.set(f"{key}/{self.job.rank}", json.dumps(mine))
        if self.job.rank:
            return {}
        every: list[dict[str, Any]] = []
        for rank in range(self.job.world):
            try:
                self.job.store.wait([f"{key}/{rank}"], timedelta(seconds=ANSWER_SECONDS))
                every.append(json.loads(self.job.store.get(f"{key}/{rank}")))
            except dist.DistError:  # its host is down: write the report without it
                every.append({})
        return {
            task.name: [Outcome.from_json(found[task.name]) if task.name in found else None for found in every]
            for task in self.tasks
        }

    # ---- one start of the workers ----

    def _start(self, tasks: list[Task], folder: Path) -> str | None:
        """Run tasks in one worker for each rank; return the task that ended the worker early, or None."""
        if not (tasks[0].rank0_only and self.job.rank):
            self._worker = self._spawn([task.name for task in tasks], folder)
            while not self._worker.ended:
                if (problem := self._listen() or self._trouble()) is not None:
                    self._announce(problem)
                if self._failure() is not None:
                    return self._end_worker(folder)
            self._worker.process.join(GRACE_SECONDS)
            self._worker.kill()
        self._say("done", "")
        while self.job.store.add(self._key("done"), 0) < self.job.world:
            if self._failure() is not None:
                return self._end_worker(folder)
            time.sleep(TICK_SECONDS)  # supervisors of the other ranks watch their workers
        return None

    def _spawn(self, names: list[str], folder: Path) -> _Worker:
        context = get_context("spawn")
        near, far = context.Pipe(duplex=False)
        log, stacks = (folder / f"{kind}-{self._attempt}" for kind in ("log", "stacks"))
        job = self.job
        orders = Orders(
            tuple(names),
            self._attempt,
            job.rank,
            job.world,
            job.local_rank,
            job.hosts,
            job.ranks_here,
            job.device,
            job.address,
            str(log),
            str(stacks),
            self.against_torch,
            {name: outcome.figures for name, outcome in self.outcomes.items()},
        )
        process = context.Process(target=work, args=(orders, far), daemon=True, name=f"fsdp2 check, rank {job.rank}")
        process.start()
        far.close()
        return _Worker(process, near, task=names[0])

    def _listen(self) -> dict[str, Any] | None:
        """Read the worker's messages; return a problem if it has died or a task has raised an error."""
        worker = self._worker
        assert worker is not None
        problem = None
        connection.wait([worker.pipe, worker.process.sentinel], TICK_SECONDS)
        try:
            while worker.pipe.poll():
                kind, *values = worker.pipe.recv()
                worker.last, worker.heard = time.monotonic(), True
                if kind == "begin":
                    worker.task, worker.doing, worker.begun = values[0], "starting", True
                    self.progress(values[0], None)
                elif kind == "doing":
                    worker.doing = values[0]
                elif kind == "end":
                    self.outcomes[values[0]] = Outcome.from_json(values[1])
                    if self.outcomes[values[0]].verdict == "failed":
                        problem = {"task": values[0], "kind": "failed", "begun": True}
                    else:
                        self.progress(values[0], self.outcomes[values[0]])
                elif problem is None:
                    worker.ended = True
        except (EOFError, OSError):
            pass  # the worker has died, and its messages are all read
        if problem is None and not worker.ended and not worker.process.is_alive() and not worker.pipe.poll():
            problem = {"task": worker.task, "kind": "died", "begun": worker.begun}
        return problem

    def _trouble(self) -> dict[str, Any] | None:
        worker = self._worker
        assert worker is not None
        patience = self.patience if worker.heard else max(START_SECONDS, self.patience)
        if not worker.ended and time.monotonic() - worker.last > patience:
            return {"task": worker.task, "kind": "hangs", "begun": worker.begun}
        return None

    # ---- messages to all ranks ----

    def _key(self, name: str) -> str:
        return f"{self._attempt}/{name}"

    def _say(self, name: str, value: str) -> None:
        self.job.store.set(f"{self._key(name)}/{self.job.rank}", value)
        self.job.store.add(self._key(name), 1)

    def _announce(self, problem: dict[str, Any]) -> None:
        """Announce a problem to every rank; the first one counts."""
        self.job.store.compare_set(self._key("failure"), "", json.dumps({**problem, "rank": self.job.rank}))

    def _failure(self) -> dict[str, Any] | None:
        if not self.job.store.check([self._key("failure")]):
            return None
        return json.loads(self.job.store.get(self._key("failure")))  # type: ignore[no-any-return]  # a dict

    def _end_worker(self, folder: Path) -> str:
        """End the worker after a failure, record this rank's outcome of the failed task, and return the task's name."""
        failure, worker = self._failure(), self._worker
        assert failure is not None
        task, own = str(failure["task"]), {"doing": "had ended", "dump": "", "died": "", "output": ""}
        if worker is not None and not worker.ended:
            if failure["kind"] != "hangs":  # this rank may be about to report its own error
                until = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < until and worker.process.is_alive() and task not in self.outcomes:
                    self._listen()
            gone = not worker.process.is_alive()
            own["doing"] = worker.doing if worker.task == task else f"{worker.task}: {worker.doing}"
            own["dump"] = "" if gone else self._stacks(worker, folder)
            if gone and task not in self.outcomes:
                own["output"] = self._output(folder)
                own["died"] = _ending(worker.process.exitcode, own["output"])
        if worker is not None:
            worker.kill()
        found = self._others(own)
        if own["died"]:
            self.outcomes[task] = Outcome("died", own["died"], figures={"stacks": own["output"]})
        elif failure["kind"] == "hangs":
            stuck = [Stuck(rank, one["doing"], one["dump"]) for rank, one in found.items() if one["dump"]]
            self.outcomes[task] = Outcome(
                "hangs",
                describe(stuck, self.patience),
                figures={"stacks": own["dump"]},
            )
        elif task not in self.outcomes:
            self.outcomes[task] = Outcome("not run", f"rank {failure['rank']} {failure['kind']} meanwhile")
        self.outcomes[task].figures["first"] = failure["rank"]
        self.progress(task, self.outcomes[task])
        return task

    def _others(self, own: dict[str, str]) -> dict[int, dict[str, str]]:
        """Return the last step of each rank that answers."""
        key, store = self._key("doing"), self.job.store
        store.set(f"{key}/{self.job.rank}", json.dumps(own))
        found = {}
        for rank in range(self.job.world):
            with suppress(dist.DistError):
                store.wait([f"{key}/{rank}"], timedelta(seconds=ANSWER_SECONDS))
                found[rank] = json.loads(store.get(f"{key}/{rank}"))
        return found

    def _output(self, folder: Path) -> str:
        """Return the end of the worker's output."""
        path = folder / f"log-{self._attempt}"
        return path.read_text(errors="replace")[-MUCH_OUTPUT:] if path.exists() else ""

    def _stacks(self, worker: _Worker, folder: Path) -> str:
        """Return the stacks of the worker's threads, which faulthandler writes even while the GIL is held."""
        path = folder / f"stacks-{self._attempt}"
        if worker.process.pid is None or not path.exists():
            return ""
        os.kill(worker.process.pid, signal.SIGUSR1)
        until, size = time.monotonic() + 2.0, -1
        while time.monotonic() < until:
            time.sleep(TICK_SECONDS)  # there is no event for the end of the other process's output
            if size == (size := path.stat().st_size) and size:
                break
        return path.read_text(errors="replace")


def _ending(status: int | None, output: str) -> str:
    """Return how a process ended, with the line if its output has it, else with the last lines of the output."""
    how = f"its process ended with status {status}"
    if status is not None and status < 0:
        with suppress(ValueError):
            how = f"its process was ended by {signal.Signals(-status).name}"
    _, fatal, stacks = output.rpartition("Fatal Python error")
    if fatal and (frame := innermost(stacks)) is not None:
        return f"{how}, at {frame}"
    return "\n".join([how, *output.splitlines()[-LINES_OF_LOG:]])
