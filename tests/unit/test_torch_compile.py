"""Dynamo tells when it compiles, from its import on."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT
from tests.unit.probing import probes

COMPILES = """
import sys
import torch
import torch.distributed as dist
from torch import nn
import fsdp2
from fsdp2._torch.compile import around_compilation

calls = []
around_compilation(lambda: calls.append("start"), lambda: calls.append("end"))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.two(x), (x,))


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fsdp2.fully_shard(Branches(), mesh=dist.init_device_mesh("cpu", (1,)))
assert "torch._dynamo" not in sys.modules
with torch.no_grad():
    model(torch.ones(1, 4))  # torch.cond imports and uses Dynamo
print(*calls)
torch._dynamo.reset()
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
print(*calls)
dist.destroy_process_group()
"""


@probes("around_compilation")
def test_compilations_are_noticed() -> None:
    """In the first forward, which imports Dynamo, and after a reset, which makes Dynamo forget whom to tell."""
    run = subprocess.run([sys.executable, "-c", COMPILES], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.splitlines() == ["start end", "start end start end"], run.stderr
