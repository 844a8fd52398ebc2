"""The data-parallel mesh of one call: its axes, what it refuses, default and regrouped meshes."""

from __future__ import annotations

import re
import warnings
from inspect import signature
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2.policies import DataParallelMeshDims
from fsdp2.sharding.mesh import Axis, DataParallelMesh, default_mesh, listed_ranks, regroup, regroup_within
from fsdp2.sharding.platform import Platform, platform, simulated, using
from tests.support.fake import fake_mesh
from tests.unit.meshes import gloo_mesh

NAMES = ("pp", "dp", "cp", "tp")


def ranks_of(axis: Axis) -> list[int]:
    """Return the global ranks of an axis."""
    assert axis.group is not None
    return dist.get_process_group_ranks(axis.group)


def assert_absent(axis: Axis) -> None:
    """Assert that an axis communicates nothing."""
    assert (axis.group, axis.size, axis.rank) == (None, 1, 0)


# ---- axes ----


@pytest.mark.parametrize("order", [[3, 1, 0, 2], [[1, 0], [3, 2]]])
@pytest.mark.parametrize("keeps", [False, True])
def test_shards_that_checkpoints_put_elsewhere_are_warned_about(
    order: list[int] | list[list[int]], keeps: bool
) -> None:
    """A DTensor's place is that on the mesh; a shard is cut by its rank in the process group, which sorts."""
    options = {"preserve_rank_order": True} if keeps else {}
    if not options.keys() <= signature(DeviceMesh.__init__).parameters.keys():
        pytest.skip("torch 2.15")
    with fake_mesh(4):
        mesh = DeviceMesh("cpu", order, mesh_dim_names=("replicate", "shard")[-torch.tensor(order).ndim :], **options)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            whole = DataParallelMesh.from_mesh(mesh)
        places = [ranks_of(whole.shard).index(dist.get_rank()), (mesh.get_coordinate() or [])[-1]]
        assert whole.shard.rank == places[0] and (places[0] == places[1]) is keeps
        assert ["torch.distributed.checkpoint takes the place" in str(one.message) for one in seen] == [True] * (
            not keeps
        )


@pytest.mark.parametrize("rank", range(6))
def test_an_axis_is_one_dimension_as_this_rank_sees_it(rank: int) -> None:
    with fake_mesh(2, 3, names=("a", "b"), rank=rank) as mesh:
        first, second = Axis.of(mesh, 0), Axis.of(mesh, 1)
        assert (first.size, first.rank, first.backend) == (2, rank // 3, "fake")
        assert (second.size, second.rank, second.backend) == (3, rank % 3, "fake")
        assert ranks_of(first) == [rank % 3, rank % 3 + 3]
        assert ranks_of(second) == [rank // 3 * 3 + i for i in range(3)]


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo"])
def test_the_backend_is_that_of_the_meshs_device(backend: str) -> None:
    with gloo_mesh(backend) as mesh:
        with using(simulated("nccl")):
            assert Axis.of(mesh, 0).backend == "nccl"
        assert Axis.of(mesh, 0).backend == "gloo"


def test_an_axis_can_have_a_communicator_of_its_own() -> None:
    with gloo_mesh() as mesh:
        axis = Axis.of(mesh, 0)
        own = axis.with_own_group()
        assert own.group is not axis.group
        assert (own.size, own.rank, own.backend) == (axis.size, axis.rank, axis.backend)
        assert ranks_of(own) == ranks_of(axis)
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=own.group)
        assert tensor.tolist() == [1.0, 1.0]


# ---- without a shard axis ----


@pytest.mark.parametrize("rank", [0, 3])
def test_the_same_ranks_may_replicate_only(rank: int) -> None:
    with fake_mesh(4, names=("dp",), rank=rank) as mesh:
        whole = DataParallelMesh.from_mesh(mesh).replicated()
        assert_absent(whole.shard)
        assert ranks_of(whole.replicate) == [0, 1, 2, 3] and whole.mesh is mesh
        assert whole.roles == ("replicate",) and whole.replicated() is whole and whole.first_axis is whole.replicate
    with fake_mesh(2, 2, names=("r", "s"), rank=rank) as mesh:
        both = DataParallelMesh.from_mesh(mesh)
        whole = both.replicated()
        assert_absent(whole.shard)
        assert ranks_of(whole.replicate) == [0, 1, 2, 3] and whole.mesh is mesh
        assert whole.roles == ("replicate", "replicate") and both.roles == ("replicate", "shard")
        assert both.first_axis is both.shard and both.replicated().replicate.group is whole.replicate.group


@pytest.mark.parametrize(("shard", "replicate"), [("dp", None), (("dp", "cp"), None), ("cp", "dp")])
def test_named_dimensions_may_replicate_only(shard: str | tuple[str, ...], replicate: str | None) -> None:
    with fake_mesh(2, 2, 2, names=("dp", "cp", "tp"), rank=5) as mesh:
        given = DataParallelMesh.from_mesh(mesh, DataParallelMeshDims(shard=shard, replicate=replicate))
        whole = given.replicated()
        assert_absent(whole.shard)
        assert ranks_of(whole.replicate) == ([1, 5] if shard == "dp" else [1, 3, 5, 7])
        assert whole.spmd is mesh and whole.roles == ("replicate",) and whole.dims.shard_names == ()


# ---- positional and named dimensions ----


@pytest.mark.parametrize(
    ("sizes", "names", "rank", "dims", "shard", "replicate"),
    [
        ((4,), (), 3, {}, [0, 1, 2, 3], []),
        ((2, 4), ("replicas", "shards"), 6, {}, [4, 5, 6, 7], [2, 6]),
        ((2, 2), ("dp", "tp"), 3, {"shard": "dp"}, [1, 3], []),
        ((2, 2), ("dp", "tp"), 3, {"replicate": "dp"}, [], [1, 3]),
        ((2, 2, 2), ("shards", "tp", "replicas"), 5, {"shard": "shards", "replicate": "replicas"}, [1, 5], [4, 5]),
        ((2, 2, 2, 2), NAMES, 15, {"shard": ("dp", "cp"), "replicate": "pp"}, [9, 11, 13, 15], [7, 15]),
    ],
    ids=["one", "two", "shards", "replicas", "in another order", "several are one axis"],
)
def test_dimensions_shard_and_replicate(
    sizes: tuple[int, ...],
    names: tuple[str, ...],
    rank: int,
    dims: dict[str, Any],
    shard: list[int],
    replicate: list[int],
) -> None:
    """Without names the last dimension shards, and the first of two replicates."""
    with fake_mesh(*sizes, names=names, rank=rank) as mesh:
        given = DataParallelMeshDims(**dims) if dims else None
        dp = DataParallelMesh.from_mesh(mesh, given)
        for axis, ranks in ((dp.shard, shard), (dp.replicate, replicate)):
            if ranks:
                assert (axis.size, axis.rank, ranks_of(axis)) == (len(ranks), ranks.index(rank), ranks)
            else:
                assert_absent(axis)
        assert dp.roles == ("replicate",) * bool(replicate) + ("shard",) * bool(shard)
        assert dp.mesh.ndim == len(dp.roles) and dp.device == torch.device("cpu")
        assert dp.spmd is (mesh if dims else None) and dp.dims == given
        assert dims or dp.mesh is mesh
        if shard:
            assert dp.shard_mesh.mesh.tolist() == shard
        again = DataParallelMesh.from_mesh(mesh, given)
        assert again.shard.group is dp.shard.group  # one communicator for all calls


@pytest.mark.parametrize(
    ("sizes", "names", "dims", "error", "text"),
    [
        ((2, 2, 2), NAMES[:3], None, ValueError, "expects a 1D or 2D DeviceMesh"),
        ((2, 2), (), None, AssertionError, "with mesh_dim_names specified"),
        ((2, 2), ("dp", "tp"), "cp", ValueError, "'cp' not found in"),
        ((4,), (), "dp", ValueError, "must have mesh_dim_names when dp_mesh_dims"),
        ((4,), ("dp",), (), ValueError, "At least one of shard or replicate"),
    ],
)
def test_dimensions_that_the_mesh_lacks_are_refused(
    sizes: tuple[int, ...], names: tuple[str, ...], dims: Any, error: type[Exception], text: str
) -> None:
    with fake_mesh(*sizes, names=names) as mesh, pytest.raises(error, match=text):
        DataParallelMesh.from_mesh(mesh, None if dims is None else DataParallelMeshDims(shard=dims))


def test_anything_but_a_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, got int; make one with"):
        DataParallelMesh.from_mesh(2)


def test_a_mesh_without_this_rank_is_refused() -> None:
    with fake_mesh(4, rank=3):
        others = DeviceMesh("cpu", [0, 1])
        with pytest.raises(ValueError, match="rank 3 is not part of the mesh"):
            DataParallelMesh.from_mesh(others)


# ---- default and regrouped meshes ----


def test_meshes_are_looked_at_as_they_are_under_fake_tensor_mode() -> None:
    """A mesh of two dimensions raised "Please convert all Tensors to FakeTensors first" there."""
    names = "replicate", "shard"
    with fake_mesh(2, 2, names=names, rank=1) as mesh:
        mixed = DeviceMesh("cpu", [[0, 1], [3, 2]], mesh_dim_names=names)
        with FakeTensorMode():
            whole = DataParallelMesh.from_mesh(mesh)
            assert (whole.replicate.rank, whole.shard.rank) == (0, 1)
            assert listed_ranks(whole.over_replicas().mesh_of_shards) == [0, 2, 1, 3]
            with pytest.raises(ValueError, match=re.escape("lists the ranks [[0, 1], [3, 2]]")):
                DataParallelMesh.from_mesh(mixed)


def test_the_default_mesh_is_one_per_process_group() -> None:
    with fake_mesh(4):
        first = default_mesh()
        assert first.mesh.tolist() == [0, 1, 2, 3] and first.device_type == "cpu"
        assert default_mesh() is first
    with fake_mesh(2):
        assert default_mesh().mesh.tolist() == [0, 1]


def test_the_default_mesh_is_on_an_accelerator_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # A torch built for CUDA names it on machines without one, too, unless asked to look.
    named = lambda check_available=False: None if check_available else torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", named)
    with fake_mesh(2):
        assert default_mesh().device_type == "cpu"


def test_the_default_mesh_makes_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    init = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda: init("fake", store=FakeStore(), rank=1, world_size=2))
    try:
        assert not dist.is_initialized()
        assert default_mesh().get_local_rank() == 1
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("rank", [0, 5])
def test_neighbours_are_grouped(size: int, rank: int) -> None:
    with fake_mesh(8, rank=rank) as mesh:
        grouped = regroup(mesh, size)
        assert grouped.mesh.tolist() == [list(range(start, start + size)) for start in range(0, 8, size)]
        assert ranks_of(Axis.of(grouped, 1)) == list(range(rank // size * size, (rank // size + 1) * size))
        assert regroup(mesh, size) is grouped  # process groups are made once


def test_neighbours_are_numbered_as_in_a_mesh_of_torchs() -> None:
    """Process groups sort ranks that the mesh does not, unless it was told to preserve their order (torch 2.15)."""
    order = torch.tensor([3, 1, 2, 0])
    with fake_mesh(4, rank=3):
        meshes = regroup(DeviceMesh("cpu", order), 2), DeviceMesh("cpu", order.view(2, 2))
        for ours, theirs in zip(*(mesh.get_all_groups() for mesh in meshes), strict=True):
            assert ours.rank() == theirs.rank()
            assert dist.get_process_group_ranks(ours) == dist.get_process_group_ranks(theirs)


def test_neighbours_are_not_those_of_an_earlier_default_process_group() -> None:
    """DTensor's caches hold meshes, and return them in place of equal ones of a later process group: full parameters
    that stay in pieces met groups that were destroyed ("dimension 1 of the mesh has no process group")."""
    with fake_mesh(4) as earlier:
        pass
    for _ in range(2):
        with fake_mesh(4) as mesh:
            for one in (mesh, earlier):
                assert ranks_of(Axis.of(regroup(one, 2), 1)) == [0, 1]


def test_neighbours_on_the_shard_axis_are_grouped_within_their_replica() -> None:
    with fake_mesh(2, 4, names=("replicas", "shards")) as mesh:
        assert regroup(mesh, 2).mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_later_dimensions_stay_as_they_are() -> None:
    with fake_mesh(4, 2, names=("dp", "tp")) as mesh:
        assert regroup_within(mesh, mesh["dp"], 2).mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_another_device_answers_for_itself() -> None:
    """A device that torch calls a CPU, with streams and a backend of its own: inside the block, and not outside."""
    streams, device = object(), torch.device("cpu")
    other = Platform(lambda device: streams, lambda group, device_type: "ccl" if device_type == "cpu" else "")
    with gloo_mesh() as mesh:
        with pytest.raises(KeyError), using(other):
            with using(simulated("nccl")):
                assert Axis.of(mesh, 0).is_nccl and platform().streams(device) is None
            axis = Axis.of(mesh, 0)
            assert axis.backend == "ccl" and axis.coalesces and not axis.is_nccl
            assert platform().streams(device) is streams
            raise KeyError
        assert Axis.of(mesh, 0).backend == "gloo" and platform().streams(device) is None
        assert Axis.of(mesh, 0).reaches_nobody, "one rank"
    with fake_mesh(2) as mesh, using(simulated("nccl")):
        assert Axis.of(mesh, 0).reaches_nobody, "ranks that are only pretended"
