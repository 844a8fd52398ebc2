"""What torch calls the parts of a group; libraries, memory trackers and torch's own tests read them by these names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fsdp2._torch.fsdp import ShardedState, TrainingState
from fsdp2.comm.gather import Gathering
from fsdp2.comm.streams import InFlight
from fsdp2.engine.lifecycle import Residency
from fsdp2.engine.param import FSDPParam
from fsdp2.sharding.mesh import DataParallelMesh

if TYPE_CHECKING:
    from fsdp2.engine.group import FSDPParamGroup

__all__ = [
    "all_gather_result",
    "fsdp_params",
    "is_sharded",
    "is_unsharded",
    "mesh_info",
    "module_fqn",
    "orig_dtype",
    "reduce_dtype",
    "reduce_scatter_max_input_buffers",
    "reshard_after_forward",
    "sharded_state",
    "training_state",
]

_TRAINING_STATES = ("IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD")  # by Phase
_SHARDED_STATES = ("SHARDED", "SHARDED", "UNSHARDED", "SHARDED_POST_FORWARD")  # by Residency


def fsdp_params(group: FSDPParamGroup) -> list[FSDPParam]:
    """Its parameters."""
    return group.params


def module_fqn(group: FSDPParamGroup) -> str:
    """Its modules' names in the root."""
    return group.name


def mesh_info(group: FSDPParamGroup) -> DataParallelMesh:
    """Its mesh."""
    return group.mesh


def training_state(group: FSDPParamGroup) -> TrainingState:
    """Where it is in the iteration; while a step belongs to a phase before or ahead, that one."""
    return TrainingState[_TRAINING_STATES[group.acting_for or group.lifecycle.phase]]


def sharded_state(group: FSDPParamGroup) -> ShardedState:
    """Where its parameters are; on their way counts as sharded."""
    return ShardedState[_SHARDED_STATES[group.lifecycle.residency]]


def all_gather_result(group: FSDPParamGroup) -> InFlight[Gathering] | None:
    """Its gather in flight."""
    return group.gathering


def reshard_after_forward(group: FSDPParamGroup) -> bool:
    """Whether its full parameters are freed after forward."""
    return group.after_forward is not False


def reduce_scatter_max_input_buffers(group: FSDPParamGroup) -> int:
    """How many chunks of gradients it asked to have in flight; 1 where it left that to the backend, as torch says."""
    return group.options.reduce_inputs or 1


def is_unsharded(group: FSDPParamGroup) -> bool:
    """Whether the modules show full parameters."""
    return group.lifecycle.residency is Residency.UNSHARDED


def is_sharded(group: FSDPParamGroup) -> bool:
    """Whether the modules show shards."""
    return group.lifecycle.residency in (Residency.SHARDED, Residency.GATHERING)


def orig_dtype(group: FSDPParamGroup) -> torch.dtype | None:
    """The dtype its parameters are kept in: of the first that trains, else of the first that could."""
    return next((param.dtype for param in _trainable_first(group)), None)


def reduce_dtype(group: FSDPParamGroup) -> torch.dtype | None:
    """The dtype the gradient of that parameter is summed in."""
    return next((param.reduce_dtype for param in _trainable_first(group)), None)


def _trainable_first(group: FSDPParamGroup) -> list[FSDPParam]:
    floating = [param for param in group.params if param.dtype.is_floating_point]
    return sorted(floating, key=lambda param: not param.requires_grad)
