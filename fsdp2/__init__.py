"""fsdp2: composable per-module parameter sharding on DTensor; a drop-in ``fully_shard`` for PyTorch."""

from fsdp2.full.export import iter_full_params
from fsdp2.full.summon import summon_full_params
from fsdp2.fully_shard import fully_shard
from fsdp2.install import install, uninstall
from fsdp2.module import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from fsdp2.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    UnshardHandle,
)
from fsdp2.weights import use_weights

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardPlacementResult",
    "UnshardHandle",
    "fully_shard",
    "install",
    "iter_full_params",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "summon_full_params",
    "uninstall",
    "use_weights",
]
