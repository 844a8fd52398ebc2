"""``load_safetensors``: each rank copies its slices out of the files that everybody else writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import torch
from torch import nn

from fsdp2.weights.boxes import blocks, numel, whole
from fsdp2.weights.matching import Loaded, Match, check_ties, match, partly_loaded
from fsdp2.weights.materialize import materialize, warn_of_meta_buffers
from fsdp2.weights.progress import Progress, showing
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.safetensors import WeightFiles
from fsdp2.weights.select import Selection, ranks_of, select

__all__ = ["load_safetensors"]

_WHERE = "load_safetensors"
_BLOCK_BYTES = 64 << 20
"""Read at once, so that what is mapped but no longer needed can be dropped by the system."""


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], strict: bool = True, *, progress: Progress = False
) -> Loaded:
    """Load weights from safetensors files into ``model``, sharded or not; what could not be matched.

    Each rank maps the files and copies its own slices: nothing is communicated but whether all went well. So every rank
    of the model's mesh must call it and see the files; for a model that is not spread over ranks each process acts for
    itself. Parameters and persistent buffers on the meta device get memory on the mesh's device and stay the same
    objects. Values are cast to the dtype of the parameter.

    Args:
        model: A module, its keys those of the plain model: without what torch.compile and checkpoint_wrapper put in.
        path: A file, an index (``model.safetensors.index.json``), or a folder with either. Tied parameters need to be
            there once only.
        strict: Refuse missing and unexpected keys.
        progress: True shows a bar (of the package tqdm) on the first rank, a function is called there with the bytes
            that are through and those that there are.

    Returns:
        ``(missing_keys, unexpected_keys)``, empty with ``strict``.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file is truncated or is no safetensors file, or an index is wrong.
        RuntimeError: keys, shapes or kinds of dtypes differ, or a forward or backward is going on.
        ImportError: the package safetensors is not installed.

    A failure on one rank is raised on all, and names the rank. All headers are looked at before anything is changed.
    """
    default = torch.get_default_device()
    ranks = ranks_of(model) or Ranks.alone(torch.device("cpu") if default.type == "meta" else default)
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            selection = select(model, _WHERE)
            selection.check(_WHERE, idle=True)
            files = stack.enter_context(WeightFiles(path, _WHERE))
            extras = [name for name in files.given if name in selection.extras]
            given = {name: entry for name, entry in files.given.items() if name not in selection.extras}
            matched = match(selection, given, extras, strict=strict, where=_WHERE)
            if strict:
                check_ties(matched, files.read, _BLOCK_BYTES, _WHERE)
            total = sum(numel(place.box) * given[names[-1]].dtype.itemsize for place, names in matched.values)
            moved = stack.enter_context(showing(progress, _WHERE, total, here=ranks.first))
        with ranks.agreed(partly_loaded(_WHERE)):
            _copy(selection, matched, files, ranks.device, moved)
    warn_of_meta_buffers(selection, _WHERE)
    return matched.loaded


@torch.no_grad()
def _copy(
    selection: Selection, matched: Match, files: WeightFiles, device: torch.device, moved: Callable[[int], None]
) -> None:
    """Put this rank's slices in their places."""
    for group in selection.groups:
        group.before_load()
    materialize([place for place, _ in matched.values], device)
    for place, names in matched.values:
        name = names[-1]
        size = files.given[name].dtype.itemsize
        pieces = list(blocks(place.box, max(_BLOCK_BYTES // size, 1)))
        for i, box in enumerate(pieces):
            place.write(box, files.read(name, box), last=i == len(pieces) - 1)
            moved(numel(box) * size)
    for group in selection.groups:
        group.adopt_shards()
    for name in matched.extras:
        shape = files.given[name].shape
        selection.extras[name].set_extra_state(files.read(name, whole(shape)).clone())
