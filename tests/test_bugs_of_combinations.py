"""Bugs that combining fsdp2 with other tools brought to light; each test opens with the story of its bug."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from tests.support import api
from tests.support.models import Block, children, mlp
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


@on_ranks(2)
def test_gradients_asked_of_autograd_itself(rank, world):
    """``torch.autograd.grad`` with respect to full parameters died inside a hook: the engine will not say of a leaf
    that it was asked for whether it will be reached."""
    torch.manual_seed(0)
    reference = mlp(4, 4, 4)
    torch.manual_seed(0)
    module = api.ours.fully_shard(mlp(4, 4, 4), mesh=cpu_mesh(world), reshard_after_forward=False)
    inputs = torch.full((2, 4), rank + 1.0)
    got = torch.autograd.grad(module(inputs).sum(), list(module.parameters()))
    expected = torch.autograd.grad(reference(inputs).sum(), list(reference.parameters()))
    for mine, whole in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, whole)
    assert all(parameter.grad is None for parameter in module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_parameters_looked_up_between_forward_and_backward(rank, world, reshard):
    """A zero-bubble pipeline asks the module for its parameters after forward and differentiates with respect to them,
    in two parts. Units that reshard after forward showed shards, which are not in the graph: their weights got no
    gradient at all, without a word (torch's fully_shard loses them still)."""
    torch.manual_seed(0)
    reference = mlp(4, 4, 4)
    torch.manual_seed(0)
    module = mlp(4, 4, 4)
    for unit in (*children(module), module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), reshard_after_forward=reshard)
    inputs = torch.arange(8.0).view(2, 4)
    losses = [module(inputs * scale).sum() for scale in (1, 2)]  # the second forward reshards again
    module.set_is_last_backward(False)
    for loss in losses:
        module.set_reshard_after_backward(False)
        parameters = list(module.parameters())
        grads = torch.autograd.grad(loss, parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    module.set_is_last_backward(True)
    module.set_reshard_after_backward(True)
    module._get_fsdp_state()._root_post_backward_final_callback()
    (reference(inputs).sum() + reference(inputs * 2).sum()).backward()
    for mine, whole in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)


@on_ranks(2)
def test_the_embedding_before_a_compiled_block(rank, world):
    """Under tensor parallelism a block's input may be a collective under way. A compiled block takes such an input for
    one that needs no gradient: backward died, and with torch's fully_shard the embedding's gradient is zero."""
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    grads = []
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(6, 4), Block(4))
        spread = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        parallelize_module(model, mesh["tp"], {"0": spread})
        model[1].compile(backend=backend, fullgraph=True)
        for unit in (model[1], model):
            api.ours.fully_shard(unit, mesh=mesh["dp"])
        model(torch.arange(12).view(2, 6) % 6).square().sum().backward()
        model.reshard()
        grads.append(model[0].weight.grad.full_tensor())
        torch._dynamo.reset()
    assert grads[0].count_nonzero() == 24
    torch.testing.assert_close(grads[1], grads[0])


@on_ranks(2)
def test_saving_in_the_background(rank, world, tmp_path):
    """Shards were views further back in one storage. ``dcp.async_save`` takes a DTensor of such a piece for a tensor
    with data and died with "invalid python storage", and saving one parameter wrote the shards of its whole group."""
    module = api.ours.fully_shard(mlp(4, 4, 4), mesh=cpu_mesh(world))
    for parameter in module.parameters():
        local = parameter.to_local()
        assert parameter.data_ptr() == 0 and local.untyped_storage().nbytes() == local.nbytes
    before = {name: value.full_tensor() for name, value in module.state_dict().items()}
    dcp.async_save(module.state_dict(), checkpoint_id=tmp_path).result()
    other = api.ours.fully_shard(mlp(4, 4, 4), mesh=cpu_mesh(world))
    dcp.load(other.state_dict(), checkpoint_id=tmp_path)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), before[name])


@on_ranks(2)
def test_other_experts_on_other_ranks(rank, world):
    """Parameters on a smaller mesh than the root's were compared over all ranks: experts of other shapes were refused
    as "different models", experts of other values drew a warning about the seed."""
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("each", "one"))["one"]
    torch.manual_seed(0)
    dense = nn.Linear(4, 4)
    torch.manual_seed(rank)
    module = nn.Sequential(dense, nn.Linear(4, 3 + rank))
    api.ours.fully_shard(module[1], mesh=alone)
    api.ours.fully_shard(module, mesh=cpu_mesh(world))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.ones(1, 4)).sum().backward()
    assert module[1].weight.grad.full_tensor().shape == (3 + rank, 4)
