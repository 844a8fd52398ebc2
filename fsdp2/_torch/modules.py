"""Modules: the state that an API keeps on them, and how they register, save and load."""

from __future__ import annotations

from typing import Any

from torch import nn

# The state of a composable API lives on the module under this key; `fully_shard.state(module)` reads it there, and
# `replicate` and torch's own fully_shard read the registry to refuse a module that is already managed.
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem

# Libraries find the state of a module through this mapping; it keeps weak references, hence the class to derive from.
from torch.distributed._composable_state import _get_module_state as composable_state
from torch.distributed._composable_state import _insert_module_state as insert_composable_state
from torch.distributed._composable_state import _State as ComposableState

__all__ = [
    "REGISTRY_KEY",
    "STATE_KEY",
    "ComposableState",
    "RegistryItem",
    "composable_state",
    "insert_composable_state",
    "loads_as_torch_does",
    "non_persistent_buffers",
    "overrides_setattr",
    "run_policy",
]


def run_policy(policy: Any, root: nn.Module, ignored: set[nn.Module]) -> dict[nn.Module, dict[str, Any]] | None:
    """What a ModuleWrapPolicy or CustomPolicy matches in ``root``, each with its arguments; None for anything else."""
    return policy._run_policy(root, ignored, {}) if hasattr(policy, "_run_policy") else None


def overrides_setattr(module: nn.Module) -> bool:
    """Whether the class watches its attributes (nn.LSTM keeps a list of its weights), so ``setattr`` must be used."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of the module's own buffers that state dicts leave out."""
    return module._non_persistent_buffers_set


def loads_as_torch_does(module: nn.Module) -> bool:
    """Whether what ``load_state_dict`` gives ``module`` is loaded as it is: no code but torch's and ours sees it first.

    Such code may rename or reshape what it is given, so its module's state dict cannot be judged beforehand.
    """
    if not type(module)._load_from_state_dict.__module__.startswith("torch.nn."):
        return False
    known = ("fsdp2.", "torch.distributed.algorithms._checkpoint.")
    return all(getattr(h, "__module__", "").startswith(known) for h in module._load_state_dict_pre_hooks.values())
