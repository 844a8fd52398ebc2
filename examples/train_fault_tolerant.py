"""Train replicas of a sharded model that may die and come back, with torchft (https://github.com/pytorch/torchft).

    pip install torchft
    torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000 &     # on one host, on port 29510
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    until torchrun --standalone --nproc-per-node 2 examples/train_fault_tolerant.py; do :; done &
    until torchrun --standalone --nproc-per-node 2 examples/train_fault_tolerant.py; do :; done

Each torchrun is one replica, on as many hosts as it needs. If you kill the processes of one, the other continues. The
shell loop restarts the replica, which gets the weights, the optimizer state and the step from the memory of the other.

Each replica shards the model over its own ranks only, so nothing changes for fully_shard when replicas come and go.
torchft averages the reduced gradients of each unit over the replicas. The batch of a step is divided among the replicas
that take part in it, so the losses do not depend on which ones are alive.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from fsdp2 import fully_shard

WIDTH, LAYERS, ROWS = 32, 3, 24  # the rows of a batch, a multiple of the ranks of all replicas
CUDA = torch.cuda.is_available()
TIMEOUT = timedelta(seconds=60)


def build() -> nn.Sequential:
    """Return the model, before it is sharded."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def batch(step: int) -> torch.Tensor:
    """Return the rows of a step, of all replicas together."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def manage(model: Any, optimizer: torch.optim.Optimizer) -> Manager:
    """Let torchft average gradients over replicas, and send the state to a replica that returns."""

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupNCCL(timeout=TIMEOUT) if CUDA else ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        use_async_quorum=False,  # a replica that returns gets its state before its forward, and takes part in the step
        timeout=TIMEOUT,
    )
    model.set_all_reduce_hook(lambda gradients: manager.allreduce(gradients).wait(), recurse=True)
    return manager


def train(steps: int) -> None:
    """Train until ``steps`` steps have succeeded."""
    rank, ranks = dist.get_rank(), dist.get_world_size()  # of this replica
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    model = build().to(device)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = manage(model, optimizer)
    while manager.current_step() < steps:
        manager.start_quorum()
        optimizer.zero_grad()  # after start_quorum, to drop the gradients of a step that failed
        step, replica, replicas = manager.current_step(), manager.participating_rank(), manager.num_participants()
        rows = batch(step).chunk(replicas * ranks)[replica * ranks + rank].to(device)
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        total = loss.detach() / ranks
        dist.all_reduce(total)
        manager.allreduce(total).wait()
        if manager.should_commit():  # False on all ranks if a replica was lost; the step is then repeated
            optimizer.step()
            if rank == 0:
                print(f"step {step}, {replicas} replicas: loss {total.item():.6f}", flush=True)
    manager.shutdown()


def main() -> None:
    """Run one rank of one replica."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # the ranks of this replica
    train(options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
