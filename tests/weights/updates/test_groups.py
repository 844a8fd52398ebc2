"""Updates over a process group: receivers are other processes, and end with the trainer's weights bit for bit."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import WeightReceiver, WeightSender
from fsdp2.weights.updates import collect, sender
from fsdp2.weights.updates.link import ToGroup
from tests.support import api, processes
from tests.support.parity import mesh_1d, shard_each
from tests.support.pool import LIMIT_SECONDS, POOL, on_ranks
from tests.weights.updates.engines import WAIT, assert_equal, bitwise, group_with, nudged, raised

pytestmark = api.fsdp2_only


def one_port() -> int:
    """Return a port that rank 0 finds free, on every rank."""
    port = [processes.free_port()]
    dist.broadcast_object_list(port)
    return port[0]


def model() -> nn.Sequential:
    """Return layers of sizes that no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5), nn.LayerNorm(5))


def engine(address: str, folder: Path, updates: int) -> None:
    """Receive so many updates in a process without a default process group."""
    group = fsdp2.weight_sync_group(address, 1, 2, timeout=timedelta(seconds=WAIT))
    receiver = WeightReceiver()
    for _ in range(updates):
        version = receiver.receive(group)
        torch.save(receiver.tensors, folder / f"{version}.pt")


UPDATES = (3, 2)
"""How many each of two programs receives."""


def test_an_engine_of_another_job(tmp_path):
    """A program without a default process group receives weights of a model in training. When it has ended, the next
    update raises an error on every rank. Another program that takes its place is sent everything, without being asked
    for, and then changes again."""
    ports = [processes.free_port() for _ in UPDATES]
    engines = [
        processes.start(engine, f"127.0.0.1:{port}", tmp_path, updates, log=str(tmp_path / f"log-{port}"))
        for port, updates in zip(ports, UPDATES)
    ]
    POOL.run(2, train_for_engines, {"folder": tmp_path, "ports": ports}, LIMIT_SECONDS)
    for port, process in zip(ports, engines):
        process.join(WAIT)
        assert process.exitcode == 0, (tmp_path / f"log-{port}").read_text()
    for version in range(1, sum(UPDATES) + 1):
        assert_equal(torch.load(tmp_path / f"{version}.pt"), torch.load(tmp_path / f"expected-{version}.pt"))


def train_for_engines(rank: int, world: int, folder: Path, ports: list[int]) -> None:
    """Train, and send to one engine until it ends, then to the next."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    sender = WeightSender(module, dtype=torch.bfloat16, delta=True)
    version = 0
    for port, updates in zip(ports, UPDATES):
        with group_with(rank, [0], port, size=2) as group:
            for update in range(updates):
                module(torch.randn(4, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                version += 1
                report = sender.send(group)
                assert (report.version, report.full) == (version, update == 0)
                expected = dict(fsdp2.iter_full_params(module, dtype=torch.bfloat16))
                if rank == 0:
                    torch.save(expected, folder / f"expected-{version}.pt")
            assert raised(lambda group=group: sender.send(group)).startswith("RuntimeError")


def dying(address: str) -> None:
    """Send once, and end as a process does that is killed."""
    group = fsdp2.weight_sync_group(address, 0, 2)
    WeightSender(nn.Linear(2, 2)).send(group)
    os._exit(1)


def test_a_trainer_that_dies(tmp_path):
    """A receiver that waits for the next update raises an error, and keeps the version that it has."""
    address = f"127.0.0.1:{processes.free_port()}"
    processes.start(dying, address, log=str(tmp_path / "log"))
    group = fsdp2.weight_sync_group(address, 1, 2, timeout=timedelta(seconds=WAIT))
    receiver = WeightReceiver()
    assert receiver.receive(group) == 1
    assert raised(lambda: receiver.receive(group)).startswith("RuntimeError")
    assert receiver.version == 1
    dist.destroy_process_group(group)


class Job:
    """Two ranks that train, and one rank or more that receive; ``step`` is what each does in one update."""

    def __init__(self, rank: int, world: int, trainers: int = 2, **options: Any) -> None:
        self.rank, self.trains = rank, rank < trainers
        self.module = model()
        mesh = DeviceMesh("cpu", list(range(trainers)))
        self.sender: Any = None
        self.receiver = WeightReceiver()
        if self.trains:
            shard_each(self.module, fsdp2, mesh=mesh)
            self.sender = WeightSender(self.module, dtype=torch.bfloat16, delta=True, bucket_mb=1e-4, **options)
        self.steps = 0

    def step(self, group: dist.ProcessGroup | None, **how: Any) -> fsdp2.SentWeights | None:
        """Change the model and send, or receive."""
        self.steps += 1
        if not self.trains:
            self.receiver.receive(group)
            return None
        nudged(self.module, self.steps)
        return self.sender.send(group, **how)

    def assert_same(self) -> None:
        """Assert that every receiver has the trainer's weights."""
        expected = [None]
        if self.trains:
            expected = [dict(fsdp2.iter_full_params(self.module, dtype=torch.bfloat16))]
        dist.broadcast_object_list(expected)
        if not self.trains:
            assert_equal(self.receiver.tensors, expected[0])


@on_ranks(4)
def test_a_receiver_that_restarted(rank, world):
    """Two receivers follow; when one of them starts anew, both get everything, and then changes again."""
    with group_with(rank, [0, 2, 3], one_port()) as group:
        job = Job(rank, world)
        for step in range(6):
            if step == 3 and rank == 3:
                job.receiver = WeightReceiver()
            report = job.step(group, full=step == 5) if job.trains else job.step(group)
            assert report is None or report.full == (step in (0, 3, 5))
            assert job.trains or job.receiver.version == step + 1
            job.assert_same()


@on_ranks(3)
def test_tensors_of_an_engine(rank, world):
    """Values are written to the engine's own parameters, in place; those that are not the sender's are refused on
    every rank and in every receiver, before anything is sent."""
    with group_with(rank, [0, 2], one_port()) as group:
        job = Job(rank, world)
        engine = model().bfloat16()
        before = [parameter.detach().clone() for parameter in engine.parameters()]
        wrong = {"0.weight": engine[0].weight.float(), "other": torch.zeros(2)}
        job.receiver = WeightReceiver({**dict(engine.named_parameters()), **wrong})
        error = raised(lambda: job.step(group))
        assert "the tensors sent are not those of the receiver: 0.weight (got torch.bfloat16" in error
        assert "expected torch.float32 of shape (7, 8)), other (got none, expected" in error
        assert ("WeightSender.send: refused by rank 1 of the group" in error) == job.trains
        assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), before))
        job.receiver = WeightReceiver(dict(engine.named_parameters()))
        for _ in range(3):
            job.step(group)
            job.assert_same()
        assert all(value is parameter for value, parameter in zip(job.receiver.tensors.values(), engine.parameters()))


@on_ranks(3)
@pytest.mark.parametrize("where", ["comparing", "first", "later"])
def test_a_rank_that_fails_in_the_middle(rank, world, where):
    """An error on one rank that trains is raised on the others and in receivers, which may have parts of two versions;
    the next update is full. Those that had got nothing were told of two versions, too."""
    function, call = ("changed", 2) if where == "comparing" else ("encode", 1 if where == "first" else 5)
    with group_with(rank, [0, 2], one_port()) as group:
        job = Job(rank, world)
        job.step(group)
        with failing(function, call) if rank == 1 else nullcontext():
            error = raised(lambda: job.step(group, full=where == "later") if job.trains else job.step(group))
        assert "no memory" in error, error
        if not job.trains:
            assert error.startswith("RuntimeError: WeightReceiver.receive: the sender stopped (RuntimeError: on rank 1")
            assert ("Nothing was written" in error, "of two versions" in error) == (where != "later", where == "later")
            assert job.receiver.version == (None if where == "later" else 1)  # nothing was overwritten
        for full in (True, False):
            report = job.step(group)
            assert report is None or report.full == full
            job.assert_same()


@on_ranks(3)
def test_a_trainer_that_fails_when_all_is_received(rank, world):
    """The receiver has gone on by then: nothing tells it of an error, which it would take for the next update."""
    with group_with(rank, [0, 2], one_port()) as group:
        job = Job(rank, world)
        if job.trains:
            with mock.patch.object(sender, "SentWeights", side_effect=MemoryError("no memory")):
                assert "no memory" in raised(lambda: job.step(group))
        else:
            job.step(group)
        report = job.step(group)
        assert report is None or report.full == (job.steps == 2)
        job.assert_same()


@on_ranks(3)
def test_a_bucket_that_does_not_fit_on_the_device(rank, world):
    """Receivers hear of the error; they would wait for the bucket if it had been announced."""
    to = torch.Tensor.to

    def fails(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if sys._getframe(1).f_code is ToGroup.deliver.__code__:
            raise MemoryError("no memory")
        return to(self, *arguments, **options)

    with group_with(rank, [0, 2], one_port()) as group:
        job = Job(rank, world)
        job.step(group)
        with mock.patch.object(torch.Tensor, "to", fails):
            assert "no memory" in raised(lambda: job.step(group))
        report = job.step(group)
        assert report is None or report.full
        job.assert_same()


@contextmanager
def failing(function: str, call: int) -> Iterator[None]:
    """Let a function of fsdp2/weights/updates/collect.py raise at its ``call``-th call."""
    calls = itertools.count(1)
    inner = getattr(collect, function)

    def fails(*arguments: Any) -> Any:
        if next(calls) == call:
            raise MemoryError("no memory")
        return inner(*arguments)

    with mock.patch.object(collect, function, fails):
        yield


@on_ranks(4)
def test_a_receiver_that_fails(rank, world):
    """What one receiver raises, all members raise, after the others have received everything; the next update is
    full."""
    with group_with(rank, [0, 2, 3], one_port()) as group:
        job = Job(rank, world)
        loaded: list[str] = []

        def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
            loaded.extend(name for name, _ in tensors)
            if job.steps == 2 and rank == 3 and len(loaded) > 5:
                raise ValueError("not mine")

        if not job.trains:
            job.receiver = WeightReceiver(load=load)
        job.step(group)
        assert job.trains or sorted(loaded) == sorted(job.receiver.tensors)
        error = raised(lambda: job.step(group))
        assert error.endswith("not received by rank 2 of the group: ValueError: not mine"), error
        report = job.step(group)
        assert report is None or report.full
        job.assert_same()
        report = job.step(group)
        assert report is None or not report.full
        job.assert_same()


@on_ranks(2)
def test_two_senders(rank, world):
    """A group has one sender: all members raise, and it can be used afterwards."""
    with group_with(rank, [0, 1], one_port()) as group:
        alone = nn.Linear(3, 3)
        error = raised(lambda: WeightSender(alone).send(group))
        assert "got senders on the ranks [0, 1] of the group, expected one" in error
        receiver = WeightReceiver()
        if rank:
            WeightSender(alone).send(group)
        else:
            receiver.receive(group)
        values = [bitwise(alone.weight)]
        dist.broadcast_object_list(values, src=1)
        assert rank or torch.equal(bitwise(receiver.tensors["weight"]), values[0])
        error = raised(lambda: WeightReceiver().receive(group))
        assert "got senders on the ranks [] of the group" in error


def test_addresses_of_a_group():
    """Before anyone waits."""
    for address in ("host", "host:", ":5", "[]:5", "host:port"):
        with pytest.raises(ValueError, match='address must be "host:port"'):
            fsdp2.weight_sync_group(address, 0, 1)
    with mock.patch.object(dist, "TCPStore", side_effect=LookupError) as made, pytest.raises(LookupError):
        fsdp2.weight_sync_group("[::1]:5", 0, 1)
    assert made.call_args.args[:2] == ("::1", 5), "the brackets were part of the name, which nobody has"
    with pytest.raises(ValueError, match="rank must be from 0 to world_size - 1 = 1, got 2"):
        fsdp2.weight_sync_group("127.0.0.1:1", 2, 2)
