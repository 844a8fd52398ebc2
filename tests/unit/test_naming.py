"""What messages call a module."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fsdp2
from fsdp2._naming import class_name
from tests.unit.meshes import gloo_mesh


def test_a_module_is_called_by_the_class_that_its_author_wrote():
    """Errors spoke of an FSDPSequential, which no source had."""
    with gloo_mesh():
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for shard in (fsdp2.fully_shard, fully_shard):
            layer, whole = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
            for module in (layer, whole):
                shard(module, mesh=mesh)
            assert (class_name(layer), class_name(whole), class_name(whole[0])) == ("Linear", "Sequential", "Linear")
    assert (class_name(nn.Linear(2, 2)), class_name(3)) == ("Linear", "int")
