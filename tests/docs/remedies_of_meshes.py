"""Remedies of errors about meshes, dimensions and kinds of tensors, each tried as it is written.

``remedies.py`` says what a case is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import fsdp2
from fsdp2 import DataParallelMeshDims, ShardPlacementResult, fully_shard
from tests.docs.remedies import Call, goes_on, layers, loss, model, remedy
from tests.docs.remedies_of_setups import environment, hybrid, saved
from tests.grouping.test_unusual_parameters import PackedLinear, Uncut
from tests.step.test_communication import Gather
from tests.step.test_extensions import Halves, OnlyViewed, frozen_first
from tests.step.test_named_dimensions import OnMesh, spread
from tests.support.parity import mesh_1d, mesh_of


def partial_sum(shape: tuple[int, ...]) -> nn.Parameter:
    """Return a parameter whose ranks hold terms of a sum."""
    return nn.Parameter(DTensor.from_local(torch.ones(shape), mesh_1d(), [Partial()], run_check=False))


# ---- the mesh ----


@remedy("ranks of every row in ascending order, or make the mesh with", ranks=4)
def rows_in_different_orders(rank: int) -> Iterator[Call]:
    """The rows are sorted."""
    names = ("replicate", "shard")
    module, mesh = layers(), DeviceMesh("cpu", torch.tensor([[0, 1], [3, 2]]), mesh_dim_names=names)
    yield lambda: fully_shard(module, mesh=mesh)
    fully_shard(module, mesh=DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=names))
    goes_on(module)


@remedy("of them on this node; pass", ranks=4)
def nodes_of_different_sizes(rank: int) -> Iterator[Call]:
    """The mesh that is named."""
    module = layers()
    with environment(LOCAL_WORLD_SIZE="3"):
        yield lambda: fully_shard(module, strategy=ShardingStrategy.HYBRID_SHARD)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(module, strategy=ShardingStrategy.HYBRID_SHARD, mesh=mesh)
    goes_on(module)


@remedy("mesh that has all of these ranks. Shard a parameter of the module, such as the root's, on", ranks=4)
def meshes_that_overlap(rank: int) -> Iterator[Call]:
    """A layer more is sharded over all ranks."""
    meshes = [DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    rows, columns = (next(one for one in pair if rank in one.mesh) for pair in (meshes[:2], meshes[2:]))
    for root in (False, True):
        module = layers()
        fully_shard(module[0], mesh=rows)
        fully_shard(module[1], mesh=columns)
        if root:
            fully_shard(module, mesh=mesh_1d())
        else:
            yield lambda: list(fsdp2.iter_full_params(module))  # noqa: B023  # it is called at once
    whole = dict(fsdp2.iter_full_params(module))
    assert all(torch.equal(value, whole[name]) for name, value in layers().state_dict().items())


@remedy("At least one of shard or replicate must be set in dp_mesh_dims")
def no_dimension(rank: int) -> Iterator[Call]:
    """One is set."""
    module, mesh = OnMesh(), mesh_of(2, names=("dp",))
    shard = DataParallelMeshDims(shard="dp")
    spread(module, mesh, shard)
    yield lambda: fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=()))
    fully_shard(module, mesh=mesh, dp_mesh_dims=shard)
    goes_on(module)


@remedy("with SPMD mesh (dp_mesh_dims); pass True or False")
def pieces_on_named_dimensions(rank: int) -> Iterator[Call]:
    """True, and False."""
    mesh, shard = mesh_of(2, names=("dp",)), DataParallelMeshDims(shard="dp")
    for reshard in (2, True, False):
        module = OnMesh()
        spread(module, mesh, shard)
        shards = lambda: fully_shard(module, mesh=mesh, dp_mesh_dims=shard, reshard_after_forward=reshard)  # noqa: B023
        if reshard == 2:
            yield shards
        else:
            shards()
            goes_on(module)


@remedy("not supported with dp_mesh_dims; leave one of the two out")
def named_dimensions_over_replicas(rank: int) -> Iterator[Call]:
    """Either one."""
    dims = DataParallelMeshDims(shard="shard", replicate="replicate")
    module = OnMesh()
    spread(module, hybrid(), dims)
    yield lambda: fully_shard(module, mesh=hybrid(), dp_mesh_dims=dims, shard_over_replicas=True)
    fully_shard(module, mesh=hybrid(), dp_mesh_dims=dims)
    goes_on(module)
    module = layers()
    fully_shard(module, mesh=hybrid(), shard_over_replicas=True)
    goes_on(module)


@remedy("stream cannot be set when using native HSDP")
def a_stream_beside_a_replicate_dimension(rank: int) -> Iterator[Call]:
    """It is left out, and the hook runs."""
    module, seen = layers(), []
    fully_shard(module, mesh=hybrid())
    yield lambda: module.set_all_reduce_hook(seen.append, stream=object())
    module.set_all_reduce_hook(seen.append)
    goes_on(module)
    assert seen


@remedy("comm is custom:")
def memory_for_a_custom_gather(rank: int) -> Iterator[Call]:
    """One of the two is left out."""
    for custom in (True, False):
        module = model()
        if custom:
            module[0].set_custom_all_gather(Gather())
            yield lambda: module[0].set_allocate_memory_from_process_group_for_comm(True)  # noqa: B023
        else:
            module[0].set_allocate_memory_from_process_group_for_comm(True)
        goes_on(module)


# ---- tensors ----


@remedy(": shard_placement_fn must return Shard or None, got")
def a_placement_that_cuts_nothing(rank: int) -> Iterator[Call]:
    """Each of the two."""
    module = layers()
    placed = lambda placement: ShardPlacementResult(placement, mesh_1d())
    yield lambda: fully_shard(module, mesh=mesh_1d(), shard_placement_fn=lambda param: placed(Replicate()))
    cut = lambda param: placed(Shard(1) if param.ndim > 1 else None)
    fully_shard(module, mesh=mesh_1d(), shard_placement_fn=cut)
    goes_on(module)


@remedy("can be sharded over replicas. Pass shard_over_replicas=False for the unit")
def an_extension_over_replicas(rank: int) -> Iterator[Call]:
    """That unit is not, and the others are."""
    module = layers()
    module[0].weight = nn.Parameter(Halves(module[0].weight.detach()))
    for unit in (module[1], module[2]):
        fully_shard(unit, mesh=hybrid(), shard_over_replicas=True)
    yield lambda: fully_shard(module[0], mesh=hybrid(), shard_over_replicas=True)
    fully_shard(module[0], mesh=hybrid(), shard_over_replicas=False)
    fully_shard(module, mesh=hybrid(), shard_over_replicas=True)
    loss(module).backward()
    assert all(param.grad is not None for param in module.parameters())


@remedy("fsdp_pre_all_gather and fsdp_post_all_gather. Leave it out with ignored_params (each")
def a_class_that_cannot_be_cut(rank: int) -> Iterator[Call]:
    """Each rank keeps all of it."""
    torch.manual_seed(0)
    module = nn.Sequential(PackedLinear(torch.randn(8, 8)), nn.Linear(8, 8))
    module[0].weight = nn.Parameter(Uncut.of(torch.randn(8, 8)), requires_grad=False)
    yield lambda: fully_shard(module, mesh=mesh_1d())
    fully_shard(module, mesh=mesh_1d(), ignored_params={module[0].weight})
    goes_on(module)


@remedy("must keep the parameter's local shape, dtype, and device: expected")
def a_view_of_another_shape(rank: int) -> Iterator[Call]:
    """The view has it."""
    alone = DeviceMesh.from_group([dist.new_group([one]) for one in range(2)][rank], "cpu")
    module = frozen_first(OnlyViewed)
    fully_shard(module, mesh=alone)
    OnlyViewed.view = lambda tensor: tensor[:4]
    yield lambda: loss(module)
    module.reset_iter_state()
    OnlyViewed.view = torch.Tensor.detach
    goes_on(module)


@remedy("that does not keep its elements in one tensor of the same shape and dtype; expected one")
def whole_values_of_quantized_shards(rank: int) -> Iterator[Call]:
    """``unshard()`` shows what forward computes with."""
    torch.manual_seed(0)
    module = nn.Sequential(PackedLinear(torch.randn(8, 8)), nn.Linear(8, 8))
    weight = module[0].weight.detach().unpack()
    fully_shard(module, mesh=mesh_1d())
    yield lambda: list(fsdp2.iter_full_params(module))
    module.unshard()
    torch.testing.assert_close(module[0].weight.unpack(), weight)
    module.reshard()
    goes_on(module)


@remedy(", expected only Shard and Replicate, on a mesh with this rank; redistribute it first")
def pieces_that_are_no_boxes(rank: int) -> Iterator[Call]:
    """It is redistributed."""
    module = layers()
    module[1].weight = partial_sum((8, 8))
    fully_shard(module, mesh=mesh_1d(), ignored_params={module[1].weight})
    with saved() as folder:
        yield lambda: fsdp2.load_safetensors(module, folder)
        module[1].weight = nn.Parameter(module[1].weight.detach().redistribute(placements=[Replicate()]))
        fsdp2.load_safetensors(module, folder)
    assert torch.equal(module[1].weight.to_local(), layers()[1].weight)


@remedy(", expected pieces sharded by Shard and Replicate on a mesh with this rank; redistribute")
def an_optimizer_of_a_partial_sum(rank: int) -> Iterator[Call]:
    """It is redistributed, and then it is left to another optimizer."""
    param = partial_sum((8, 8))
    step: Any = lambda given: fsdp2.use_full_params(torch.optim.SGD([given], lr=0.1)).step()
    param.grad = param.detach().clone()
    yield lambda: step(param)
    whole = nn.Parameter(param.detach().redistribute(placements=[Shard(0)]))
    whole.grad = torch.ones_like(whole)
    step(whole)
    torch.testing.assert_close(whole.full_tensor(), torch.full((8, 8), 1.9))
    torch.optim.SGD([param], lr=0.1).step()


@remedy("no group for it, expected one; pass the module that was given to fully_shard")
def a_module_beside_the_unit(rank: int) -> Iterator[Call]:
    """The unit is kept, and passed."""
    beside = nn.Module()
    beside.weight = fully_shard(layers()[0], mesh=mesh_1d()).weight
    gc.collect()  # the unit is gone
    yield lambda: fsdp2.sync_module_states(beside)
    module = fully_shard(layers()[0], mesh=mesh_1d())
    fsdp2.sync_module_states(module)
    goes_on(module)
