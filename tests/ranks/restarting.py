"""Train under torchrun, end badly in the first attempt, go on from the checkpoint in the second; write what came out.

``python -m tests.ranks.restarting END FOLDER``, where END says how rank 1 ends the first attempt: raise, kill, or delay
(it does not end, but comes late after ``init_process_group``). ``launch`` does what torchrun does with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fsdp2
from fsdp2.comm.host_work import observe_waits
from fsdp2.ranks.process import _Waits

STEPS, SAVED, ENDS, LATE = 7, 2, 5, 6
"""How many there are; when the checkpoint is written, rank 1 ends, and comes late in the next attempt."""
COMES = timedelta(seconds=60)
"""How long rank 1 waits until the other has looked what keeps it."""


class Noting(_Waits):
    """Notes in the store that this rank has looked what the others do, because it waits long."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self.store, self.key = store, key

    def waiting(self) -> None:
        """Look, then note."""
        super().waiting()
        self.store.set(self.key, "")


def forget_addresses(store: dist.Store, attempt: int) -> None:
    """Delete what gloo left in the store: a rank that is faster than another connects to where that one was before."""
    if int(os.environ["RANK"]) == 0:
        for key in store.list_keys():
            if "//cpu//" in key and "fsdp2/" not in key:
                store.delete_key(key)
        store.set(f"forgotten/{attempt}", "")
    store.wait([f"forgotten/{attempt}"])


def main(end: str, folder: Path) -> None:
    """One attempt of one rank."""
    # A fork makes torch's thread pool anew at the first call. In 2.14 two threads that call at once (autograd's is one)
    # may end the process with "Invalid thread pool".
    torch.set_num_threads(1)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    looked = f"looked/{attempt}"
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if attempt:
        forget_addresses(store, attempt)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0:
        observe_waits(Noting(store, looked))
    if rank == 1 and end == "delay":
        store.wait([looked], COMES)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for unit in (model[0], model):
        fsdp2.fully_shard(unit)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint, begin = folder / "checkpoint", 0
    if (checkpoint / ".metadata").exists():
        states = get_state_dict(model, optimizer)
        dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        begin = SAVED
    if rank == 0 and end == "delay":
        store.set(looked, "")  # its first forward is next
    losses = []
    for step in range(begin, STEPS):
        if rank == 1 and attempt == 0 and step == ENDS:
            if end == "raise":
                raise ValueError("a broken sample")
            if end == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and attempt == 1 and step == LATE:
            store.wait([looked], COMES)
        rows = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step + 1 == SAVED and end != "delay":
            states = get_state_dict(model, optimizer)
            dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=checkpoint)
    if rank == 0:  # in a file: what several processes print at once may stand in one line
        (folder / f"attempt-{attempt}.json").write_text(json.dumps(losses))


def launch(end: str, folder: Path) -> None:
    """Be torchrun's agent, whose ranks are forks of this process: nothing is imported again, in neither attempt."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="restarting",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, main)(end, folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
