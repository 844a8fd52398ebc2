"""The sharding of one parameter: the DTensor of its shard, and that of the full parameter if it was a DTensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp2._torch.tensors import (
    AsyncCollectiveTensor,
    DTensorSpec,
    StridedShard,
    TensorMeta,
    concatenate_meshes,
    dtensor_from_local,
    dtensor_spec,
    local_tensor,
)
from fsdp2.sharding.layout import Cut, ShardLayout
from fsdp2.sharding.mesh import Axis, DataParallelMesh, regroup_within, shard_first

__all__ = ["ShardedSpec", "arrived", "cut_dim", "dense_strides", "dtensor_like", "on_this_rank", "placed_alike"]


def on_this_rank(tensor: Any) -> Any:
    """Return the local tensor of a DTensor (the same object, without a copy), or any other tensor unchanged."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def dtensor_like(shard: Any, local: torch.Tensor) -> DTensor:
    """Return a DTensor with the placements of ``shard``, and with the local tensor ``local`` and its dtype."""
    return dtensor_from_local(local, _with_dtype(dtensor_spec(shard), local.dtype))


def placed_alike(one: Any, other: Any) -> bool:
    """Return True if both are DTensors with the same elements on each rank; their dtypes may differ."""
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return False
    mine, theirs = dtensor_spec(one), dtensor_spec(other)
    if mine is theirs:
        return True
    return mine.placements == theirs.placements and mine.shape == theirs.shape and mine.mesh == theirs.mesh


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` after waiting for a collective of tensor parallelism that may still write it."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def cut_dim(placement: Placement) -> int | None:
    """Return the dimension that ``placement`` cuts, also for strided shards, or None if it cuts none."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return strides for the shape and the memory order of ``tensor``, without gaps or overlap."""
    shape, stride = tensor.shape, tensor.stride()
    order = range(tensor.ndim) if tensor.is_contiguous() else sorted(range(tensor.ndim), key=lambda d: -stride[d])
    dense, step = [0] * tensor.ndim, 1
    for d in reversed(order):
        dense[d] = step
        step *= max(shape[d], 1)
    return tuple(dense)


@dataclass(frozen=True)
class ShardedSpec:
    """The sharding of one parameter over a mesh.

    ``cuts`` are those of the tensor that this process computes with: the parameter, or its local tensor if tensor
    parallelism made it a DTensor. The first is over the shard axis; with ``shard_over_replicas``, another one cuts its
    piece over the replicate axis. ``dtensor`` is the DTensor spec of the shard, and ``full`` that of the full parameter
    (None for a plain tensor). ``dp_dims`` are the dimensions of the mesh of ``full`` over which fsdp2 sums gradients,
    and tensor parallelism does not.
    """

    cuts: tuple[Cut, ...]
    dtensor: DTensorSpec
    full: DTensorSpec | None = None
    dp_dims: frozenset[int] = frozenset()

    @classmethod
    def of(cls, param: torch.Tensor, placement: Shard | None, mesh: DataParallelMesh, name: str) -> ShardedSpec:
        """Return the spec of ``param`` along the dimension of ``placement`` (default: the first).

        Raises:
            AssertionError: The placement is not a ``Shard``, or its dimension does not exist (torch's contract).
            ValueError: ``dp_mesh_dims`` is used, and ``param`` is not placed on the mesh as required.
        """
        is_dtensor = isinstance(param, DTensor)
        local = on_this_rank(param)
        dim = _shard_dim(local, placement, name)
        layout = ShardLayout(tuple(local.shape), dense_strides(local), dim, mesh.shard.size)
        if mesh.spmd is not None:
            if not is_dtensor:
                raise ValueError(
                    "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh (e.g. via "
                    f"distribute_module). Got plain tensor for parameter '{name}'."
                )
            return _on_spmd_mesh(layout, dtensor_spec(param), mesh, name)
        own = tuple(_dp_placement(role, dim, 1) for role in mesh.roles)
        if not is_dtensor:
            meta = TensorMeta(param.shape, layout.stride, param.dtype)
            return cls._of_layout(layout, mesh, DTensorSpec(mesh.mesh_of_shards, own, tensor_meta=meta))
        full = dtensor_spec(param)
        own = tuple(_dp_placement(role, dim, _pieces(full, dim)) for role in mesh.roles)
        whole = concatenate_meshes([mesh.mesh, full.mesh])
        whole = shard_first(whole) if mesh.has_portions else whole
        both = DTensorSpec(whole, (*own, *full.placements), tensor_meta=full.tensor_meta)
        return cls._of_layout(layout, mesh, both, full)

    @classmethod
    def _of_layout(
        cls, layout: ShardLayout, mesh: DataParallelMesh, dtensor: DTensorSpec, full: DTensorSpec | None = None
    ) -> ShardedSpec:
        """Return the spec of a parameter with ``layout``, cut again over the replicate axis if ``mesh`` says so."""
        first = Cut(layout, mesh.shard.rank)
        again = (first.again(mesh.parts, mesh.replicate.rank),) if mesh.has_portions else ()
        return cls((first, *again), dtensor, full)

    @classmethod
    def of_shard(cls, shard: DTensor, mesh: DataParallelMesh) -> ShardedSpec | None:
        """Return the spec of a DTensor already sharded over ``mesh`` as fsdp2 shards, or None for any other."""
        placed = dtensor_spec(shard)
        dim = next((p.dim for p in placed.placements if isinstance(p, Shard)), None)
        own = tuple(_dp_placement(role, dim, 1) for role in mesh.roles)
        if placed.mesh != mesh.mesh_of_shards or dim is None or tuple(placed.placements) != own:
            return None
        layout = ShardLayout(tuple(shard.shape), dense_strides(shard), dim, mesh.shard.size)
        # Not the mesh of ``shard``: on some ranks DTensor's caches may have returned an equal mesh with other process
        # groups for it.
        return cls._of_layout(layout, mesh, replace(placed, mesh=mesh.mesh_of_shards))

    @staticmethod
    def least_padded(param: torch.Tensor, mesh: DataParallelMesh) -> Shard | None:
        """Return the placement of ``param`` with the least padding, the same on every rank; None for a scalar."""
        if not param.ndim:
            return None
        local, shape = param, list(param.shape)
        if isinstance(param, DTensor):  # local tensors may differ in size: use the size on the first rank
            local = local_tensor(param)
            for i, placement in enumerate(param.placements):
                if (dim := cut_dim(placement)) is not None:
                    shape[dim] = -(-shape[dim] // param.device_mesh.size(i))
        ranks = mesh.shard.size * mesh.parts
        best = ShardLayout.least_padded(tuple(shape), dense_strides(local), ranks)
        assert best.dim is not None
        return Shard(best.dim)

    @property
    def layout(self) -> ShardLayout:
        """The layout over the shard axis."""
        return self.cuts[0].layout

    @property
    def over_replicas(self) -> ShardLayout | None:
        """The layout over the replicate axis of the piece that the shard axis leaves; None if that is not cut."""
        return self.cuts[1].layout if len(self.cuts) > 1 else None

    @property
    def over_all(self) -> ShardLayout:
        """The layout over all ranks that share the parameter; rounding up twice gives pieces of the same size."""
        return replace(self.layout, ranks=math.prod(cut.layout.ranks for cut in self.cuts))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        return self.cuts[-1].shape

    @property
    def shard_stride(self) -> tuple[int, ...]:
        """The strides of this rank's piece."""
        return self.cuts[-1].stride

    @property
    def shard_numel(self) -> int:
        """The number of elements of this rank's piece."""
        return math.prod(self.shard_shape)

    @property
    def reaches_all_ranks(self) -> bool:
        """True if no rank's piece is empty."""
        parts = self.cuts[1].layout.ranks if len(self.cuts) > 1 else 1
        ends = {0, self.layout.ranks - 1}  # if the last piece has elements, those before it are as long as the first
        return all(self.layout.within(rank, parts).shard_numel(parts - 1) for rank in ends)

    @property
    def bounds(self) -> tuple[int, int]:
        """(start, length) of this rank's piece along the sharded dimension."""
        found = [cut.layout.bounds(cut.rank) for cut in self.cuts]
        return sum(start for start, _ in found), found[-1][1]

    @property
    def sums_elsewhere(self) -> bool:
        """True if tensor parallelism replicates the parameter, so that its gradient may be a partial sum."""
        if self.full is None:
            return False
        return any(p.is_replicate() for i, p in enumerate(self.full.placements) if i not in self.dp_dims)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return a view of this rank's piece of ``full``, a plain tensor."""
        if self.layout.dim is None:
            return full
        # Quantized weights can be split, but not narrowed; they are not sharded twice.
        if len(self.cuts) == 1 and type(full) not in (torch.Tensor, torch.nn.Parameter):
            pieces = full.chunk(self.layout.ranks, self.layout.dim)
            if self.cuts[0].rank < len(pieces):
                return pieces[self.cuts[0].rank]
        return full.narrow(self.layout.dim, *self.bounds)

    def shard(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor with the local tensor ``local`` (the same object, not a view)."""
        return dtensor_from_local(local, self.dtensor)

    def shard_as(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor of ``local``, which may have another dtype than the parameter."""
        return dtensor_from_local(local, _with_dtype(self.dtensor, local.dtype))

    @staticmethod
    def shards_as(specs: Sequence[ShardedSpec], locals_: Sequence[torch.Tensor]) -> list[DTensor]:
        """Call ``shard_as`` for each pair, fast for thousands of them."""
        placed = [spec.dtensor for spec in specs]
        if any([spec.tensor_meta.dtype != local.dtype for spec, local in zip(placed, locals_)]):  # type: ignore[union-attr]  # a shard's has one
            placed = [_with_dtype(spec, local.dtype) for spec, local in zip(placed, locals_)]
        return [dtensor_from_local(local, spec) for local, spec in zip(locals_, placed)]

    def wrap_full(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the full parameter for forward: ``tensor``, or a DTensor of it if the original was one."""
        if self.full is None:
            return tensor
        return dtensor_from_local(tensor, _with_dtype(self.full, tensor.dtype))

    def of_plain(self, plain: torch.Tensor) -> torch.Tensor:
        """Return the part of a whole plain tensor that this rank computes with, without communication."""
        if self.full is None:
            return plain
        return local_tensor(distribute_tensor(plain.detach(), self.full.mesh, self.full.placements, src_data_rank=None))

    def unwrap_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a full parameter's gradient, after the sums of tensor parallelism.

        Dimensions that fsdp2 sums over are left as they are: the reduction expects partial gradients there.
        """
        if self.full is None or not isinstance(grad, DTensor):
            return grad
        wanted = tuple(
            got if i in self.dp_dims else want
            for i, (got, want) in enumerate(zip(grad.placements, self.full.placements))
        )
        if wanted != tuple(grad.placements):
            grad = grad.redistribute(placements=wanted)
        return local_tensor(grad)

    def on_subgroup(self, mesh: DataParallelMesh, size: int) -> ShardedSpec:
        """Return the spec for ``size`` neighbours of the shard axis, replicated over the rest."""
        layout = replace(self.layout, ranks=size)
        grouped = regroup_within(self.dtensor.mesh, mesh.mesh, size)
        own = (Replicate(), _dp_placement("shard", layout.dim, _pieces(self.full, layout.dim)))
        rest = self.dtensor.placements[mesh.mesh.ndim :]
        spec = DTensorSpec(grouped, (*own, *rest), tensor_meta=self.dtensor.tensor_meta)
        return ShardedSpec((Cut(layout, Axis.of(grouped, 1).rank),), spec, self.full, self.dp_dims)


def _with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return ``spec`` with ``dtype``; the same object if it has that dtype already."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype == dtype:
        return spec
    return replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))


def _pieces(full: DTensorSpec | None, dim: int | None) -> int:
    """Return the number of pieces into which tensor parallelism cuts the dimension ``dim`` of a full parameter."""
    return 1 if full is None or dim is None else full.num_shards_map[dim]


def _dp_placement(role: str, dim: int | None, factor: int) -> Placement:
    """Return the placement for a data-parallel dimension, after others have sharded the parameter ``factor`` times."""
    if role == "replicate" or dim is None:
        return Replicate()
    return Shard(dim) if factor == 1 else StridedShard(dim, split_factor=factor)


def _on_spmd_mesh(layout: ShardLayout, full: DTensorSpec, mesh: DataParallelMesh, name: str) -> ShardedSpec:
    """Return the spec of a parameter that already lies on the mesh of ``dp_mesh_dims``."""
    assert mesh.dims is not None and mesh.spmd is not None
    names = mesh.spmd.mesh_dim_names or ()
    if full.mesh is not mesh.spmd and full.mesh != mesh.spmd:
        raise ValueError(
            f"{name}: Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got different mesh "
            f"objects: {full.mesh} and {mesh.spmd}"
        )
    shard_dims = [names.index(n) for n in mesh.dims.shard_names]
    replicate_dims = [names.index(n) for n in mesh.dims.replicate_names]
    for kind, dims in (("shard", shard_dims), ("replicate", replicate_dims)):
        for i in dims:
            if not isinstance(full.placements[i], Replicate):
                raise ValueError(
                    f"{name}: Expected Replicate() on DP {kind} dim '{names[i]}' (index {i}) but got "
                    f"{full.placements[i]}; distribute the parameter with Replicate() on data-parallel dimensions"
                )
    placements = list(full.placements)
    for i in shard_dims:
        later = range(i + 1, mesh.spmd.ndim)
        sizes = [mesh.spmd.size(j) for j in later if cut_dim(full.placements[j]) == layout.dim]
        placements[i] = _dp_placement("shard", layout.dim, math.prod(sizes))
    spec = DTensorSpec(mesh.spmd, tuple(placements), tensor_meta=full.tensor_meta)
    if len(shard_dims) > 1:
        spec = _flatten_shard_dims(spec, mesh, names)
    cut = Cut(layout, mesh.shard.rank)
    return ShardedSpec((cut,), spec, full, frozenset(shard_dims + replicate_dims))


def _flatten_shard_dims(spec: DTensorSpec, mesh: DataParallelMesh, names: tuple[str, ...]) -> DTensorSpec:
    """Return ``spec`` with several shard dimensions flattened to one, so that the shard is cut once."""
    assert mesh.dims is not None and mesh.spmd is not None
    shard, replicate = set(mesh.dims.shard_names), set(mesh.dims.replicate_names)
    parts: list[DeviceMesh] = []
    placements: list[Placement] = []
    for i, name in enumerate(names):
        if name in shard:
            if mesh.mesh in parts:  # the flattened mesh stands for all of them, at the place of the first
                continue
            parts.append(mesh.mesh)
            placements += [Replicate()] * (mesh.mesh.ndim - 1) + [spec.placements[i]]
        elif name not in replicate:
            parts.append(mesh.spmd[name])
            placements.append(spec.placements[i])
    return DTensorSpec(concatenate_meshes(parts), tuple(placements), tensor_meta=spec.tensor_meta)


def _shard_dim(param: torch.Tensor, placement: Shard | None, name: str) -> int | None:
    if placement is not None and not isinstance(placement, Shard):
        raise AssertionError(f"{name}: shard_placement_fn must return Shard or None, got {placement!r}")
    if param.ndim == 0:
        return None
    dim = 0 if placement is None else placement.dim
    dim = dim + param.ndim if dim < 0 else dim
    if not 0 <= dim < param.ndim:
        raise AssertionError(
            f"Shard dim {dim} is invalid for {param.ndim}D tensor: {tuple(param.shape)} ({name}); "
            f"return Shard(d) with d < {param.ndim} from shard_placement_fn"
        )
    return dim
