"""How a shard presents itself as a DTensor: mesh, placements, global shape, and the way back to a plain tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp2._torch import DTensorSpec, TensorMeta, dtensor_from_local
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.mesh import DataParallelMesh

__all__ = ["ShardedSpec", "dense_strides"]


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of ``tensor`` without gaps or overlap, in the same order of dimensions."""
    return torch.empty_like(tensor.detach().to("meta") if not tensor.is_meta else tensor).stride()


@dataclass(frozen=True)
class ShardedSpec:
    """One parameter cut over a mesh: the layout of its pieces, which one is ours, and the DTensor spec of the shard."""

    layout: ShardLayout
    rank: int
    dtensor: DTensorSpec

    @classmethod
    def of(cls, param: torch.Tensor, placement: Shard | None, mesh: DataParallelMesh, name: str) -> ShardedSpec:
        """Cut ``param`` as ``placement`` says (default: the first dimension).

        Raises:
            NotImplementedError: ``param`` already is a DTensor.
            AssertionError: the placement is not a ``Shard`` or its dimension does not exist (torch's contract).
        """
        if isinstance(param, DTensor):
            raise NotImplementedError(
                f"{name}: fully_shard on a parameter that already is a DTensor ({param.placements} on "
                f"{param.device_mesh}) is not supported yet; apply fully_shard to plain parameters"
            )
        dim = _shard_dim(param, placement, name)
        layout = ShardLayout(tuple(param.shape), dense_strides(param), dim, mesh.shard.size)
        placements: tuple[Placement, ...] = (Replicate() if dim is None else Shard(dim),)
        if mesh.mesh.ndim == 2:
            placements = (Replicate(), *placements)
        meta = TensorMeta(param.shape, layout.stride, param.dtype)
        return cls(layout, mesh.shard.rank, DTensorSpec(mesh.mesh, placements, tensor_meta=meta))

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of this rank's piece."""
        return self.layout.shard_shape(self.rank)

    @property
    def shard_stride(self) -> tuple[int, ...]:
        """The strides of this rank's piece."""
        return self.layout.shard_stride(self.rank)

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's piece."""
        return self.layout.shard_numel(self.rank)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's piece of ``full``, a view."""
        if self.layout.dim is None:
            return full
        return full.narrow(self.layout.dim, *self.layout.bounds(self.rank))

    def shard(self, local: torch.Tensor) -> DTensor:
        """The DTensor whose local piece is ``local`` (the tensor itself, no view of it)."""
        return dtensor_from_local(local, self.dtensor)

    def shard_as(self, local: torch.Tensor) -> DTensor:
        """Like ``shard``, for a piece of another dtype than the parameter's."""
        meta = self.dtensor.tensor_meta
        assert meta is not None
        other = TensorMeta(meta.shape, meta.stride, local.dtype)
        return dtensor_from_local(local, replace(self.dtensor, tensor_meta=other))


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
