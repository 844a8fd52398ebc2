"""Names of the plain model: without what activation checkpointing and compilation put in between."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CHECKPOINTED", "COMPILED", "clean_name", "clean_names"]

CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name under which torch's ``checkpoint_wrapper`` keeps the module it wraps; it hides it in state dicts itself."""
COMPILED = "_orig_mod"
"""The name under which ``torch.compile`` keeps the module it wraps."""


def clean_name(name: str) -> str:
    """``name`` as the plain model has it."""
    if CHECKPOINTED not in name and COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (CHECKPOINTED, COMPILED))


def clean_names(names: Iterable[str], what: str) -> dict[str, str]:
    """Each of ``names`` by its name in the plain model; ``what`` says in an error where they are from.

    Raises:
        ValueError: two of them have the same, so that one value would be lost.
    """
    found: dict[str, str] = {}
    for name in names:
        earlier = found.setdefault(clean_name(name), name)
        if earlier != name:
            raise ValueError(
                f"{what} holds both {earlier} and {name}; got two values for the name {clean_name(name)} of the plain "
                "model, expected one; remove one of them"
            )
    return found
