"""What is documented: scripts that write pages, the code that pages show, and the names that fsdp2 adds to torch's."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

from tests.support import ROOT

__all__ = [
    "EXTRA_METHODS",
    "EXTRA_NAMES",
    "EXTRA_PARAMETERS",
    "NEWER_METHODS",
    "NEWER_NAMES",
    "NEWER_PARAMETERS",
    "script",
    "snippets",
]


EXTRA_METHODS = {"set_compression", "set_deterministic_reduction", "set_transfer_sizes", "state_dict", "zero_grad"}
"""Public methods that torch's FSDPModule does not have."""
EXTRA_NAMES = {
    "CompressionPolicy",
    "SentWeights",
    "ShardedGradScaler",
    "WeightBucket",
    "WeightReceiver",
    "WeightSender",
    "broadcast_from_rank0",
    "clip_grad_norm_",
    "cpu_offload_by_budget",
    "forecast",
    "fsdp_modules",
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
    "save_safetensors",
    "set_rank_checks",
    "set_state_dict_type",
    "state_dict_type",
    "summon_full_params",
    "sync_module_states",
    "uninstall",
    "use_full_params",
    "use_local_shards",
    "use_weights",
    "weight_sync_group",
}
"""Public names of the package that torch has not at all."""
EXTRA_PARAMETERS: dict[str, set[str]] = {
    "fully_shard": {"compression", "ignored_modules", "policy", "replicated_params", "shard_over_replicas", "strategy"},
    "unshard": {"recurse"},
    "reshard": {"recurse"},
    "set_custom_all_gather": {"recurse"},
    "set_custom_reduce_scatter": {"recurse"},
    "set_all_reduce_hook": {"recurse"},
    "set_reduce_scatter_divide_factor": {"recurse"},
    "set_gradient_divide_factor": {"recurse"},
    "set_force_sum_reduction_for_comms": {"recurse"},
    "set_unshard_in_backward": {"recurse"},
    "set_reduce_scatter_unused_params": {"any_order"},
}
"""Parameters of ours, by function or method, that torch's does not have."""
NEWER_METHODS = {
    "finalize_backward",
    "get_pending_gradients",
    "reset_iter_state",
    "set_keep_unsharded_storage",
    "set_manual_backward_finalization",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
    "synchronize_gradients",
}
NEWER_NAMES = {"DataParallelMeshDims", "GradientReductionHandle", "ShardPlacementResult"}
NEWER_PARAMETERS = {"fully_shard": {"dp_mesh_dims"}}
"""What torch has got since the oldest version that fsdp2 runs on, and fsdp2 has on every one."""


def script(name: str) -> ModuleType:
    """Return docs/NAME.py as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def snippets(page: str) -> list[str]:
    """Return the Python code in docs/PAGE."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
