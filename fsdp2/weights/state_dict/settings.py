"""Which kind of state dict a module makes: torch's names, enumeration and configurations for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fsdp2.autograd.hooks import hook_loading, hook_saving
from fsdp2.engine.unit import get_state
from fsdp2.weights.state_dict.loading import after_load_tree, before_load_tree
from fsdp2.weights.state_dict.saving import SETTING, Setting, after_save

__all__ = ["get_state_dict_type", "set_state_dict_type", "state_dict_type"]

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the form of ``state_dict()`` of ``module`` and of modules below it, and of ``optim_state_dict``.

    Args:
        module: A sharded module, or one that contains sharded modules.
        state_dict_type: ``FULL_STATE_DICT``: whole plain tensors, copies of the current values; with
            ``rank0_only=True`` on the first rank, and an empty dictionary on the others. ``SHARDED_STATE_DICT``:
            DTensors. ``LOCAL_STATE_DICT``: this rank's pieces, see ``merge_local_state_dicts``. The last two share
            memory with the model, unless ``offload_to_cpu=True`` copies them to the CPU. Every rank of the mesh must
            call ``state_dict()`` if it is full.
        state_dict_config: torch's configuration class of that name; default values if None.
        optim_state_dict_config: Likewise for the optimizer's.

    Returns:
        The previous settings.

    Raises:
        TypeError: not a module, not a ``StateDictType``, or a configuration of another type.
    """
    settings = _check(module, state_dict_type, state_dict_config, optim_state_dict_config)
    previous = _settings_of(module)
    _install(module, settings)
    return previous[0] if previous else _default()


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """``set_state_dict_type`` for the length of a ``with`` block; what was set before, module by module, comes back."""
    settings = _check(module, state_dict_type, state_dict_config, optim_state_dict_config)
    before = {submodule: submodule.__dict__.get(SETTING) for submodule in module.modules()}
    _install(module, settings)
    try:
        yield
    finally:
        for submodule in module.modules():
            setting = before.get(submodule)
            _put(submodule, None if setting is None else Setting(setting.settings, setting.outermost))


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """What ``set_state_dict_type`` chose for the sharded modules below ``module``; sharded if nothing was.

    Raises:
        AssertionError: they have different settings (torch's contract).
    """
    _check_module("get_state_dict_type", module)
    found = _settings_of(module)
    for other in found[1:]:
        if other != found[0]:
            raise AssertionError(
                f"get_state_dict_type: All FSDP modules must have the same state dict settings. Got {other} and "
                f"{found[0]}; call set_state_dict_type on the outermost module"
            )
    return found[0] if found else _default()


def _default() -> StateDictSettings:
    return StateDictSettings(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


def _settings_of(module: nn.Module) -> list[StateDictSettings]:
    """The settings of the sharded modules below ``module``, or else of ``module`` alone, the outermost first."""
    modules = [m for m in module.modules() if get_state(m) is not None] or [module]
    settings = [m.__dict__.get(SETTING) for m in modules]
    return [_default() if s is None else s.settings for s in settings]


def _check_module(where: str, module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"{where}: expected an nn.Module, got {module!r}")


def _check(module: Any, kind: Any, config: Any, optim_config: Any) -> StateDictSettings:
    _check_module("set_state_dict_type", module)
    if not isinstance(kind, StateDictType):
        raise TypeError(f"set_state_dict_type: state_dict_type must be a StateDictType, got {kind!r}")
    names, given = ("state_dict_config", "optim_state_dict_config"), (config, optim_config)
    made: list[Any] = []
    for name, value, expected in zip(names, given, _CONFIGS[kind]):
        if value is not None and not isinstance(value, expected):
            raise TypeError(
                f"set_state_dict_type: Expected {name} of type {expected} for {kind} but got {type(value)}; pass "
                f"{expected.__name__}(...) or None"
            )
        made.append(expected() if value is None else value)
    return StateDictSettings(kind, *made)


def _install(module: nn.Module, settings: StateDictSettings) -> None:
    for submodule in module.modules():
        _put(submodule, Setting(settings, submodule is module))


def _put(module: nn.Module, setting: Setting | None) -> None:
    """Let ``module`` follow ``setting``, and no earlier one."""
    former = module.__dict__.pop(SETTING, None)
    for handle in () if former is None else former.handles:
        handle.remove()
    if setting is None:
        return
    setting.handles = hook_saving([module], after_save)
    if setting.outermost and get_state(module) is None:  # sharded modules do this at any time
        setting.handles += hook_loading([module], before_load_tree, after_load_tree)
    module.__dict__[SETTING] = setting
