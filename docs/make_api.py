"""Write docs/api.md: torch's FSDP2 compared with fsdp2, name by name and parameter by parameter, each with its test.

    python docs/make_api.py

The rows come from the code of the installed torch and of fsdp2; this file only adds the tests of the names. If a name
or parameter of torch's has no counterpart or no test, this script fails, and so does tests/docs/test_api.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.fsdp as theirs
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_common

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import fsdp2  # noqa: E402
from fsdp2 import policies  # noqa: E402
from tests.support.docs import (  # noqa: E402
    EXTRA_METHODS,
    EXTRA_NAMES,
    EXTRA_PARAMETERS,
    NEWER_METHODS,
    NEWER_NAMES,
    NEWER_PARAMETERS,
)

OLD = {
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
}
"""Public names of torch.distributed.fsdp that belong to FullyShardedDataParallel, the wrapper class of FSDP1."""

PRIVATE_METHODS = ("_set_unshard_async_op",)
"""Methods of torch's FSDPModule with a leading underscore that libraries call."""

STEP, BUILD, OPTIM = "tests/step/", "tests/grouping/", "tests/optim/"
WEIGHTS, STATE = "tests/weights/", "tests/fsdp1/state_dict/"
TESTS: dict[str, str] = {
    "fully_shard": STEP + "test_options.py::test_reshard_after_forward",
    "fully_shard(module)": STEP + "test_grouped.py::test_members_share_everything",
    "fully_shard(mesh)": STEP + "test_meshes.py::test_two_dimensions_are_hybrid_sharding",
    "fully_shard(reshard_after_forward)": STEP + "test_reshard_to_int.py::test_parameters_stay_on_two_ranks",
    "fully_shard(shard_placement_fn)": STEP + "test_meshes.py::test_several_meshes_in_one_unit",
    "fully_shard(mp_policy)": STEP + "test_options.py::test_mixed_precision",
    "fully_shard(offload_policy)": STEP + "test_arguments.py::test_cpu_offload",
    "fully_shard(ignored_params)": STEP + "test_arguments.py::test_ignored_params",
    "fully_shard(dp_mesh_dims)": STEP + "test_named_dimensions.py::test_training",
    "fully_shard(ignored_modules)": BUILD + "test_modules.py::test_ignored_modules",
    "fully_shard(policy)": BUILD + "test_policies.py::test_nesting_sharing_and_parts_nobody_calls",
    "fully_shard(replicated_params)": BUILD + "test_replicated_params.py::test_training",
    "fully_shard(strategy)": "tests/fsdp1/test_strategies.py::test_training",
    "fully_shard(compression)": STEP + "test_compression.py::test_compression",
    "fully_shard(shard_over_replicas)": STEP + "test_over_replicas.py::test_trains_as_hybrid_sharding_does",
    "FSDPModule": STEP + "test_module_methods.py::test_indexing_and_names",
    "FSDPModule.reshard": STEP + "test_module_methods.py::test_unshard_and_reshard",
    "FSDPModule.unshard": STEP + "test_module_methods.py::test_unshard_and_reshard",
    "FSDPModule.unshard(async_op)": STEP + "test_module_methods.py::test_asynchronous_unshard",
    "FSDPModule.finalize_backward": STEP + "test_manual_backward.py::test_finalize_backward",
    "FSDPModule.set_keep_unsharded_storage": STEP + "test_manual_backward.py::test_keep_unsharded_storage",
    "FSDPModule.set_keep_unsharded_storage(recurse)": STEP
    + "test_manual_backward.py::test_kept_storage_stays_where_it_is",
    "FSDPModule.synchronize_gradients": STEP + "test_synchronize_gradients.py::test_synchronize_gradients",
    "FSDPModule.get_pending_gradients": STEP + "test_synchronize_gradients.py::test_get_pending_gradients",
    "FSDPModule.set_manual_backward_finalization": STEP + "test_manual_backward.py::test_finalize_backward",
    "GradientReductionHandle": STEP + "test_manual_backward.py::test_finalize_backward",
    "FSDPModule.reset_iter_state": STEP + "test_errors.py::test_training_goes_on_after_an_exception",
    "FSDPModule.set_is_last_backward": STEP + "test_module_methods.py::test_is_last_backward_with_one_forward",
    "FSDPModule.set_requires_gradient_sync": STEP + "test_synchronize_gradients.py::test_some_units_alone",
    "FSDPModule.set_requires_gradient_sync(recurse)": STEP + "test_arguments.py::test_setters_of_one_or_all",
    "FSDPModule.set_requires_all_reduce": STEP + "test_reduction.py::test_requires_all_reduce",
    "FSDPModule.set_reshard_after_forward": STEP + "test_module_methods.py::test_reshard_after_forward",
    "FSDPModule.set_reshard_after_forward(recurse)": STEP + "test_arguments.py::test_setters_of_one_or_all",
    "FSDPModule.set_reshard_after_backward": STEP + "test_module_methods.py::test_reshard_after_backward",
    "FSDPModule.set_reshard_after_backward(recurse)": STEP + "test_arguments.py::test_setters_of_one_or_all",
    "FSDPModule.set_modules_to_forward_prefetch": STEP + "test_module_methods.py::test_settings_keep_training_right",
    "FSDPModule.set_modules_to_backward_prefetch": STEP + "test_module_methods.py::test_settings_keep_training_right",
    "FSDPModule.set_custom_all_gather": STEP + "test_communication.py::test_custom_collectives",
    "FSDPModule.set_custom_reduce_scatter": STEP + "test_communication.py::test_custom_collectives",
    "FSDPModule.set_all_reduce_hook": STEP + "test_communication.py::test_all_reduce_hook",
    "FSDPModule.set_all_reduce_hook(stream)": STEP + "test_communication.py::test_all_reduce_hook_and_streams",
    "FSDPModule.set_post_optim_event": STEP + "test_communication.py::test_post_optim_event",
    "FSDPModule.set_reduce_scatter_divide_factor": STEP + "test_reduction.py::test_divide_factor",
    "FSDPModule.set_gradient_divide_factor": STEP + "test_reduction.py::test_divide_factor",
    "FSDPModule.set_force_sum_reduction_for_comms": STEP + "test_reduction.py::test_force_sum",
    "FSDPModule.set_reduce_scatter_unused_params": STEP + "test_reduction.py::test_reduce_scatter_unused_params",
    "FSDPModule.set_reduce_scatter_unused_params(recurse)": STEP
    + "test_reduction.py::test_unused_params_of_which_units",
    "FSDPModule.set_reduce_scatter_unused_params(any_order)": "tests/ranks/test_orders_of_experts.py::test_any_order",
    "FSDPModule.set_reduce_scatter_max_input_buffers": STEP
    + "test_reduction.py::test_reduce_scatter_max_input_buffers",
    "FSDPModule.set_separate_reduce_scatter_group": STEP + "test_communication.py::test_separate_reduce_scatter_group",
    "FSDPModule.set_unshard_in_backward": STEP + "test_arguments.py::test_unshard_in_backward",
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": STEP
    + "test_communication.py::test_memory_from_the_process_group",
    "FSDPModule.set_symm_mem_for_comm": STEP + "test_communication.py::test_symmetric_memory_needs_nccl",
    "FSDPModule._set_unshard_async_op": STEP + "test_arguments.py::test_unshard_async_op",
    "UnshardHandle": STEP + "test_module_methods.py::test_asynchronous_unshard",
    "MixedPrecisionPolicy": STEP + "test_options.py::test_mixed_precision",
    "MixedPrecisionPolicy(output_dtype)": STEP + "test_options.py::test_mixed_precision",
    "MixedPrecisionPolicy(cast_forward_inputs)": STEP + "test_options.py::test_inputs_are_left_alone_if_asked",
    "MixedPrecisionPolicy(param_dtype_override_fn)": STEP + "test_param_dtypes.py::test_param_dtype_override_fn",
    "OffloadPolicy": STEP + "test_arguments.py::test_cpu_offload",
    "CPUOffloadPolicy": STEP + "test_arguments.py::test_cpu_offload",
    "DataParallelMeshDims": STEP + "test_named_dimensions.py::test_training",
    "AllGather": STEP + "test_communication.py::test_custom_collectives",
    "ReduceScatter": STEP + "test_communication.py::test_custom_collectives",
    "ShardPlacementResult": STEP + "test_meshes.py::test_several_meshes_in_one_unit",
    "register_fsdp_forward_method": STEP + "test_module_methods.py::test_registered_forward_method",
    "share_comm_ctx": STEP + "test_communication.py::test_share_comm_ctx",
    "broadcast_from_rank0": WEIGHTS + "test_save_and_load.py::test_table",
    "load_safetensors": WEIGHTS + "test_save_and_load.py::test_table",
    "save_safetensors": WEIGHTS + "test_save_and_load.py::test_table",
    "sync_module_states": "tests/weights/test_sync.py::test_before_sharding",
    "clip_grad_norm_": OPTIM + "test_clip_grad_norm.py::test_any_mix_of_meshes",
    "clip_grad_norm_(norm_type)": OPTIM + "test_clip_grad_norm.py::test_norms_are_those_of_a_single_process",
    "clip_grad_norm_(error_if_nonfinite)": OPTIM + "test_clip_grad_norm.py::test_what_is_not_finite",
    "clip_grad_norm_(foreach)": OPTIM + "test_clip_grad_norm.py::test_norms_are_those_of_a_single_process",
    "clip_grad_norm_(pp_mesh)": OPTIM + "test_clip_grad_norm.py::test_pipeline_stages",
    "use_full_params": OPTIM + "test_full_params.py::test_steps_are_those_of_one_process",
    "use_full_params(cost)": OPTIM + "test_full_params.py::test_cost_decides_who_owns",
    "use_full_params(stacked)": OPTIM + "test_full_params.py::test_a_matrix_each_of_a_stack",
    "use_full_params(overlap_backward)": OPTIM
    + "test_full_params_overlap.py::test_whatever_happens_between_backward_and_step",
    "use_full_params(keep_full_params)": OPTIM + "test_full_params_kept.py::test_whatever_happens_between_steps",
    "use_full_params(batched)": OPTIM + "test_full_params.py::test_matrices_of_one_shape_in_one_batch",
    "use_full_params(bucket_mb)": OPTIM + "test_full_params.py::test_steps_are_those_of_one_process",
    "offload_optimizer_state": OPTIM + "test_offload.py::test_steps_are_those_without",
    "offload_optimizer_state(device_budget_bytes)": OPTIM + "test_offload.py::test_a_budget",
    "offload_optimizer_state(bucket_mb)": OPTIM + "test_offload.py::test_moments_are_copied_and_bounded",
    "offload_optimizer_state(pin_memory)": OPTIM + "test_offload.py::test_memory_is_page_locked_if_asked_for",
    "offload_optimizer_state(elementwise)": OPTIM + "test_offload.py::test_other_classes_that_are_elementwise",
    "use_local_shards": OPTIM + "test_local_shards.py::test_steps_are_those_on_plain_tensors",
    "use_local_shards(elementwise)": OPTIM + "test_proxies.py::test_other_classes_that_are_elementwise",
    "ShardedGradScaler": OPTIM + "test_grad_scaler.py::test_found_inf_agrees",
    "cpu_offload_by_budget": BUILD + "test_offloading.py::test_a_budget_of_parameters_on_the_cpu",
    "cpu_offload_by_budget(pin_memory)": BUILD + "test_offloading.py::test_a_budget_of_parameters_on_the_cpu",
    "fsdp_modules": BUILD + "test_modules.py::test_fsdp_modules",
    "no_sync": BUILD + "test_modules.py::test_no_sync_accumulates",
    "padding_report": BUILD + "test_padding.py::test_a_cut_chosen_by_padding_trains_alike",
    "plan_units": BUILD + "test_policies.py::test_nesting_sharing_and_parts_nobody_calls",
    "install": "tests/fsdp1/test_install.py::test_replaces_and_gives_back",
    "forecast": "tests/tools/forecast/test_against_gloo.py::test_real_processes",
    "record_steps": "tests/tools/forecast/test_recording.py::test_real_steps",
    "set_rank_checks": "tests/ranks/test_agreeing.py::test_comparing_can_be_switched_off",
    "use_weights": "tests/weights/test_use.py::test_a_loss_that_uses_weights",
    "uninstall": "tests/fsdp1/test_install.py::test_replaces_and_gives_back",
    "summon_full_params": WEIGHTS + "test_summon.py::test_shows_the_unsharded_model",
    "summon_full_params(recurse)": WEIGHTS + "test_summon.py::test_writeback",
    "summon_full_params(writeback)": WEIGHTS + "test_summon.py::test_writeback",
    "summon_full_params(rank0_only)": WEIGHTS + "test_summon.py::test_one_rank_only",
    "summon_full_params(offload_to_cpu)": WEIGHTS + "test_summon.py::test_one_rank_only",
    "summon_full_params(with_grads)": WEIGHTS + "test_summon_gradients.py::test_shows_full_gradients",
    "iter_full_params": WEIGHTS + "test_export.py::test_exports_every_parameter",
    "iter_full_params(buffers)": WEIGHTS + "test_export.py::test_buffers",
    "iter_full_params(dtype)": WEIGHTS + "test_export.py::test_dtype_and_device",
    "iter_full_params(device)": WEIGHTS + "test_export.py::test_dtype_and_device",
    "WeightSender": WEIGHTS + "updates/test_sending.py::test_every_kind",
    "WeightSender(mapping)": WEIGHTS + "updates/test_sending.py::test_names_and_dtypes",
    "WeightSender(dtype)": WEIGHTS + "updates/test_sending.py::test_names_and_dtypes",
    "WeightSender(bucket_mb)": WEIGHTS + "updates/test_sending.py::test_buckets",
    "WeightSender(delta)": WEIGHTS + "updates/test_changing.py::test_a_model_that_changes",
    "WeightReceiver": WEIGHTS + "updates/test_groups.py::test_tensors_of_an_engine",
    "WeightReceiver(load)": WEIGHTS + "updates/test_changing.py::test_a_function_that_loads",
    "WeightReceiver(device)": WEIGHTS + "updates/test_groups.py::test_a_receiver_that_restarted",
    "WeightBucket": WEIGHTS + "updates/test_changing.py::test_whole_tensors_and_changes_of_a_bucket",
    "SentWeights": WEIGHTS + "updates/test_groups.py::test_a_receiver_that_restarted",
    "weight_sync_group": WEIGHTS + "updates/test_groups.py::test_a_receiver_that_restarted",
    "state_dict_type": STATE + "test_settings.py::test_what_is_remembered",
    "set_state_dict_type": STATE + "test_settings.py::test_what_is_remembered",
    "get_state_dict_type": STATE + "test_settings.py::test_what_is_remembered",
    "optim_state_dict": STATE + "test_optimizer.py::test_training_goes_on",
    "optim_state_dict_to_load": STATE + "test_optimizer.py::test_training_goes_on",
    "merge_local_state_dicts": WEIGHTS + "test_save_and_load.py::test_table",
    "CompressionPolicy": STEP + "test_compression.py::test_compression",
    "CompressionPolicy(replicate)": STEP + "test_compression.py::test_copies_of_hybrid_sharding_stay_equal",
    "CompressionPolicy(block)": STEP + "test_compression.py::test_bytes_on_the_wire",
    "CompressionPolicy(min_numel)": STEP + "test_compression.py::test_what_is_skipped_travels_as_it_is",
    "CompressionPolicy(skip)": STEP + "test_compression.py::test_what_is_skipped_travels_as_it_is",
    "CompressionPolicy(stochastic)": STEP
    + "test_compression.py::test_gradients_are_within_a_step_of_the_largest_of_their_block",
    "FSDPModule.set_compression": STEP + "test_compression.py::test_compression",
    "FSDPModule.set_compression(recurse)": STEP + "test_compression.py::test_set_compression_of_one_unit",
    "FSDPModule.set_deterministic_reduction": STEP
    + "test_deterministic_reduction.py::test_the_same_bits_on_two_and_four_ranks",
    "FSDPModule.set_transfer_sizes": STEP + "test_module_methods.py::test_transfer_sizes_say_what_is_packed",
    "FSDPModule.state_dict": STEP + "test_state.py::test_a_state_dict_in_inference_mode",
    "FSDPModule.zero_grad": STEP + "test_synchronize_gradients.py::test_zeroing_drops_unreduced_gradients",
}
"""The test of each name; ``name(parameter)`` for a parameter that has a test of its own, else that of the name."""

HEAD = """<!-- Written by docs/make_api.py from the code of torch {torch} and fsdp2; do not edit. -->
# The API compared with torch's

fsdp2 has every public name and parameter of torch's FSDP2, with the same meaning. To migrate, import `fully_shard` from
`fsdp2` instead of `torch.distributed.fsdp`. The first three tables show torch {torch}: *same* means that fsdp2 has the
name or parameter too, and *same class* that fsdp2 re-exports torch's own class. The fourth shows what later versions of
torch have added; fsdp2 has it with every version. [What newer versions of torch bring](newer_torch.md) explains these.
"""


@dataclass(frozen=True)
class Row:
    """One name or parameter: its default, what fsdp2 has for it, and its test."""

    name: str
    parameter: str
    default: str
    ours: str

    @property
    def key(self) -> str:
        """The key of the row in ``TESTS``."""
        return f"{self.name}({self.parameter})" if self.parameter else self.name


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a function or method without ``self``, ignoring decorators."""
    found = inspect.signature(inspect.unwrap(function)).parameters
    return {name: parameter for name, parameter in found.items() if name != "self"}


def show(parameter: inspect.Parameter) -> str:
    """Return the default of a parameter as source code."""
    if parameter.default is inspect.Parameter.empty:
        return "required"
    value = parameter.default
    return f"{type(value).__name__}()" if dataclasses.is_dataclass(value) else repr(value)


def callable_rows(name: str, original: Any, own: Any) -> Iterator[Row]:
    """Yield a row for a function or method, and one for each parameter."""
    yield Row(name, "", "", "same" if own is not None else "missing")
    mine = parameters(own) if own is not None else {}
    for parameter, entry in parameters(original).items():
        same = parameter in mine and (mine[parameter].kind, show(mine[parameter])) == (entry.kind, show(entry))
        yield Row(name, parameter, show(entry), "same" if same else "missing")


def class_rows(name: str, original: type, own: Any) -> Iterator[Row]:
    """Yield a row for a class, and one for each field."""
    same = "same class" if own is original else "subclass" if inspect.isclass(own) else "missing"
    yield Row(name, "", "", "same" if name == "ShardPlacementResult" else same)
    fields = dataclasses.fields(original) if dataclasses.is_dataclass(original) else ()
    mine = {field.name for field in dataclasses.fields(own)} if dataclasses.is_dataclass(own) else set()
    for field in fields:
        default = "required" if field.default is dataclasses.MISSING else repr(field.default)
        yield Row(name, field.name, default, "same" if field.name in mine else "missing")


def public_classes() -> dict[str, tuple[type, Any]]:
    """Return torch's public classes except FSDPModule, and the classes that its methods take, each with ours."""
    names = [n for n in theirs.__all__ if n not in OLD and inspect.isclass(getattr(theirs, n)) and n != "FSDPModule"]
    found = {name: (getattr(theirs, name), getattr(fsdp2, name, None)) for name in names}
    for name in ("AllGather", "ReduceScatter"):
        found[name] = (getattr(_fsdp_api, name), getattr(policies, name, None))
    result = getattr(_fsdp_common, "ShardPlacementResult", None)
    if result is not None:  # torch has it since 2.12
        found["ShardPlacementResult"] = (result, fsdp2.ShardPlacementResult)
    return found


def public_functions() -> list[str]:
    """Return the names of torch's public functions."""
    return [name for name in theirs.__all__ if name not in OLD and inspect.isfunction(getattr(theirs, name))]


def public_methods() -> list[str]:
    """Return the names of the methods of torch's FSDPModule that users or libraries may call."""
    return [n for n in vars(theirs.FSDPModule) if not n.startswith("_")] + list(PRIVATE_METHODS)


def rows() -> dict[str, list[Row]]:
    """Return the tables by title."""
    functions = [r for n in public_functions() for r in callable_rows(n, getattr(theirs, n), getattr(fsdp2, n, None))]
    methods = [Row("FSDPModule", "", "", "subclass")]
    for name in public_methods():
        own = vars(fsdp2.FSDPModule).get(name)
        methods += [
            dataclasses.replace(row, name=f"FSDPModule.{name}")
            for row in callable_rows(name, getattr(theirs.FSDPModule, name), own)
        ]
    classes = [row for name, pair in public_classes().items() for row in class_rows(name, *pair)]
    extras = []
    for name in sorted(EXTRA_NAMES):
        extras += [Row(name, "", "", "only here")]
        own = parameters(getattr(fsdp2, name)).items()
        extras += [Row(name, p, show(entry), "only here") for p, entry in own]
    for name in [name for name in EXTRA_PARAMETERS if name in fsdp2.__all__]:
        own = [item for item in parameters(getattr(fsdp2, name)).items() if item[0] in EXTRA_PARAMETERS[name]]
        extras += [Row(name, "", "", "more parameters")]
        extras += [Row(name, p, show(entry), "only here") for p, entry in own]
    for name in sorted(EXTRA_METHODS):
        own = getattr(fsdp2.FSDPModule, name)
        extras += [Row(f"FSDPModule.{name}", "", "", "only here")]
        extras += [Row(f"FSDPModule.{name}", p, show(entry), "only here") for p, entry in parameters(own).items()]
    later = [row for name in sorted(NEWER_NAMES) if not hasattr(theirs, name) for row in own_rows(name, name)]
    for name in sorted(name for name in NEWER_METHODS if not hasattr(theirs.FSDPModule, name)):
        later += own_rows(f"FSDPModule.{name}", name)
    return {
        "Functions": functions,
        "FSDPModule": methods,
        "Classes": classes,
        "In later versions of torch": later,
        "Only in fsdp2": extras,
    }


def own_rows(name: str, attribute: str) -> list[Row]:
    """Return the rows of a name that the installed torch lacks: a method's with its parameters, a class alone."""
    own = getattr(fsdp2, attribute, None) or getattr(fsdp2.FSDPModule, attribute)
    found = {} if inspect.isclass(own) else parameters(own)
    return [Row(name, "", "", "with every torch"), *[Row(name, p, show(e), "") for p, e in found.items()]]


def problems() -> list[str]:
    """Return the problems of the tables: names without a counterpart or a test, undocumented extras."""
    found = []
    for table in rows().values():
        for row in table:
            if row.ours == "missing":
                found.append(f"{row.key}: torch has it, fsdp2 lacks it or its kind or default differs")
            if row.key not in TESTS and row.name not in TESTS:
                found.append(f"{row.key}: no test is named for it in docs/make_api.py")
    covered = set(public_functions()) | set(public_classes()) | {"FSDPModule"}
    found += [f"{name}: public in torch, in no table" for name in theirs.__all__ if name not in covered | OLD]
    extras = set(fsdp2.__all__) - covered - EXTRA_NAMES - NEWER_NAMES
    found += [f"{name}: only in fsdp2 and not documented" for name in extras]
    methods = {name for name in vars(fsdp2.FSDPModule) if not name.startswith("_")}
    methods -= {*public_methods(), *EXTRA_METHODS, *NEWER_METHODS}
    found += [f"{name}: only in fsdp2 and not documented" for name in methods]
    for name in (*public_functions(), *public_methods()):
        pairs = [getattr(home, name, None) or getattr(home.FSDPModule, name, None) for home in (fsdp2, theirs)]
        if None not in pairs:
            extra = set(parameters(pairs[0])) - set(parameters(pairs[1]))
            extra -= EXTRA_PARAMETERS.get(name, set()) | NEWER_PARAMETERS.get(name, set())
            found += [f"{name}({parameter}): only in fsdp2 and not documented" for parameter in sorted(extra)]
    return found


def text() -> str:
    """Return the whole document."""
    import torch

    lines = [HEAD.format(torch=".".join(torch.__version__.split("+")[0].split(".")[:2]))]
    for title, table in rows().items():
        lines += [f"## {title}\n", "| name | default | fsdp2 |", "|---|---|---|"]
        for row in table:
            name = f"&nbsp;&nbsp;`{row.parameter}`" if row.parameter else f"**`{row.name}`**"
            default = f"`{row.default}`" if row.default else ""
            lines.append(f"| {name} | {default} | {row.ours} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write the file; 1 if something is missing."""
    found = problems()
    print("\n".join(found), file=sys.stderr)
    if not found:
        (ROOT / "docs" / "api.md").write_text(text())
    return len(found) > 0


if __name__ == "__main__":
    sys.exit(main())
