"""Full parameters where they are spread in other ways: replicas, tensor parallelism, several meshes, extensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import float8_linear
import fsdp2
from fsdp2 import iter_full_params, summon_full_params
from tests.support import api
from tests.support.parity import full, mesh_1d, mesh_2d, shard_each, stack
from tests.support.pool import on_ranks
from tests.weights.test_summon import BF16

pytestmark = api.fsdp2_only


def uneven() -> nn.Sequential:
    """Return layers whose sizes nothing divides."""
    return nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 3), nn.Linear(3, 8))


def check(module: Any, expected: nn.Module, forward: bool = True) -> None:
    """Assert that parameters and gradients are shown, written, and exported as those of an unsharded model."""
    order = [name for name, _ in expected.named_parameters()]
    if forward:
        module(torch.ones(2, 8)).square().sum().backward()
        expected(torch.ones(2, 8)).square().sum().backward()
    for reverse in (False, True):
        with summon_full_params(module, with_grads=True):
            assert [name for name, _ in module.named_parameters()] == order
            for (name, got), want in zip(module.named_parameters(), expected.parameters()):
                assert type(got) is nn.Parameter and type(got.data) is torch.Tensor, name
                assert got.shape == want.shape and torch.equal(got, want), name
                assert (got.grad is None) == (want.grad is None)
                if got.grad is not None:
                    torch.testing.assert_close(got.grad, want.grad)
                with torch.no_grad():
                    for one in (got, want):
                        one.copy_(one.flip(0) + 1)
                        if one.grad is not None:
                            one.grad.mul_(-2)
        for (name, got), want in zip(module.named_parameters(), expected.parameters()):
            assert isinstance(got, DTensor) and torch.equal(full(got), want), name
            if want.grad is not None:
                torch.testing.assert_close(full(got.grad), want.grad)
        exported = list(iter_full_params(module, bucket_mb=1 if reverse else 1e-4))
        assert [name for name, _ in exported] == order
        for (name, got), want in zip(exported, expected.parameters()):
            assert type(got) is torch.Tensor and torch.equal(got, want), name
    if forward:
        module(torch.ones(2, 8)).square().sum().backward()


def twins(build=stack) -> tuple[nn.Sequential, nn.Sequential]:
    """Return two equal models."""
    pair = []
    for _ in range(2):
        torch.manual_seed(3)
        pair.append(build())
    return pair[0], pair[1]


@on_ranks(2, 4)
@pytest.mark.parametrize("build", [stack, uneven])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_replicas(rank, world, build, reshard):
    """Hybrid sharding: every replica writes its own."""
    module, expected = twins(build)
    shard_each(module, fsdp2, mesh=mesh_2d(), reshard_after_forward=reshard)
    check(module, expected)


@on_ranks(2)
def test_replicas_alone(rank, world):
    """A mesh that only replicates."""
    module, expected = twins()
    mesh = mesh_1d()
    for parameter in list(module.parameters()):
        assert parameter.ndim
    for layer in module:
        for name, parameter in list(layer.named_parameters()):
            layer.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    shard_each(module, fsdp2, mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(replicate="shard"))
    check(module, expected, forward=False)


@on_ranks(4)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("build", [stack, uneven])
def test_tensor_parallel(rank, world, reshard, build):
    """DTensor parameters are shown plain and whole, and cut both ways when written; forward inside is refused."""
    module, expected = twins(build)
    mesh = mesh_2d("dp", "tp")
    if build is stack:
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    else:  # cut unevenly, along both dimensions
        for layer, dim in ((module[0], 0), (module[1], 1)):
            cut = distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(dim)])
            layer.register_parameter("weight", nn.Parameter(cut))
    for unit in (module[0], module[1], module):
        fsdp2.fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=reshard)
    check(module, expected, forward=build is stack)
    with summon_full_params(module), torch.no_grad():
        with pytest.raises(RuntimeError, match="tensor-parallel parameters are shown as plain tensors"):
            module(torch.ones(2, 8))


@on_ranks(4)
def test_one_rank_of_tensor_parallel_ones(rank, world):
    """``rank0_only`` is one rank in the whole mesh, not one in each data-parallel part."""
    module, expected = twins()
    mesh = mesh_2d("dp", "tp")
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for unit in (module[0], module[1]):
        fsdp2.fully_shard(unit, mesh=mesh["dp"])
    with summon_full_params(module[:2], writeback=False, rank0_only=True, offload_to_cpu=True):
        for layer, want in zip(module[:2], expected):
            assert isinstance(layer.weight, DTensor) == (rank > 0)
            assert rank or torch.equal(layer.weight, want.weight)


@on_ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_named_dimensions(rank, world, dim):
    """Parameters that lie on the whole mesh."""
    module, expected = twins()
    mesh = mesh_2d("dp", "tp")
    for layer in module:
        for name, parameter in list(layer.named_parameters()):
            placement = Shard(dim) if parameter.ndim > 1 else Replicate()
            cut = distribute_tensor(parameter.detach(), mesh, [Replicate(), placement])
            layer.register_parameter(name, nn.Parameter(cut))
    shard_each(module, fsdp2, mesh=mesh, dp_mesh_dims=fsdp2.DataParallelMeshDims(shard="dp"))
    check(module, expected, forward=False)


@on_ranks(4)
@pytest.mark.parametrize("reshard", [True, False, 2])
def test_several_meshes_and_dimensions(rank, world, reshard):
    """Parameters of one unit cut over different meshes and along different dimensions, some by large pieces."""
    module, expected = twins(uneven)
    line, hybrid = mesh_1d(), mesh_2d()
    own = {module[0].weight: fsdp2.ShardPlacementResult(Shard(1), hybrid), module[2].weight: Shard(1)}
    fsdp2.fully_shard(module, mesh=line, shard_placement_fn=own.get, reshard_after_forward=reshard)
    module.set_transfer_sizes(direct_param_bytes=0, direct_group_bytes=0)
    check(module, expected)


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
def test_float8_weights(rank, world, reshard):
    """What is shown, written and exported is in full precision; forward goes on with the rounded values."""
    build = lambda: nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 8))
    module, expected = twins(build)
    float8_linear.use_float8(module)
    shard_each(module, fsdp2, mesh=mesh_1d(), reshard_after_forward=reshard, mp_policy=BF16)
    before = module(torch.ones(2, 8))
    with summon_full_params(module):
        for got, want in zip(module.parameters(), expected.parameters()):
            assert torch.equal(got, want) and type(got.data) is torch.Tensor
            for one in (got, want):
                one.data.mul_(4)
    before.sum().backward()
    for (_, got), want in zip(iter_full_params(module), expected.parameters()):
        assert torch.equal(got, want)
    assert type(module[0].weight.to_local()) is float8_linear.Float8Weight or not reshard
    torch.testing.assert_close(module(torch.ones(2, 8)).float(), expected(torch.ones(2, 8)), rtol=0.2, atol=1)


@on_ranks(1, 2)
def test_extensions_that_hide_their_elements(rank, world):
    """A subclass that says of more or of other tensors that they are inside is refused by name, before anything."""

    class Scaled(float8_linear.Float8Weight):
        def __tensor_flatten__(self):
            return ["_tensor", "_tensor"], None

    module = nn.Sequential(nn.Linear(8, 4))
    float8_linear.use_float8(module)
    shard_each(module, fsdp2, mesh=mesh_1d())
    for parameter in module.parameters():
        local = parameter._local_tensor
        if isinstance(local, float8_linear.Float8Weight):
            local.__class__ = Scaled
    for act in (lambda: summon_full_params(module).__enter__(), lambda: next(iter_full_params(module))):
        with pytest.raises(NotImplementedError, match="0.weight: its shard is a Scaled"):
            act()


@on_ranks(4)
def test_meshes_of_which_none_has_all_ranks(rank, world, tmp_path):
    """One layer on the rows of a mesh, the other on its columns: files had zeros in the place of pieces, two ranks took
    themselves for the first, and buffers differed afterwards, all without a word."""
    mesh, model = mesh_2d("row", "column"), stack(layers=2)
    fsdp2.fully_shard(model[0], mesh=mesh["row"])
    fsdp2.fully_shard(model[1], mesh=mesh["column"])
    message = "whole weights: got parameters on meshes of ranks .* expected one mesh"
    with pytest.raises(NotImplementedError, match=message):
        fsdp2.save_safetensors(model, tmp_path / "model.safetensors")
    with pytest.raises(NotImplementedError, match=message):
        fsdp2.sync_module_states(model)
