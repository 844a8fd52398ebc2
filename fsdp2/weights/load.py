"""Load values into a module: each rank reads its slices of files, or the first rank sends values to all."""

from __future__ import annotations

import contextlib
import os
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._warn import warn
from fsdp2.sharding.boxes import narrow, numel, whole
from fsdp2.sharding.packing import bucket_bytes
from fsdp2.weights.buckets import Entry, Part, blocks
from fsdp2.weights.handed import copies_of_lent, why_unreadable
from fsdp2.weights.matching import Loaded, check_ties, match, naming, partly_loaded
from fsdp2.weights.materialize import materialize
from fsdp2.weights.names import clean_names
from fsdp2.weights.progress import Progress, showing
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.safetensors import WeightFiles
from fsdp2.weights.select import Place, Selection, ranks_of, select
from fsdp2.weights.transfer import transfer

__all__ = ["broadcast_from_rank0", "load_safetensors"]

_FROM_RANK0 = "broadcast_from_rank0"
_FROM_FILES = "load_safetensors"
_BLOCK_BYTES = 64 << 20
"""The size of one read. Between reads the system can drop mapped pages that are no longer needed."""


def broadcast_from_rank0(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    bucket_mb: float = 64.0,
    progress: Progress = False,
) -> Loaded:
    """Load full weights that only rank 0 holds into ``model``, sharded or not; return the keys that did not match.

    Every rank of the model's mesh must call it. Parameters and persistent buffers may be on the meta device on any
    rank. They get memory on the mesh's device (on the CPU if the unit offloads) and stay the same objects. Each rank
    needs memory for one bucket besides. Values are cast to the dtype of the parameter.

    Args:
        model: A module. Keys are those of the plain model: without prefixes of torch.compile and checkpoint_wrapper.
        state_dict: On rank 0 (the first of the mesh) plain tensors on any device; tied tensors may appear under one
            name or under all. Other ranks ignore it and usually pass None.
        strict: Refuse missing and unexpected keys.
        bucket_mb: The size of the bucket in MiB. All ranks use rank 0's value.
        progress: True shows a progress bar on rank 0, which needs the package tqdm. A function is called on rank 0 with
            the number of bytes done and the total.

    Returns:
        ``(missing_keys, unexpected_keys)``; both are empty with ``strict``.

    Raises:
        RuntimeError: Keys, shapes or kinds of dtypes differ (on any rank), or a forward or backward is running.
        ValueError: Two keys of rank 0's ``state_dict`` stand for one tensor of the plain model.
        TypeError: ``model`` is not an nn.Module, or rank 0's ``state_dict`` is not a mapping of names to plain tensors.

    An error is raised on every rank and leaves the model unchanged. If the error occurs while rank 0 reads its tensors,
    the model is partly loaded, and the error says so.

    Example:
        ```python
        weights = torch.load("model.pt", weights_only=True) if rank == 0 else None
        fsdp2.broadcast_from_rank0(model, weights)
        ```
    """
    ranks = ranks_of(model, managed=True) or Ranks.world()
    with ranks.agreed():
        selection = select(model, _FROM_RANK0)
        selection.check(_FROM_RANK0, idle=True)
        made = _FromFirst.of(selection, state_dict, strict, bucket_mb) if ranks.first else None
    return _load(selection, ranks.share(made), ranks, strict, progress, _FROM_RANK0)


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True, *, progress: Progress = False
) -> Loaded:
    """Load weights from safetensors files into ``model``, sharded or not; return the keys that did not match.

    Each rank maps the files and copies its own slices. The ranks communicate only to find out whether all of them
    succeeded, so every rank of the model's mesh must call it and must have access to the files. If the model is not
    sharded, each process loads it on its own. Parameters and persistent buffers on the meta device get memory on the
    mesh's device and stay the same objects. Values are cast to the dtype of the parameter.

    Args:
        model: A module. Keys are those of the plain model: without prefixes of torch.compile and checkpoint_wrapper.
        path: A file, an index (``model.safetensors.index.json``), or a folder with either. Tied parameters need only
            one of their names.
        strict: Refuse missing and unexpected keys.
        progress: True shows a progress bar on the first rank, which needs the package tqdm. A function is called on the
            first rank with the number of bytes done and the total.

    Returns:
        ``(missing_keys, unexpected_keys)``; both are empty with ``strict``.

    Raises:
        TypeError: ``path`` is not a str or os.PathLike.
        FileNotFoundError: A file does not exist.
        ValueError: A file is truncated or not a safetensors file, an index is wrong or names a file outside its
            folder, or two keys stand for one tensor of the plain model.
        RuntimeError: Keys, shapes or kinds of dtypes differ, or a forward or backward is running.
        ImportError: The package safetensors is not installed.

    If one rank fails, every rank raises an error that names that rank. All headers are checked before anything is
    changed.

    Example:
        ```python
        with torch.device("meta"):
            model = Transformer(config)
        fsdp2.fully_shard(model)
        fsdp2.load_safetensors(model, "checkpoints/llama")
        ```
    """
    default = torch.get_default_device()
    ranks = ranks_of(model) or Ranks.alone(None if default.type == "meta" else default)
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            selection = select(model, _FROM_FILES)
            selection.check(_FROM_FILES, idle=True)
            source = _FromFiles(selection, WeightFiles(path, _FROM_FILES, stack))
            if strict:
                check_ties(selection, source.given, source.files.read, _FROM_FILES)
        return _load(selection, source, ranks, strict, progress, _FROM_FILES)


def _load(
    selection: Selection, source: _FromFiles | _FromFirst, ranks: Ranks, strict: bool, progress: Progress, where: str
) -> Loaded:
    """Load the values of ``source`` into ``selection``. Every rank calls it with its own ``source``."""
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            matched, loaded = match(
                selection, source.given, source.extras, source.unexpected, strict=strict, where=where
            )
            moved = stack.enter_context(showing(progress, where, source.total(matched), here=ranks.first))
        with ranks.agreed():
            stack.enter_context(selection.changing())
            materialize(matched, ranks.device)
        with ranks.agreed(partly_loaded(where)), torch.no_grad():
            source.move(matched, ranks, moved)
            for name, module in selection.extras.items():
                if name in source.extras:
                    with naming(name):
                        module.set_extra_state(source.extras[name])
    waiting = [place.name for place in selection.left_out if place.local.is_meta]
    if waiting:
        warn(
            f"{where}: non-persistent buffers are still on the meta device: {waiting}; no checkpoint holds them, "
            "compute them and set them on their modules"
        )
    return loaded


class _FromFiles:
    """Weights in files. Every rank reads its own slices."""

    def __init__(self, selection: Selection, files: WeightFiles) -> None:
        self.files = files
        self.given = {name: entry for name, entry in files.given.items() if name not in selection.extras}
        extras = {name: entry for name, entry in files.given.items() if name in selection.extras}
        self.extras = {name: files.read(name, whole(entry.shape)).clone() for name, entry in extras.items()}
        self.unexpected: list[str] = []

    def total(self, matched: dict[Place, str]) -> int:
        return sum(numel(place.box) * self.given[name].dtype.itemsize for place, name in matched.items())

    def move(self, matched: dict[Place, str], ranks: Ranks, moved: Callable[[int], None]) -> None:
        for place, name in matched.items():
            size = self.given[name].dtype.itemsize
            pieces = list(blocks(place.box, max(_BLOCK_BYTES // size, 1)))
            for i, box in enumerate(pieces):
                with naming(name):
                    place.write(box, self.files.read(name, box), last=i == len(pieces) - 1)
                moved(numel(box) * size)


@dataclass
class _FromFirst:
    """Weights that the first rank holds and sends, each tensor once.

    ``entries`` describe the tensors in the order in which they are sent, and ``sent`` maps a parameter's name to the
    index of its entry. ``keys`` are the keys of the entries in ``state_dict``, which only the first rank has and reads
    while it sends.
    """

    state_dict: Any
    extras: dict[str, Any]
    unexpected: list[str]
    limit: int
    given: dict[str, Entry] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that the other ranks receive: all but ``state_dict``."""
        return {**vars(self), "state_dict": None}

    @classmethod
    def of(cls, selection: Selection, state_dict: Any, strict: bool, bucket_mb: float) -> _FromFirst:
        """Return the values in ``state_dict`` for ``selection``, both of the first rank."""
        limit = bucket_bytes(_FROM_RANK0, bucket_mb)
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"{_FROM_RANK0}: the state_dict of rank 0 must map names to tensors, got {type(state_dict).__name__}; "
                "pass the full state dict of the plain model there"
            )
        state_dict = ChainMap(copies_of_lent(state_dict, selection.groups), state_dict)  # type: ignore[arg-type]  # is read
        keys = clean_names(state_dict, f"{_FROM_RANK0}: rank 0's state_dict")
        extras = {name: state_dict[key] for name, key in keys.items() if name in selection.extras}
        found = {name: _entry(state_dict[key], key) for name, key in keys.items() if name in selection.by_name}
        if strict:
            check_ties(selection, found, lambda name, box: narrow(state_dict[keys[name]].detach(), box), _FROM_RANK0)
        made = cls(state_dict, extras, [name for name in keys if name not in found and name not in extras], limit)
        for place in selection.places:
            names = [name for name in place.names if name in found]
            if names:  # the last name counts, also for ties that other ranks lack
                source = found[names[-1]]
                wire = min(place.dtype, source.dtype, key=lambda dtype: dtype.itemsize)
                made.given.update({name: found.get(name, source) for name in place.names})
                made.sent.update(dict.fromkeys(place.names, len(made.entries)))
                made.entries.append(Entry(source.shape, wire))
                made.keys.append(keys[names[-1]])
        return made

    def total(self, matched: dict[Place, str]) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def move(self, matched: dict[Place, str], ranks: Ranks, moved: Callable[[int], None]) -> None:
        targets: dict[int, list[Place]] = {}
        for place, name in matched.items():
            targets.setdefault(self.sent[name], []).append(place)

        def fill(part: Part, view: torch.Tensor) -> None:
            with naming(self.keys[part.index]):
                view.copy_(narrow(self.state_dict[self.keys[part.index]].detach(), part.box))

        def drain(part: Part, view: torch.Tensor) -> None:
            for place in targets.get(part.index, ()):
                with naming(place.name):
                    place.write(part.box, view, last=part.last)
            moved(part.nbytes)

        transfer(self.entries, ranks, self.limit, fill, drain)


def _entry(value: Any, key: str) -> Entry:
    got = type(value).__name__
    if isinstance(value, torch.Tensor):
        got += f" on {value.device}"
        got += f" of layout {value.layout}" if value.layout is not torch.strided else ""
        got += f" quantized as {value.dtype}" if value.is_quantized else ""
    plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and not value.is_quantized
    if not plain or value.is_meta or value.layout is not torch.strided:
        raise TypeError(
            f"{_FROM_RANK0}: {key} of rank 0's state_dict must be a full plain tensor, got {got}; gather DTensors "
            "first, and leave out what is not a tensor"
        )
    if problem := why_unreadable(value):
        raise ValueError(f"{_FROM_RANK0}: {key} of rank 0's state_dict: {problem}")
    return Entry(tuple(value.shape), value.dtype)
