"""``fully_shard``: check arguments, choose parameters, build their groups, turn the modules into FSDPModules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp2._torch import (
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
    insert_composable_state,
    root_modules,
    torch_fully_shard,
)
from fsdp2.collect import Found, collect, move_to
from fsdp2.module import make_fsdp_module
from fsdp2.optimizers import follow_parameters
from fsdp2.policies import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from fsdp2.runtime.hooks import hook_forward, hook_state_dict
from fsdp2.runtime.options import GroupOptions
from fsdp2.runtime.param import FSDPParam
from fsdp2.runtime.param_group import FSDPParamGroup
from fsdp2.runtime.state import FSDPState, get_state
from fsdp2.sharding.mesh import DataParallelMesh, default_mesh
from fsdp2.sharding.spec import ShardedSpec

__all__ = ["fully_shard"]

PlacementFn = Callable[[nn.Parameter], Shard | None]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (torch's signature; frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard the parameters of ``module`` over data-parallel ranks, in place, and return it as an ``FSDPModule``.

    The call makes one unit of all parameters below ``module`` that no earlier call on a submodule manages: call it
    bottom-up, on each block and then on the whole model. A unit's parameters are gathered before its forward and its
    backward and freed after; its gradients are reduced to shards of their mean.

    Args:
        module: A module, or several that communicate as one unit and need not all run in every forward.
        mesh: 1D: shard over it. Default: all ranks, on the accelerator if there is one; makes the default process group
            where none exists.
        reshard_after_forward: Free the full parameters after forward (True) or keep them for backward (False). None:
            True, and False for the root.
        shard_placement_fn: Which dimension to cut, ``Shard(d)``, per parameter; None for the first. Any d, even or not.
        mp_policy: dtypes of computation, reduction and outputs; see torch's ``MixedPrecisionPolicy``.
        offload_policy: Not supported yet beyond the default.
        ignored_params: Not supported yet.
        dp_mesh_dims: Not supported yet.

    Returns:
        The same object; its class is now a subclass of both its own and ``FSDPModule``.

    Raises:
        ValueError: a container without forward, a mesh of the wrong rank or without this rank, a tree that torch's own
            fully_shard manages.
        TypeError: an argument of the wrong type.
        AssertionError: ``module`` already went through a fully_shard call (torch's contract).
        NotImplementedError: an argument this version does not support.
    """
    modules = _check_modules(module)
    _refuse_unsupported(reshard_after_forward, offload_policy, ignored_params, dp_mesh_dims)
    options = GroupOptions(
        mp_policy=mp_policy, offload_policy=offload_policy, reshard_after_forward=reshard_after_forward
    )
    dp_mesh = DataParallelMesh.from_mesh(default_mesh() if mesh is None else mesh)
    managed = collect(modules, ignored_params or set())
    specs = [_spec(found, shard_placement_fn, dp_mesh) for found in managed.params]
    move_to(dp_mesh.device, managed.params, managed.buffers)

    state = FSDPState(modules, dp_mesh.device, mp_policy)
    if managed.params:
        state.groups.append(_make_group(managed.params, specs, modules, dp_mesh, options, state))
    _attach(state)
    for submodule in managed.modules:  # Dynamo guards on these
        submodule._is_fsdp_managed_module = True  # type: ignore[assignment]
        submodule._fsdp_use_orig_params = True  # type: ignore[assignment]
    for submodule in modules:
        make_fsdp_module(submodule)
    return module


def _check_modules(module: Any) -> tuple[nn.Module, ...]:
    given = [module] if isinstance(module, nn.Module) else module
    if not isinstance(given, (list, tuple)) or not given or not all(isinstance(m, nn.Module) for m in given):
        raise TypeError(f"fully_shard: expected an nn.Module or a non-empty list of them, got {module!r}")
    for m in given:
        if isinstance(m, (nn.ModuleList, nn.ModuleDict)) and type(m).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: {m}\n"
                "Call fully_shard on each module in it, or pass them as a list to make one unit of them"
            )
    modules = tuple(given) if isinstance(module, nn.Module) else tuple(root_modules(list(given)))
    for m in modules:
        if get_state(m) is not None or "fully_shard" in (m.__dict__.get(REGISTRY_KEY) or {}):
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has "
                f"already been applied to the following module:\n{m}"
            )
    return modules


def _refuse_unsupported(
    reshard_after_forward: Any, offload_policy: Any, ignored_params: Any, dp_mesh_dims: Any
) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, (bool, int)):
        raise TypeError(
            f"fully_shard: reshard_after_forward must be a bool, an int or None, got {reshard_after_forward!r}"
        )
    unsupported = []
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        unsupported.append("reshard_after_forward as an int (use True or False)")
    if isinstance(offload_policy, CPUOffloadPolicy):
        unsupported.append("CPUOffloadPolicy (use the default offload_policy)")
    if ignored_params:
        unsupported.append("ignored_params (leave it out)")
    if dp_mesh_dims is not None:
        unsupported.append("dp_mesh_dims (pass the data-parallel mesh as mesh)")
    if unsupported:
        raise NotImplementedError(f"fully_shard: not supported yet: {'; '.join(unsupported)}")


def _spec(found: Found, placement_fn: PlacementFn | None, mesh: DataParallelMesh) -> ShardedSpec:
    placement = None if placement_fn is None else placement_fn(found.param)
    return ShardedSpec.of(found.param, placement, mesh, found.name)


@torch.no_grad()
def _make_group(
    found: list[Found],
    specs: list[ShardedSpec],
    modules: tuple[nn.Module, ...],
    mesh: DataParallelMesh,
    options: GroupOptions,
    state: FSDPState,
) -> FSDPParamGroup:
    params = [FSDPParam(entry.param, spec, entry.slots, entry.name) for entry, spec in zip(found, specs)]
    pieces = [spec.cut(entry.param.detach()) for entry, spec in zip(found, specs)]
    group = FSDPParamGroup(params, pieces, modules, mesh, options, state.root)
    follow_parameters([entry.param for entry in found], params)
    return group


def _attach(state: FSDPState) -> None:
    """Make the state findable from its modules, by us and by torch, and register the hooks that drive it."""
    for module in state.modules:
        insert_composable_state(module, state)
        module.__dict__.setdefault(STATE_KEY, {})[torch_fully_shard()] = state
        module.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()
    hook_forward(state.modules, state.pre_forward, state.post_forward)
    for group in state.groups:
        owners = dict.fromkeys(slot.module for param in group.params for slot in param.slots)
        hook_state_dict(owners, group.before_save, group.after_save, group.before_load, group.after_load)
