"""The store that a program brings decides nothing: a file, a store written in Python, one with a time limit of its own,
and one that ends with the process of rank 0."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2._torch.collectives import default_store
from fsdp2.ranks import board, process
from fsdp2.ranks.board import Board
from fsdp2.ranks.store import Connections, Keys
from tests.ranks.apart import SOON, run_apart
from tests.support.parity import sharded, stack
from tests.support.stores import LIMIT, Complete, Written

TWO = partial(stack, layers=2)


def train(model: nn.Module) -> None:
    """One forward and backward."""
    model(torch.ones(2, 8)).sum().backward()


def before_comparing(act: Callable[[], None]) -> None:
    """Let this rank ``act`` in its first forward, after the first collective and before it meets the others."""
    compare = process.compare

    def later(*args: Any) -> int:
        act()
        return compare(*args)

    process.compare = later


def late(rank: int, world: int, store: Any = None) -> None:
    """The last rank comes to the meeting of the first forward after another one has looked why that takes long."""
    store, look = store or default_store().clone(), Board.look

    def noting(*args: Any, **kwargs: Any) -> None:
        look(*args, **kwargs)
        store.set("looked", "")

    Board.look = noting
    if rank == world - 1:
        before_comparing(lambda: store.wait(["looked"], LIMIT))
    model = sharded(TWO)
    for _ in range(3):
        train(model)
    expected = TWO()
    expected.load_state_dict({name: param.full_tensor() for name, param in model.named_parameters()})
    for _ in range(3):
        train(expected)
    assert torch.equal(model[0].weight.grad.full_tensor(), expected[0].weight.grad)


def test_a_rank_is_late_to_a_meeting_in_a_file():
    """With ``init_method="file://..."`` a rank more than two seconds late ended the job of all: a wait that is over
    raises another exception there than in a TCP store."""
    ended = run_apart(late, 2, "file")
    assert [one.status for one in ended] == [0, 0], ended


def late_for_the_store(rank: int, world: int) -> None:
    """The caller's store waits less long than the process group, but long enough to connect on a busy machine."""
    default_store().set_timeout(timedelta(seconds=4 * SOON))
    # A rank looks what the others do after its store has given up.
    board._LOOK_SECONDS = (5 * SOON, board._LOOK_SECONDS[1])
    late(rank, world)


def test_a_rank_is_later_than_the_timeout_of_the_store():
    """A store waits five minutes by default and a process group thirty. A rank that came later than the five minutes
    ended a job that would have gone on."""
    ended = run_apart(late_for_the_store, 2)
    assert [one.status for one in ended] == [0, 0], ended


def on_a_store_in_python(kind: type[Written], rank: int, world: int) -> None:
    """Start anew on a store of that kind."""
    real = default_store().clone()
    dist.barrier()  # on a busy machine the other rank may still be connecting
    dist.destroy_process_group()
    store = kind(dist.PrefixStore("again", real))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        late(rank, world, real) if kind is Complete else train(sharded(TWO))
    told = [str(one.message) for one in caught if "ranks are not compared" in str(one.message)]
    assert len(told) == (kind is Written), told
    assert all("the store of the process group has no compare_set" in text for text in told)


@pytest.mark.parametrize("kind", [Complete, Written])
def test_a_store_written_in_python(kind):
    """A subclass of ``torch.distributed.Store`` has no ``clone``, so the first forward raised. Ranks compare themselves
    in it if it has the operations for that, and not only those which a process group needs; else they say that they do
    not, and train."""
    ended = run_apart(partial(on_a_store_in_python, kind), 2)
    assert [one.status for one in ended] == [0, 0], ended


def test_a_thread_that_waits_does_not_keep_another_from_the_store():
    """On a device a thread waits for other ranks while the host goes on. Both used one connection, so each operation
    of the host took as long as the wait."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connections = Connections(dist.TCPStore("127.0.0.1", server.port, is_master=False))
    keys, waits, got = Keys(connections, "job", "1"), threading.Event(), []

    def wait() -> None:
        assert connections.own is not None
        waits.set()
        got.append(keys.get_within("late", 3.0))

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    for _ in range(100):
        keys.add("meanwhile", 1)
    keys.set("late", "here")  # which comes in time only if nothing before it had to wait for the wait
    thread.join()
    assert got == ["here"]


def pause(store: dist.Store) -> None:
    """Wait for a second, or until the store is not there any more."""
    with contextlib.suppress(RuntimeError):
        store.wait(["nothing"], timedelta(seconds=1))


def slow_reader(rank: int, world: int) -> None:
    """Rank 0, which hosts the store, fails before the other one has come to see that; that one is slow."""
    store = default_store().clone()

    def until_the_host_is_gone() -> None:
        store.wait(["raised"], LIMIT)
        pause(store)

    if rank == 0:
        with torch.device("meta"):
            model = fsdp2.fully_shard(nn.Linear(8, 8))
        try:
            train(model)
        except RuntimeError:
            store.set("raised", "")
            raise
    else:
        before_comparing(until_the_host_is_gone)
        train(fsdp2.fully_shard(nn.Linear(8, 8)))


def test_the_host_of_the_store_fails_first():
    """Rank 0 hosts the store, knows first why the job fails, and ends; another rank could not read it any more, and
    raised a network error."""
    ended = run_apart(slow_reader, 2, "rank 0")
    assert [one.status for one in ended] == [1, 1], ended
    assert all("FSDP parameters should be materialized" in one.error for one in ended), ended


def host_raises(rank: int, world: int) -> None:
    """Rank 0, which hosts the store, raises an exception of its own between two steps, while the others wait for it."""
    model = sharded(TWO)
    for _ in range(3):
        train(model)
    if rank == 0:
        try:
            raise ValueError("a broken sample")
        except ValueError as error:
            sys.last_value = error  # as the interpreter does; a process of multiprocessing does not
            raise
    train(model)


def test_the_host_of_the_store_raises():
    """Rank 0 wrote its exception to the store that ended with it, before another rank could read that."""
    ended = run_apart(host_raises, 3, "rank 0")
    assert [one.status for one in ended] == [1, 1, 1], ended
    assert all(one.error == "RuntimeError: rank 0 ended with ValueError: a broken sample" for one in ended[1:]), ended


def host_has_fewer_batches(rank: int, world: int) -> None:
    """Rank 0, which hosts the store, has one batch less, and ends as a program does."""
    model = sharded(TWO)
    for _ in range(4 if rank else 3):
        train(model)


def test_the_host_of_the_store_has_fewer_batches():
    """The others said that the store was gone, and neither what they waited in nor what to do."""
    ended = run_apart(host_has_fewer_batches, 2, "rank 0")
    assert [one.status for one in ended] == [0, 1], ended
    assert re.search(
        r"StoreEnded: the process that hosts the store .*\(rank 0, unless a launcher does\) has ended \(its own output "
        r"may say why\); rank 1 waits for it in gather .* in forward\. Expected: every rank runs as many forwards and "
        r"backwards as the others\. Give all ranks the same number of batches \(drop_last=True of DistributedSampler",
        ended[1].output,
    ), ended[1].output


def host_is_gone(rank: int, world: int) -> None:
    """Rank 0, which hosts the store, comes to its end without a forward; the others wait until it is gone."""
    store = default_store().clone()
    dist.barrier()
    if rank > 0:
        with contextlib.suppress(dist.DistNetworkError):
            store.wait(["nothing"], LIMIT)
        train(sharded(TWO))


def test_the_host_of_the_store_is_gone_before_the_first_forward():
    """A new connection to it is tried for five minutes. All that time the first forward seemed to hang, and then warned
    that the store had no ``compare_set``."""
    ended = run_apart(host_is_gone, 3, "rank 0")
    assert [one.status for one in ended] == [0, 1, 1], ended
    assert all("(rank 0, unless a launcher does) has ended" in one.output for one in ended[1:]), ended


def each_on_its_own(rank: int, world: int) -> None:
    """Each rank trains a model of its own; the others come to their first forward when rank 0 has ended."""
    store = default_store().clone()
    mesh = [DeviceMesh("cpu", [other]) for other in range(world)][rank]
    dist.barrier()
    if rank > 0:
        with contextlib.suppress(dist.DistNetworkError):
            store.wait(["nothing"], LIMIT)
    train(sharded(TWO, mesh=mesh))


def test_a_model_on_one_rank_needs_no_store():
    """Its ranks are not compared. It looked for the store all the same, and raised if the host of that had ended."""
    ended = run_apart(each_on_its_own, 2, "rank 0")
    assert [one.status for one in ended] == [0, 0], ended


def test_a_connection_begins_with_the_timeout_of_the_store():
    """A thread's connection was a copy of another thread's. Where that one was waiting two seconds for a key, the new
    one was given up after two seconds, which a store that is busy or has thousands of clients may need: the thread that
    says where a rank waits ended without a word."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=LIMIT)
    connections, got = Connections(store), []
    keys, waiting = Keys(connections, "job", "1"), connections.own

    def begin() -> None:
        while waiting.timeout == LIMIT:  # until the main thread waits
            time.sleep(0.001)
        got.append(connections.own.timeout)
        keys.set("late", "here")

    thread = threading.Thread(target=begin)
    thread.start()
    assert keys.get_within("late", 30.0) == "here"
    thread.join()
    assert got == [LIMIT]
    assert waiting.timeout == LIMIT  # again, also after a wait that was given up
    assert keys.get_within("never", 0.001) is None and waiting.timeout == LIMIT


def slow_to_leave(rank: int, world: int) -> None:
    """The program ends with a meeting, to which rank 0 comes last, and which the other one leaves later."""
    store, add, get_within = default_store().clone(), Keys.add, Keys.get_within

    def host_comes_last(keys: Keys, key: str, amount: int) -> int:
        if rank == 0 and key.startswith("meet/"):
            store.wait([f"here/{key}"], LIMIT)
        total = add(keys, key, amount)
        if rank == 1 and key.startswith("meet/"):
            store.set(f"here/{key}", "")
        return total

    def slow(keys: Keys, key: str, seconds: float) -> str | None:
        if rank == 1 and key.startswith("go/"):
            pause(store)
        return get_within(keys, key, seconds)

    model = fsdp2.fully_shard(nn.Linear(8, 8))
    loss = model(torch.ones(2, 8)).sum()
    Keys.add, Keys.get_within = host_comes_last, slow
    loss.backward()  # nobody knows the steps of the first one, so they are compared at its end


def test_the_host_of_the_store_ends_first():
    """A meeting was the last thing of a program. Rank 0, which hosts the store, left it first and ended, and the other
    rank raised a network error although both were done."""
    ended = run_apart(slow_to_leave, 2, "rank 0")
    assert [one.status for one in ended] == [0, 0], ended
