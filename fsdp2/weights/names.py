"""Names of the plain model: without the components that activation checkpointing and compilation insert."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["CHECKPOINTED", "COMPILED", "clean_name", "clean_names"]

CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name under which torch's ``checkpoint_wrapper`` keeps its module; the wrapper removes it from state dicts."""
COMPILED = "_orig_mod"
"""The name under which ``torch.compile`` keeps the module it wraps."""


def clean_name(name: str) -> str:
    """Return ``name`` as it is in the plain model."""
    if CHECKPOINTED not in name and COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part not in (CHECKPOINTED, COMPILED))


def clean_names(names: Iterable[str], what: str) -> dict[str, str]:
    """Return a dictionary from the plain model's name to the name in ``names``; errors begin with ``what``.

    Raises:
        TypeError: A name is not a string.
        ValueError: Two names are the same in the plain model, so one value would be lost.
    """
    found: dict[str, str] = {}
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{what} has the key {name!r}; expected names of parameters and buffers")
        earlier = found.setdefault(clean_name(name), name)
        if earlier != name:
            raise ValueError(
                f"{what} holds both {earlier} and {name}; got two values for the name {clean_name(name)} of the plain "
                "model, expected one; remove one of them"
            )
    return found
