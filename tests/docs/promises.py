"""What the pages and the docstrings promise, and the tests that hold them to it.

A promise is a statement that a user acts on: "raises on every rank", "never", "always", "bit for bit", a default, a
number. ``test_promises.py`` finds such words in every page and in the docstrings of everything public, and fails if a
statement is neither here nor in ``NO_PROMISE``, if a text no longer says it, or if a test does not exist. So whoever
writes "every rank raises an error" also writes the test, of inputs other than the page's.
"""

from __future__ import annotations

__all__ = ["NO_PROMISE", "PROMISES"]

DOCS = "tests/docs/test_promises.py::"
PARTING = "tests/ranks/test_parting.py::"
STEP = "tests/step/"
SYNC = "tests/step/test_synchronize_gradients.py::"
WEIGHTS = "tests/weights/"
OPTIM = "tests/optim/"
STATE = "tests/fsdp1/state_dict/"

PROMISES: dict[str, dict[str, tuple[str, ...]]] = {
    "README.md": {
        "is repaired at its next step": (
            "tests/unit/optim/test_prebuilt.py::test_training_goes_on_as_if_nothing_had_happened",
        ),
        "ranks that differ raise an error that names the unit": (
            PARTING + "test_every_rank_raises_and_names_what_each_does",
            "tests/ranks/test_differing.py::test_skipped_without_the_option",
        ),
        "Results match torch's bit for bit unless the summation order differs": (
            DOCS + "test_results_are_torchs_bit_for_bit",
        ),
        "every rank raises an error that names the [unit]": (
            PARTING + "test_every_rank_raises_and_names_what_each_does",
            "tests/ranks/test_differing.py::test_other_shape",
        ),
    },
    "docs/check.md": {
        "results must equal torch's own bit for bit": ("tests/tools/check/test_cases.py::test_all_is_well",),
        'A result is "same bits", or the largest difference': (
            "tests/tools/check/test_report.py::test_verdicts_in_words",
        ),
    },
    "docs/clients.md": {
        "the weights of one process, bit for bit": (
            "tests/ecosystem/test_optimizers.py::test_steps_are_those_of_one_process",
        ),
        "training continues bit for bit": ("tests/ecosystem/test_state_dicts.py::test_training_goes_on",),
        "Other methods that read the parameters find shards and raise an error": (
            "tests/ecosystem/test_peft.py::test_methods_beside_forward",
        ),
        "the next forward raises an error that names the weights": (
            STEP + "test_kept.py::test_data_assigned_to_shards",
        ),
        "or that `fully_shard` was never called and what to set": (
            "tests/ecosystem/test_running.py::test_units_that_ran_are_counted",
        ),
        "`weight_norm` after sharding removes a sharded parameter": (
            "tests/grouping/test_added.py::test_weight_norm_after_sharding",
        ),
    },
    "docs/compression.md": {
        "the error of an element is at most half a step": (
            "tests/unit/compression/test_formats.py::test_errors_are_at_most_half_a_step_of_the_block",
            "tests/unit/compression/test_formats.py::test_half_a_step_holds_while_the_scale_is_a_normal_number",
        ),
        "Values that the format can represent arrive unchanged": (
            "tests/unit/compression/test_formats.py::test_what_the_format_can_represent_arrives_as_it_is",
        ),
        "Gradients are never summed in few bits": ("tests/unit/compression/test_formats.py::test_sums_of_rows",),
    },
    "docs/differences.md": {
        "Results match torch's bit for bit": (DOCS + "test_results_are_torchs_bit_for_bit",),
        "A chunk of gradients of 256 KiB or more is summed in float32": (
            DOCS + "test_in_which_dtype_gloo_sums_chunks",
        ),
        "`p.data = x` on a shard": (STEP + "test_kept.py::test_data_assigned_to_shards",),
        "a scalar is whole on every rank": (
            "tests/grouping/test_unusual_parameters.py::test_copies_of_a_scalar_stay_equal",
        ),
        "call `reshard()` after such a write": (
            "tests/weights/test_written_while_held.py::test_resharded_behind_a_write_that_nothing_shows",
        ),
        "On a GPU a later forward raises an error": (
            STEP + "test_teachers.py::test_on_streams_a_later_forward_raises",
        ),
        "Call the unit's `reshard()` after the write": (
            STEP + "test_teachers.py::test_a_teacher_with_gradients_is_resharded_behind_the_write",
        ),
        "make it before the forward, or call `reshard(recurse=True)` first": (
            STEP + "test_kept.py::test_parameters_listed_while_shards_are_shown",
        ),
        "tie before the forward, or call `reset_iter_state()`": (
            STEP + "test_changed_inside.py::test_a_tie_between_a_forward_and_its_backward",
        ),
        "a training forward that writes to its own weights": (
            STEP + "test_errors.py::test_a_forward_that_writes_to_its_weight",
        ),
        "a forward after a backward that raised": (
            STEP + "test_errors.py::test_training_goes_on_after_an_exception",
            STEP + "test_errors.py::test_a_forward_after_a_backward_that_raised",
        ),
        "a step, or clipping, before gradients are reduced": (
            SYNC + "test_what_reads_gradients_is_refused",
            STEP + "test_manual_backward.py::test_gradients_that_wait_for_finalization",
        ),
        "applied once, everywhere": (STEP + "test_reduction.py::test_divide_factor",),
        "always take effect": (STEP + "test_reduction.py::test_reduce_scatter_max_input_buffers",),
        "otherwise all ranks raise an error that names it": (
            "tests/ranks/test_store.py::test_one_that_differs_is_named_on_all",
            "tests/ranks/test_differing.py::test_skipped_without_the_option",
        ),
        "hooks on sharded parameters": (
            STEP + "test_graphs.py::test_hooks_after_sharding",
            STEP + "test_gradient_hooks.py::test_a_hook_returns_another_gradient",
            STEP + "test_gradient_hooks.py::test_a_hook_writes_to_a_part_of_the_gradient",
        ),
        "an all-gather extension that sends a different size on one rank": (
            STEP + "test_bad_input.py::test_extension_of_other_sizes",
        ),
    },
    "docs/extending.md": {
        "Classes written for torch's own setters work unchanged": (
            STEP + "test_communication.py::test_custom_collectives",
        ),
        "Otherwise all ranks raise an error": (
            "tests/ranks/test_differing.py::test_other_policy",
            STEP + "test_extensions.py::test_ranks_send_one_dtype",
        ),
    },
    "docs/forecast.md": {
        "Any other feature that torch's own lacks": ("tests/tools/forecast/test_beside.py::test_what_torchs_lacks",),
        "Each of these raises an error with the remedy and the line of your code": (
            "tests/tools/forecast/test_run.py::test_code_that_needs_more",
            "tests/tools/forecast/test_run.py::test_weights_are_not_loaded",
        ),
    },
    "docs/full_parameters.md": {
        "If the block raises an error, nothing is written": (
            WEIGHTS + "test_iteration.py::test_exception_in_the_block",
        ),
        "entering the block takes at most twice the memory of the largest parameter": (
            WEIGHTS + "test_memory.py::test_ranks_that_show_nothing",
        ),
        "With gradients enabled, a forward raises an error": (WEIGHTS + "test_summon.py::test_forward_inside",),
        "`torch.jit.trace`, `make_fx` and `torch.func.linearize` raise an error": (
            WEIGHTS + "test_summon.py::test_export_of_shards_is_refused",
        ),
        "additional memory, at most": (
            WEIGHTS + "test_memory.py::test_whole_model_and_one_parameter",
            WEIGHTS + "test_memory.py::test_export",
        ),
        "`summon_full_params` raises an error inside a forward or backward": (
            WEIGHTS + "test_iteration.py::test_refused_in_forward_and_backward",
            WEIGHTS + "test_export.py::test_inside_forward",
        ),
        "Inside the block, `unshard`, `reshard` and `to` raise errors": (
            WEIGHTS + "test_iteration.py::test_refused_inside",
        ),
        "If the block raises an error on one rank": (WEIGHTS + "test_iteration.py::test_exception_in_the_block",),
        "A forward inside the block raises an error for them": (WEIGHTS + "test_summon.py::test_forward_inside",),
        "Parameters on the meta device raise an error, on all ranks": (
            WEIGHTS + "test_iteration.py::test_ranks_that_differ",
        ),
    },
    "docs/how_it_works.md": {
        "The optimizer updates the shards, without communication": (DOCS + "test_nothing_is_sent_where_pages_say_so",),
        "without communication while iterations repeat": (
            "tests/ranks/test_store.py::test_an_iteration_costs_a_rank_the_same_whatever_the_ranks_and_units",
        ),
        "every rank raises an error that names the unit and the collective of each rank": (
            PARTING + "test_every_rank_raises_and_names_what_each_does",
        ),
    },
    "docs/loading.md": {
        "If one rank finds an error, all ranks raise it before anything changes": (
            WEIGHTS + "test_broadcast_refuses.py::test_every_rank_learns_what_is_wrong",
            WEIGHTS + "test_broadcast_refuses.py::test_what_is_wrong_on_another_rank",
        ),
        "| `broadcast_from_rank0` | rank 0": (WEIGHTS + "test_broadcast.py::test_memory",),
        "| `save_safetensors` | the sharded model": (WEIGHTS + "test_safetensors.py::test_memory_of_saving",),
        "| `sync_module_states` | the first of several copies": (WEIGHTS + "test_sync.py::test_memory",),
        "floats for an integer parameter raise an error": (
            WEIGHTS + "test_broadcast.py::test_integers_load_into_floats_but_not_floats_into_integers",
        ),
        "two different values raise an error": (WEIGHTS + "test_broadcast.py::test_ties_of_different_values",),
        "Parameters of one name that differ between ranks raise an error": (
            WEIGHTS + "test_saving.py::test_values_that_ranks_have_for_themselves",
        ),
        "a file with both `weight` and `_orig_mod.weight` raises an error": (
            WEIGHTS + "test_broadcast.py::test_prefixes_in_the_values",
        ),
    },
    "docs/migration.md": {
        "others raise an error that names the replacement": (
            "tests/grouping/test_policies.py::test_names_of_the_old_arguments",
        ),
        "Buffers are never cast": (STEP + "test_dtypes.py::test_batch_norm",),
        "`replicated_params` stay whole on every rank": ("tests/grouping/test_replicated_params.py::test_training",),
        "A sharded module cannot be pickled": (DOCS + "test_a_sharded_module_is_copied_but_not_pickled",),
    },
    "docs/multimodal.md": {
        "If that changes, every rank raises an error": (
            DOCS + "test_marked_units_in_another_order_raise_on_every_rank",
        ),
        "Without a mark, every rank raises an error if only some ranks use a unit": (
            "tests/ranks/test_differing.py::test_skipped_without_the_option",
        ),
    },
    "docs/reproducibility.md": {
        "The sums then do not depend on the backend, on timing, or on the sizes of chunks": (
            STEP + "test_deterministic_reduction.py::test_the_same_bits_on_two_and_four_ranks",
        ),
        "half as many ranks that accumulate two micro-batches each compute the same bits": (
            STEP + "test_deterministic_reduction.py::test_the_same_bits_on_two_and_four_ranks",
        ),
    },
    "docs/newer_torch.md": {
        "later, the next backward raises an error with the parameter's name": (
            STEP + "test_grad_dtype.py::test_it_may_not_be_set_on_shards_after_the_first_forward",
        ),
        "does the same, for gradients before and after the reduction": (
            STEP + "test_grad_dtype.py::test_a_wide_gradient_of_a_narrow_weight_is_not_rounded",
        ),
        "`dp_mesh_dims` takes only DTensors": (STEP + "test_named_dimensions.py::test_what_is_refused",),
        "hybrid sharding over rows whose sorted ranks do not line up": (
            STEP + "test_meshes.py::test_a_mesh_may_list_its_ranks_in_any_order",
        ),
        "If a rank does not call it, or lacks a gradient, every rank raises an error": (
            SYNC + "test_calls_that_make_no_sense",
        ),
        "A name that matches nothing raises ValueError": (
            "tests/grouping/test_offloading.py::test_patterns_and_mistakes",
        ),
        "A tensor that has only this function raises an error with its name": (
            STEP + "test_extensions.py::test_wrong_views",
        ),
        "raises ValueError with the name of the parameter": (STEP + "test_bad_input.py::test_wrong_placements",),
        "raises RuntimeError on every rank, unless the optimizer has other parameters": (
            SYNC + "test_what_reads_gradients_is_refused",
            SYNC + "test_other_optimizers_step",
        ),
        "`fsdp2.clip_grad_norm_`, `ShardedGradScaler` | | raise RuntimeError on every rank": (
            SYNC + "test_what_reads_gradients_is_refused",
        ),
        "the next step raises RuntimeError": (SYNC + "test_what_reads_gradients_is_refused",),
    },
    "docs/optimizer_state.md": {
        "Weights and state are those of the step without it, bit for bit": (
            OPTIM + "test_offload.py::test_steps_are_those_without",
        ),
        "An optimizer whose parameters depend on each other raises an error": (
            OPTIM + "test_offload.py::test_optimizers_and_options_that_cannot_work",
        ),
        "a step that is captured in a CUDA graph, raise errors": (
            OPTIM + "test_offload.py::test_optimizers_and_options_that_cannot_work",
            "tests/nullgpu/test_captured.py::test_state_on_the_host_is_not_captured",
        ),
    },
    "docs/optimizers.md": {
        "every rank raises an error before anything is changed": (
            OPTIM + "test_full_params.py::test_a_gradient_on_one_rank_alone_is_refused_everywhere",
        ),
        "if so, every rank raises one": (
            OPTIM + "test_full_params.py::test_an_error_at_one_owner_is_raised_everywhere",
        ),
        "the new weights are those of one process, bit for bit": (
            OPTIM + "test_full_params.py::test_steps_are_those_of_one_process",
        ),
        "and results are the same bit for bit": (
            OPTIM + "test_full_params_overlap.py::test_whatever_happens_between_backward_and_step",
        ),
        "Results are the same bit for bit": (OPTIM + "test_full_params_kept.py::test_whatever_happens_between_steps",),
        "if it differs between matrices, `state_dict` raises an error": (
            OPTIM + "test_full_params.py::test_numbers_that_differ_between_matrices_of_a_stack",
        ),
        "reading a value raises an error that names the owner": (
            OPTIM + "test_full_params.py::test_state_of_others_says_where_it_is",
        ),
        "`state_dict` raises an error on every rank": (
            OPTIM + "test_full_params_state.py::test_state_that_is_made_of_other_tensors",
        ),
        "`step(closure)`, LBFGS and SparseAdam raise errors": (OPTIM + "test_full_params.py::test_what_is_refused",),
    },
    "docs/settings.md": {
        "parameters always keep their names": (STEP + "test_state.py::test_state_dict_is_sharded_at_any_time",),
    },
    "docs/several_roots.md": {
        "If a rank comes to another root first, every rank raises an error within half a minute": (
            "tests/ranks/test_orders_of_roots.py::test_forwards_in_another_order",
            "tests/ranks/test_orders_of_roots.py::test_backwards_in_another_order",
        ),
        "while a handle of `finalize_backward(async_op=True)` is not, it raises an error": (
            STEP + "test_several_roots.py::test_sharing_while_gradients_are_on_their_way",
        ),
    },
    "docs/state_dicts.md": {
        "an error names the parameters with both shapes before anything is loaded": (
            STATE + "test_loading.py::test_wrong_shapes",
        ),
        "Names are always those of the plain model": (WEIGHTS + "test_save_and_load.py::test_table",),
        "all ranks raise an error before anything is sent": (
            STATE + "test_full.py::test_names_that_the_first_rank_lacks",
        ),
        "so it raises an error then": (STATE + "test_full.py::test_names_that_the_first_rank_lacks",),
        "They raise an error that names the function of `fsdp2` to call": (
            STATE + "test_settings.py::test_functions_of_fsdp1_that_would_do_nothing",
        ),
    },
    "docs/timeline.md": {
        "so each micro-batch of an accumulation counts as a step": (DOCS + "test_each_micro_batch_is_a_recorded_step",),
    },
    "docs/troubleshooting.md": {
        "says after about 20 seconds where it waits and where the others are": (
            "tests/ranks/test_standstill.py::test_a_collective_of_one_rank_between_passes",
        ),
        "and they are not all at the same line, each one says where all are": (
            "tests/unit/ranks/test_standstill.py::test_devices_that_wait_for_each_other",
        ),
        "If they end the process, the others raise an error, and on GPUs log it within seconds": (
            "tests/ranks/test_kinds_of_store.py::test_the_host_of_the_store_has_fewer_batches",
            "tests/unit/ranks/test_board.py::test_a_rank_that_launches_more_than_one_that_ended",
        ),
        "If they differ, every rank raises an error within seconds": (
            PARTING + "test_every_rank_raises_and_names_what_each_does",
        ),
    },
    "docs/tutorials/checkpoint.md": {
        "the next forward or backward raises an error on every rank": (
            "tests/ranks/test_saving.py::test_asynchronous_save",
        ),
    },
    "docs/tutorials/finetune.md": {
        "`plan_units` shows what it finds, before anything is sharded": (
            "tests/grouping/test_policies.py::test_plans_need_no_processes",
        ),
        "Nothing is communicated inside the block": (DOCS + "test_nothing_is_sent_where_pages_say_so",),
        "`save_safetensors` gathers at most 64 MiB of it at a time": (
            WEIGHTS + "test_safetensors.py::test_memory_of_saving",
        ),
    },
    "docs/tutorials/loop.md": {
        "The others accumulate them without communication": (DOCS + "test_nothing_is_sent_where_pages_say_so",),
        "Schedulers of `torch.optim.lr_scheduler` work unchanged": (STEP + "test_training_tools.py::test_schedules",),
        "or until fsdp2 raises an error": (
            "tests/ranks/test_differing.py::test_rank_raises",
            PARTING + "test_every_rank_raises_and_names_what_each_does",
        ),
        "ends with the same weights as an uninterrupted run, bit for bit": (
            "tests/docs/test_pages.py::test_the_complete_loop_resumes_bit_for_bit",
        ),
    },
    "docs/weight_sync.md": {
        "it sends only what changed since the last time, exactly": (
            WEIGHTS + "updates/test_sending.py::test_every_kind",
        ),
        "They must be exactly what is sent: names, shapes and dtypes": (
            WEIGHTS + "updates/test_groups.py::test_tensors_of_an_engine",
        ),
        "The engine ends with the trainer's weights bit for bit": (
            WEIGHTS + "updates/test_groups.py::test_an_engine_of_another_job",
        ),
        "changes that do not fit what a receiver has raise an error there": (
            WEIGHTS + "updates/test_changing.py::test_a_receiver_that_lacks_the_version",
        ),
        "A rule that fits nothing, tensors that do not fit together": (
            WEIGHTS + "updates/test_changing.py::test_refused_before_anything_is_sent",
        ),
        "Names, shapes and dtypes that a receiver of a group does not expect": (
            WEIGHTS + "updates/test_groups.py::test_tensors_of_an_engine",
        ),
        "If a receiver dies, the next `send` raises an error on every rank": (
            WEIGHTS + "updates/test_groups.py::test_an_engine_of_another_job",
        ),
        "A receiver whose trainer dies raises an error likewise": (
            WEIGHTS + "updates/test_groups.py::test_a_trainer_that_dies",
        ),
        "A mapping that does not fit, parameters on the meta device": (
            WEIGHTS + "updates/test_changing.py::test_refused_before_anything_is_sent",
            WEIGHTS + "updates/test_changing.py::test_one_name_for_experts_of_several_ranks",
        ),
        "If the function, a rank or a receiver raises an error during an update, every rank raises one": (
            WEIGHTS + "updates/test_changing.py::test_a_function_that_raises",
            WEIGHTS + "updates/test_groups.py::test_a_rank_that_fails_in_the_middle",
            WEIGHTS + "updates/test_groups.py::test_a_receiver_that_fails",
        ),
    },
    "docs/recipes.md": {
        "Nothing is communicated inside the block": (DOCS + "test_nothing_is_sent_where_pages_say_so",),
    },
    "fsdp2.WeightReceiver": {
        "They must be exactly those that are sent": (WEIGHTS + "updates/test_groups.py::test_tensors_of_an_engine",),
    },
    "fsdp2.no_sync": {
        "Accumulate full gradients without communication": (DOCS + "test_nothing_is_sent_where_pages_say_so",),
    },
    "fsdp2.optim_state_dict_to_load": {
        "They are sharded without communication and copied": (DOCS + "test_nothing_is_sent_where_pages_say_so",),
    },
    "fsdp2.record_steps": {
        "Outside the block it costs nothing": (DOCS + "test_nothing_is_sent_where_pages_say_so",),
    },
    "fsdp2.set_rank_checks": {
        "It costs nothing in a repeated iteration": (
            "tests/ranks/test_store.py::test_an_iteration_costs_a_rank_the_same_whatever_the_ranks_and_units",
        ),
    },
    "fsdp2.broadcast_from_rank0": {
        "An error is raised on every rank and leaves the model unchanged": (
            WEIGHTS + "test_broadcast_refuses.py::test_every_rank_learns_what_is_wrong",
        ),
    },
    "fsdp2.clip_grad_norm_": {
        "Raise an error if the norm is NaN or infinite, before anything is scaled": (
            OPTIM + "test_clip_grad_norm.py::test_what_is_not_finite",
        ),
        "the same on every rank": (
            OPTIM + "test_clip_grad_norm.py::test_any_mix_of_meshes",
            OPTIM + "test_clip_grad_norm.py::test_dtypes",
        ),
        "is set (on every rank)": (OPTIM + "test_clip_grad_norm.py::test_what_is_not_finite",),
    },
    "fsdp2.fully_shard": {
        "Parameters to leave unchanged": (STEP + "test_arguments.py::test_ignored_params",),
        "NO_SHARD (whole on every rank of the mesh": ("tests/fsdp1/test_strategies.py::test_training",),
        "Parameters to keep whole on every rank": ("tests/grouping/test_replicated_params.py::test_training",),
        "Modules to leave unchanged": ("tests/grouping/test_modules.py::test_ignored_modules",),
    },
    "fsdp2.iter_full_params": {
        "Values always come from the shards": (WEIGHTS + "test_export.py::test_at_any_time",),
    },
    "fsdp2.load_safetensors": {
        "All headers are checked before anything is changed": (
            WEIGHTS + "test_files_that_do_not_fit.py::test_every_rank_learns_what_is_wrong",
        ),
        "If one rank fails, every rank raises an error that names that rank": (
            WEIGHTS + "test_files_that_do_not_fit.py::test_every_rank_learns_what_is_wrong",
        ),
    },
    "fsdp2.save_safetensors": {
        "Errors are raised on every rank": (
            WEIGHTS + "test_saving.py::test_interrupted_saves",
            WEIGHTS + "test_saving.py::test_a_full_disk",
        ),
    },
    "fsdp2.summon_full_params": {
        "a forward inside the block computes with the full parameters": (
            DOCS + "test_nothing_is_sent_where_pages_say_so",
        ),
        "other ranks need at most twice the largest parameter": (
            WEIGHTS + "test_memory.py::test_ranks_that_show_nothing",
        ),
        "a backward that gives a shown parameter a gradient raises RuntimeError": (
            WEIGHTS + "test_summon_gradients.py::test_a_backward_inside",
        ),
        "Where the block raises an error, nothing is written": (
            WEIGHTS + "test_iteration.py::test_exception_in_the_block",
        ),
    },
    "fsdp2.WeightSender": {
        "so receivers end bit for bit with what a full update sends": (
            WEIGHTS + "updates/test_sending.py::test_every_kind",
            WEIGHTS + "updates/test_groups.py::test_an_engine_of_another_job",
        ),
        "Every rank raises the error": (WEIGHTS + "updates/test_changing.py::test_refused_before_anything_is_sent",),
    },
    "fsdp2.sync_module_states": {
        "Every rank raises it before anything is changed": (
            WEIGHTS + "test_sync.py::test_nothing_to_copy",
            WEIGHTS + "test_sync.py::test_ranks_differ",
        ),
    },
    "fsdp2.use_full_params": {
        "Plain parameters are stepped on every rank": (
            OPTIM + "test_full_params.py::test_plain_parameters_are_stepped_on_every_rank",
        ),
    },
    "fsdp2.offload_optimizer_state": {
        "Values are those of the step without it, bit for bit": (
            OPTIM + "test_offload.py::test_steps_are_those_without",
        ),
        "three buckets at most": (OPTIM + "test_offload.py::test_moments_are_copied_and_bounded",),
    },
    "fsdp2.use_local_shards": {
        "so schedulers, hooks and checkpoints work unchanged": (
            OPTIM + "test_local_shards_in_use.py::test_schedulers_hooks_and_closures",
            OPTIM + "test_every_entry.py::test_table",
        ),
        "bit for bit if the same implementation runs": (
            OPTIM + "test_local_shards.py::test_steps_are_those_on_plain_tensors",
        ),
    },
    "fsdp2.FSDPModule.set_requires_gradient_sync": {
        "accumulate full gradients without communication (False)": (DOCS + "test_nothing_is_sent_where_pages_say_so",),
        "raise RuntimeError on every rank": (SYNC + "test_what_reads_gradients_is_refused",),
    },
    "fsdp2.FSDPModule.synchronize_gradients": {
        "On every rank: only some ranks call it": (SYNC + "test_calls_that_make_no_sense",),
    },
    "fsdp2.FSDPModule.set_deterministic_reduction": {
        "get the same bits as ``2 * n`` ranks with one each": (
            STEP + "test_deterministic_reduction.py::test_the_same_bits_on_two_and_four_ranks",
        ),
    },
    "fsdp2.FSDPModule.set_transfer_sizes": {
        "None leaves a size unchanged": (STEP + "test_module_methods.py::test_transfer_sizes_say_what_is_packed",),
        "never on other backends": (
            DOCS + "test_in_which_dtype_gloo_sums_chunks",
            "tests/unit/comm/test_collectives.py::test_gloo_alone_exchanges_large_rows",
        ),
    },
}
"""By page, or by the public name whose docstring it is: what is said, and the tests."""

NO_PROMISE = {
    "docs/clients.md": ("Call such methods on every rank, like this",),
    "docs/compression.md": ("A compressed run cannot be resumed bit for bit",),
    "docs/extending.md": ("They must do the same on every rank",),
    "docs/full_parameters.md": ("so make the same change on every rank",),
    "docs/loading.md": ("Call it on every rank inside",),
    "docs/many_nodes.md": ("trains on many machines unchanged", "at most `--max-restarts` times"),
    "docs/multimodal.md": ("which costs the encoder's compute on every rank",),
    "docs/newer_torch.md": ("may change or never be released",),
    "docs/recipes.md": ("DTensor draws the same numbers on every rank",),
    "docs/tutorials/finetune.md": ("Request whole tensors on every rank",),
    "fsdp2.iter_full_params": ("# on every rank",),
    "fsdp2.save_safetensors": ("# on every rank",),
    "fsdp2.state_dict_type": ("# on every rank",),
    "fsdp2.sync_module_states": ("on every rank fsdp2.sync_module_states(model)",),
    "fsdp2.FSDPModule.set_reshard_after_backward": ("Call it on every rank",),
    "fsdp2.FSDPModule.set_compression": ("Call it between two steps, on every rank",),
}
"""What asks the reader for something, or describes another program."""
