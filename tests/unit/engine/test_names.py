"""A group answers by torch's names for what it is and where it is."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_param_group

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2._torch.fsdp import ShardedState, TrainingState
from fsdp2.engine.group import FSDPParamGroup
from tests.support.parity import shard_each


def test_residencies_by_torchs_names(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=2)
    (group,) = module._get_fsdp_state()._fsdp_param_groups
    assert group._sharded_state is ShardedState.SHARDED and group._all_gather_result is None
    handle = module.unshard(async_op=True)
    assert group._sharded_state is ShardedState.SHARDED and group._all_gather_result is not None
    assert group.is_sharded and not group.is_unsharded
    handle.wait()
    assert group._sharded_state is ShardedState.UNSHARDED and group._all_gather_result is None
    assert group.is_unsharded and not group.is_sharded
    module(torch.ones(2, 4))
    assert group._sharded_state is ShardedState.SHARDED_POST_FORWARD
    assert not group.is_unsharded and not group.is_sharded


def test_a_state_and_its_communication_by_torchs_names(mesh: DeviceMesh) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([module[0], module[1]], mesh=mesh)
    fully_shard(module, mesh=mesh)
    module[0].set_reduce_scatter_max_input_buffers(3)
    module(torch.ones(2, 4))
    state, root = module[0]._get_fsdp_state(), module._get_fsdp_state()
    assert state._comm_ctx is root._comm_ctx and root._comm_ctx.reduce_scatter_max_input_buffers == 3
    assert state._fsdp_param_group.reduce_scatter_max_input_buffers == 3
    assert state._modules_to_run_forward == root._modules_to_run_forward == set()
    running: list[set[nn.Module]] = []
    module[1].register_forward_hook(lambda *unused: running.append(set(root._modules_to_run_forward)))
    module(torch.ones(2, 4))
    assert running == [{module}]


def test_a_mesh_and_unset_buffers_by_torchs_names(mesh: DeviceMesh) -> None:
    group = fully_shard(nn.Linear(4, 4), mesh=mesh)._get_fsdp_state()._fsdp_param_group
    info = group.mesh_info
    assert info.shard_process_group is mesh.get_group() and (info.shard_mesh_size, info.shard_mesh_rank) == (4, 0)
    assert group.reduce_scatter_max_input_buffers == 1


def test_dtypes_of_a_group_by_torchs_names(mesh: DeviceMesh) -> None:
    module = nn.Linear(4, 4)
    module.counts = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
    fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float64))
    group = module._get_fsdp_state()._fsdp_param_group
    assert (group._orig_dtype, group._reduce_dtype) == (torch.float32, torch.float64)
    module.requires_grad_(False)
    assert (group._orig_dtype, group._reduce_dtype) == (torch.float32, torch.float64)
    numbers = nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)])
    numbers.forward = lambda: None
    group = fully_shard(numbers, mesh=mesh)._get_fsdp_state()._fsdp_param_group
    assert group._orig_dtype is group._reduce_dtype is None


def test_no_reduction_is_left_for_the_next_forward(mesh: DeviceMesh) -> None:
    module = fully_shard(nn.Linear(4, 4), mesh=mesh)
    module(torch.ones(2, 4)).sum().backward()
    assert not module._get_fsdp_state()._comm_ctx._last_post_reduce_events


STEPS = ("unshard", "reshard", "post_backward")


def events(fsdp: ModuleType, groups: type, mesh: DeviceMesh, reshard: object, run: Callable[..., None]) -> list[str]:
    """What groups of a class do in ``run``, each with its module and the state it is in, as torch's tests note it."""
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    module.scale = nn.Parameter(torch.ones(4))  # the root's own
    shard_each(module, fsdp, mesh=mesh, reshard_after_forward=reshard)
    seen: list[str] = []

    def noted(step: str, original: Callable[..., object]) -> Callable[..., object]:
        def method(group: Any, *args: object, **kwargs: object) -> object:
            idle = step == "unshard" and (group._all_gather_result or group._sharded_state is ShardedState.UNSHARDED)
            before, kept = group._training_state, not group._reshard_after_forward
            idle = idle or (step == "reshard" and before is TrainingState.FORWARD and kept)
            result = original(group, *args, **kwargs)
            state = group._training_state if step == "post_backward" else before
            if not idle:
                seen.append(f"{step} {group._module_fqn} {state.name}")
            return result

        return method

    with pytest.MonkeyPatch.context() as patch:
        for step in STEPS:
            patch.setattr(groups, step, noted(step, getattr(groups, step)))
        run(module, seen)
    return seen


def one_iteration(module: Any, seen: list[str]) -> None:
    output = module(torch.ones(2, 4, requires_grad=True))
    seen.append("backward")
    output.sum().backward()


def prefetched_forward(module: Any, seen: list[str]) -> None:
    module[0].set_modules_to_forward_prefetch([module[1], module[2]])
    module[1].set_modules_to_forward_prefetch([module[2], module[3]])
    one_iteration(module, seen)


def prefetched_backward(module: Any, seen: list[str]) -> None:
    module[3].set_modules_to_backward_prefetch([module[2], module[1]])
    module[2].set_modules_to_backward_prefetch([module[1], module[0]])
    one_iteration(module, seen)


@pytest.mark.parametrize("reshard", [True, False, None])
@pytest.mark.parametrize("run", [one_iteration, prefetched_forward, prefetched_backward])
def test_groups_do_what_torchs_do_in_the_same_states(
    mesh: DeviceMesh, reshard: object, run: Callable[..., None]
) -> None:
    """Memory trackers and torch's tests patch the steps of groups and read their states meanwhile."""
    ours = events(fsdp2, FSDPParamGroup, mesh, reshard, run)
    theirs = events(torch.distributed.fsdp, torch_param_group.FSDPParamGroup, mesh, reshard, run)
    assert ours == theirs and any(event.startswith("post_backward") for event in ours)
