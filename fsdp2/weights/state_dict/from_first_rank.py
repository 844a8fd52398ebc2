"""From the first rank to the others: an optimizer state of whole tensors that only the first rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import pytree
from fsdp2.sharding.boxes import Entry, Part, narrow
from fsdp2.sharding.packing import align
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.state_dict.pieces import is_piece
from fsdp2.weights.transfer import transfer

__all__ = ["from_first_rank"]

_SMALL = 64
"""Tensors of so many elements or fewer, step counters above all, travel with the plan."""


class _Coming(NamedTuple):
    """Stands for a tensor that the first rank is about to send."""

    number: int
    entry: Entry


def _announce(value: Any, sent: list[torch.Tensor]) -> Any:
    if isinstance(value, DTensor) or is_piece(value):
        raise TypeError(
            "optim_state_dict_to_load: with rank0_only the first rank must give whole tensors, got a "
            f"{type(value).__name__}; load sharded or local state without rank0_only, on every rank"
        )
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() <= _SMALL:
        return value.detach().cpu()
    sent.append(value.detach())
    return _Coming(len(sent) - 1, Entry(tuple(value.shape), value.dtype))


@torch.no_grad()
def from_first_rank(
    state_dict: Any, ranks: Ranks, keep: Callable[[str, str, torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """The optimizer state that the first of ``ranks`` gave; every one of them must call this.

    Of each tensor of a parameter's state stays what ``keep`` makes of the name, the key and the whole tensor, which it
    must copy. Beyond that, every rank holds a bucket of the size of the largest tensor.

    Raises:
        TypeError: the first rank gave DTensors; on every rank.
    """
    sent: list[torch.Tensor] = []
    with ranks.agreed():
        announced = None
        if ranks.first:
            announced = pytree.tree_map(lambda value: _announce(value, sent), state_dict, is_leaf=is_piece)
    plan = ranks.share(announced)
    leaves, tree = pytree.tree_flatten_with_path(plan, is_leaf=lambda value: isinstance(value, _Coming))
    result = [leaf for _, leaf in leaves]

    def take(index: int, tensor: torch.Tensor) -> None:
        parts, name, key, *_ = [str(getattr(step, "key", "")) for step in leaves[index][0]] + [""] * 3
        result[index] = keep(name, key, tensor) if parts == "state" else tensor.clone()

    with ranks.agreed():
        for index, leaf in enumerate(result):
            if isinstance(leaf, torch.Tensor):
                take(index, leaf)
    coming = [(index, leaf.entry) for index, leaf in enumerate(result) if isinstance(leaf, _Coming)]
    entries = [entry for _, entry in coming]
    largest = align(max((entry.nbytes for entry in entries), default=0))  # so every tensor is one part

    def fill(part: Part, view: torch.Tensor) -> None:
        view.copy_(narrow(sent[part.index], part.box))

    with ranks.agreed():
        transfer(entries, ranks, largest, fill, lambda part, view: take(coming[part.index][0], view))
    return pytree.tree_unflatten(result, tree)
