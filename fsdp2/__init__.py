"""fsdp2: composable per-module parameter sharding on DTensor; a drop-in ``fully_shard`` for PyTorch."""

import importlib as _importlib
import typing as _typing

from fsdp2.compression.policy import CompressionPolicy
from fsdp2.forward_methods import register_fsdp_forward_method
from fsdp2.fsdp1 import names as _names
from fsdp2.fully_shard import fully_shard
from fsdp2.grouping.modules import fsdp_modules, no_sync
from fsdp2.grouping.plan import plan_units
from fsdp2.module import FSDPModule, share_comm_ctx
from fsdp2.optim.clip import clip_grad_norm_
from fsdp2.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    GradientReductionHandle,
    OffloadPolicy,
    ShardPlacementResult,
    UnshardHandle,
)
from fsdp2.policies import PublicMixedPrecisionPolicy as MixedPrecisionPolicy
from fsdp2.ranks.process import set_rank_checks

if _typing.TYPE_CHECKING:
    from fsdp2.engine.use import use_weights
    from fsdp2.fsdp1.install import install, uninstall
    from fsdp2.fsdp1.state_dict.optimizer import optim_state_dict, optim_state_dict_to_load
    from fsdp2.fsdp1.state_dict.settings import get_state_dict_type, set_state_dict_type, state_dict_type
    from fsdp2.grouping.offloading import cpu_offload_by_budget
    from fsdp2.grouping.padding import padding_report
    from fsdp2.optim.grad_scaler import ShardedGradScaler
    from fsdp2.optim.local.local_step import use_local_shards
    from fsdp2.optim.offload import offload_optimizer_state
    from fsdp2.optim.whole.full_params import use_full_params
    from fsdp2.tools.forecast.recording import record_steps
    from fsdp2.tools.forecast.run import forecast
    from fsdp2.weights.export import iter_full_params
    from fsdp2.weights.load import broadcast_from_rank0, load_safetensors
    from fsdp2.weights.local_pieces import merge_local_state_dicts
    from fsdp2.weights.save import save_safetensors
    from fsdp2.weights.summon import summon_full_params
    from fsdp2.weights.sync import sync_module_states
    from fsdp2.weights.updates.bucket import WeightBucket
    from fsdp2.weights.updates.link import weight_sync_group
    from fsdp2.weights.updates.receiver import WeightReceiver
    from fsdp2.weights.updates.sender import SentWeights, WeightSender

__all__ = [
    "CPUOffloadPolicy",
    "CompressionPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "SentWeights",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "UnshardHandle",
    "WeightBucket",
    "WeightReceiver",
    "WeightSender",
    "broadcast_from_rank0",
    "clip_grad_norm_",
    "cpu_offload_by_budget",
    "forecast",
    "fsdp_modules",
    "fully_shard",
    "get_state_dict_type",
    "install",
    "iter_full_params",
    "load_safetensors",
    "merge_local_state_dicts",
    "no_sync",
    "offload_optimizer_state",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "padding_report",
    "plan_units",
    "record_steps",
    "register_fsdp_forward_method",
    "save_safetensors",
    "set_rank_checks",
    "set_state_dict_type",
    "share_comm_ctx",
    "state_dict_type",
    "summon_full_params",
    "sync_module_states",
    "uninstall",
    "use_full_params",
    "use_local_shards",
    "use_weights",
    "weight_sync_group",
]

# Imported at the first use: what a program that only shards and trains does not need.
_LATER = {
    "SentWeights": "fsdp2.weights.updates.sender",
    "ShardedGradScaler": "fsdp2.optim.grad_scaler",
    "WeightBucket": "fsdp2.weights.updates.bucket",
    "WeightReceiver": "fsdp2.weights.updates.receiver",
    "WeightSender": "fsdp2.weights.updates.sender",
    "broadcast_from_rank0": "fsdp2.weights.load",
    "cpu_offload_by_budget": "fsdp2.grouping.offloading",
    "forecast": "fsdp2.tools.forecast.run",
    "get_state_dict_type": "fsdp2.fsdp1.state_dict.settings",
    "install": "fsdp2.fsdp1.install",
    "iter_full_params": "fsdp2.weights.export",
    "load_safetensors": "fsdp2.weights.load",
    "merge_local_state_dicts": "fsdp2.weights.local_pieces",
    "offload_optimizer_state": "fsdp2.optim.offload",
    "optim_state_dict": "fsdp2.fsdp1.state_dict.optimizer",
    "optim_state_dict_to_load": "fsdp2.fsdp1.state_dict.optimizer",
    "padding_report": "fsdp2.grouping.padding",
    "record_steps": "fsdp2.tools.forecast.recording",
    "save_safetensors": "fsdp2.weights.save",
    "set_state_dict_type": "fsdp2.fsdp1.state_dict.settings",
    "state_dict_type": "fsdp2.fsdp1.state_dict.settings",
    "summon_full_params": "fsdp2.weights.summon",
    "sync_module_states": "fsdp2.weights.sync",
    "uninstall": "fsdp2.fsdp1.install",
    "use_full_params": "fsdp2.optim.whole.full_params",
    "use_local_shards": "fsdp2.optim.local.local_step",
    "use_weights": "fsdp2.engine.use",
    "weight_sync_group": "fsdp2.weights.updates.link",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(_importlib.import_module(_LATER[name]), name)
    return found


_names.give_names()
