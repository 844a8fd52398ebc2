"""What parity compares is what was cut into shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.parity import fulls, mesh_1d, mesh_of
from tests.support.pool import on_ranks

KINDS = ("cut", "whole", "plain", "copied", "cut twice", "cut in two dimensions")
SHAPES = [(8, 3), (5, 3), (1, 7), (3, 1), (0, 4), (7,), (2, 3, 5)]


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("dim", [0, -1])
def test_whole_tensors_are_what_was_cut(rank, world, dim):
    """Uneven and empty pieces, two dtypes, two cuts, what is not cut, and what is not there.

    They are compared with the tensors that were cut. DTensor's own are others where somebody has flattened the mesh:
    it then gathers pieces of uneven sizes over that in one step.
    """
    tensors, wholes = {}, {}
    for index, shape in enumerate(SHAPES):
        whole = torch.arange(torch.Size(shape).numel(), dtype=(torch.float32, torch.float64)[index % 2]).view(shape)
        tensors[f"cut {shape}"] = distribute_tensor(whole, mesh_1d(), [Shard(dim % len(shape))])
        tensors[f"whole {shape}"] = distribute_tensor(whole, mesh_1d(), [Replicate()])
        tensors[f"plain {shape}"] = whole
        wholes |= dict.fromkeys((f"{kind} {shape}" for kind in KINDS), whole)
        if world == 4:
            turned = mesh_of(2, 2, names=("a", "b"))
            last = Shard(len(shape) - 1)
            tensors[f"copied {shape}"] = distribute_tensor(whole, turned, [Replicate(), Shard(0)])
            tensors[f"cut twice {shape}"] = distribute_tensor(whole, turned, [Shard(0), Shard(0)])
            tensors[f"cut in two dimensions {shape}"] = distribute_tensor(whole, turned, [Shard(0), last])
    if world == 4:
        layers = nn.Sequential(nn.Linear(6, 5), nn.Linear(3, 12, bias=False))
        wholes |= {f"strided {name}": parameter.detach().clone() for name, parameter in layers.named_parameters()}
        parallelize_module(layers, turned["b"], {"*": ColwiseParallel()})
        torch_fully_shard(layers, mesh=turned["a"])  # over what tensor parallelism has left
        tensors |= {f"strided {name}": parameter.detach() for name, parameter in layers.named_parameters()}
    values = fulls({**tensors, "none": None})
    assert list(values) == [*tensors, "none"] and values["none"] is None
    for name, tensor in tensors.items():
        assert torch.equal(values[name], wholes[name]) and values[name].dtype == tensor.dtype, name
