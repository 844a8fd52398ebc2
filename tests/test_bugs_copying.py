"""Bugs of copying and saving that must not come back; each test opens with the story of its bug."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support import api
from tests.support.models import mlp
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


@on_ranks(1, 2)
def test_saving_and_copying_a_sharded_state_dict(rank, world):
    """All shards of a unit but the first lie at an offset in its buffer. torch tells a DTensor from a tensor with
    memory by its address, which is the offset, so ``torch.save`` and ``copy.deepcopy`` of a state dict died with
    "invalid python storage"."""
    module = api.ours.fully_shard(mlp(4, 6, 3), mesh=cpu_mesh(world))
    state = module.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for other in (copy.deepcopy(state), torch.load(file, weights_only=True)):
        for name, value in other.items():
            assert isinstance(value, DTensor) and torch.equal(value.to_local(), state[name].to_local())
            assert value.to_local().data_ptr() != state[name].to_local().data_ptr() or not value.to_local().numel()
    assert file.getbuffer().nbytes < 20_000  # no other rank's, no other parameter's bytes
    before = module(torch.ones(2, 4))
    module.reshard()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.to_local().mul_(2)  # the memory is still the unit's own
    assert not torch.equal(module(torch.ones(2, 4)), before)


@on_ranks(1, 2)
def test_copying_a_part_of_a_unit(rank, world):
    """The hooks of a module inside a unit led ``copy.deepcopy`` to the unit's full parameters, whose memory is freed,
    and from there to "invalid python storage" or a crash."""
    module = api.ours.fully_shard(mlp(4, 6, 3), mesh=cpu_mesh(world))
    module(torch.ones(2, 4)).sum().backward()
    module.zero_grad()
    with pytest.raises(NotImplementedError, match=r"0.weight: a part of a sharded unit cannot be deep-copied"):
        copy.deepcopy(module[0])
    copy.deepcopy(nn.Sequential(module))
