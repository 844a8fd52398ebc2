"""The leaves of optimizer states and state dicts, which are trees of torch's pytree containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fsdp2._torch.tensors import pytree

__all__ = ["keys_in", "map_leaves", "take_apart"]


def take_apart(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Return the leaves of ``tree``, and a function that builds the same tree from other leaves.

    Only torch's pytree containers are taken apart; ``autograd.trees`` walks over arguments of forwards.
    """
    leaves, structure = pytree.tree_flatten(tree, is_leaf=is_leaf)
    return leaves, lambda others: pytree.tree_unflatten(list(others), structure)


def map_leaves(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return ``tree`` with every leaf of ``take_apart`` replaced by ``function(leaf)``."""
    leaves, rebuild = take_apart(tree, is_leaf)
    return rebuild(map(function, leaves))


def keys_in(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[list[str]]:
    """Return the keys that lead to each leaf of ``take_apart``, outermost first; "[0]" is the first of a sequence."""
    found, _ = pytree.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return [[str(getattr(step, "key", step)) for step in path] for path, _ in found]
