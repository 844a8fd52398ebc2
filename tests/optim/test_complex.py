"""Complex parameters: torch's optimizers step on their real and imaginary parts, as in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fsdp2
from tests.optim.stepping import OPTIMIZERS
from tests.support import api
from tests.support.parity import assert_weights, mesh_1d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Phases(nn.Module):
    """A vector that is cut unevenly, a matrix whose columns are, a row, and numbers, one of which has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        made = {"vector": (5,), "matrix": (4, 5), "row": (1, 5), "number": (1,), "scalar": ()}
        for name, shape in made.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.complex64)))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix * self.vector + self.row) * self.number * self.scalar


@on_ranks(2, 4)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Rprop"])  # DTensor refuses what it computes
def test_steps_on_uneven_pieces(rank, world, name, foreach):
    """Writes to a view of real and imaginary parts were lost where the last dimension is cut unevenly: DTensor made the
    view of a gathered copy. Such parameters were trained with wrong moments, without a word; torch's own are, too."""
    torch.manual_seed(4)
    alone = Phases()
    module = copy.deepcopy(alone)
    fsdp2.fully_shard(module, mesh=mesh_1d(), shard_placement_fn=lambda p: Shard(p.ndim - 1) if p.ndim else None)
    kind, options = OPTIMIZERS[name]
    optimizers = [kind(one.parameters(), **{**options, "lr": 0.01}, foreach=foreach) for one in (module, alone)]
    for step in range(3):
        rows = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(step))
        for one, optimizer in zip((module, alone), optimizers):
            one(rows).abs().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_weights(module, alone)
