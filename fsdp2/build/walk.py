"""What may be a unit at all, and what of a module tree is looked at to find units."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fsdp2.engine.unit import apis_of

__all__ = ["children_to_plan", "has_forward", "has_parameters"]


def children_to_plan(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The named children of ``module`` that may be units or hold some.

    ``nn.MultiheadAttention`` reads the weights of its parts without calling them, and ``replicate`` keeps its own.
    """
    if isinstance(module, nn.MultiheadAttention) or "replicate" in apis_of(module):
        return iter(())
    return module.named_children()


def has_forward(module: nn.Module) -> bool:
    """Whether ``module`` can be called; gathers hang on calls."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def has_parameters(module: nn.Module) -> bool:
    """Whether ``module`` or anything below it has a parameter."""
    return next(module.parameters(), None) is not None
