"""What a user may ask for: torch's own policy classes, re-exported so that ``isinstance`` agrees everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)
from torch.distributed.tensor import Shard

from fsdp2._torch import AllGather, ReduceScatter

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


@dataclass(frozen=True)
class ShardPlacementResult:
    """What ``shard_placement_fn`` returns to put a parameter on a mesh of its own, such as an expert's.

    Attributes:
        placement: The dimension to cut; None for the first.
        mesh_info: The 1D or 2D mesh to cut it over, read as ``fully_shard`` reads its ``mesh``.
    """

    placement: Shard | None
    mesh_info: DeviceMesh
