"""How many bytes full parameters cost at most, on one rank of sixty-four, against bounds derived from the shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import iter_full_params, summon_full_params
from fsdp2.tools.check.strict import LiveBytes
from tests.support import api
from tests.support.fake import fake_mesh
from tests.support.parity import shard_each

pytestmark = api.fsdp2_only
WORLD, LAYERS, WIDTH = 64, 6, 512  # a weight is the smallest default bucket, 1 MiB
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WEIGHT = 4 * WIDTH * WIDTH
WHOLE = LAYERS * (WEIGHT + 4 * WIDTH)
SLACK = 0.05
"""Alignment and what ranks compare, in weights."""


@contextmanager
def counted(dim: int = 0, rank: int = 0, **options) -> Iterator[tuple[nn.Module, LiveBytes, int]]:
    """Yield equal layers that are units, with gradients, cut along a dimension; a counter, and what it begins with."""
    with fake_mesh(WORLD, rank=rank) as mesh:
        module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        place = lambda parameter: Shard(min(dim, parameter.ndim - 1))
        shard_each(module, fsdp2, mesh=mesh, shard_placement_fn=place, mp_policy=BF16, **options)
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with LiveBytes([*module.parameters(), *(parameter.grad for parameter in module.parameters())]) as seen:
            yield module, seen, seen.now


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("with_grads", [True, False])
@pytest.mark.parametrize("writeback", [True, False])
def test_whole_model_and_one_parameter(dim, with_grads, writeback):
    """Inside, the whole parameters (and gradients); while entered one more weight; afterwards nothing."""
    whole = WHOLE * (2 if with_grads else 1)
    with counted(dim) as (module, seen, before):
        with summon_full_params(module, with_grads=with_grads, writeback=writeback):
            assert whole <= seen.now - before <= whole + SLACK * WEIGHT
            assert seen.peak - before <= whole + (1 + SLACK) * WEIGHT
            seen.reset_peak()
        assert seen.peak - before <= whole + SLACK * WEIGHT  # writing back copies nothing twice
        assert seen.now - before <= SLACK * WEIGHT


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_ranks_that_show_nothing(rank, dim):
    """They take part, hold up to twice the largest parameter meanwhile, and nothing inside."""
    with counted(dim, rank) as (module, seen, before):
        with summon_full_params(module, writeback=False, rank0_only=True, with_grads=True):
            if rank:
                assert seen.now - before <= SLACK * WEIGHT
                assert seen.peak - before <= (2 + SLACK) * WEIGHT
            else:
                assert seen.now - before >= 2 * WHOLE


def test_kept_parameters_are_neither_freed_nor_doubled_afterwards():
    """What a unit keeps after forward costs what it cost before."""
    with counted(reshard_after_forward=False) as (module, seen, _):
        with torch.no_grad():
            module(torch.ones(1, WIDTH))
        kept = seen.now
        with summon_full_params(module):
            assert seen.now - kept <= WHOLE + SLACK * WEIGHT
        assert abs(seen.now - kept) <= SLACK * WEIGHT


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("bucket", [0.01, 1, 2, 3])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_export(dim, bucket, dtype):
    """One bucket, or one parameter where that is larger (twice if it is unpacked), if the caller drops what comes."""
    size = 0.5 if dtype else 1.0
    alone = size if dim == 0 else 2 * size
    with counted(dim) as (module, seen, before):
        count = 0
        for _, tensor in iter_full_params(module, bucket_mb=bucket * WEIGHT / 2**20, dtype=dtype):
            del tensor
            count += 1
        assert count == 2 * LAYERS
        assert seen.peak - before <= (max(bucket, alone) + SLACK) * WEIGHT
        assert seen.now - before <= SLACK * WEIGHT


def test_export_left_midway():
    """What was gathered and not handed out is freed with the iterator."""
    with counted() as (module, seen, before):
        for _, tensor in iter_full_params(module):
            assert seen.now - before >= WHOLE
            del tensor
            break
        assert seen.now - before <= SLACK * WEIGHT
