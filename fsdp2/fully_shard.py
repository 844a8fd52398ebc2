"""``fully_shard``: check arguments, choose parameters, build their groups, turn the modules into FSDPModules."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._torch import (
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
    insert_composable_state,
    root_modules,
    torch_fully_shard,
)
from fsdp2.collect import collect
from fsdp2.grouping import PlacementFn, Unit
from fsdp2.module import make_fsdp_module
from fsdp2.policies import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, PolicyOf, policy_by_name
from fsdp2.runtime.hooks import hook_forward, hook_loading
from fsdp2.runtime.options import GroupOptions
from fsdp2.runtime.state import FSDPState, get_state
from fsdp2.sharding.mesh import DataParallelMesh, default_mesh
from fsdp2.state_dicts.loading import after_load_tree, before_load_tree

__all__ = ["fully_shard"]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | Mapping[str, MixedPrecisionPolicy] | PolicyOf = MixedPrecisionPolicy(),  # noqa: B008 (torch's signature; frozen)
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
        reshard_after_forward: Free the full parameters after forward (True), keep them for backward (False), or keep
            them cut over so many neighbouring ranks, a factor of the shard axis (int). None: True, and False for the
            root.
        shard_placement_fn: Which dimension to cut, ``Shard(d)``, per parameter; None for the first. Any d, even or not.
            A ``ShardPlacementResult`` also says on which mesh: such parameters make a group of their own.
        mp_policy: dtypes of computation, reduction and outputs; see torch's ``MixedPrecisionPolicy``. Or a policy for
            each parameter: a mapping from names or patterns such as ``"*norm.weight"`` (first match; ``""`` for all
            others and for the unit's inputs and outputs), or a function of the name. They still travel in one gather.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, their gradients and so the optimizer on the CPU.
        ignored_params: Parameters to leave alone: not sharded, not moved, their gradients not reduced.
        dp_mesh_dims: ``mesh`` is the whole mesh that the parameters, all of them DTensors, lie on; these of its
            dimensions are the data-parallel ones.

    Returns:
        The same object; its class is now a subclass of both its own and ``FSDPModule``.

    Raises:
        ValueError: a container without forward, a mesh of the wrong rank or without this rank, a tree that torch's own
            fully_shard manages.
        TypeError: an argument of the wrong type.
        AssertionError: ``module`` already went through a fully_shard call (torch's contract).
        NotImplementedError: ``reshard_after_forward`` as an int together with ``dp_mesh_dims``.
    """
    modules = _check_modules(module)
    _check_arguments(shard_placement_fn, offload_policy, ignored_params, dp_mesh_dims)
    policy_of = policy_by_name(mp_policy)
    dp_mesh = DataParallelMesh.from_mesh(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    reshard_after_forward = _check_reshard(reshard_after_forward, dp_mesh)
    options = GroupOptions(
        mp_policy=policy_of(""), offload_policy=offload_policy, reshard_after_forward=reshard_after_forward
    )
    ignored = set(ignored_params or ())
    managed = collect(modules, ignored)
    state = FSDPState(modules, dp_mesh.device, options.mp_policy)
    unit = Unit(state, dp_mesh, options, shard_placement_fn, ignored, policy_of)
    unit.manage(managed)
    state.adopt_added = unit.adopt_added
    _attach(state)
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


def _check_arguments(placement_fn: Any, offload_policy: Any, ignored_params: Any, dp_mesh_dims: Any) -> None:
    for name, value, kind in (
        ("offload_policy", offload_policy, OffloadPolicy),
        ("dp_mesh_dims", dp_mesh_dims, (DataParallelMeshDims, type(None))),
    ):
        if not isinstance(value, kind):
            expected = kind[0].__name__ if isinstance(kind, tuple) else kind.__name__
            raise TypeError(f"fully_shard: {name} must be a {expected}, got {value!r}")
    if placement_fn is not None and not callable(placement_fn):
        raise TypeError(f"fully_shard: shard_placement_fn must be callable, got {placement_fn!r}")
    if ignored_params is not None and not all(isinstance(p, nn.Parameter) for p in ignored_params):
        raise TypeError(f"fully_shard: ignored_params must be a set of nn.Parameter, got {ignored_params!r}")


def _check_reshard(value: Any, mesh: DataParallelMesh) -> bool | int | None:
    """``reshard_after_forward`` with the whole axis as True and one rank as False."""
    if value is None or isinstance(value, bool):
        return value
    size = mesh.shard.size
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward should be a bool or an int representing the group size to reshard to, not {value!r}"
        )
    if mesh.dims is not None:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims); pass True or False"
        )
    if value < 1 or value > size or size % value != 0:
        raise ValueError(f"If passing reshard_after_forward as an int, it should be a factor of {size}, not {value}")
    if value == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, instead of "
            "reshard_after_forward=True (bool)",
            stacklevel=3,
        )
        return False
    return True if value == size else value


class _Registry(dict):
    """The composable APIs applied to a module; refuses torch's own fully_shard on a module above ours.

    torch would take our shards for tensor-parallel parameters and shard them again. The only thing it asks of a module
    it is about to manage is whether ``replicate`` is in here.
    """

    def __contains__(self, name: object) -> bool:
        if name == "replicate" and sys._getframe(1).f_code.co_name == "_is_composable_with_fsdp":
            raise ValueError(
                "torch.distributed.fsdp.fully_shard: a module below is managed by fsdp2.fully_shard; one module tree "
                "cannot mix them. Use fsdp2.fully_shard for the whole tree, or call fsdp2.install() first"
            )
        return super().__contains__(name)


def _attach(state: FSDPState) -> None:
    """Make the state findable from its modules, by us and by torch, and register the hooks that drive it."""
    for module in state.modules:
        insert_composable_state(module, state)
        module.__dict__.setdefault(STATE_KEY, {})[torch_fully_shard] = state
        registry = _Registry(module.__dict__.get(REGISTRY_KEY) or {})
        registry["fully_shard"] = RegistryItem()
        module.__dict__[REGISTRY_KEY] = registry
    handles = hook_forward(state.modules, state.pre_forward, state.post_forward)
    state._pre_forward_hook_handle, state._post_forward_hook_handle = handles[0]
    hook_loading(state.modules, before_load_tree, after_load_tree)


fully_shard.state = get_state  # type: ignore[attr-defined]  # torch's function has it too; pipelining asks for it
