"""A rank that waits for long says in its log in what, since when, and where the other ranks are."""

from __future__ import annotations

import itertools
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2._torch.collectives import default_store
from fsdp2.ranks import board, process, standstill
from fsdp2.ranks.standstill import Standstill
from fsdp2.ranks.store import Connections, Keys
from tests.ranks.apart import SOON, Awaits, Ended, run_apart, until_logged
from tests.support.models import Three
from tests.unit.meshes import gloo_mesh

HERE = str(Path(__file__).resolve())
REMEDY = "call them outside of `if rank == 0:`"


def trained() -> Three:
    """A sharded model after two steps."""
    torch.manual_seed(0)
    model = Three()
    fsdp2.fully_shard(model.first)
    fsdp2.fully_shard(model)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    return model


def calls_alone(call: str, patterns: list[str], rank: int, world: int) -> None:
    """The last rank does what it alone is told to: it gathers, saves or evaluates. The others come to a barrier."""
    model = trained()
    until_logged(patterns[rank], range(world))
    if rank == world - 1 and call == "full_tensor()":
        model.last.weight.full_tensor()
    elif rank == world - 1 and call == "get_model_state_dict()":
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    elif rank == world - 1:
        with torch.no_grad():
            model(torch.ones(2, 8))
    dist.barrier()


def before_the_first_forward(rank: int, world: int) -> None:
    """The last rank gathers a parameter of a new model, which it alone is told to, and the others begin to train."""
    model = Three()
    fsdp2.fully_shard(model)
    until_logged("waits for other ranks", range(world - 1, world))
    if rank == world - 1:
        model.last.weight.full_tensor()
    time.sleep(2 * standstill._PATIENCE_SECONDS)
    dist.barrier()


def across_meshes(rank: int, world: int) -> None:
    """Two stages of a pipeline, each sharded over its own ranks: the first rank waits for what the last never sends."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("stage", "shard"))["shard"]
    model = Three()
    fsdp2.fully_shard(model, mesh=mesh)
    until_logged("waits for other ranks", range(1))
    if rank == 0:
        dist.recv(torch.ones(1), world - 1)
    default_store().clone().wait(["logged/0"])


def without_checks(rank: int, world: int) -> None:
    """One rank waits for the other one, and nobody wants to know."""
    model = Three()
    fsdp2.fully_shard(model)
    fsdp2.set_rank_checks(False)
    if rank == 0:
        time.sleep(2.5 * standstill._PATIENCE_SECONDS)
    dist.barrier()


def checked_since_the_first_forward(rank: int, world: int) -> None:
    """One rank waits for the other one, which logs that it does not come; checks were off while the model was built."""
    fsdp2.set_rank_checks(False)
    model = Three()
    fsdp2.fully_shard(model)
    fsdp2.set_rank_checks(True)
    model(torch.ones(2, 8))
    until_logged("waits for other ranks", range(1, 2))
    if rank == 0:
        default_store().clone().wait(["logged/1"])
    dist.barrier()


def line_of(program: object, text: str) -> int:
    """The number of a program's line in this file."""
    lines = Path(HERE).read_text().splitlines()
    first = program.__code__.co_firstlineno
    return next(i for i, line in enumerate(lines, 1) if i > first and text in line)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("full_tensor()", "weight.full_tensor()"),
        ("get_model_state_dict()", "get_model_state_dict(model"),
        ("evaluation", "model(torch"),
    ],
)
def test_a_collective_of_one_rank_between_passes(call, line):
    """All ranks waited out the timeout of the process group, and then gloo named neither rank nor place."""
    where = re.escape(os.path.relpath(HERE))
    place = lambda text: rf"at {where}:{line_of(calls_alone, text)}, for \d+(?: to \d+)? s"
    barrier, alone = rf"in barrier\(\), {place('dist.barrier')}", rf"in {re.escape(call)}, {place(line)}"
    patterns = []
    for rank in range(3):
        others = f"rank {rank}, {1 - rank}: {barrier}" if rank < 2 else ""
        order = f"{others}; rank 2: {alone}" if rank < 2 else f"rank 2: {alone}; rank 0, 1: {barrier}"
        patterns.append(rf"^rank {rank} waits for other ranks\. R{order[1:]}\. .*{re.escape(REMEDY)}")
    for rank, ended in enumerate(run_apart(partial(calls_alone, call, patterns), 3)):
        assert ended.status == 0 and re.search(patterns[rank], ended.output, re.MULTILINE), ended


SILENT = r"; rank 2: no answer: it was killed, or hangs outside of Python\. "


def test_a_collective_of_one_rank_before_the_first_forward():
    """The watch began in the first forward, with a collective: both ranks waited for ever, and nobody said a word."""
    ended = run_apart(before_the_first_forward, 2)[1]
    place = f"{re.escape(os.path.relpath(HERE))}:{line_of(before_the_first_forward, 'full_tensor()')}"
    line = rf"^rank 1 waits for other ranks\. Rank 1: in full_tensor\(\), at {place}, for \d+ s; rank 0: at .*$"
    found = re.search(line, ended.output, re.MULTILINE)
    assert ended.status == 0 and found and REMEDY in found[0], ended


def test_a_wait_across_meshes():
    """The ranks of its own mesh were asked, and the one that it waits for is not among them."""
    ended = run_apart(across_meshes, 4)[0]
    lines = [f"{os.path.relpath(HERE)}:{line_of(across_meshes, text)}" for text in ("dist.recv", "clone().wait")]
    waits, elsewhere = map(re.escape, lines)
    line = rf"rank 0 waits for other ranks\. Rank 0: in recv\(\), at {waits}, for \d+ s; rank 1, 2, 3: at {elsewhere}\."
    assert re.search(line, ended.output), ended


def test_without_checks_nobody_watches():
    for ended in run_apart(without_checks, 2):
        assert ended.status == 0 and "waits for other ranks" not in ended.output, ended


def test_checks_that_begin_with_the_first_forward():
    """So does the watch, which begins in ``fully_shard`` otherwise."""
    waits, comes = run_apart(checked_since_the_first_forward, 2)[::-1]
    assert waits.status == comes.status == 0 and "rank 1 waits for other ranks" in waits.output, waits


def stops(rank: int, world: int) -> None:
    """The last rank stands still outside of Python, as one does that waits for a dead disk."""
    trained()
    if rank == world - 1:
        default_store().set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    stopped, standstill._ANSWER_LOOKS = int(default_store().get("pid")), 8
    until_logged(SILENT, range(world - 1), (lambda: os.kill(stopped, signal.SIGKILL)) if rank == 0 else lambda: None)
    dist.barrier()


def test_a_silent_rank_is_named_before_the_timeout():
    *others, stopped = run_apart(stops, 3)
    assert stopped.status == -signal.SIGKILL
    for ended in others:
        assert re.search(SILENT, ended.output), ended


def comes_late(rank: int, world: int) -> None:
    """One rank evaluates, and its group's timeout is over when it knows where the other is, which is busy elsewhere."""
    model, store, ahead = trained(), default_store().clone(), 0.0

    def let_time_pass() -> None:
        nonlocal ahead
        ahead = 1e6

    if rank == 0:
        clock = time.monotonic
        logging.getLogger("fsdp2").addHandler(Awaits("rank 1: at ", let_time_pass))
        board._LOOK_SECONDS = (SOON, SOON)
        board.time = SimpleNamespace(monotonic=lambda: clock() + ahead, sleep=time.sleep)
        try:
            with torch.no_grad():
                model(torch.ones(2, 8))
        finally:
            store.set("over", "")
    store.wait(["over"])


def test_a_meeting_that_is_given_up_says_where_the_others_are():
    ended, _ = run_apart(comes_late, 2)
    place = f"rank 1: at {os.path.relpath(HERE)}:{line_of(comes_late, 'store.wait')}. Expected: every rank comes"
    assert "rank 0 waited 1800 s, the timeout of its process group, for ranks that did not come; " in ended.error, ended
    assert place in ended.error, ended


def as_the_interpreter_ends(program: object, rank: int, world: int) -> None:
    """Leave an exception to the interpreter, which notes it before functions that run at exit; then end.

    This process need not wait for readers of what it says: it does not host the store.
    """
    process._READERS_SECONDS = 0.0
    try:
        program(rank, world)
    except RuntimeError as error:
        sys.last_value = error
        raise
    finally:
        for one in [*process._processes.values()]:
            one.leave()


def barrier_that_breaks(rank: int, world: int) -> None:
    """One rank comes to a barrier, and the other one does not: it dies when that one knows where it is."""
    trained()
    store = default_store().clone()

    def logged() -> None:
        standstill._LOOK_SECONDS = 60.0  # not again before the process ends, which may take as long on a busy machine
        store.set("logged", "")

    if rank == 0:
        logging.getLogger("fsdp2").addHandler(Awaits("rank 1: at ", logged))
        dist.barrier()
    store.wait(["logged"])
    os._exit(0)


def ends_alone(rank: int, world: int) -> None:
    """One rank gathers a parameter when the other one has ended."""
    model = trained()
    if rank == 0:
        time.sleep(1)
        model.last.weight.full_tensor()


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            barrier_that_breaks,
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
    """gloo says that a connection was reset."""
    ended: Ended = run_apart(partial(as_the_interpreter_ends, program), 2)[0]
    assert ended.status == 1 and "gloo" in ended.output and text in ended.output, ended


def evaluates_late(rank: int, world: int) -> None:
    """One rank comes late to an evaluation, and the other one looks several times whether there is something to say."""
    model, looked = trained(), 0
    board._LOOK_SECONDS = (SOON, SOON)
    look = board.Board.look

    def count(*args: Any, **kwargs: Any) -> None:
        nonlocal looked
        looked += 1
        if looked == 4:
            store.set("looked", "")
        look(*args, **kwargs)

    store, board.Board.look = default_store().clone(), count
    if rank == 0:
        store.wait(["looked"])
    with torch.no_grad():
        model(torch.ones(2, 8))
    print("evaluated")


def test_a_long_wait_fills_no_log():
    """torch logs two lines whenever the time of a wait in its store is over: a rank that waited for a minute had six of
    them beside its own line. It polls after the first."""
    for ended in run_apart(evaluates_late, 2):
        assert ended.status == 0 and "evaluated" in ended.output and ended.output.count("waitForInput") <= 2, ended


class Calls(torch.Tensor):
    """Ones that call ``at_use`` whenever they are used, by a collective for example."""

    at_use: Callable[[], object]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            args[0].at_use()
            return func(*args, **kwargs or {})


def test_a_rank_that_goes_on_is_not_one_that_waits(monkeypatch):
    """A line that is passed again and again looks like one that is never left. The collectives tell them apart."""
    now, left, asked, frames = 0.0, 0, [], standstill._frames
    before_torch = lambda frame: frame.f_code.co_filename != dist.distributed_c10d.__file__  # what looks, here
    monkeypatch.setattr(standstill, "_frames", lambda: itertools.dropwhile(before_torch, frames()))
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=lambda: now))
    keys = Keys(Connections(dist.HashStore()), "job", "standstill")
    looks, ones = Standstill(keys, 0, 2, str), torch.ones(1).as_subclass(Calls)

    def look() -> None:
        nonlocal now, left
        while left:
            now, left = now + standstill._PATIENCE_SECONDS, left - 1
            looks.look()
            assert looks._place.waits

    ones.at_use = look
    with gloo_mesh():
        for left in (1, 1, 1, 2):  # looks while this rank is in one collective
            dist.all_reduce(ones)
            assert not left
            asked.append(keys.has("asked"))
    assert asked == [False, False, False, True]


@pytest.mark.parametrize("late", [0, 1, 3, None])
def test_answers_are_awaited(monkeypatch, caplog, late):
    """A rank on a busy machine that looked later than twice after the question was said to be killed, or to hang. All
    have more time, and where all have answered nobody waits for it to pass."""
    times = itertools.count(0, standstill._PATIENCE_SECONDS)
    monkeypatch.setattr(standstill, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(standstill, "_place", lambda doing: standstill._Place("barrier()", True, 1))
    store = dist.HashStore()
    asks, answers = (Standstill(Keys(Connections(store), "job", "standstill"), rank, 2, str) for rank in range(2))
    asks.look()
    for looks in range(standstill._ANSWER_LOOKS):
        assert not caplog.messages
        if looks == late:
            answers.look()
        asks.look()
        if looks == late:
            break
    (line,) = caplog.messages
    assert ("it has not come to fully_shard" if late is None else "Rank 0, 1: in barrier()") in line
    assert not Keys(Connections(store), "job", "standstill").has("answered/1")


def test_where_a_process_is():
    """Code of torch and of Python's library is no place that tells a user anything: a user's line is."""
    seen: list[standstill._Place] = []
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: seen.append(standstill._place(str)))
    layer(torch.ones(1, 2))
    assert re.fullmatch(rf"{re.escape(os.path.relpath(HERE))}:\d+", seen[0].text) and not seen[0].waits, seen
