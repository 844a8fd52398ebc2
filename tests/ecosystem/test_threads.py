"""Ranks that are threads of one process: torch tests much of its own on them, and a program may do the same."""

from __future__ import annotations

import copy
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from tests.support import api
from tests.support.parity import full, mesh_of, on_one_axis, shard_each, stack

pytest.importorskip("expecttest", reason="torch's test helpers need expecttest")
from torch.testing._internal.common_distributed import MultiThreadedTestCase

pytestmark = [
    api.fsdp2_only,
    pytest.mark.skipif(not api.torch_since("2.12"), reason="DTensor's first operators in threads may crash this torch"),
]


def same_on_all(module: nn.Module) -> nn.Module:
    """Give all ranks the first one's parameters: threads share one random generator."""
    for parameter in module.parameters():
        dist.broadcast(parameter.detach(), src=0)
    return module


def rows(rank: int) -> torch.Tensor:
    """Return the batch of a rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))


class TestThreads(MultiThreadedTestCase):
    """Four ranks, each a thread with a process group of its own."""

    @property
    def world_size(self) -> int:
        """The number of threads."""
        return 4

    def setUp(self) -> None:
        """Start them; the environment that torch's class changes is this test's alone."""
        environment = mock.patch.dict(os.environ)
        environment.start()
        self.addCleanup(environment.stop)
        super().setUp()
        self._spawn_threads()

    def test_training(self) -> None:
        """Each thread gathers, reduces and shows what a process would, whatever is kept between the passes."""
        for reshard in (True, False, 2, None):
            reference = same_on_all(stack())
            module = copy.deepcopy(reference)
            on_one_axis(module, fsdp2, reshard_after_forward=reshard)
            for _ in range(2):
                for one in (reference, module):
                    one.zero_grad()
                output = module(rows(self.rank))
                kept = [not isinstance(unit.weight, DTensor) for unit in module if hasattr(unit, "weight")]
                assert set(kept) == {reshard is False}, (reshard, kept)
                for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(full(mine), theirs.detach(), rtol=0, atol=0)
                output.sum().backward()
                assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
                torch.cat([reference(rows(rank)) for rank in range(4)]).sum().backward()
                for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(full(mine.grad), theirs.grad / 4)

    def test_materialized_from_meta_in_mixed_precision(self) -> None:
        """Parameters get their memory after sharding, with pieces of unequal sizes and none."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for width in (8, 3, 1):
            with torch.device("meta"):
                module = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 8))
                on_one_axis(module, fsdp2, mp_policy=policy)
            module.to_empty(device="cpu")
            for part in module:
                part.reset_parameters()
            optimizer = torch.optim.Adam(module.parameters())
            module(rows(self.rank)).sum().backward()
            optimizer.step()
            assert all(parameter.grad.dtype == torch.float32 for parameter in module.parameters())

    def test_hybrid_sharding_and_a_hook_in_its_place(self) -> None:
        """A hook that averages over the other half's group does what the replicate axis does."""
        mesh = mesh_of(2, 2, names=("replicate", "shard"))
        reference = same_on_all(stack())
        hybrid, hooked = copy.deepcopy(reference), copy.deepcopy(reference)
        shard_each(hybrid, fsdp2, mesh=mesh)
        shard_each(hooked, fsdp2, mesh=mesh["shard"])
        group = mesh.get_group("replicate")
        for unit in (*hooked, hooked):
            unit.set_all_reduce_hook(lambda output: dist.all_reduce(output.div_(2), group=group))
        for module in (hybrid, hooked):
            module(rows(self.rank)).sum().backward()
        for one, other in zip(hybrid.parameters(), hooked.parameters(), strict=True):
            assert other.placements == (Shard(0),)
            torch.testing.assert_close(one.grad.to_local(), other.grad.to_local())
