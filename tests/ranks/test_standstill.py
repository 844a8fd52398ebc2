"""A rank that waits for long says in its log in what, since when, and where the other ranks are."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.ranks import standstill
from tests.ranks.apart import Ended, run_apart
from tests.support.models import Three

HERE = str(Path(__file__).resolve())
SHORT = timedelta(seconds=4)
REMEDY = "call them outside of `if rank == 0:`"


def trained(mesh: DeviceMesh | None = None) -> Three:
    """A sharded model after two steps."""
    torch.manual_seed(0)
    model = Three()
    fsdp2.fully_shard(model.first, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    return model


class _EndsWhenAllHaveLogged(logging.Handler):
    """Ends this process when every rank of ``ranks`` has logged a line, which the log of the process keeps."""

    def __init__(self, ranks: range) -> None:
        super().__init__()
        self._store, self._ranks = dist.distributed_c10d._get_default_store().clone(), ranks

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), flush=True)
        self._store.set(f"logged/{dist.get_rank()}", "")
        self._store.wait([f"logged/{rank}" for rank in self._ranks])
        os._exit(0)


def until_logged(ranks: range) -> None:
    """End this process as soon as all of ``ranks`` have logged something."""
    logging.getLogger("fsdp2").addHandler(_EndsWhenAllHaveLogged(ranks))


def full_tensor_alone(rank: int, world: int) -> None:
    """The last rank gathers a parameter, which it alone is told to, and the others come to a barrier."""
    model = trained()
    until_logged(range(world))
    if rank == world - 1:
        model.last.weight.full_tensor()  # type: ignore[operator]
    dist.barrier()


def state_dict_alone(rank: int, world: int) -> None:
    """The last rank saves."""
    model = trained()
    until_logged(range(world))
    if rank == world - 1:
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    dist.barrier()


def evaluates_alone(rank: int, world: int) -> None:
    """The last rank evaluates."""
    model = trained()
    until_logged(range(world))
    if rank == world - 1:
        with torch.no_grad():
            model(torch.ones(2, 8))
    dist.barrier()


def line_of(program: object, text: str) -> int:
    """The number of a program's line in this file."""
    lines = Path(HERE).read_text().splitlines()
    first = program.__code__.co_firstlineno  # type: ignore[attr-defined]
    return next(i for i, line in enumerate(lines, 1) if i > first and text in line)


@pytest.mark.parametrize(
    ("program", "call", "what"),
    [
        (full_tensor_alone, "full_tensor()", r"full_tensor\(\)"),
        (state_dict_alone, "get_model_state_dict(", r"get_model_state_dict\(\)"),
        (evaluates_alone, "model(torch", "evaluation"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_collective_of_one_rank_between_passes(program, call, what):
    """All ranks waited out the timeout of the process group, and then gloo named neither rank nor place."""
    place = lambda text: rf"at {re.escape(os.path.relpath(HERE))}:{line_of(program, text)}, for \d+ s"
    barrier, alone = rf"in barrier\(\), {place('dist.barrier')}", rf"in {what}, {place(call)}"
    for rank, ended in enumerate(run_apart(program, 3)):
        others = f"rank {rank}, {1 - rank}: {barrier}" if rank < 2 else ""
        order = f"{others}; rank 2: {alone}" if rank < 2 else f"rank 2: {alone}; rank 0, 1: {barrier}"
        found = re.search(rf"^rank {rank} waits for other ranks\. R{order[1:]}\. .*$", ended.output, re.MULTILINE)
        assert ended.status == 0 and found and REMEDY in found[0], ended


def stops(rank: int, world: int) -> None:
    """The last rank stands still outside of Python, as one does that waits for a dead disk."""
    trained()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    until_logged(range(world - 1))
    dist.barrier()


def test_a_silent_rank_is_named_before_the_timeout(monkeypatch):
    monkeypatch.setattr("tests.ranks.apart.LIMIT_SECONDS", 15.0)
    *others, stopped = run_apart(stops, 3)
    assert stopped.status is None
    for ended in others:
        assert "; rank 2: no answer: it was killed, or hangs outside of Python. " in ended.output, ended


def comes_late(rank: int, world: int) -> None:
    """One rank evaluates, on a group of a short timeout, while the other one is busy elsewhere."""
    group = dist.new_group(timeout=SHORT)
    model = trained(DeviceMesh.from_group(group, "cpu"))
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(2, 8))
    time.sleep(2 * SHORT.total_seconds())


def test_a_meeting_that_is_given_up_says_where_the_others_are():
    ended, _ = run_apart(comes_late, 2)
    place = f"rank 1: at {os.path.relpath(HERE)}:{line_of(comes_late, 'time.sleep')}. Expected: every rank comes"
    assert "rank 0 waited 4 s, the timeout of its process group, for ranks that did not come; " in ended.error, ended
    assert place in ended.error, ended


def as_the_interpreter_ends(program: object, rank: int, world: int) -> None:
    """Leave an exception to the interpreter, which notes it before functions that run at exit; then end."""
    try:
        program(rank, world)  # type: ignore[operator]
    except RuntimeError as error:
        sys.last_value = error
        raise
    finally:
        for process in list(fsdp2.ranks.process._processes.values()):  # type: ignore[attr-defined]
            process.leave()


def barrier_with_timeout(rank: int, world: int) -> None:
    """One rank comes to a barrier, and the other one does not."""
    group = dist.new_group(timeout=SHORT)
    trained()
    if rank == 0:
        dist.barrier(group)
    time.sleep(2 * SHORT.total_seconds())


def ends_alone(rank: int, world: int) -> None:
    """One rank gathers a parameter when the other one has ended."""
    model = trained()
    if rank == 0:
        time.sleep(1)
        model.last.weight.full_tensor()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            barrier_with_timeout,
            "rank 0 failed where it waited for other ranks. When it last asked, rank 0: in barrier(), at ",
        ),
        (
            ends_alone,
            "rank 0 failed in a collective, which all ranks must call: rank 1 ended, after the end of backward",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_failed_collective_is_explained_when_the_process_ends(program, text):
    """gloo says that it timed out, or that a connection was reset."""
    ended: Ended = run_apart(partial(as_the_interpreter_ends, program), 2)[0]
    assert ended.status == 1 and "gloo" in ended.output and text in ended.output, ended


def goes_on(rank: int, world: int) -> None:
    """Steps and barriers, each in one line, for longer than a rank waits before it asks; one rank is much slower."""
    model = trained()
    end, more = time.monotonic() + 4 * standstill._PATIENCE_SECONDS, torch.ones(1)
    while more:
        if rank == 0:
            time.sleep(standstill._PATIENCE_SECONDS / 4)
        model(torch.ones(2, 8)).sum().backward()
        for _ in range(20):
            dist.barrier()
        more.fill_(time.monotonic() < end)
        dist.broadcast(more, 0)


def test_ranks_that_go_on_say_nothing():
    """A line that is passed again and again looks like one that is never left. The collectives tell them apart."""
    for ended in run_apart(goes_on, 2):
        assert ended.status == 0 and "waits for other ranks" not in ended.output, ended


def test_where_a_process_is():
    """Code of torch and of Python's library is no place that tells a user anything: a user's line is."""
    seen: list[standstill._Place] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: seen.append(standstill._place(str)))
    layer(torch.ones(1, 2))
    assert re.fullmatch(rf"{re.escape(os.path.relpath(HERE))}:\d+", seen[0].text) and not seen[0].waits, seen
