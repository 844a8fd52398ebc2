"""``load_safetensors`` and ``save_safetensors``: sharded models and the files that everybody else reads and writes."""

from __future__ import annotations

import contextlib
import os

import torch
from torch import nn

from fsdp2.weights.boxes import blocks, whole
from fsdp2.weights.files import WeightFiles
from fsdp2.weights.matching import Loaded, Match, check_ties, match, partly_loaded
from fsdp2.weights.materialize import materialize, warn_of_meta_buffers
from fsdp2.weights.places import Places, find_places, ranks_of
from fsdp2.weights.ranks import Ranks

__all__ = ["load_safetensors"]

_LOAD = "load_safetensors"
_BLOCK_BYTES = 64 << 20
"""Read at once, so that what is mapped but no longer needed can be dropped by the system."""


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], strict: bool = True) -> Loaded:
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
    places, matched, problem = Places([], [], {}, []), None, None
    with contextlib.ExitStack() as stack:
        try:
            places = find_places(model, _LOAD)
            places.check_idle(_LOAD)
            files = stack.enter_context(WeightFiles(path, _LOAD))
            extras = [name for name in files.given if name in places.extras]
            given = {name: entry for name, entry in files.given.items() if name not in places.extras}
            matched = match(places, given, extras, strict=strict, where=_LOAD)
            if strict:
                check_ties(matched, files.read, _BLOCK_BYTES, _LOAD)
        except Exception as error:
            problem = error
        ranks.agree(problem)
        assert matched is not None
        try:
            _copy(places, matched, files, ranks.device)
        except Exception as error:
            problem = error
        ranks.agree(partly_loaded(problem, _LOAD))
    warn_of_meta_buffers(places, _LOAD)
    return matched.loaded


@torch.no_grad()
def _copy(places: Places, matched: Match, files: WeightFiles, device: torch.device) -> None:
    """Put this rank's slices in their places."""
    for group in places.groups:
        group.before_load()
    materialize([place for place, _ in matched.values], device)
    for place, names in matched.values:
        name = names[-1]
        pieces = list(blocks(place.box, max(_BLOCK_BYTES // files.given[name].dtype.itemsize, 1)))
        for i, box in enumerate(pieces):
            place.write(box, files.read(name, box), last=i == len(pieces) - 1)
    for group in places.groups:
        group.after_load()
    for name in matched.extras:
        shape = files.given[name].shape
        places.extras[name].set_extra_state(files.read(name, whole(shape)).clone())
