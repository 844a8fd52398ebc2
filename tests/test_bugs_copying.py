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


class Shifted(nn.Linear):
    """A linear layer with a shift, once there is one."""

    def forward(self, x):
        return super().forward(x) + getattr(self, "shift", 0.0)


@on_ranks(1, 2)
def test_a_copy_adopts_what_is_added_to_it(rank, world):
    """A copy did not know with which arguments its units had been made: parameters added to it (adapters on a reference
    model) stayed outside of every unit, their gradients were each rank's own."""
    torch.manual_seed(0)
    original = nn.Sequential(Shifted(4, 6), nn.Linear(6, 3))
    original.scale = nn.Parameter(torch.ones(()))
    whole = copy.deepcopy(original)
    api.ours.fully_shard(original[0], mesh=cpu_mesh(world))
    api.ours.fully_shard(original, mesh=cpu_mesh(world), ignored_params={original.scale})
    clone = copy.deepcopy(original)
    for module in (clone, whole):
        torch.manual_seed(1)
        module[0].register_parameter("shift", nn.Parameter(torch.randn(6)))
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    clone(batch.chunk(world)[rank]).square().mean().backward()
    whole(batch).square().mean().backward()
    names = {name: parameter for name, parameter in clone.named_parameters() if isinstance(parameter, DTensor)}
    assert set(names) == {name for name, _ in whole.named_parameters()} - {"scale"}
    for name, parameter in names.items():
        torch.testing.assert_close(parameter.grad.full_tensor(), whole.get_parameter(name).grad)
    assert not hasattr(original[0], "shift") and clone.scale is not original.scale
