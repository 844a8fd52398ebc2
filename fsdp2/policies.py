"""What a user may ask for: torch's own policy classes, re-exported so that ``isinstance`` agrees everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from torch.distributed.tensor import Shard

from fsdp2._torch import AllGather, ReduceScatter, TorchDataParallelMeshDims

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardHandle",
]


@dataclass
class _DataParallelMeshDims:
    """Which dimensions of a mesh are data-parallel: torch's class of that name, for a torch that lacks it.

    Raises:
        ValueError: neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("At least one of shard or replicate must be set in DataParallelMeshDims")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dimensions parameters are cut over."""
        return (self.shard,) if isinstance(self.shard, str) else tuple(self.shard or ())

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dimensions that hold copies."""
        return (self.replicate,) if isinstance(self.replicate, str) else tuple(self.replicate or ())


if TYPE_CHECKING:
    from torch.distributed.fsdp import DataParallelMeshDims
else:
    DataParallelMeshDims = TorchDataParallelMeshDims or _DataParallelMeshDims


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` returns to put a parameter on a mesh of its own, such as an expert's.

    Attributes:
        placement: The dimension to cut; None for the first.
        mesh_info: The 1D or 2D mesh to cut it over, read as ``fully_shard`` reads its ``mesh``.
    """

    placement: Shard | None
    mesh_info: DeviceMesh
