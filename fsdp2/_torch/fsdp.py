"""torch's own fully_shard: what stands in for it, and what must not be mixed up with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp as torch_fsdp

# The phase and residency of a group under the names by which torch's test helpers and trackers ask for them.
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

# To tell a module that torch's own fully_shard manages, which must not be mixed with ours in one tree.
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as TorchFSDPState

__all__ = [
    "ShardedState",
    "TorchFSDPState",
    "TrainingState",
    "torch_fully_shard",
]

# The function under whose name torch keeps a module's state; taken now, since install() replaces the public one.
torch_fully_shard: Callable[..., Any] = torch_fsdp.fully_shard.__wrapped__  # type: ignore[attr-defined]  # contract() made it
