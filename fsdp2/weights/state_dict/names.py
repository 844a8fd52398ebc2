"""Names of the plain model: without what activation checkpointing and compilation put in between."""

from __future__ import annotations

import torch
from torch import nn

from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam, Slot

__all__ = ["CHECKPOINTED", "COMPILED", "Managed", "clean_name", "parameter_names"]

CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name under which torch's ``checkpoint_wrapper`` keeps the module it wraps; it hides it in state dicts itself."""
COMPILED = "_orig_mod"
"""The name under which ``torch.compile`` keeps the module it wraps."""

Managed = tuple[FSDPParam, FSDPParamGroup]


def clean_name(name: str) -> str:
    """``name`` as the plain model has it."""
    if CHECKPOINTED not in name and COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (CHECKPOINTED, COMPILED))


def parameter_names(module: nn.Module, slots: dict[Slot, Managed]) -> dict[torch.Tensor, list[str]]:
    """All names of each parameter an optimizer may hold: the shards of managed ones, whatever the modules show now."""
    names: dict[torch.Tensor, list[str]] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        for name, shown in submodule._parameters.items():
            managed = slots.get(Slot(submodule, name))
            tensor = shown if managed is None else managed[0].sharded
            if tensor is not None:
                names.setdefault(tensor, []).append(clean_name(f"{path}.{name}" if path else name))
    return names
