"""Meshes: two dimensions are hybrid sharding, parameters may have meshes of their own, dimensions may be named."""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial
from inspect import signature
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.tensor import Replicate, Shard

import fsdp2
from tests.support import api
from tests.support.composition import composes
from tests.support.counting import Collectives
from tests.support.models import Three
from tests.support.parity import assert_parity, mesh_1d, mesh_2d, on_two_axes, shard_each, stack
from tests.support.pool import on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PLACES = api.torch_since("2.12")
"""Whether torch's own knows meshes of single parameters, and has a class to say so."""


@composes("hybrid sharding", "SGD")
@on_ranks(2, 4)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_two_dimensions_are_hybrid_sharding(rank, world, reshard):
    """Shards over the second dimension, copies over the first; training is torch's and a single process's."""
    run = assert_parity(partial(on_two_axes, reshard_after_forward=reshard))
    weight = run.module[0].weight
    assert weight.placements == (Replicate(), Shard(0)) and tuple(weight.device_mesh.shape) == (2, world // 2)
    assert weight.to_local().shape == (8 // (world // 2), 8)


@composes("hybrid sharding", "uneven", "mixed precision")
@on_ranks(4)
def test_hybrid_sharding_of_uneven_parameters_in_mixed_precision(rank, world):
    """Neither the axis' size nor the dtypes matter."""
    build = lambda: nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 1), nn.Linear(1, 3))
    assert_parity(partial(on_two_axes, mp_policy=BF16), build=build, against=("torch",), tolerance=0.05)


@composes("several meshes", "hybrid sharding", "shard dim")
@on_ranks(4)
@pytest.mark.parametrize("kind", ["ours", "torch's"] if PLACES else ["ours"])
@pytest.mark.parametrize("reshard", [True, False])
def test_several_meshes_in_one_unit(rank, world, kind, reshard):
    """Parameters of one call on two meshes make two groups, each with its own collectives."""
    hybrid, line = mesh_2d(), mesh_1d()

    def prepare(module, fsdp):
        ours = kind == "ours" and fsdp is api.ours
        make = fsdp2.ShardPlacementResult if ours else _fsdp_common.ShardPlacementResult
        there = hybrid if ours else HSDPMeshInfo(hybrid, 1, 0)
        own = {module.middle.weight: make(Shard(1), there), module.middle.bias: make(None, there)}
        place = lambda parameter: own.get(parameter, Shard(0) if parameter is module.first.weight else None)

        fsdp.fully_shard(module, mesh=line, shard_placement_fn=place, reshard_after_forward=reshard)

    run = assert_parity(prepare, build=Three, against=api.against("2.12"))
    module = run.module
    assert module.middle.weight.placements == (Replicate(), Shard(1))
    assert module.middle.bias.placements == (Replicate(), Shard(0))
    assert module.first.weight.placements == (Shard(0),)
    with Collectives() as seen:
        module(torch.ones(2, 8)).sum().backward()
    assert seen.gathers == (4 if reshard else 2) and seen.reductions == 3
    for method in (module.set_custom_all_gather, module.set_custom_reduce_scatter, module.set_all_reduce_hook):
        with pytest.raises(ValueError, match="not supported with multiple param groups"):
            method(lambda *_: None)


@on_ranks(2)
def test_a_placement_on_something_that_is_no_mesh(rank, world):
    """It is refused at the call, with what was got."""
    place = lambda parameter: fsdp2.ShardPlacementResult(None, "mesh")
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
        fsdp2.fully_shard(nn.Linear(8, 8), mesh=mesh_1d(), shard_placement_fn=place)


@on_ranks(2)
def test_meshes_made_anew_are_the_same(rank, world):
    """Units on equal meshes, each made for itself, train together."""
    prepare = lambda module, fsdp: [
        fsdp.fully_shard(unit, mesh=init_device_mesh("cpu", (world,))) for unit in (*module, module)
    ]
    assert_parity(prepare)


# ---- ranks in another order ----

ORDER = [3, 1, 0, 2]
PRESERVES = "preserve_rank_order" in signature(DeviceMesh.__init__).parameters
"""Whether a mesh can make process groups in its own order (torch 2.15); they are sorted otherwise."""

orders = pytest.mark.parametrize(
    "order", [{}, pytest.param({"preserve_rank_order": True}, marks=pytest.mark.skipif(not PRESERVES, reason="2.15"))]
)


def separate_and_shard(module: nn.Module, fsdp: ModuleType, **options: object) -> None:
    """Make units whose gradients have a process group of their own."""
    shard_each(module, fsdp, **options)
    module.set_separate_reduce_scatter_group()


@composes("hybrid sharding", "reshard to int")
@on_ranks(4)
@orders
@pytest.mark.parametrize("prepare", [shard_each, separate_and_shard])
@pytest.mark.parametrize("reshard", [True, 2])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_mesh_may_list_its_ranks_in_any_order(rank, world, order, prepare, reshard, shape):
    """The place of a rank is its rank in the process group, wherever the mesh lists it.

    Neighbours that keep parameters between forward and backward used to be numbered by their rank on the whole axis,
    so that two of them could keep the same piece: gradients were wrong, and nothing else was. torch's own mixes
    gradients up where a group of their own sorts the ranks that the mesh does not.
    """
    mesh = DeviceMesh(
        "cpu", torch.tensor(ORDER).view(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :], **order
    )
    if len(shape) == 2 and not order:  # rank 3 holds the second half, 0 the first: torch's own adds them up
        with pytest.raises(ValueError, match="ascending order"):
            fsdp2.fully_shard(stack(), mesh=mesh)
        return
    right = prepare is shard_each or not order
    against = ("torch", "alone") if right else ("alone",)
    assert_parity(partial(prepare, mesh=mesh, reshard_after_forward=reshard), against=against)


NAMES = {
    "says the same": [
        ("replicate", "shard"),
        ("dp_replicate", "dp_shard_cp"),
        ("dp", "fsdp"),
        ("ddp", "efsdp"),
        ("inter", "intra"),
        ("node", "gpu"),
        ("a", "b"),
    ],
    "says something else": [
        ("dp_shard", "cp"),
        ("shard", "replicate"),
        ("fsdp", "tp"),
        ("dp", "tp"),
        ("DP", "Context"),
        ("pp", "dp"),
        ("ep", "efsdp"),
    ],
}


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("kind", NAMES)
def test_names_of_dimensions_say_what_they_are_for(rank, world, kind):
    """A mesh of (shard, context parallel) was read as (replicate, shard), without a word: more memory than was meant,
    and shards over the wrong ranks. The remedy is one dimension over the ranks of both."""
    for names in NAMES[kind]:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        module = stack()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")  # as it is without pytest: each text once
            for unit in (*module, module):
                fsdp2.fully_shard(unit, mesh=mesh)
        texts = [str(one.message) for one in warned]
        assert len(texts) == (kind == "says something else"), (names, texts)
        for text in texts:
            assert str(names) in text
            remedy = re.search(r"pass (mesh\._flatten\(.*?\));", text)[1]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                module = fsdp2.fully_shard(stack(), mesh=eval(remedy, {"mesh": mesh}))
            module(torch.ones(2, 8)).sum().backward()
            assert module[0].weight.placements == (Shard(0),) and module[0].weight.device_mesh.size() == world


@api.fsdp2_only
@on_ranks(4)
@composes("context parallel", "SGD")
def test_ranks_with_parts_of_the_same_sequences(rank, world):
    """One dimension over data-parallel and context-parallel ranks: the loss of all tokens is the mean of the ranks'."""
    torch.manual_seed(0)
    alone = stack()
    module = copy.deepcopy(alone)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    flat = mesh._flatten("dp_shard_cp")
    for unit in (*module, module):
        fsdp2.fully_shard(unit, mesh=flat)
    sequences = torch.randn(2, 6, 8)
    data, context = mesh["dp_shard"].get_local_rank(), mesh["cp"].get_local_rank()
    mine = sequences[data, 3 * context : 3 * context + 3]
    for model, tokens in ((module, mine), (alone, sequences)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for sharded, whole in zip(module.parameters(), alone.parameters(), strict=True):
        assert sharded.device_mesh.size() == world
        torch.testing.assert_close(sharded.full_tensor(), whole.detach())
