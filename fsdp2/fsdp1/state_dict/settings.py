"""Choose the kind of state dict that a module returns, with torch's names, enumeration and configurations."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
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

from fsdp2._naming import check_module
from fsdp2.autograd.hooks import hook_loading, hook_saving
from fsdp2.engine.unit import get_state
from fsdp2.fsdp1.state_dict.saving import SETTING, Setting, after_save
from fsdp2.weights.load_state_dict import after_load_tree, before_load_tree

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
    """Choose the kind of ``state_dict()`` for ``module`` and the modules below it, and of ``optim_state_dict``.

    Args:
        module: A sharded module, or one that contains sharded modules.
        state_dict_type: ``FULL_STATE_DICT`` returns whole plain tensors, copies of the current values. Every rank of
            the mesh must call ``state_dict()``; with ``rank0_only=True`` all but the first get an empty dictionary.
            ``SHARDED_STATE_DICT`` returns DTensors. ``LOCAL_STATE_DICT`` returns this rank's pieces, see
            ``merge_local_state_dicts``. The last two share memory with the model, unless ``offload_to_cpu=True``
            copies them to the CPU.
        state_dict_config: An instance of torch's configuration class for that type; None stands for its defaults.
        optim_state_dict_config: Likewise for optimizer state dicts.

    Returns:
        The previous settings.

    Raises:
        TypeError: An argument is not a module, not a ``StateDictType``, or a configuration for another type.
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
    """Call ``set_state_dict_type`` for a ``with`` block, and restore each module's setting at its end.

    Example:
        ```python
        with fsdp2.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full = model.state_dict()  # on every rank
        ```
    """
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
    """Return the settings of the sharded modules below ``module``; the default is ``SHARDED_STATE_DICT``.

    Raises:
        AssertionError: The modules have different settings (AssertionError is torch's contract).
    """
    check_module(module, "get_state_dict_type")
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
    """Return the settings of the sharded modules below ``module``, outermost first; else that of ``module``."""
    modules = [m for m in module.modules() if get_state(m) is not None] or [module]
    settings = [m.__dict__.get(SETTING) for m in modules]
    return [_default() if s is None else s.settings for s in settings]


def _check(module: Any, kind: Any, config: Any, optim_config: Any) -> StateDictSettings:
    check_module(module, "set_state_dict_type")
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
        if not isinstance(submodule, torch.jit.ScriptModule):  # it takes no hooks, and shows no shards
            _put(submodule, Setting(settings, submodule is module))


def _put(module: nn.Module, setting: Setting | None) -> None:
    """Replace the setting of ``module`` by ``setting`` (None for no setting)."""
    former = module.__dict__.pop(SETTING, None)
    for handle in () if former is None else former.handles:
        handle.remove()
    if setting is None:
        return
    setting.handles = hook_saving([module], after_save)
    if setting.outermost and get_state(module) is None:  # sharded modules always have these hooks
        setting.handles += hook_loading([module], before_load_tree, after_load_tree)
    module.__dict__[SETTING] = setting
