"""Several ranks, each with a process and a device: they call NCCL alike, and where they do not, that is named.

gloo forgives what NCCL does not: it matches messages, so two communicators may be used in any order, and the host waits
for each collective by itself.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2.ranks import standstill
from fsdp2.ranks.process import _processes as processes
from tests.nullgpu.jobs import run
from tests.nullgpu.test_runs import MIXED, WIDTH, Block, sharded
from tests.support import host_parts

# ---- NCCL of the null device ----


def different_operations(rank: int, world: int) -> None:
    """Rank 1 makes two collectives in the other order."""
    a, b = torch.zeros(1 << 20, device="cuda"), torch.zeros(world << 20, device="cuda")
    for gather in (True, False) if rank != 1 else (False, True):
        if gather:
            dist.all_gather_into_tensor(b, a)
        else:
            dist.all_reduce(a)
    torch.cuda.synchronize()


def one_more(rank: int, world: int) -> None:
    """Rank 0 makes a collective that nobody else makes, and does not wait for it."""
    tensor = torch.zeros(1 << 20, device="cuda")
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 0:
        dist.all_reduce(tensor, async_op=True)
        dist.distributed_c10d._get_default_store().set("called", "1")
    else:
        dist.distributed_c10d._get_default_store().get("called")


def opposite_orders(rank: int, world: int) -> None:
    """Two communicators, each collective behind the other: on one rank the first waits for the second."""
    groups = [dist.new_group(range(world)) for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    tensor = torch.zeros(1 << 20, device="cuda")
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(tensor, group=group)
    torch.cuda.synchronize()


def values_arrive(rank: int, world: int) -> None:
    """What ranks tell each other is right: numbers, objects, rows, and messages in both directions at once."""
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert [one["rank"] for one in objects] == list(range(world))
    one = torch.tensor([rank + 1.0], device="cpu").cuda()
    dist.all_reduce(one)
    assert one.item() == world * (world + 1) / 2
    sent, got = torch.tensor([float(rank)], device="cpu").cuda(), torch.zeros(1, device="cpu").cuda()
    to, back = (rank + 1) % world, (rank - 1) % world
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, got, back)])
    for work in works:
        work.wait()
    assert got.item() == back
    half = dist.new_group([0, 1])
    if rank < 2:
        dist.broadcast(sent, 1, group=half)
        assert sent.item() == 1.0


def test_sampled_a_wrong_order_is_named():
    """By the rank that waits, at once, and when the processes have ended."""
    job = run(2, different_operations)
    assert all("calls" in error and "waits in call" in error for error in job.errors), job.errors
    assert len(job.differences) == 1
    assert "rank 0 calls all_gather of 1,048,576 x float32, rank 1 calls all_reduce" in job.differences[0]


def test_a_collective_that_nobody_waits_for():
    """No rank notices: only the comparison of all calls does."""
    job = run(2, one_more)
    assert not any(job.errors), job.errors
    assert len(job.differences) == 1 and "rank 0 waits in all_reduce" in job.differences[0]


def test_communicators_in_opposite_orders():
    """Each communicator by itself is right: each rank's second collective waits behind the first one."""
    job = run(2, opposite_orders, host_waits_seconds=3.0)
    assert all("has called it behind work that is not done" in error for error in job.errors), job.errors
    assert len(job.differences) == 1 and "launches" in job.differences[0]


@pytest.mark.parametrize("world", [2, 4])
def test_values_arrive(world):
    """Small messages are carried between the processes, also in groups and on several communicators."""
    job = run(world, values_arrive)
    assert job.right, job


# ---- fsdp2 ----


def step(model: Any, optimizer: torch.optim.Optimizer, rank: int, waits: bool = True) -> None:
    """Train a step, with another number of rows on each rank; with ``waits`` until the other ranks have come to it."""
    model(torch.randn(4 + rank, WIDTH, device="cuda")).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if waits:
        torch.cuda.synchronize()


def blocks(number: int = 3) -> nn.Sequential:
    """Return blocks on the device."""
    return nn.Sequential(*(Block() for _ in range(number))).cuda()


def trains(rank: int, world: int, kind: str) -> None:
    """Train with rank checks, as they are by default."""
    options: dict[str, Any] = {"mp_policy": MIXED}
    two = (2, world // 2)
    if kind in ("hybrid", "over replicas"):
        mesh = init_device_mesh("cuda", two, mesh_dim_names=("replicate", "shard"))
        options["shard_over_replicas"] = kind == "over replicas"
    elif kind == "tensor parallel":
        both = init_device_mesh("cuda", two, mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
    else:
        mesh = init_device_mesh("cuda", (world,))
    if kind == "compressed":
        options["compression"] = fsdp2.CompressionPolicy(torch.int8, torch.int8, min_numel=1024)
    if kind == "offloaded":
        options["offload_policy"] = fsdp2.CPUOffloadPolicy()
    model = blocks()
    if kind == "tensor parallel":
        for block in model:
            parallelize_module(block, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded(mesh, model, **options)
    if kind == "separate group":
        model.set_separate_reduce_scatter_group(True)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        if kind == "tensor parallel":
            torch.manual_seed(mesh.get_local_rank())
            step(model, optimizer, 0)
        else:
            step(model, optimizer, rank)


KINDS = ("plain", "hybrid", "over replicas", "tensor parallel", "compressed", "offloaded", "separate group")


@pytest.mark.parametrize(("world", "kind"), [(4, kind) for kind in KINDS] + [(2, "plain"), (8, "hybrid")])
def test_trains(world, kind):
    """All ranks make the same calls in one order, over all communicators."""
    job = run(world, trains, kind)
    assert job.right, job


class Skipping(nn.Module):
    """Blocks of which some ranks leave the second one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for index, layer in enumerate(self.layers):
            if not (self.skip and index == 1):
                x = layer(x)
        return x


def skipping(*shape: int) -> Any:
    """Return blocks that are units, on a mesh of one dimension, or of replicas and shards."""
    names = ("replicate", "shard")[-len(shape) :]
    model: Any = Skipping().cuda()
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    for unit in (*model.layers, model):
        fsdp2.fully_shard(unit, mesh=mesh)
    return model


def skips_a_unit(rank: int, world: int, marked: bool, checked: bool) -> None:
    """Rank 1 leaves a unit out in every second step."""
    fsdp2.set_rank_checks(checked)
    model = skipping(world)
    if marked:
        model.set_reduce_scatter_unused_params(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(4):
        model.skip = rank == 1 and number % 2 == 1
        step(model, optimizer, 0, waits=marked)
        if checked and not marked:
            time.sleep(number * 3)  # a thread of each rank finds out what the others did, and the next pass raises


def test_marked_units_may_be_skipped():
    """A rank that skips one joins its collectives."""
    job = run(2, skips_a_unit, True, True)
    assert job.right, job


def test_a_skipped_unit_is_named_on_every_rank():
    """Without the mark every rank raises, and none hangs."""
    job = run(2, skips_a_unit, False, True)
    assert all("layers.1" in error for error in job.errors), job.errors


def test_without_rank_checks_nccl_gets_different_calls():
    """What the ranks would have been spared, the null device names."""
    job = run(2, skips_a_unit, False, False, host_waits_seconds=3.0)
    assert any(job.errors) or job.differences
    assert job.differences, job


def evaluates(rank: int, world: int, alone: bool) -> None:
    """On two replicas of two ranks the first replica evaluates before a step, or ``alone`` its first rank."""
    model = skipping(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(60 if alone else 4):
        if number == 2 and (rank == 0 if alone else rank < 2):
            with torch.no_grad():
                model(torch.randn(4, WIDTH, device="cuda"))
        step(model, optimizer, 0, waits=False)
        if alone and number > 1:
            time.sleep(1)  # a thread of each rank finds out what the others did, and a later pass raises


def test_one_replica_evaluates():
    """The other one does nothing meanwhile."""
    job = run(4, evaluates, False)
    assert job.right, job


def test_one_rank_of_a_replica_evaluates():
    """Every rank raises and names what those of its replica do. NCCL would have matched unlike collectives."""
    job = run(4, evaluates, True, host_waits_seconds=3.0)
    assert all("rank 0: evaluation; rank 1: training" in error for error in job.errors), job.errors


def logged(rank: int, world: int) -> None:
    """Let the process end as soon as all ranks have logged something, which is then their error: the host waits."""
    store = dist.distributed_c10d._get_default_store().clone()

    class Ends(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            """Take what a thread has logged."""
            store.set(f"logged/{rank}", "")
            store.wait([f"logged/{other}" for other in range(world)])
            Path(os.environ["NULLGPU_SHARED"], f"rank-{rank}").write_text(record.getMessage())
            os._exit(0)

    logging.getLogger("fsdp2").addHandler(Ends(logging.WARNING))


def gathers_alone(rank: int, world: int) -> None:
    """After a step, rank 0 alone gathers a parameter, and the others go on to a step whose loss they print."""
    logged(rank, world)
    with mock.patch.multiple(standstill, _LOOK_SECONDS=0.5, _PATIENCE_SECONDS=1.0, _STANDING_SECONDS=2.0):
        model = skipping(world)
        for _ in range(2):
            loss = model(torch.randn(4, WIDTH, device="cuda")).sum()
            loss.backward()
            loss.item()
            if rank == 0:
                model.layers[0].up.weight.full_tensor().cpu()


def test_one_rank_gathers_a_parameter():
    """The most common way to hang: no host waits in a collective, so ranks waited for the timeout without a word."""
    gathers = "Rank 0: at .*test_ranks.py:\\d+, for \\d+ s"
    job = run(2, gathers_alone, host_waits_seconds=140.0, hangs_seconds=140.0)
    assert all("their devices may wait for each other" in error for error in job.errors), job.errors
    assert re.search(gathers, job.errors[0]), job.errors


def does_less(rank: int, world: int, what: str) -> None:
    """Rank 1 ends, having done less than rank 0, which waits for its device."""
    if rank == 0:
        logged(rank, 1)
    if what == "everything":
        standstill._LOOK_SECONDS, standstill._PATIENCE_SECONDS = 0.5, 1.0  # in this process, which ends with the test
    model = skipping(world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(0 if what == "everything" and rank == 1 else 4):
        step(model, optimizer, 0, waits=False)
    if rank == 0:
        step(model, optimizer, 0, waits=True)
    elif what == "a step before an evaluation":
        with torch.no_grad():
            model(torch.randn(4, WIDTH, device="cuda"))
    for process in [*processes.values()]:  # as at the end of a process
        process.leave()


LESS = {
    "the last step": r"rank 0: rank 1 ended, after .*; rank 0 waits for it in .*drop_last=True",
    "a step before an evaluation": r"rank 0: ranks do not do the same: rank 0: forward; rank 1: evaluation\.",
    "everything": r"rank 0 waits for other ranks\. Rank 0: in forward, at .*; rank 1: has ended\.",
}
"""What a rank does not do, and what the other one logs."""


@pytest.mark.parametrize("what", LESS)
def test_a_rank_ends_that_has_done_less(what):
    """The host waited for its device until the timeout, and nothing said why. A rank whose thread was still on its way
    to a meeting, behind a step that it had left out, ended and told nobody."""
    job = run(2, does_less, what, host_waits_seconds=140.0, hangs_seconds=140.0)
    assert re.match(LESS[what], job.errors[0]), job.errors
    assert not job.errors[1], job.errors


class Scaled(nn.Module):
    """Two units, behind one without parameters, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.first, self.second = nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the units."""
        return self.second(self.first(self.empty(x))) * self.scale


def gathers_by_hand_first(rank: int, world: int, late: int) -> None:
    """Gather before the first forward, one rank later than the others, which go on to that forward."""
    model: Any = Scaled().cuda()
    for unit in (model.empty, model.first, model.second, model):
        fsdp2.fully_shard(unit)
    with torch.no_grad(), mock.patch("fsdp2.ranks.board._LOOK_SECONDS", (0.1, 1.0)):
        model.unshard()
        if rank == late:
            time.sleep(2)  # the others look at the board meanwhile
        with fsdp2.use_weights(model):
            pass
        model(torch.randn(4, WIDTH, device="cuda"))


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_gathers_by_hand_later(late):
    """Ranks compare what was gathered before the first forward as it was, though that forward lists units anew."""
    job = run(2, gathers_by_hand_first, late)
    assert job.right, job


def computes_on_the_host(rank: int, world: int, how: str) -> None:
    """Train; backward is late on the host on one rank, and on the device on the other."""
    model = host_parts.made(how, "host" if rank == 0 else "device").cuda()
    mesh = init_device_mesh("cuda", (world,))
    for unit in host_parts.units(model):
        fsdp2.fully_shard(unit, mesh=mesh)
    for _ in range(6):
        model(torch.randn(4, host_parts.WIDTH, device="cuda")).sum().backward()
        torch.cuda.synchronize()


@pytest.mark.parametrize("how", host_parts.HOW)
def test_parts_on_the_host(how):
    """Autograd runs what the host computes on a thread of its own, at any time; collectives keep their order.

    Units are small: a large one gathers ahead when its gradients are there, and so in one order.
    """
    job = run(2, computes_on_the_host, how)
    assert job.right, job


def pipelines(rank: int, world: int) -> None:
    """Two stages of as many ranks each."""
    both = init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("pp", "dp"))
    place = both.get_local_rank("pp")
    model: Any = sharded(both["dp"], blocks(2))
    rows = torch.randn(8, WIDTH, device="cuda")
    stage = PipelineStage(model, place, 2, torch.device("cuda", rank), group=both.get_group("pp"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, target: (output - target).sum())
    with objects_by_the_store():
        for _ in range(2):
            schedule.step(*([rows] if place == 0 else []), **({} if place == 0 else {"target": rows}))
            torch.cuda.synchronize()


@contextmanager
def objects_by_the_store() -> Iterator[None]:
    """Let stages tell each other shapes over the store: torch adds up the sizes of objects with a kernel."""
    store, sent, received = dist.distributed_c10d._get_default_store(), itertools.count(), itertools.count()

    def send(objects: list[Any], dst: int, **unused: Any) -> None:
        key = f"{dist.get_rank()} to {dst}: {next(sent)}"
        store.set(key, pickle.dumps(objects))

    def receive(objects: list[Any], src: int, **unused: Any) -> None:
        key = f"{src} to {dist.get_rank()}: {next(received)}"
        objects[:] = pickle.loads(store.get(key))

    with mock.patch.object(dist, "send_object_list", send), mock.patch.object(dist, "recv_object_list", receive):
        yield


def test_pipelines():
    """Messages between stages and collectives within them."""
    job = run(4, pipelines)
    assert job.right, job
