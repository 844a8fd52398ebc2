"""A rank of a replica that shards a model over its own ranks only, and averages gradients over the replicas that live.

The test says which replicas these are: it writes a list of them, a *quorum*, to a store whenever one has died or comes
back. torchft does the same and more; this shows without it what fsdp2 must bear.
"""

from __future__ import annotations

import io
import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2

REPLICAS, RANKS, WIDTH, ROWS = 3, 2, 8, 24
DIES, RETURNS, STEPS = 3, 6, 9
"""The step in which replica 1 dies, the one that waits until it is back, and how many there are."""


def build(seed: int) -> nn.Sequential:
    """Return a model of three layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))


def batch(step: int) -> torch.Tensor:
    """Return the rows of a step, of all replicas together."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


class Across:
    """The same rank of all replicas of a quorum."""

    def __init__(self, store: dist.Store, replica: int, rank: int) -> None:
        self.store, self.replica, self.rank = store, replica, rank
        self.members: list[int] = []
        self.group: Any = None
        self.lost = False  # a replica has died since the quorum was formed

    def form(self, quorum: int) -> None:
        """Wait for the members of a quorum and connect to them."""
        self.members = json.loads(self.store.get(f"quorum/{quorum}"))
        self.place, self.lost = self.members.index(self.replica), False
        self.group = None  # closes its connections: others may still wait in a sum that misses the dead replica
        own = dist.PrefixStore(f"quorum/{quorum}/rank/{self.rank}", self.store)
        limit = timedelta(seconds=60)
        self.group = dist.ProcessGroupGloo(own, self.place, len(self.members), limit)

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over replicas; after a replica has died it stays as it is."""
        if self.lost:
            return
        try:
            self.group.allreduce([tensor]).wait()
        except RuntimeError:  # the connection was reset
            self.lost = True
        tensor /= len(self.members)

    def share(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of the first member."""
        file = io.BytesIO()
        torch.save(state, file)
        content = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
        size = torch.tensor([content.numel()])
        self.group.broadcast(size, 0).wait()
        content = content if self.place == 0 else torch.empty(int(size), dtype=torch.uint8)
        self.group.broadcast(content, 0).wait()
        return torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=False)


def main(replica: int, rank: int, attempt: int, folder: str, port: int) -> None:
    """Train, and print the step, the replicas and the loss of each step that has succeeded."""
    inside = dist.FileStore(str(Path(folder) / f"replica {replica}, attempt {attempt}"), RANKS)
    dist.init_process_group("gloo", store=inside, rank=rank, world_size=RANKS)
    model: Any = build(seed=attempt)  # the replica that comes back has other weights until it gets the others'
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("shard",))
    for unit in (model[0], model[2], model[4], model):
        fsdp2.fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    across = Across(dist.TCPStore("127.0.0.1", port, is_master=False), replica, rank)
    step, averaged = 0, 0

    def average(gradients: torch.Tensor) -> None:
        nonlocal averaged
        averaged += 1
        if replica == 1 and attempt == 0 and averaged == 3 * DIES + 2:  # in the middle of a backward
            os.kill(os.getpid(), signal.SIGKILL)
        across.average(gradients)

    def come_together() -> int:
        across.form(2)
        state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state = across.share(state)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    model.set_all_reduce_hook(average, recurse=True)
    if attempt:
        step = come_together()
    else:
        across.form(0)
    while step < STEPS:
        if step == RETURNS and len(across.members) < REPLICAS:
            step = come_together()
        parts, part = len(across.members) * RANKS, across.place * RANKS + rank
        rows = batch(step).chunk(parts)[part]
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        total = loss.detach() / RANKS
        across.average(total)
        both = torch.stack([total, torch.tensor(float(across.lost))])
        dist.all_reduce(both)  # the ranks of a replica agree whether the step has succeeded
        if not both[1]:
            optimizer.step()
            print(json.dumps([step, across.members, both[0].item()]), flush=True)
            step += 1
        optimizer.zero_grad()
        if both[1]:
            across.form(1)
    dist.destroy_process_group()
    print("done", flush=True)
