"""``dp_mesh_dims``: the mesh is the whole one that DTensor parameters lie on, and its data-parallel part is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

from fsdp2 import DataParallelMeshDims
from tests.support import api
from tests.support.composition import composes, refuses
from tests.support.parity import assert_parity, mesh_2d, mesh_of, shard_each, stack
from tests.support.pool import on_ranks


class OnMesh(nn.Sequential):
    """The layers of ``stack`` on DTensors: the batch is cut over data-parallel dimensions, so is the output.

    Without a mesh they are ordinary layers.
    """

    mesh: DeviceMesh | None = None
    names: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__(*stack())

    def forward(self, x):
        mesh = self.mesh
        if mesh is None:
            return super().forward(x)
        rows = [Shard(0) if name in self.names else Replicate() for name in mesh.mesh_dim_names or ()]
        x = super().forward(DTensor.from_local(x, mesh, rows, run_check=False))
        return x.redistribute(placements=rows).to_local(grad_placements=rows)


def spread(module: OnMesh, mesh: DeviceMesh, dims: DataParallelMeshDims, cut: dict[str, int] | None = None) -> None:
    """Make every parameter a DTensor: replicated, but matrices cut along the dimension of that name where given."""
    module.mesh, module.names = mesh, (*dims.shard_names, *dims.replicate_names)
    cut = cut or {}

    def partition(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(part.named_parameters(recurse=False)):
            own = cut if parameter.ndim > 1 else {}
            placements = [Shard(own[n]) if n in own else Replicate() for n in mesh.mesh_dim_names or ()]
            part.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))

    distribute_module(module, mesh, partition)


CASES = {
    "shard": (("dp",), DataParallelMeshDims(shard="dp"), None),
    "shard_beside_model": (("dp", "tp"), DataParallelMeshDims(shard="dp"), {"tp": 0}),
    "shard_beside_model_other_dim": (("dp", "tp"), DataParallelMeshDims(shard="dp"), {"tp": 1}),
    "model_first": (("tp", "dp"), DataParallelMeshDims(shard="dp"), {"tp": 0}),
    "two_shard_dims": (("a", "b"), DataParallelMeshDims(shard=("a", "b")), None),
    "hybrid": (("r", "s"), DataParallelMeshDims(shard="s", replicate="r"), None),
    "replicate": (("r",), DataParallelMeshDims(replicate="r"), None),
    "two_replicate_dims": (("r", "q"), DataParallelMeshDims(replicate=("r", "q")), None),
}


LONG = ("shard_beside_model_other_dim", "two_replicate_dims")


def ranks_of(dims: DataParallelMeshDims, mesh: DeviceMesh) -> tuple[int, int]:
    """Return which part of the batch this rank takes, of how many."""
    coordinate, index, count = mesh.get_coordinate(), 0, 1
    for name in (*dims.replicate_names, *dims.shard_names):
        dim = mesh.mesh_dim_names.index(name)
        index, count = index * mesh.size(dim) + coordinate[dim], count * mesh.size(dim)
    return index, count


@composes("named dimensions", "tensor parallel", "SGD")
@composes("named dimensions", "hybrid sharding", "SGD")
@on_ranks(4)
@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.slow if case in LONG else []) for case in CASES])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_training(rank, world, case, reshard):
    """Training equals torch's, and a single process on the whole batch."""
    names, dims, cut = CASES[case]
    mesh = mesh_of(*((4,) if len(names) == 1 else (2, 2)), names=names)

    def prepare(module, fsdp):
        spread(module, mesh, dims, cut)
        shard_each(module, fsdp, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)

    against = ("alone",) if names[0] == "tp" else api.against("2.12")
    run = assert_parity(prepare, build=OnMesh, part=ranks_of(dims, mesh), against=against)
    weight = run.module[0].weight
    shards = 1 if dims.shard is None else 4 // (2 if len(names) == 2 and len(dims.shard_names) == 1 else 1)
    beside = 2 if cut else 1
    assert weight.to_local().numel() == 64 // shards // beside


@on_ranks(4)
@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_stay_on_the_whole_mesh(rank, world, reshard):
    """Shards lie on the mesh that was given; a full parameter is the DTensor it was."""
    mesh = mesh_2d("dp", "tp")
    module = OnMesh()
    dims = DataParallelMeshDims(shard="dp")
    spread(module, mesh, dims, {"tp": 0})
    before = module[0].weight
    api.ours.fully_shard(module, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
    assert module[0].weight.device_mesh == mesh and module[0].bias.placements == (Shard(0), Replicate())
    assert torch.equal(module[0].weight.full_tensor(), before.full_tensor())
    module.unshard()
    assert module[0].weight.placements == (Replicate(), Shard(0)) == before.placements
    assert torch.equal(module[0].weight.to_local(), before.to_local())


@refuses("named dimensions", "reshard to int", by="both", reason="NotImplementedError when `fully_shard` is called")
@on_ranks(2)
def test_what_is_refused(rank, world):
    """Dimensions that do not exist, parameters that do not lie where they must, and an int to reshard to."""
    mesh, shard = mesh_of(2, names=("dp",)), DataParallelMeshDims(shard="dp")
    other = mesh_of(2, 1, names=("dp", "tp"))

    def attempt(fsdp, error, match, *, on=mesh, given=mesh, dims=shard, cut=None, **options):
        module = OnMesh()
        if on is not None:
            spread(module, on, shard, cut)
        with pytest.raises(error, match=match):
            fsdp.fully_shard(module, mesh=given, dp_mesh_dims=dims, **options)

    for fsdp in api.both("2.12"):
        attempt(fsdp, ValueError, "not found in mesh.mesh_dim_names", dims=DataParallelMeshDims(shard="cp"))
        attempt(fsdp, ValueError, "must be DTensors", on=None)
        attempt(fsdp, ValueError, "same mesh", on=other)
        attempt(fsdp, ValueError, "Expected Replicate", cut={"dp": 0})
        attempt(fsdp, ValueError, "mesh must have mesh_dim_names", given=mesh_of(2))
        attempt(fsdp, NotImplementedError, "reshard_after_forward as int", reshard_after_forward=2)
    attempt(api.ours, TypeError, "dp_mesh_dims must be a DataParallelMeshDims, got 'dp'", dims="dp")
