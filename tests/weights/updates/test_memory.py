"""How many bytes an update costs at most, against bounds derived from the shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import WeightSender
from fsdp2.tools.check.strict import LiveBytes, settled
from tests.support import api
from tests.support.parity import mesh_1d, shard_each
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
LAYERS, WIDTH, IN_A_BUCKET = 24, 256, 8
WEIGHT = 2 * WIDTH * WIDTH
"""A weight as an engine has it, in bfloat16."""
SLACK = WEIGHT // 8
"""Alignment, what ranks compare, and biases."""
HELD = 3
"""A thread of gloo may hold what was sent for a moment longer, so messages count more than once."""


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("delta", [False, True])
def test_a_bucket_and_a_parameter(rank, world, delta):
    """The first rank has a bucket of full weights, and what arrives: an eighth of a bucket, or a parameter. The others
    have their part of what they send. With ``delta`` each rank keeps its shards as sent, and a compared parameter."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    shard_each(module, fsdp2, mesh=mesh_1d())
    sender = WeightSender(module, dtype=torch.bfloat16, bucket_mb=(IN_A_BUCKET + 0.2) * WEIGHT / 2**20, delta=delta)
    kept = LAYERS * WEIGHT / world if delta else 0
    piece = WEIGHT / world
    with LiveBytes(list(module.parameters())) as seen:
        before = seen.now
        report = sender.send(lambda bucket: None)
        assert report.buckets == 3
        arriving = HELD * (2 * piece + (WEIGHT if rank == 0 else 0))
        assert seen.peak - before <= kept + (IN_A_BUCKET * WEIGHT if rank == 0 else 0) + arriving + SLACK
        assert kept <= settled(lambda: seen.now, int(before + kept + SLACK)) - before <= kept + SLACK
        if not delta:
            return
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.to_local().view(-1)[::50] += 1  # 4 bytes each instead of 2 of each of 50
        seen.reset_peak()
        report = sender.send(lambda bucket: None)
        assert not report.full and report.buckets == 1
        bucket = LAYERS * WEIGHT * 2 / 50
        # the compared piece in two dtypes, and of each element the mask and positions of those that changed
        comparing = 2 * piece + 2 * piece + 8 * piece / 2 / 50 * 3
        assert seen.peak - before <= kept + comparing + bucket / world + (bucket if rank == 0 else 0) + SLACK
        assert kept <= settled(lambda: seen.now, int(before + kept + SLACK)) - before <= kept + SLACK
