"""What a user may ask for: torch's own policy classes, re-exported so that ``isinstance`` agrees everywhere."""

from __future__ import annotations

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
)

from fsdp2._torch import AllGather, ReduceScatter

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "UnshardHandle",
]
