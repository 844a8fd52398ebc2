"""Tests for modules that can be units, and the children to search for units."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fsdp2.engine.unit import apis_of

__all__ = ["children_to_plan", "has_forward", "has_parameters"]


def children_to_plan(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the named children of ``module`` that may be units or contain some.

    There are none in ``nn.MultiheadAttention``, which reads the weights of its children without calling them, and below
    ``replicate``, which manages its own parameters.
    """
    if isinstance(module, nn.MultiheadAttention) or "replicate" in apis_of(module):
        return iter(())
    return module.named_children()


def has_forward(module: nn.Module) -> bool:
    """Return True if ``module`` can be called: only a call starts a gather."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def has_parameters(module: nn.Module) -> bool:
    """Return True if ``module`` or any module below it has a parameter."""
    return next(module.parameters(), None) is not None
