"""From the first rank to the others: an optimizer state of whole tensors that only the first rank has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import pytree
from fsdp2.sharding.packing import align
from fsdp2.weights.boxes import Box, Entry, Part, copy_common, narrow, whole
from fsdp2.weights.names import clean_name
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.transfer import transfer

__all__ = ["from_first_rank"]

_SMALL = 64
"""Tensors of so many elements or fewer, step counters above all, travel with the plan."""

Target = Callable[[Entry, str], "tuple[torch.Tensor, torch.Tensor, Box] | None"]
"""(entry, name of the parameter) to the tensor that this rank keeps, its memory, and the box it is; None for all."""


class _Coming(NamedTuple):
    """Stands for a tensor that the first rank is about to send, and says where that was."""

    number: int
    entry: Entry
    device: str


def _announce(value: Any, sent: list[torch.Tensor]) -> Any:
    if isinstance(value, DTensor):
        raise TypeError(
            "optim_state_dict_to_load: with rank0_only the first rank must give whole tensors, got a DTensor; load "
            "sharded state without rank0_only, on every rank"
        )
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() <= _SMALL:
        return value.detach().cpu()
    sent.append(value.detach())
    return _Coming(len(sent) - 1, Entry(tuple(value.shape), value.dtype), value.device.type)


@torch.no_grad()
def from_first_rank(state_dict: Any, ranks: Ranks, target: Target) -> Any:
    """The optimizer state that the first of ``ranks`` gave; every one of them must call this.

    Beyond what is kept, every rank holds a bucket of the size of the largest tensor.

    Raises:
        TypeError: the first rank gave DTensors; on every rank.
    """
    sent: list[torch.Tensor] = []
    with ranks.agreed():
        announced = pytree.tree_map(lambda value: _announce(value, sent), state_dict) if ranks.first else None
    plan = ranks.share(announced)
    if not isinstance(plan, Mapping) or not isinstance(plan.get("state"), Mapping):
        return plan  # every rank refuses it
    coming: dict[int, tuple[Entry, torch.Tensor, Box]] = {}

    def receive(value: Any, name: str | None) -> Any:
        if not isinstance(value, _Coming):
            return value
        found = None if name is None else target(value.entry, name)
        if found is None:
            tensor = torch.empty(value.entry.shape, dtype=value.entry.dtype, device=value.device)
            found = tensor, tensor, whole(value.entry.shape)
        coming[value.number] = value.entry, found[1], found[2]
        return found[0]

    def received(state: Any, name: str | None) -> Any:
        return pytree.tree_map(lambda v: receive(v, name), state, is_leaf=lambda v: isinstance(v, _Coming))

    with ranks.agreed():
        result = {key: received(entry, None) for key, entry in plan.items() if key != "state"}
        result["state"] = {
            name: received(state, clean_name(name) if isinstance(name, str) else None)
            for name, state in plan["state"].items()
        }
    entries, locals_, boxes = zip(*(coming[number] for number in sorted(coming))) if coming else ((), (), ())
    largest = align(max((entry.nbytes for entry in entries), default=0))

    def fill(part: Part, view: torch.Tensor) -> None:
        view.copy_(narrow(sent[part.index], part.box))

    def drain(part: Part, view: torch.Tensor) -> None:
        copy_common(view, part.box, locals_[part.index], boxes[part.index])

    with ranks.agreed():
        transfer(entries, ranks, largest, fill, drain)
    return result
