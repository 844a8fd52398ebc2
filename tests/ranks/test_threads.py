"""Models that are trained in threads of one process, each on process groups of its own."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.ranks import process
from tests.ranks.apart import run_apart

STEPS = 5


def build(number: int) -> nn.Sequential:
    """Two models of different shapes."""
    torch.manual_seed(number)
    width = 8 + 8 * number
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def train(model: nn.Module) -> None:
    """Some steps, with an evaluation among them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == 2:
            with torch.no_grad():
                model(torch.ones(2, 8))
        optimizer.zero_grad()
        model(torch.full((2, 8), step + 1.0)).square().mean().backward()
        optimizer.step()


def trains_two(rank: int, world: int) -> None:
    """Each rank starts the thread of one model when that of the other is in its first forward, which comes on first."""
    groups = [dist.new_group(list(range(world))) for _ in range(2)]
    meshes = [DeviceMesh.from_group(group, "cpu") for group in groups]
    models, errors = [build(0), build(1)], []
    began, compared = threading.Event(), threading.Event()
    reduce_max, compare = process.all_reduce_max, process.compare
    alone: list[Any] = copy.deepcopy(models)

    def first_collective(*args: Any) -> None:
        second = began.is_set()
        began.set()
        reduce_max(*args)
        if second:
            compared.wait()

    def first_meeting(*args: Any) -> int:
        compared.set()
        return compare(*args)

    process.all_reduce_max, process.compare = first_collective, first_meeting
    for model, mesh in zip(models, meshes):
        fsdp2.fully_shard(model[0], mesh=mesh)
        fsdp2.fully_shard(model, mesh=mesh)

    def run(model: nn.Module) -> None:
        try:
            train(model)
        except Exception as error:
            errors.append(error)
            began.set()

    threads = [threading.Thread(target=run, args=(model,), daemon=True) for model in models]
    threads[rank].start()
    began.wait()
    threads[1 - rank].start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for model, expected in zip(models, alone):
        train(expected)
        for got, param in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor(), param)


def test_first_forwards_come_in_another_order_on_each_rank():
    """The ranks trained two models in two threads, on two process groups of the same ranks. What they wrote for each
    other was numbered by the order of first forwards, so one model met the other: a hang, or "different models"."""
    ended = run_apart(trains_two, 2)
    assert [one.status for one in ended] == [0, 0], ended
