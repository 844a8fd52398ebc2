"""torch's own fully_shard: what stands in for it, and what must not be mixed up with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp as torch_fsdp

# torch's test helpers and trackers patch the class of groups, which they import from this module.
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group_module

# Newer than torch 2.11: what code written for torch's fully_shard returns from shard_placement_fn.
from torch.distributed.fsdp._fully_shard import _fsdp_common

# The phase and residency of a group under the names by which torch's test helpers and trackers ask for them.
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

# To tell a module that torch's own fully_shard manages, which must not be mixed with ours in one tree.
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchFSDPState

__all__ = [
    "ShardedState",
    "TorchDataParallelMeshDims",
    "TorchFSDPState",
    "TorchShardPlacementResult",
    "TrainingState",
    "torch_fully_shard",
    "torch_group_module",
]

# Newer than torch 2.11, where there is nothing to be mixed up with them; ours is built from a DeviceMesh, and the
# latter names the data-parallel dimensions of a mesh.
TorchShardPlacementResult: Any = getattr(_fsdp_common, "ShardPlacementResult", None)
TorchDataParallelMeshDims: Any = getattr(torch_fsdp, "DataParallelMeshDims", None)

# The function under whose name torch keeps a module's state; taken now, since install() replaces the public one.
torch_fully_shard: Callable[..., Any] = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]  # contract() made it
