"""Names of the plain model: without what activation checkpointing and compilation put in between."""

from __future__ import annotations

__all__ = ["CHECKPOINTED", "COMPILED", "clean_name"]

CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name under which torch's ``checkpoint_wrapper`` keeps the module it wraps; it hides it in state dicts itself."""
COMPILED = "_orig_mod"
"""The name under which ``torch.compile`` keeps the module it wraps."""


def clean_name(name: str) -> str:
    """``name`` as the plain model has it."""
    if CHECKPOINTED not in name and COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (CHECKPOINTED, COMPILED))
