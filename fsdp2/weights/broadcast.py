"""Weights that one rank has, for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2.weights.boxes import Entry, Part, narrow
from fsdp2.weights.matching import Loaded, Match, check_ties, match, partly_loaded
from fsdp2.weights.materialize import materialize, warn_of_meta_buffers
from fsdp2.weights.names import clean_name
from fsdp2.weights.progress import Progress, showing
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Place, Selection, ranks_of, select
from fsdp2.weights.transfer import broadcast_entries, bucket_bytes

__all__ = ["broadcast_from_rank0"]

_WHERE = "broadcast_from_rank0"


@dataclass
class _Offer:
    """What the first rank has: tensors as they travel with their keys there, and what each name gets of them."""

    entries: list[Entry]
    keys: list[str]
    names: dict[str, int]
    given: dict[str, Entry]
    extras: dict[str, Any]
    unexpected: list[str]
    limit: int


def broadcast_from_rank0(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    bucket_mb: float = 64.0,
    progress: Progress = False,
) -> Loaded:
    """Load the full weights that rank 0 alone holds into ``model``, sharded or not; what could not be matched.

    Every rank of the model's mesh must call it. Parameters and persistent buffers may be on the meta device, on any
    ranks: they get memory on the mesh's device (on the CPU where the unit offloads) and stay the same objects. Beyond
    that, every rank holds one bucket at a time. Values are cast to the dtype of the parameter.

    Args:
        model: A module, its keys those of the plain model: without what torch.compile and checkpoint_wrapper put in.
        state_dict: On rank 0 (the first of the mesh) plain tensors on any device, tied ones under one name or all.
            Elsewhere None or {}; anything else is not looked at.
        strict: Refuse missing and unexpected keys.
        bucket_mb: The size of the bucket in MiB; rank 0's counts.
        progress: True shows a bar (of the package tqdm) on rank 0, a function is called there with the bytes that are
            through and those that there are.

    Returns:
        ``(missing_keys, unexpected_keys)``, empty with ``strict``.

    Raises:
        RuntimeError: keys, shapes or kinds of dtypes differ (on any rank), or a forward or backward is going on.
        TypeError: ``model`` is no module, or rank 0's ``state_dict`` no mapping of names to plain tensors.

    Errors name what is wrong, are raised on every rank, and leave the model as it was; except those that happen while
    rank 0 reads its tensors, which say so.
    """
    ranks = ranks_of(model, managed=True) or Ranks.world()
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            selection = select(model, _WHERE)
            selection.check(_WHERE, idle=True)
            made = _make_offer(selection, state_dict, strict, bucket_mb) if ranks.first else None
        offer: _Offer = ranks.share(made)
        with ranks.agreed():
            matched = match(selection, offer.given, offer.extras, strict=strict, where=_WHERE)
            total = sum(entry.nbytes for entry in offer.entries)
            moved = stack.enter_context(showing(progress, _WHERE, total, here=ranks.first))
        with ranks.agreed():
            for group in selection.groups:
                group.before_load()
            materialize([place for place, _ in matched.values], ranks.device)
        with ranks.agreed(partly_loaded(_WHERE)), torch.no_grad():
            _load(selection, matched, offer, state_dict, ranks, moved)
    warn_of_meta_buffers(selection, _WHERE)
    return Loaded(matched.loaded.missing_keys, list(dict.fromkeys(offer.unexpected + matched.loaded.unexpected_keys)))


def _make_offer(selection: Selection, state_dict: Any, strict: bool, bucket_mb: float) -> _Offer:
    """What ``state_dict`` has for this rank's ``selection``, checked against them."""
    limit = bucket_bytes(bucket_mb)
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"{_WHERE}: the state_dict of rank 0 must map names to tensors, got {type(state_dict).__name__}; pass the "
            "full state dict of the plain model there"
        )
    keys = {clean_name(key): key for key in state_dict}
    extras = {name: state_dict[key] for name, key in keys.items() if name in selection.extras}
    known = selection.by_name
    given = {
        name: _entry(state_dict[key], key) if name in known else Entry((), torch.float32)  # its name alone matters
        for name, key in keys.items()
        if name not in extras
    }
    matched = match(selection, given, extras, strict=strict, where=_WHERE)
    if strict:
        check_ties(matched, lambda name, box: narrow(state_dict[keys[name]].detach(), box), limit, _WHERE)
    offer = _Offer([], [], {}, {}, extras, matched.loaded.unexpected_keys, limit)
    for place, found in matched.values:
        source = given[found[-1]]
        wire = min(place.dtype, source.dtype, key=lambda dtype: dtype.itemsize)
        offer.names.update(dict.fromkeys(place.names, len(offer.entries)))
        offer.given.update(dict.fromkeys(place.names, source))
        offer.entries.append(Entry(source.shape, wire))
        offer.keys.append(keys[found[-1]])
    return offer


def _entry(value: Any, key: str) -> Entry:
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.layout is torch.strided
    if not plain or value.is_meta:
        got = f"{type(value).__name__} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise TypeError(
            f"{_WHERE}: {key} of rank 0's state_dict must be a full plain tensor, got {got}; gather DTensors first, "
            "and leave out what is no tensor"
        )
    return Entry(tuple(value.shape), value.dtype)


def _load(
    selection: Selection,
    matched: Match,
    offer: _Offer,
    state_dict: Any,
    ranks: Ranks,
    moved: Callable[[int], None],
) -> None:
    """Send what was offered and put it in its selection."""
    targets: dict[int, list[Place]] = {}
    for place, names in matched.values:
        targets.setdefault(offer.names[names[-1]], []).append(place)

    def fill(part: Part, view: torch.Tensor) -> None:
        view.copy_(narrow(state_dict[offer.keys[part.index]].detach(), part.box))

    def drain(part: Part, view: torch.Tensor) -> None:
        for place in targets.get(part.index, ()):
            place.write(part.box, view, last=part.last)
        moved(part.nbytes)

    try:
        broadcast_entries(offer.entries, ranks, offer.limit, fill, drain)
    finally:
        for group in selection.groups:
            group.adopt_shards()
    for name in matched.extras:
        selection.extras[name].set_extra_state(offer.extras[name])
