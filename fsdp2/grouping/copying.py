"""Copies of sharded modules: deep copies (for averages of weights, say), independent shards; and shallow copies."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp2._naming import class_name
from fsdp2._torch.modules import inherited_call
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.index import units_below
from fsdp2.engine.param import FSDPParam, Site, copy_of
from fsdp2.engine.unit import FSDPState, get_state, keep_state

__all__ = ["DeepCopied", "copy_module", "reduce_module"]


class DeepCopied:
    """``__deepcopy__`` of a class, which none of its modules has: ``reduce_module`` copies them.

    A wrapper that looks up in its module what it has not itself (``checkpoint_wrapper``, ``torch.compile``, PEFT's)
    would find the module's, and ``copy.deepcopy`` would return a copy of the module in the place of the wrapper's. The
    class has one so that no other is inherited, or put into a parametrized class.
    """

    def __get__(self, module: nn.Module | None, cls: type) -> Any:
        if module is None:
            return _deepcopy_module
        raise AttributeError("__deepcopy__")


class _Reduced:
    """What ``module.__reduce_ex__`` hands out: ``copy.deepcopy`` copies it with its memo, and pickle cannot."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return _deepcopy_module(self.module, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_pickling(self.module)


def reduce_module(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Return what ``copy.deepcopy`` makes a deep copy of ``module`` from, for ``module.__reduce_ex__``.

    It cannot be pickled.
    """
    return _itself, (_Reduced(module),)


def _itself(copied: nn.Module) -> nn.Module:
    return copied


def _deepcopy_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of ``module``.

    New units, groups and shards are put into ``memo`` first, so that copies of references to the old ones (in hooks)
    refer to the new ones, by the ordinary rules of ``copy.deepcopy``. The copy starts like a newly sharded module:
    resharded, outside any iteration, without a root.
    """
    units = [unit for unit in units_below(module) if id(unit) not in memo]
    for unit in units:
        unit.reconcile()
    groups = list(dict.fromkeys(group for unit in units for group in unit.groups if id(group) not in memo))
    shown_before = {group: group.residency.shown for group in groups if not group.residency.summoned}
    try:  # an attribute that cannot be copied (a lock) must not leave shards where full parameters were shown
        for unit in units:
            memo[id(unit)] = FSDPState.__new__(FSDPState)
        for group in groups:
            memo[id(group)] = FSDPParamGroup.__new__(FSDPParamGroup)
            group.residency.show_shards()
            for param in group.params:
                _copy_shard(param, memo)
        clone: nn.Module = nn.Module.__new__(_class_of_copy(type(module)))
        memo[id(module)] = clone
        # nn.Module's own rule leaves out the result of ``module.compile()``, which computes with the old module's
        # weights.
        attributes = nn.Module.__getstate__(module)
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in attributes.items()})
        for unit in units:
            _finish_unit(unit, memo)
    finally:
        for group, shown in shown_before.items():
            group.residency.show(shown)
    return clone


def _class_of_copy(cls: type) -> type:
    """Return ``cls``, or one like it for a traced module, whose class holds the forward of this module alone."""
    if not inherited_call(cls):
        return cls
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls.__name__, cls.__bases__, own)


def copy_module(module: nn.Module) -> nn.Module:
    """Return a shallow copy for ``module.__copy__``: another object with the same parameters, submodules and state."""
    clone = nn.Module.__new__(type(module))
    clone.__dict__.update(module.__dict__)
    unit = get_state(module)
    if unit is not None:
        keep_state(clone, unit)
    return clone


def _refuse_pickling(module: nn.Module) -> NoReturn:
    """Raise an error: process groups, hooks and streams belong to this process.

    Raises:
        TypeError: Always, with the alternatives.
    """
    raise TypeError(
        f"cannot pickle {class_name(module)}: it is sharded over process groups of this process. Save its "
        "state_dict() (torch.distributed.checkpoint, or torch.save on each rank), then build the model, shard it and "
        "call load_state_dict(); copy.deepcopy makes a copy in this process"
    )


@torch.no_grad()
def _copy_shard(param: FSDPParam, memo: dict[int, Any]) -> None:
    assert param.sharded is not None
    clone = FSDPParam(param.sharded, param.spec, [], param.name, param.policy)
    clone.name_in_unit, clone.formats = param.name_in_unit, param.formats
    clone.hooks = (None, None)  # as nn.Parameter copies itself: a hook may act on what belongs to the original
    clone.sharded = memo.get(id(param.sharded))  # an optimizer that was copied first holds it already
    if clone.sharded is not None:
        clone.drop_gradient()
        clone.sharded.__dict__.update(clone.attributes, _fsdp2_managed=True)
    clone.set_shard(copy_of(param.local))
    memo[id(param)], memo[id(param.sharded)] = clone, clone.sharded


def _finish_unit(unit: FSDPState, memo: dict[int, Any]) -> None:
    """Initialize the new state and its groups, now that their modules are copied."""
    clone: FSDPState = memo[id(unit)]
    modules = tuple(copy.deepcopy(module, memo) for module in unit.modules)
    made_by = unit.made_by.copied(memo)
    clone.__init__(modules, unit.device, unit.mp_policy, made_by)  # type: ignore[misc]  # made bare above
    for module in modules:
        keep_state(module, clone)
    for group in unit.groups:
        new: FSDPParamGroup = memo[id(group)]
        if not new.__dict__:
            params = [memo[id(param)] for param in group.params]
            for old, param in zip(group.params, params):
                param.set_sites([Site(copy.deepcopy(site.module, memo), site.name) for site in old.sites])
            inside = tuple(copy.deepcopy(module, memo) for module in group.modules)
            store, comm = group.store.for_params(params), clone.root.comm
            new.__init__(store, inside, comm, clone.notice_backward, shared=group.shared)  # type: ignore[misc]  # likewise
            new.gradients.use_axis(group.gradients.axis)
        clone.groups.append(new)
    for name in ("forward_prefetch", "backward_prefetch"):
        setattr(clone, name, [memo.get(id(other), other) for other in getattr(unit, name)])
