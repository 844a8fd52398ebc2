"""How shards present themselves as DTensors, checked against torch.chunk and DTensor's own arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp2._torch.tensors import StridedShard
from fsdp2.policies import DataParallelMeshDims
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.mesh import DataParallelMesh
from fsdp2.sharding.spec import ShardedSpec, dense_strides, placed_alike
from tests.support.fake import fake_mesh
from tests.unit.meshes import as_rank
from tests.unit.strategies import chunk, counted, layouts, offsets


@pytest.fixture
def dp4(mesh: DeviceMesh) -> DataParallelMesh:
    """A shard axis of four ranks."""
    return DataParallelMesh.from_mesh(mesh)


class Quantized(Tensor):
    """A tensor that can be split, but perhaps not narrowed."""


def numbered(*shape: int) -> Tensor:
    """Return 0, 1, 2... in this shape."""
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def that_matter(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the strides that decide where an element lies; torch chooses the others as it likes."""
    return [] if 0 in shape else [step for size, step in zip(shape, stride) if size > 1]


# ---- plain parameters ----


@given(layouts(ranks=4), st.booleans())
def test_every_rank_cuts_what_torch_chunk_gives_it(dp4: DataParallelMesh, layout: ShardLayout, negative: bool) -> None:
    full = counted(layout)
    dim = layout.dim
    placement = None if dim is None else Shard(dim - full.ndim if negative else dim)
    for rank in range(4):
        spec = ShardedSpec.of(full, placement, as_rank(dp4, rank), "weight")
        expected = chunk(full, layout, rank)
        assert torch.equal(spec.cut(full), expected)
        assert torch.equal(spec.cut(full.as_subclass(Quantized)), expected)
        assert spec.cut(full).untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert (spec.layout.dim, spec.layout.ranks, spec.cuts[0].rank, spec.full) == (dim, 4, rank, None)
        assert spec.shard_shape == tuple(expected.shape) and spec.shard_numel == expected.numel()
        assert that_matter(spec.shard_shape, spec.shard_stride) == that_matter(
            layout.shard_shape(rank), layout.shard_stride(rank)
        )


@given(layouts(ranks=4))
def test_the_shard_is_a_dtensor_of_the_whole_around_the_piece_itself(
    dp4: DataParallelMesh, layout: ShardLayout
) -> None:
    full = counted(layout)
    spec = ShardedSpec.of(full, None if layout.dim is None else Shard(layout.dim), dp4, "weight")
    local = torch.empty_strided(spec.shard_shape, spec.shard_stride)
    shard = spec.shard(local)
    assert shard._local_tensor is local
    assert shard.shape == full.shape and shard.dtype == full.dtype
    assert that_matter(shard.shape, shard.stride()) == that_matter(full.shape, full.stride())
    assert shard.placements == (Replicate() if layout.dim is None else Shard(layout.dim),)
    assert shard.device_mesh == dp4.mesh
    assert compute_local_shape_and_global_offset(full.shape, dp4.mesh, shard.placements)[0] == spec.shard_shape


def test_without_a_placement_the_first_dimension_is_cut(dp4: DataParallelMesh) -> None:
    spec = ShardedSpec.of(numbered(8, 3), None, dp4, "weight")
    assert spec.layout.dim == 0 and spec.dtensor.placements == (Shard(0),)


@pytest.mark.parametrize("placement", [None, Shard(0), Shard(-1)])
def test_a_scalar_is_whole_whatever_was_asked(dp4: DataParallelMesh, placement: Shard | None) -> None:
    spec = ShardedSpec.of(torch.tensor(3.0), placement, dp4.replicated(), "scale")
    assert spec.layout.dim is None and spec.dtensor.placements == (Replicate(),)
    assert spec.cut(torch.tensor(3.0)).item() == 3.0


def test_a_piece_of_another_dtype_says_so(dp4: DataParallelMesh) -> None:
    spec = ShardedSpec.of(numbered(8, 3), None, dp4, "weight")
    shard = spec.shard_as(torch.zeros(2, 3, dtype=torch.float64))
    assert shard.dtype is torch.float64 and shard.shape == (8, 3)
    assert spec.shard(torch.zeros(2, 3)).dtype is torch.float32


def test_a_hybrid_mesh_replicates_first() -> None:
    with fake_mesh(2, 2, names=("replicas", "shards"), rank=3) as mesh:
        spec = ShardedSpec.of(numbered(4, 6), Shard(1), DataParallelMesh.from_mesh(mesh), "weight")
        assert spec.dtensor.placements == (Replicate(), Shard(1))
        assert torch.equal(spec.cut(numbered(4, 6)), numbered(4, 6)[:, 3:])


@pytest.fixture
def nested() -> Iterator[DataParallelMesh]:
    """Three replicas of two shards, without copies."""
    with fake_mesh(3, 2, names=("replicas", "shards")) as mesh:
        yield DataParallelMesh.from_mesh(mesh).over_replicas()


@given(layouts(ranks=2), st.integers(0, 1), st.integers(0, 2))
def test_pieces_are_cut_again_where_replicas_keep_no_copies(
    nested: DataParallelMesh, layout: ShardLayout, rank: int, replica: int
) -> None:
    full, dim = counted(layout), layout.dim
    mesh = replace(nested, shard=replace(nested.shard, rank=rank), replicate=replace(nested.replicate, rank=replica))
    spec = ShardedSpec.of(full, None if dim is None else Shard(dim), mesh, "weight")
    portion = chunk(full, layout, rank)
    again = spec.over_replicas
    assert again is not None and again.shape == tuple(portion.shape) and spec.over_all.ranks == 6
    expected = portion if dim is None else chunk(portion, again, replica)
    assert torch.equal(spec.cut(full), expected) and spec.shard_numel == expected.numel()
    assert spec.shard_shape == tuple(expected.shape)
    assert spec.dtensor.placements == ((Replicate(),) * 2 if dim is None else (Shard(dim),) * 2)
    assert spec.dtensor.mesh.mesh_dim_names == ("shards", "replicas")


def test_where_dtensor_finds_pieces_of_pieces() -> None:
    for rank in range(6):
        with fake_mesh(3, 2, names=("replicas", "shards"), rank=rank) as mesh:
            spec = ShardedSpec.of(numbered(11, 2), Shard(0), DataParallelMesh.from_mesh(mesh).over_replicas(), "weight")
            placed = spec.dtensor
            shape, offset = compute_local_shape_and_global_offset((11, 2), placed.mesh, placed.placements)
            assert shape == spec.shard_shape
            if spec.shard_numel:
                assert offset[0] == spec.bounds[0]


@pytest.mark.parametrize("placement", [Replicate(), Partial(), 0, "Shard(0)"])
def test_placements_that_do_not_cut_are_refused(dp4: DataParallelMesh, placement: object) -> None:
    with pytest.raises(AssertionError, match="weight: shard_placement_fn must return Shard or None, got"):
        ShardedSpec.of(numbered(4, 4), placement, dp4, "weight")


@pytest.mark.parametrize("dim", [2, -3])
def test_dimensions_that_do_not_exist_are_refused(dp4: DataParallelMesh, dim: int) -> None:
    with pytest.raises(AssertionError, match=r"is invalid for 2D tensor: \(4, 4\) \(weight\)"):
        ShardedSpec.of(numbered(4, 4), Shard(dim), dp4, "weight")


# ---- strides ----


@given(layouts(nonempty=True), st.data())
def test_dense_strides_close_gaps_and_keep_the_order(layout: ShardLayout, data: st.DataObject) -> None:
    tensor = counted(layout)
    for dim in range(tensor.ndim):
        if data.draw(st.booleans(), label=f"every other index of dimension {dim}"):
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
    strides = dense_strides(tensor)
    assert offsets(tensor.shape, strides) == list(range(tensor.numel()))
    large = [d for d in range(tensor.ndim) if tensor.shape[d] > 1]
    assert sorted(large, key=lambda d: strides[d]) == sorted(large, key=lambda d: tensor.stride(d))


def test_dense_strides_of_expanded_and_meta_tensors() -> None:
    strides = dense_strides(torch.ones(1, 3).expand(4, 3))
    assert offsets((4, 3), strides) == list(range(12))  # which do not overlap
    assert dense_strides(torch.empty(2, 3, device="meta").t()) == (1, 3)


# ---- parameters that tensor parallelism cut before ----


def on_mesh(whole: Tensor, mesh: DeviceMesh, *placements: Replicate | Shard) -> DTensor:
    """Return the DTensor of a whole tensor, its local piece cut without communication."""
    local = whole
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.tensor_split(mesh.size(dim), placement.dim)[mesh.get_local_rank(dim)]
    return DTensor.from_local(
        local.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def assert_lies_where_dtensor_says(spec: ShardedSpec, given: Tensor, whole: Tensor) -> None:
    """Assert that what is cut from ``given``, this rank's part before, is where DTensor looks for it in the whole."""
    shape, start = compute_local_shape_and_global_offset(whole.shape, spec.dtensor.mesh, spec.dtensor.placements)
    piece = spec.cut(given)
    assert tuple(piece.shape) == tuple(shape) == spec.shard_shape
    assert torch.equal(piece, whole[tuple(slice(first, first + size) for first, size in zip(start, shape))])
    assert spec.shard(piece).shape == whole.shape


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize(("tp", "cut"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_pieces_lie_where_dtensor_says(rank: int, tp: int, cut: int) -> None:
    """Tensor parallelism cuts dimension ``tp`` into 2, data parallelism what is left along ``cut`` into 4."""
    whole = numbered(16, 8)
    with fake_mesh(4, 2, names=("dp", "tp"), rank=rank) as mesh:
        param = on_mesh(whole, mesh["tp"], Shard(tp))
        dp = DataParallelMesh.from_mesh(mesh["dp"])
        assert ShardedSpec.least_padded(param, dp) == Shard(0)
        spec = ShardedSpec.of(param, Shard(cut), dp, "weight")
        own = StridedShard(cut, split_factor=2) if tp == cut else Shard(cut)
        assert spec.dtensor.placements == (own, Shard(tp))
        assert spec.dtensor.mesh.mesh.tolist() == mesh.mesh.tolist()
        assert_lies_where_dtensor_says(spec, param.to_local(), whole)


def test_pieces_on_other_meshes_of_other_dimensions_or_of_other_tensors_are_not_placed_alike() -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        one = on_mesh(numbered(4, 4), mesh["tp"], Shard(0))
        assert placed_alike(one, on_mesh(torch.ones(4, 4), mesh["tp"], Shard(0)))
        for shape, dim, place in (((4, 4), "dp", 0), ((4, 4), "tp", 1), ((4, 2), "tp", 0)):
            assert not placed_alike(one, on_mesh(numbered(*shape), mesh[dim], Shard(place)))


def test_forward_sees_a_dtensor_where_the_original_was_one() -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        param = on_mesh(numbered(4, 4), mesh["tp"], Shard(0))
        spec = ShardedSpec.of(param, None, DataParallelMesh.from_mesh(mesh["dp"]), "weight")
        local = torch.zeros(2, 4, dtype=torch.bfloat16)
        full = spec.wrap_full(local)
        assert isinstance(full, DTensor) and full._local_tensor is local
        assert (full.shape, full.dtype, full.placements) == (param.shape, torch.bfloat16, (Shard(0),))
        assert full.device_mesh == mesh["tp"]


def test_forward_sees_a_plain_tensor_where_the_original_was_one(dp4: DataParallelMesh) -> None:
    spec, full, grad = ShardedSpec.of(numbered(8, 3), None, dp4, "weight"), numbered(8, 3), torch.ones(8, 3)
    assert spec.wrap_full(full) is full
    assert spec.unwrap_gradient(grad) is grad


def test_a_gradient_in_another_layout_is_brought_to_the_parameters() -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        param = on_mesh(numbered(4, 4), mesh["tp"], Shard(0))
        spec = ShardedSpec.of(param, None, DataParallelMesh.from_mesh(mesh["dp"]), "weight")
        same = on_mesh(torch.ones(4, 4), mesh["tp"], Shard(0))
        assert spec.unwrap_gradient(same) is same._local_tensor
        other = on_mesh(torch.ones(4, 4), mesh["tp"], Replicate())
        assert torch.equal(spec.unwrap_gradient(other), torch.ones(2, 4))
        plain = torch.ones(2, 4)
        assert spec.unwrap_gradient(plain) is plain


# ---- subgroups ----


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("dim", [0, 1])
def test_a_subgroup_cuts_over_its_own_ranks_and_replicates_over_the_rest(rank: int, dim: int) -> None:
    whole = numbered(6, 5)
    with fake_mesh(4, names=("dp",), rank=rank) as mesh:
        dp = DataParallelMesh.from_mesh(mesh)
        spec = ShardedSpec.of(whole, Shard(dim), dp, "weight").on_subgroup(dp, 2)
        assert torch.equal(spec.cut(whole), whole.chunk(2, dim)[rank % 2])
        assert spec.dtensor.mesh.mesh.tolist() == [[0, 1], [2, 3]]
        assert spec.dtensor.placements == (Replicate(), Shard(dim))
        assert_lies_where_dtensor_says(spec, whole, whole)


@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("tp", [0, 1])
def test_a_subgroup_keeps_what_tensor_parallelism_cut(rank: int, tp: int) -> None:
    whole = numbered(16, 4)
    with fake_mesh(4, 2, names=("dp", "tp"), rank=rank) as mesh:
        dp = DataParallelMesh.from_mesh(mesh["dp"])
        param = on_mesh(whole, mesh["tp"], Shard(tp))
        spec = ShardedSpec.of(param, None, dp, "weight").on_subgroup(dp, 2)
        own = StridedShard(0, split_factor=2) if tp == 0 else Shard(0)
        assert spec.dtensor.placements == (Replicate(), own, Shard(tp))
        assert_lies_where_dtensor_says(spec, param.to_local(), whole)


# ---- parameters on the whole mesh (dp_mesh_dims) ----

SPMD = DataParallelMeshDims(shard="dp")


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("tp", [Replicate(), Shard(0), Shard(1)])
def test_a_parameter_on_the_whole_mesh_is_cut_on_its_data_parallel_dimension(rank: int, tp: Shard | Replicate) -> None:
    whole = numbered(8, 4)
    with fake_mesh(2, 2, names=("dp", "tp"), rank=rank) as mesh:
        param = on_mesh(whole, mesh, Replicate(), tp)
        spec = ShardedSpec.of(param, None, DataParallelMesh.from_mesh(mesh, SPMD), "weight")
        own = StridedShard(0, split_factor=2) if tp == Shard(0) else Shard(0)
        assert spec.dtensor.placements == (own, tp) and spec.dtensor.mesh is mesh
        assert spec.dp_dims == frozenset({0})
        assert_lies_where_dtensor_says(spec, param.to_local(), whole)


@pytest.mark.parametrize("rank", range(8))
def test_several_shard_dimensions_become_one(rank: int) -> None:
    whole = numbered(16, 4)
    with fake_mesh(2, 2, 2, names=("dp", "cp", "tp"), rank=rank) as mesh:
        dp = DataParallelMesh.from_mesh(mesh, DataParallelMeshDims(shard=("dp", "cp")))
        param = on_mesh(whole, mesh, Replicate(), Replicate(), Shard(0))
        spec = ShardedSpec.of(param, None, dp, "weight")
        assert spec.dtensor.mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert spec.dtensor.placements == (StridedShard(0, split_factor=2), Shard(0))
        assert_lies_where_dtensor_says(spec, param.to_local(), whole)


def test_partial_gradients_on_data_parallel_dimensions_are_left_to_the_reduction() -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        spec = ShardedSpec.of(
            on_mesh(numbered(8, 4), mesh, Replicate(), Shard(0)), None, DataParallelMesh.from_mesh(mesh, SPMD), "weight"
        )
        grad = DTensor.from_local(torch.ones(4, 4), mesh, (Partial(), Shard(0)), run_check=False)
        assert spec.unwrap_gradient(grad) is grad._local_tensor


def test_a_plain_parameter_is_refused_on_the_whole_mesh() -> None:
    with (
        fake_mesh(2, 2, names=("dp", "tp")) as mesh,
        pytest.raises(ValueError, match=r"plain tensor for parameter 'w'"),
    ):
        ShardedSpec.of(numbered(4, 4), None, DataParallelMesh.from_mesh(mesh, SPMD), "w")


def test_a_parameter_on_another_mesh_is_refused() -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        param = on_mesh(numbered(4, 4), mesh["tp"], Shard(0))
        with pytest.raises(ValueError, match="w: Expected param's DTensor mesh to be the same mesh"):
            ShardedSpec.of(param, None, DataParallelMesh.from_mesh(mesh, SPMD), "w")


@pytest.mark.parametrize("dims", [SPMD, DataParallelMeshDims(replicate="dp")])
def test_a_parameter_that_is_cut_on_a_data_parallel_dimension_is_refused(dims: DataParallelMeshDims) -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        param = on_mesh(numbered(4, 4), mesh, Shard(0), Replicate())
        with pytest.raises(ValueError, match=r"w: Expected Replicate\(\) on DP (shard|replicate) dim 'dp' \(index 0\)"):
            ShardedSpec.of(param, None, DataParallelMesh.from_mesh(mesh, dims), "w")


def test_specs_are_values(dp4: DataParallelMesh) -> None:
    one, other = (ShardedSpec.of(numbered(8, 3), None, dp4, "weight") for _ in range(2))
    assert one == other
    assert replace(one, cuts=(one.cuts[0]._replace(rank=3),)) != one
