"""How many collectives and copies a unit costs on one rank of 8, 64 and 1024 of NCCL: no more with more ranks."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from tests.support import api
from tests.support.counting import Operators
from tests.support.fake import fake_mesh
from tests.support.nccl import strict_nccl
from tests.support.parity import sharded

pytestmark = api.fsdp2_only

WORLDS = (8, 64, 1024)
HIDDEN, LAYERS = 256, 2
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETUPS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"mp_policy": MIXED},
    "last dimension": {"shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
    "last dimension, mixed": {"mp_policy": MIXED, "shard_placement_fn": lambda parameter: Shard(parameter.ndim - 1)},
}


class Block(nn.Module):
    """The parameters of a Llama block in proportion, and one whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, HIDDEN // 4, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(HIDDEN, 3 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.odd = nn.Linear(HIDDEN, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.o(self.q(h) + (self.k(h) + self.v(h)).repeat(1, 4))
        h = self.norm2(x)
        return x + self.down(torch.tanh(self.gate(h)) * self.up(h)) + self.odd(h).sum()


def launched(func: Any, args: Any) -> Counter[str] | None:
    """Return what an operator launches: a collective by its kind, or copies of tensors one by one."""
    name = func.overloadpacket.__name__
    if func.namespace == "c10d":
        return Counter(["gathers" if "gather" in name else "reductions" if "reduce_scatter" in name else name])
    if name == "_foreach_copy_":
        return Counter(copies=len(args[0]))
    return Counter(copies=1) if name == "copy_" else None


@cache
def launches(world: int, setup: str) -> dict[str, float]:
    """Return what one unit costs in a second step; chunks are a fraction of a unit, however small units are here."""
    with strict_nccl(), fake_mesh(world) as mesh:
        build = lambda: nn.Sequential(*(Block() for _ in range(LAYERS)))
        module = sharded(build, mesh=mesh, reshard_after_forward=True, **SETUPS[setup])
        module.set_transfer_sizes(chunk_bytes=1, direct_param_bytes=64 << 10, direct_group_bytes=0)
        x = torch.randn(2, HIDDEN, dtype=torch.bfloat16 if "mixed" in setup else torch.float32)
        module(x).sum().backward()
        module.zero_grad()
        with Operators(launched) as seen:
            module(x).sum().backward()
    found = sum(seen.seen, Counter())
    counted = {kind: found.pop(kind) / LAYERS for kind in ("gathers", "reductions", "copies")}
    return {**counted, "others": found.total()}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("world", WORLDS)
def test_launches_of_a_unit(world: int, setup: str) -> None:
    """A gather for forward and one for backward, each one launch; the last of the two units stays in between.

    Gradients in the dtype of the reduction are one more. Those that are packed in a wider one leave in up to four
    chunks, and in one on many ranks.
    """
    found = launches(world, setup)
    assert found["gathers"] == 1.5
    most = {8: 4, 64: 4, 1024: 1}[world] if "mixed" in setup else 1
    assert 1 <= found["reductions"] <= most and (found["reductions"] > 1) == (most > 1)
    assert found["others"] == 0


@pytest.mark.parametrize("setup", SETUPS)
def test_copies_do_not_grow_with_the_ranks(setup: str) -> None:
    """A tensor is copied once for all ranks, twice where its last piece is shorter."""
    few, some, many = (launches(world, setup)["copies"] for world in WORLDS)
    assert many <= 2 * few and some <= 2 * few
