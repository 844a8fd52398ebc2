"""Modules: the state of composable APIs, and how modules register, save and load."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

# The state of a composable API is on the module under this key, where `fully_shard.state(module)` reads it.
# `replicate` and torch's own fully_shard read the registry, and raise an error for a module that is already managed.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

# Libraries find the state of a module through this mapping. It has weak references, which the base class supports.
from torch.distributed._composable_state import _get_module_state as composable_state
from torch.distributed._composable_state import _insert_module_state as insert_composable_state
from torch.distributed._composable_state import _State as ComposableState
from torch.nn.utils import parametrize

__all__ = [
    "REGISTRY_KEY",
    "STATE_KEY",
    "ComposableState",
    "RegistryItem",
    "cached_parametrizations",
    "composable_state",
    "inherited_call",
    "insert_composable_state",
    "loads_as_torch_does",
    "non_persistent_buffers",
    "overrides_setattr",
    "run_policy",
]


def run_policy(policy: Any, root: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]] | None:
    """Return the matches of a ModuleWrapPolicy or CustomPolicy with their arguments; None for any other policy."""
    return policy._run_policy(root, ignored, {}) if hasattr(policy, "_run_policy") else None


def cached_parametrizations() -> Collection[torch.Tensor | None]:
    """Return the weights that ``parametrize.cached()`` keeps at the moment for later calls of their modules."""
    return parametrize._cache.values() if parametrize._cache_enabled else ()


def overrides_setattr(module: nn.Module) -> bool:
    """Return True if the class overrides ``__setattr__``, so it must be used (nn.LSTM keeps a list of its weights)."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def inherited_call(cls: type) -> dict[str, Any]:
    """Return what a subclass of ``cls`` needs in its own namespace to be called as ``cls`` is.

    Only the class of a ``torch.fx.GraphModule``, which each one has for itself, needs something: its ``__call__`` goes
    through this attribute. ``recompile()`` gives another to a class that has none, and both call each other forever.
    """
    return {name: getattr(cls, name) for name in ("_wrapped_call",) if hasattr(cls, name)}


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that state dicts omit."""
    return module._non_persistent_buffers_set


def loads_as_torch_does(module: nn.Module) -> bool:
    """Return True if only code of torch and fsdp2 handles the values that ``load_state_dict`` loads into ``module``.

    Other code may rename or reshape values, so the state dict of its module cannot be checked in advance.
    """
    if not type(module)._load_from_state_dict.__module__.startswith("torch.nn."):
        return False
    known = ("fsdp2.", "torch.distributed.algorithms._checkpoint.")
    return all(getattr(h, "__module__", "").startswith(known) for h in module._load_state_dict_pre_hooks.values())
