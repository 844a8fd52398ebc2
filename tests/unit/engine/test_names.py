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
from torch.distributed.tensor import DTensor

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


def described(fsdp: ModuleType, mesh: DeviceMesh, reshard: object) -> list[object]:
    """What libraries read of a unit under torch's names: its policy, sizes, places, settings."""
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    module[1].twin = module[1].weight
    policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fsdp.fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    module.set_requires_gradient_sync(False)
    module.set_requires_all_reduce(True)
    module.set_reshard_after_backward(False)
    state = module._get_fsdp_state()
    group = state._fsdp_param_group
    after = group.post_forward_mesh_info
    return [
        (state._mp_policy.param_dtype, group.mp_policy.reduce_dtype),
        (group.reduce_grads, group.all_reduce_grads, group.reshard_after_backward),
        [(param._orig_size, param._orig_size.numel(), param.sharded_size) for param in group.fsdp_params],
        [(info.module is module[1], info.param_name) for info in (p._module_info for p in group.fsdp_params)],
        [[shared is module[1] for shared in p._module_info.shared_modules] for p in group.fsdp_params],
        [p._module_info.shared_param_names for p in group.fsdp_params],
        after and (after.mesh.mesh.tolist(), after.shard_mesh_size, after.shard_mesh_rank),
    ]


@pytest.mark.parametrize("reshard", [True, False, 2])
def test_libraries_read_what_they_read_of_torchs(mesh: DeviceMesh, reshard: object) -> None:
    """ModelOpt reads the mesh after forward, finetuning-scheduler policies and sizes, quantizers a parameter's place.

    A name that only can be read refuses to be set, where a new attribute would silently have no effect.
    """
    ours = described(fsdp2, mesh, reshard)
    assert ours == described(torch.distributed.fsdp, mesh, reshard)
    group = fully_shard(nn.Linear(4, 4), mesh=mesh)._get_fsdp_state()._fsdp_param_group
    with pytest.raises(AttributeError, match="reduce_grads is .* Call the setters"):
        group.reduce_grads = False


def test_a_root_for_inference_is_told_to_reshard(mesh: DeviceMesh) -> None:
    """As DINOv3 does it: a root keeps its parameters after forward, unless its mesh of before is set again."""
    kept, freed = (fully_shard(nn.Linear(4, 4), mesh=mesh) for _ in range(2))
    group = freed._get_fsdp_state()._fsdp_param_group
    before = group.post_forward_mesh_info
    freed._get_fsdp_state()._lazy_init()
    assert before is not None and group.post_forward_mesh_info is None
    group.post_forward_mesh_info = before
    for module, kind in ((kept, False), (freed, True)):
        module(torch.ones(2, 4))
        assert isinstance(module.weight, DTensor) is kind
    group.post_forward_mesh_info = None
    freed(torch.ones(2, 4))
    assert not isinstance(freed.weight, DTensor)
    quarters = fully_shard(nn.Linear(4, 4), mesh=mesh, reshard_after_forward=2)._get_fsdp_state()._fsdp_param_group
    group.post_forward_mesh_info = quarters.post_forward_mesh_info
    freed(torch.ones(2, 4))
    assert group._sharded_state is ShardedState.SHARDED_POST_FORWARD


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
