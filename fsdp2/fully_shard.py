"""``fully_shard`` checks arguments, groups parameters, and turns modules into FSDPModules."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from fsdp2 import hints
from fsdp2._naming import class_name
from fsdp2._torch.modules import inherited_call
from fsdp2._warn import warn
from fsdp2.autograd.hooks import hook_forward, hook_loading
from fsdp2.compression.collectives import compress
from fsdp2.compression.policy import CompressionPolicy
from fsdp2.engine.apart import watch_compilation
from fsdp2.engine.options import GroupOptions
from fsdp2.engine.param import is_managed_tensor
from fsdp2.engine.unit import FSDPState, apis_of, get_state, keep_state, register_as_managed
from fsdp2.fsdp1.arguments import merge_arguments
from fsdp2.fsdp1.methods import FSDP1Methods, names_remedies, refuse_fsdp1
from fsdp2.fsdp1.strategy import follow_strategy
from fsdp2.grouping.collect import Found, check_set, collect
from fsdp2.grouping.copying import DeepCopied, copy_module, reduce_module
from fsdp2.grouping.grouping import CallOptions, warn_of_gradients
from fsdp2.grouping.placing import Placed, PlacementFn
from fsdp2.grouping.plan import describe
from fsdp2.grouping.policy import Policy, choose_units
from fsdp2.grouping.shared_memory import warn_of_shared_memory
from fsdp2.module import MADE_BY_FULLY_SHARD, FSDPModule, ZeroesHidden
from fsdp2.policies import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadOf,
    OffloadPolicy,
    PolicyOf,
    Tied,
    fits,
    offload_by_name,
    policy_by_name,
)
from fsdp2.ranks.process import watch_waits
from fsdp2.sharding.mesh import DataParallelMesh
from fsdp2.weights.load_state_dict import after_load_tree, before_load_tree, hook_group

__all__ = ["fully_shard"]

logger = logging.getLogger("fsdp2")
hints.watch()
watch_compilation()

# The FSDP class of each class. Keys and values are weak: a class that is defined in a function or a notebook may keep
# models alive through its methods.
_classes: weakref.WeakKeyDictionary[type, weakref.ref[type]] = weakref.WeakKeyDictionary()
_REMEDY_FOR_NAMES = (
    "Use names relative to the module that you pass, or pass policy=, which shards all blocks of a model with one "
    "mapping"
)
_OF_EACH_CLASS = "__dict__", "__weakref__", "__deepcopy__"  # what another class makes anew, and our own deep copy


@names_remedies
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | Mapping[str, MixedPrecisionPolicy] | PolicyOf = MixedPrecisionPolicy(),  # noqa: B008 (torch's signature; frozen)
    offload_policy: OffloadPolicy | Mapping[str, OffloadPolicy] | OffloadOf = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    policy: Policy = None,
    strategy: ShardingStrategy | None = None,
    replicated_params: set[nn.Parameter] | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    compression: CompressionPolicy | None = None,
    shard_over_replicas: bool = False,
) -> Any:
    """Shard the parameters of ``module`` over data-parallel ranks, in place, and return it as an ``FSDPModule``.

    The call makes one unit of all parameters below ``module`` that no earlier call on a submodule manages. Call it
    bottom-up, on each block and then on the whole model, or let ``policy`` choose the blocks. A unit's parameters are
    gathered before its forward and its backward and freed afterwards. Its gradients are reduced to shards of their
    mean.

    Args:
        module: A module, or a list of modules that form one unit; these need not all run in every forward.
        mesh: A 1D mesh to shard over, or a 2D mesh to replicate over its first dimension and shard over its second.
            Default: all ranks, on the accelerator if there is one. The default process group is initialized if there
            is none.
        reshard_after_forward: Free the full parameters after forward (True), keep them for backward (False), or keep
            them sharded over this many neighbouring ranks, a factor of the size of the shard dimension (int). None:
            True, and False for the root.
        shard_placement_fn: A function of a parameter that returns the dimension to shard, ``Shard(d)``, or None for the
            first. The dimension need not divide evenly. A ``ShardPlacementResult`` also gives a mesh; such parameters
            make a group of their own. "auto" chooses the dimension with the least padding, and of equal ones the
            slowest in memory, which is gathered without a copy.
        mp_policy: The dtypes of computation, reduction and outputs; see torch's ``MixedPrecisionPolicy``. Or a policy
            for each parameter: a mapping from names or patterns such as ``"*norm.weight"`` (the first match counts;
            ``""`` stands for all others and for the unit's inputs and outputs), or a function of the name. The unit
            still has one gather. With ``policy``, names are those in ``module``. A mapping may have any name of a tied
            parameter.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer state on the CPU. Or a policy for
            each parameter: a mapping from names or patterns as for ``mp_policy``, such as the result of
            ``cpu_offload_by_budget``, or a function of the name. Parameters of one policy make a group, with its own
            gathers and reductions.
        ignored_params: Parameters to leave unchanged: they are not sharded or moved, and their gradients are not
            reduced.
        dp_mesh_dims: The data-parallel dimensions of ``mesh``. All parameters must then be DTensors on ``mesh``.
        policy: The submodules that become units first, with the same arguments except ``output_dtype``, which applies
            only to the outputs of ``module``. It is torch's ``ModuleWrapPolicy`` or ``CustomPolicy``, any function for
            FSDP1's ``auto_wrap_policy`` (``size_based_auto_wrap_policy``), a set of module classes, a function
            ``(module) -> bool | dict`` (of arguments for that unit), or "auto" for the blocks that repeat.
            ``plan_units`` shows the result, and the logger "fsdp2" logs it at INFO.
        strategy: torch's ``ShardingStrategy``, which implies the kind of mesh and ``reshard_after_forward``: FULL_SHARD
            (True), SHARD_GRAD_OP (False), HYBRID_SHARD and _HYBRID_SHARD_ZERO2 (the same on a 2D mesh, by default
            sharded within a node) or NO_SHARD (whole on every rank of the mesh, gradients all-reduced).
        replicated_params: Parameters to keep whole on every rank; their gradients are all-reduced. All ranks must
            start with the same values.
        ignored_modules: Modules to leave unchanged, with all modules, parameters and buffers below them.
        compression: Sends parameters, gradients or both in eight or four bits, for slow networks. None sends them
            uncompressed.
        shard_over_replicas: On a 2D mesh, shard parameters, gradients and optimizer state over the replicate dimension
            too, so that no two ranks keep the same elements. Forward and backward gather over the shard dimension only,
            from pieces that are gathered over the replicate dimension once after the shards have changed.

    Returns:
        The same object. Its class is now a subclass of both its own class and ``FSDPModule``.

    Raises:
        ValueError: ``module`` is a container without forward, the mesh has the wrong number of dimensions or lacks
            this rank, torch's own fully_shard manages a module of the tree, the policy matches nothing, or arguments
            contradict the strategy.
        TypeError: An argument has the wrong type.
        AssertionError: ``module`` already went through a fully_shard call (torch's contract).
        NotImplementedError: The call combines two of ``reshard_after_forward`` as an int, ``dp_mesh_dims`` and
            ``shard_over_replicas``, or ``shard_over_replicas`` with a tensor that has an all-gather extension.

    Example:
        ```python
        for block in model.blocks:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        ```
    """
    modules = _check_modules(module)
    given = dict(
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=shard_placement_fn,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params=ignored_params,
        dp_mesh_dims=dp_mesh_dims,
        strategy=strategy,
        replicated_params=replicated_params,
        ignored_modules=ignored_modules,
        compression=compression,
        shard_over_replicas=shard_over_replicas,
    )
    own = _check_arguments(modules, given)
    units = [] if policy is None else _plan(modules, policy, given, own)
    calls = [*units, (modules, own)]
    # Before anything changes, all arguments are checked, and all classes made: a metaclass may refuse.
    placed = _checked(calls) if units else {}
    classes = {one: _class_for(one) for modules_of_call, _ in calls for one in modules_of_call}
    dropped = []
    for modules_of_call, call in calls:
        dropped += _shard(modules_of_call, call, placed, classes)
    if dropped:
        prefixes = {below: f"{name}." if name else "" for m in modules for name, below in m.named_modules()}
        warn_of_gradients([prefixes[found.sites[0].module] + found.sites[0].name for found in dropped])
    warn_of_shared_memory(modules)
    return module


_Call = tuple[tuple[nn.Module, ...], CallOptions]


def _plan(modules: tuple[nn.Module, ...], policy: Policy, given: dict[str, Any], own: CallOptions) -> list[_Call]:
    """Return a call for each unit that ``policy`` makes below ``modules``; ``own`` are the call's checked arguments."""
    collect(modules, own.ignored, own.ignored_modules)  # its errors come before those of a policy, of a lazy module say
    units = choose_units(modules, policy, own.ignored_modules, own.ignored)
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", describe(modules, units, own.ignored_modules, own.ignored))
    inner = {
        **given,
        "ignored_params": own.ignored,
        "ignored_modules": own.ignored_modules,
        "replicated_params": own.replicated,
    }
    calls: list[_Call] = []
    for unit in units:
        below = {
            "mp_policy": _mixed_precision_below(own.policy_of, unit.name),
            "offload_policy": _offload_below(own.offload_of, unit.name),
        }
        arguments = merge_arguments({**inner, **below}, unit.overrides, unit.name)
        calls.append(((unit.module,), _check_arguments((unit.module,), arguments)))
    return calls


def _checked(calls: list[_Call]) -> dict[nn.Parameter, Placed]:
    """Raise the errors of all ``calls`` before anything changes; return how they place each parameter, which belongs to
    the first call that has it."""
    placed: dict[nn.Parameter, Placed] = {}
    units: set[nn.Module] = set()
    for modules, call in calls:
        params = collect(modules, call.ignored, call.ignored_modules | units).params
        placed.update((entry.found.param, entry) for entry in call.check(params, placed))
        units.update(modules)
    return placed


def _mixed_precision_below(policy_of: PolicyOf, unit: str) -> PolicyOf:
    """Return the policy by names in ``unit``, from ``policy_of``, which takes names in the whole module."""

    def of(name: str) -> MixedPrecisionPolicy:
        if name:
            return policy_of(f"{unit}.{name}")
        return replace(policy_of(""), output_dtype=None)  # output_dtype is only for the whole module

    return of


def _offload_below(offload_of: OffloadOf, unit: str) -> OffloadOf:
    """Return the policy by names in ``unit``, from ``offload_of``, which takes names in the whole module."""
    return lambda name: offload_of(f"{unit}.{name}" if name else "")


def _shard(
    modules: tuple[nn.Module, ...],
    call: CallOptions,
    placed: dict[nn.Parameter, Placed],
    classes: dict[nn.Module, type],
) -> list[Found]:
    """Make one unit of ``modules``, which get their ``classes``; return the parameters whose gradients are dropped.

    It takes what is ``placed``.
    """
    managed = collect(modules, call.ignored, call.ignored_modules)
    unit = FSDPState(modules, call.mesh.device, call.options.mp_policy, call)
    dropped = call.manage(unit, managed, placed)
    watch_waits(call.mesh)
    _attach(unit)
    for module in modules:
        # Names and attributes do not change. The class may override __setattr__.
        object.__setattr__(module, "__class__", classes[module])
    return dropped


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
    inside = {child for m in given for child in m.modules() if child is not m}
    modules = tuple(dict.fromkeys(m for m in given if m not in inside))  # a shared module may be listed under two names
    for m in modules:
        if get_state(m) is not None or "fully_shard" in apis_of(m):
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard has "
                f"already been applied to the following module:\n{m}"
            )
    return modules


def _check_arguments(modules: tuple[nn.Module, ...], given: dict[str, Any]) -> CallOptions:
    for name, kind in (
        ("dp_mesh_dims", (DataParallelMeshDims, type(None))),
        ("compression", (CompressionPolicy, type(None))),
    ):
        if not isinstance(given[name], kind):
            raise TypeError(f"fully_shard: {name} must be a {kind[0].__name__}, got {given[name]!r}")
    placement_fn = given["shard_placement_fn"]
    if placement_fn not in (None, "auto") and not callable(placement_fn):
        raise TypeError(f'fully_shard: shard_placement_fn must be callable or "auto", got {placement_fn!r}')
    ignored, replicated = (
        check_set("fully_shard", name, given[name], nn.Parameter) for name in ("ignored_params", "replicated_params")
    )
    ignored_modules = check_set("fully_shard", "ignored_modules", given["ignored_modules"], nn.Module)
    for module in ignored_modules:
        if module in modules:
            raise ValueError(
                f"fully_shard: {class_name(module)} is the module to shard and in ignored_modules; remove it from "
                "ignored_modules, or do not call fully_shard on it"
            )
        ignored.update(param for param in module.parameters() if not is_managed_tensor(param))
    if ignored & replicated:
        raise ValueError(
            f"fully_shard: {len(ignored & replicated)} parameters are in ignored_params and in replicated_params; "
            "remove them from one of the two: gradients of ignored parameters are not reduced"
        )
    tied = _tied(modules) if any(isinstance(given[name], Mapping) for name in ("mp_policy", "offload_policy")) else {}
    policy_of, offload_of = policy_by_name(given["mp_policy"], tied), offload_by_name(given["offload_policy"], tied)
    _check_names(modules, given["mp_policy"], given["offload_policy"])
    mesh, reshard = follow_strategy(
        given["strategy"], given["mesh"], given["dp_mesh_dims"], given["reshard_after_forward"]
    )
    reshard = _check_reshard(reshard, mesh)
    if not isinstance(given["shard_over_replicas"], bool):
        raise TypeError(f"fully_shard: shard_over_replicas must be a bool, got {given['shard_over_replicas']!r}")
    if given["shard_over_replicas"]:
        mesh = mesh.over_replicas()
    if mesh.has_portions and not isinstance(reshard, (bool, type(None))):
        raise NotImplementedError(
            f"fully_shard: reshard_after_forward={reshard} is not supported with shard_over_replicas, whose pieces for "
            "the shard dimension stay in memory anyway; pass True or False"
        )
    options = GroupOptions(policy_of(""), offload_of(""), reshard, compression=compress(given["compression"]))
    return CallOptions(
        mesh=mesh,
        options=options,
        placement_fn=placement_fn,
        ignored=ignored,
        policy_of=policy_of,
        offload_of=offload_of,
        hook_group=hook_group,
        ignored_modules=frozenset(ignored_modules),
        replicated=replicated,
    )


def _tied(modules: tuple[nn.Module, ...]) -> Tied:
    """Return all names of each parameter that has several: a unit knows it by one of them alone.

    Names in several modules do not tell their parameters apart, so there are none then.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in modules[0].named_parameters(remove_duplicate=False) if len(modules) == 1 else ():
        names.setdefault(param, []).append(name)
    return {name: several for several in names.values() if len(several) > 1 for name in several}


def _check_names(modules: tuple[nn.Module, ...], mp: Any, offload: Any) -> None:
    """Warn of a pattern in ``mp``, and raise ValueError for one in ``offload``, that matches no parameter.

    It would silently have no effect. Dtypes are often given as one mapping for blocks of several kinds.
    """
    problems = {}
    for name, given in (("mp_policy", mp), ("offload_policy", offload)):
        if isinstance(given, Mapping):
            names = [name for module in modules for name, _ in module.named_parameters(remove_duplicate=False)]
            unknown = [pattern for pattern in given if pattern and not any(fits(name, pattern) for name in names)]
            if unknown:
                problems[name] = (
                    f"fully_shard: {name}: {unknown[0]!r} matches no parameter; expected names in "
                    f"{class_name(modules[0])}, such as {names[0] if names else 'none'!r}"
                )
    if "offload_policy" in problems:
        raise ValueError(f"{problems['offload_policy']}. {_REMEDY_FOR_NAMES}")
    if problems:
        warn(f"{problems['mp_policy']}. As it is, it has no effect. {_REMEDY_FOR_NAMES}")


def _check_reshard(value: Any, mesh: DataParallelMesh) -> bool | int | None:
    """Return ``reshard_after_forward``; the size of the shard axis becomes True, and 1 becomes False."""
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
        warn(
            "reshard_after_forward=1 (int) means resharding parameters to world size 1, instead of "
            "reshard_after_forward=True (bool)"
        )
        return False
    return True if value == size else value


class _Registry(dict):
    """The composable APIs applied to a module. It raises an error if torch's own fully_shard is called above our unit.

    torch would treat our shards as tensor-parallel parameters and shard them again. Its only test of a module that it
    is about to manage is a look-up of ``replicate`` in this registry, so the error is raised there. Libraries may also
    call torch's search for the modules of a unit; they get an answer that ends the search at our units. FSDP1's
    functions, which would find none of FSDP1's wrappers, raise an error. A look-up has nothing but a name, so the
    frames tell who asks. There is no hook: torch's ``fully_shard`` calls nothing of a module below before it shards.
    """

    def __contains__(self, name: object) -> bool:
        caller = sys._getframe(1)
        if name != "replicate" or caller.f_code.co_name != "_is_composable_with_fsdp":
            refuse_fsdp1(caller)
            return super().__contains__(name)
        search = frame = caller.f_back
        while frame is not None and frame.f_code.co_name in ("dfs", "_get_managed_modules"):
            frame = frame.f_back
        if frame is search or frame is None or str(frame.f_globals.get("__name__")).startswith("torch.distributed."):
            raise ValueError(
                "torch.distributed.fsdp.fully_shard: a module below is managed by fsdp2.fully_shard; one module tree "
                "cannot mix them. Use fsdp2.fully_shard for the whole tree, or call fsdp2.install() first"
            )
        assert search is not None
        return search.f_locals["module"] not in search.f_locals["root_modules_set"]


def _attach(unit: FSDPState) -> None:
    """Store the state on its modules, where fsdp2 and torch look it up, and register the forward hooks."""
    for module in unit.modules:
        keep_state(module, unit)
        register_as_managed(module, _Registry(apis_of(module)))
    handles = hook_forward(unit.modules, unit.pre_forward, unit.post_forward)
    unit._pre_forward_hook_handle, unit._post_forward_hook_handle = handles[0]
    hook_loading(unit.modules, before_load_tree, after_load_tree)


def _class_for(module: nn.Module) -> type:
    """Return the class that ``module`` gets: that of its class and ``FSDPModule``.

    A parametrized module has a class of its own, with a property for each parametrized tensor. torch deletes these from
    the class of the module when it removes parametrizations, and takes the first base for the class before them. So
    such a class is made anew on top of the other, as if the parametrization had come later.
    """
    cls = type(module)
    parametrized: Any = module.parametrizations if is_parametrized(module) else ()
    if not parametrized or not vars(cls).keys() >= {*parametrized}:
        return _fsdp_class(cls)
    own = {name: value for name, value in vars(cls).items() if name not in _OF_EACH_CLASS}
    own[MADE_BY_FULLY_SHARD] = True
    return type(cls.__name__, (_fsdp_class(type_before_parametrizations(module)),), own)


def _fsdp_class(cls: type[nn.Module]) -> type:
    """Return the subclass of ``cls`` and ``FSDPModule``."""
    made = _classes[cls]() if cls in _classes else None
    if made is None:
        own: dict[str, Any] = {"__deepcopy__": DeepCopied(), "__reduce_ex__": reduce_module}
        own |= {MADE_BY_FULLY_SHARD: True, **inherited_call(cls)}
        if not hasattr(cls, "__copy__"):
            own["__copy__"] = copy_module
        zeroes = (ZeroesHidden,) if cls.zero_grad is not nn.Module.zero_grad else ()
        made = type(f"FSDP{cls.__name__}", (FSDPModule, cls, *zeroes, FSDP1Methods), own)
        _classes[cls] = weakref.ref(made)
    return made


fully_shard.state = get_state  # type: ignore[attr-defined]  # torch's function has it too; pipelining asks for it
