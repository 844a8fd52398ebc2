"""torch's names for the parts of a unit, a group, a parameter and a mesh, as properties of our classes.

They are set when the package is imported. Libraries, memory trackers and torch's own tests use these names; nothing
else in the package does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import Shard

from fsdp2._torch.fsdp import ParamModuleInfo, ShardedState, TrainingState
from fsdp2.comm.context import CommContext
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam
from fsdp2.engine.passes import backward_runs
from fsdp2.engine.phase import Phase
from fsdp2.engine.residency import Level
from fsdp2.engine.unit import FSDPState, get_state
from fsdp2.sharding.mesh import DataParallelMesh, regroup

__all__ = ["give_names"]

Properties = dict[str, Callable[[Any], Any]]

_TRAINING_STATES = ("IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD")  # by Phase
_SHARDED_STATES: dict[Level, str] = {Level.FULL: "UNSHARDED", Level.PIECES: "SHARDED_POST_FORWARD"}


def _training_state(group: FSDPParamGroup) -> TrainingState:
    """Return the group's phase in the iteration; for a prefetched group, the phase of the running pass."""
    phase, unit = group.phases.phase, get_state(group.modules[0])
    if phase is Phase.IDLE and backward_runs():
        phase = Phase.BACKWARD
    elif phase is Phase.IDLE and unit is not None and unit.root.forward is not None:
        phase = Phase.FORWARD
    return TrainingState[_TRAINING_STATES[phase]]


def _trainable_first(group: FSDPParamGroup) -> list[FSDPParam]:
    floating = [param for param in group.params if param.dtype.is_floating_point]
    return sorted(floating, key=lambda param: not param.requires_grad)


def _only_group(unit: FSDPState) -> FSDPParamGroup | None:
    if len(unit.groups) > 1:
        raise AssertionError(
            f"Expected at most 1 param group, but got {len(unit.groups)} of {unit.name!r}; read _fsdp_param_groups"
        )
    return unit.groups[0] if unit.groups else None


def _module_info(param: FSDPParam) -> ParamModuleInfo:
    (first, *others), info = param.sites, ParamModuleInfo
    return info(first.module, first.name, [site.module for site in others], [site.name for site in others])


def _mesh_after_forward(group: FSDPParamGroup) -> DataParallelMesh | None:
    """Return the mesh that parameters are sharded over after forward, or None if they stay whole."""
    after = group.after_forward
    if after is False:
        return None
    return group.mesh if after is True else DataParallelMesh.from_mesh(regroup(group.mesh.mesh, after))


def _set_mesh_after_forward(group: FSDPParamGroup, mesh: DataParallelMesh | None) -> None:
    """Shard parameters over ``mesh`` after forward, or keep them for None.

    Recipes read the mesh of an inference model's root before its first forward, and set it again after
    ``_lazy_init()``: a root keeps its parameters unless something else was asked for.
    """
    after: bool | int = False if mesh is None else mesh.shard.size
    group.set_options(
        replace(group.store.options, reshard_after_forward=True if after == group.mesh.shard.size else after)
    )


_PARAM: Properties = {
    "sharded_param": lambda param: param.sharded,
    "unsharded_param": lambda param: param.full,
    "_unsharded_param": lambda param: param.full,
    "_param_fqn": lambda param: param.name,
    "_module_info": _module_info,
    "_orig_size": lambda param: torch.Size(param.spec.layout.shape),
    "sharded_size": lambda param: param.local.shape,
    "fsdp_placement": lambda param: None if param.spec.layout.dim is None else Shard(param.spec.layout.dim),
}
_GROUP: Properties = {
    "fsdp_params": lambda group: group.params,
    "mesh_info": lambda group: group.mesh,
    "is_sharded": lambda group: group.residency.level in (Level.SHARDS, Level.GATHERING),
    "reduce_scatter_max_input_buffers": lambda group: group.store.options.reduce_inputs or 1,
    "_module_fqn": lambda group: group.name,
    "_training_state": _training_state,
    "_sharded_state": lambda group: ShardedState[_SHARDED_STATES.get(group.residency.level, "SHARDED")],
    "_all_gather_result": lambda group: group.residency.gathering,
    "mp_policy": lambda group: group.store.options.mp_policy,
    "reduce_grads": lambda group: group.store.options.reduce_gradients,
    "all_reduce_grads": lambda group: group.store.options.all_reduce_gradients,
    "reshard_after_backward": lambda group: group.store.options.reshard_after_backward,
    "_reshard_after_forward": lambda group: group.after_forward is not False,
    "_orig_dtype": lambda group: next((param.dtype for param in _trainable_first(group)), None),
    "_reduce_dtype": lambda group: next((param.reduce_dtype for param in _trainable_first(group)), None),
}
_UNIT: Properties = {
    "_fsdp_param_groups": lambda unit: unit.groups,
    "_fsdp_param_group": _only_group,
    "_state_ctx": lambda unit: unit.root,
    "_comm_ctx": lambda unit: unit.root.comm,
    "_modules_to_run_forward": lambda unit: unit.members_to_run,
    "_mp_policy": lambda unit: unit.mp_policy,
    "_is_root": lambda unit: unit.is_root,
    "_modules": lambda unit: unit.modules,
}
_COMM: Properties = {
    "reduce_scatter_max_input_buffers": lambda comm: comm.reductions.limit,
    "_last_post_reduce_events": lambda comm: {},  # empty: the end of backward has already waited for reductions
}
_MESH: Properties = {
    "shard_process_group": lambda mesh: mesh.shard.group,
    "shard_mesh_size": lambda mesh: mesh.shard.size,
    "shard_mesh_rank": lambda mesh: mesh.shard.rank,
}
_UNIT_METHODS: dict[str, Callable[..., Any]] = {
    "_pre_forward": FSDPState.pre_forward,
    "_post_forward": FSDPState.post_forward,
    "_lazy_init": lambda unit: None if unit.is_root is not None else unit.init_root(),
    "_root_post_backward_final_callback": lambda unit: unit.root.end_backward(unit.root.enter_backward()),
}


def _refuse(name: str, owner: object, value: object) -> None:
    if name == "_comm_ctx":
        raise AttributeError(
            "torch's share_comm_ctx was called with modules of fsdp2, whose communication it cannot change; call "
            "fsdp2.share_comm_ctx(modules) instead"
        )
    raise AttributeError(
        f"{type(owner).__name__}.{name} is torch's name for something that fsdp2 keeps elsewhere, so it can only be "
        "read. Call the setters of FSDPModule, such as set_requires_gradient_sync"
    )


def give_names() -> None:
    """Set torch's names on our classes."""
    owners: dict[type, Properties] = {
        FSDPParam: _PARAM,
        FSDPParamGroup: _GROUP,
        FSDPState: _UNIT,
        CommContext: _COMM,
        DataParallelMesh: _MESH,
    }
    for owner, names in owners.items():
        for name, read in names.items():
            setattr(owner, name, property(read, partial(_refuse, name)))
    FSDPParamGroup.post_forward_mesh_info = property(  # type: ignore[attr-defined]  # it has no such name of its own
        _mesh_after_forward, _set_mesh_after_forward
    )
    for name, method in _UNIT_METHODS.items():
        setattr(FSDPState, name, method)
