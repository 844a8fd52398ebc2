"""torch's own fully_shard, and the names of its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp as torch_fsdp

# torch's names for the phase and residency of a group and the places of a parameter, which its test helpers, trackers
# and libraries use.
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ParamModuleInfo, ShardedState

# To recognize modules that torch's own fully_shard manages, which must not be mixed with ours in one tree.
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchFSDPState

__all__ = [
    "ParamModuleInfo",
    "ShardedState",
    "TorchFSDPState",
    "TrainingState",
    "torch_fully_shard",
]

# torch keeps a module's state under this function. Taken at import, because install() replaces the public name.
torch_fully_shard: Callable[..., Any] = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]  # contract() made it
