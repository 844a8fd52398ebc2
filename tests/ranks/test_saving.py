"""A checkpoint saved in the background while training goes on: on a group of its own, or every rank raises."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import fsdp2
from tests.support.pool import on_ranks


class Waiting(dcp.FileSystemWriter):
    """A disk that is slow until it is told to go on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.goes_on = Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Wait, then write."""
        self.goes_on.wait()
        return super().write_data(plan, planner)


@on_ranks(2)
@pytest.mark.parametrize("ranks", ["those that train", "a group of its own", "alone"])
def test_asynchronous_save(rank, world, tmp_path, ranks):
    """On the group that trains, the next pass raises on every rank before a collective of it starts: the save is whole
    afterwards. With torch's ``fully_shard`` gloo aborts the processes, or data is exchanged between the two.

    What each rank saves alone communicates nothing.
    """
    torch.manual_seed(0)
    module = fsdp2.fully_shard(nn.Linear(4, 4))
    module(torch.ones(1, 4)).sum().backward()
    weight = module.weight.full_tensor().detach()
    alone = ranks == "alone"
    writer = Waiting(tmp_path / str(rank) if alone else tmp_path)
    group = dist.new_group(backend="gloo") if ranks == "a group of its own" else None
    state = {"weight": weight} if alone else module.state_dict()
    saving = dcp.async_save({"model": state}, storage_writer=writer, process_group=group, no_dist=alone)
    if ranks != "those that train":
        module(torch.ones(1, 4)).sum().backward()
    else:
        with pytest.raises(
            RuntimeError, match="async_save is still saving .*process_group=torch.distributed.new_group"
        ):
            module(torch.ones(1, 4))
    writer.goes_on.set()
    saving.result()
    dist.barrier()
    loaded = {"weight": torch.empty(4, 4)}
    dcp.load({"model": loaded}, checkpoint_id=writer.path, no_dist=alone)
    assert torch.equal(loaded["weight"], weight)
