"""``save_safetensors`` writes a sharded model as safetensors files, block by block."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import nn

from fsdp2._naming import class_name
from fsdp2.sharding.packing import bucket_bytes, in_buckets
from fsdp2.weights.buckets import Entry, Part
from fsdp2.weights.offers import Mine, Offered, check_copies, gather_offers, joined
from fsdp2.weights.progress import Progress, showing
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.safetensors import DTYPE_NAMES, INDEX, RESERVED, path_of, write_header, write_tensor
from fsdp2.weights.select import Place, Selection, ranks_of, select
from fsdp2.weights.temporary import temporary_folder
from fsdp2.weights.transfer import check_cast, transfer

__all__ = ["save_safetensors"]

_WHERE = "save_safetensors"
_SHARD_BYTES = 5 * 10**9
"""The largest size of a file in a folder, as with Hugging Face."""


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    max_shard_bytes: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    bucket_mb: float = 64.0,
    progress: Progress = False,
) -> None:
    """Write the full parameters and persistent buffers of ``model``, sharded or not, as safetensors files.

    Every rank of the model's mesh must call it; rank 0 (the first of the mesh) writes. If the model is not sharded,
    every process that calls it writes, so call it on one. One bucket at a time is sent, and no rank needs more memory
    than that. Tied parameters are written once, under the first of their names. If a parameter is replicated (such as
    one without tensor parallelism in a tensor-parallel model), the copy of rank 0's mesh is written. Ranks may hold
    parameters of different names (experts); all of them are written.

    Files are written to a temporary folder and moved when all are complete, so an interrupted save leaves the old files
    intact. A complete save removes the files of the same name that it replaces, and temporary folders that killed saves
    left behind.

    Args:
        model: A module. Keys are those of the plain model: without prefixes of torch.compile and checkpoint_wrapper.
        path: ``name.safetensors``, or a folder (made if need be) for ``model.safetensors``.
        max_shard_bytes: Split weights that are larger into ``name-00001-of-0000N.safetensors`` with an index
            ``name.safetensors.index.json``. Default: 5 GB in a folder, no limit for a file.
        dtype: The dtype in which floating-point values are written. Default: their own.
        bucket_mb: The size of the bucket in MiB.
        progress: True shows a progress bar on rank 0, which needs the package tqdm. A function is called on rank 0 with
            the number of bytes done and the total.

    Raises:
        OSError: Rank 0 cannot write.
        RuntimeError: A parameter is on the meta device, or has another shape, dtype or value on another rank.
        NotImplementedError: The format lacks a dtype or a name, or extra state is not a tensor.
        TypeError, ValueError: An argument is wrong.

    Errors are raised on every rank.

    Example:
        ```python
        fsdp2.save_safetensors(model, "checkpoints/final", dtype=torch.bfloat16)  # on every rank
        ```
    """
    ranks = ranks_of(model) or Ranks.alone()
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            limit = bucket_bytes(_WHERE, bucket_mb)
            selection = select(model, _WHERE)
            selection.check(_WHERE, idle=False)
            target = _Target.of(path_of(path, _WHERE), max_shard_bytes)
            mine = _tensors(selection, dtype)
        # With different buckets or files, ranks would misread each other's bytes.
        limit, target = ranks.share((limit, target))
        offers = gather_offers(mine, ranks)
        with ranks.agreed():
            files = target.files(joined(mine, offers, ranks, _WHERE))
            total = sum(tensor.entry.nbytes for file in files for tensor in file)
            moved = stack.enter_context(showing(progress, _WHERE, total, here=ranks.first))
        check_copies(mine, ranks, _WHERE, "written")
        partial, temporary = None, stack.enter_context(contextlib.ExitStack())
        with ranks.agreed():
            if ranks.first:
                target.folder.mkdir(parents=True, exist_ok=True)
                partial = temporary.enter_context(temporary_folder(target.folder, target.stem))
        for number, tensors in enumerate(files):
            _write(tensors, partial and partial / str(number), ranks, limit, moved)
        with ranks.agreed():
            if partial is not None:
                _commit(target, files, partial)
                temporary.close()  # here, not at the end: no rank returns before the folder is gone


@dataclass(frozen=True)
class _Target:
    """The destination: ``folder``, the beginning of the files' names, and the largest size of a file."""

    folder: Path
    stem: str
    max_bytes: int

    @classmethod
    def of(cls, path: Path, max_shard_bytes: int | None) -> _Target:
        """Return the target for the arguments of ``save_safetensors``; raise its errors for wrong ones."""
        if path.name == ".safetensors":
            raise ValueError(
                f"{_WHERE}: {str(path)!r} names no file; got nothing before .safetensors, expected name.safetensors or "
                "a folder"
            )
        one_file = path.suffix == ".safetensors"
        if max_shard_bytes is None:
            max_shard_bytes = 1 << 62 if one_file else _SHARD_BYTES
        if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
            raise ValueError(f"{_WHERE}: max_shard_bytes must be a positive number of bytes, got {max_shard_bytes!r}")
        folder, stem = (path.parent, path.name.removesuffix(".safetensors")) if one_file else (path, "model")
        return cls(folder, stem, max_shard_bytes)

    def files(self, tensors: list[Offered]) -> list[list[Offered]]:
        """Distribute ``tensors`` over files; return each file's tensors in the order in which they are written."""
        files = list(in_buckets(tensors, lambda tensor: tensor.entry.nbytes, self.max_bytes)) or [[]]
        # The widest dtypes first, so that every tensor is aligned.
        return [sorted(file, key=lambda tensor: -tensor.entry.dtype.itemsize) for file in files]


def _tensors(selection: Selection, dtype: torch.dtype | None) -> Mine:
    """Return the tensors that this rank holds, as written; raise the errors of ``save_safetensors``."""
    check_cast(_WHERE, dtype)
    mine: Mine = {}
    for place in _with_extras(selection):
        if RESERVED in place.names:
            raise NotImplementedError(
                f"{_WHERE}: a tensor is named {RESERVED}, which the safetensors format reserves; got the names "
                f"{place.names}, expected others; rename it"
            )
        if place.local.is_meta:
            raise RuntimeError(
                f"{_WHERE}: {place.name} has no values; got the meta device, expected memory; load or initialize it "
                "first"
            )
        as_written = dtype if dtype is not None and place.dtype.is_floating_point else place.dtype
        if as_written not in DTYPE_NAMES:
            raise NotImplementedError(
                f"{_WHERE}: {place.name} has the dtype {as_written}, which safetensors files lack; convert it first"
            )
        mine[place] = Entry(place.shape, as_written)
    return mine


def _with_extras(selection: Selection) -> list[Place]:
    """Return all places, and a place for each extra state."""
    extras = []
    for name, module in selection.extras.items():
        try:
            value = module.get_extra_state()
        except Exception as error:
            raise RuntimeError(
                f"{_WHERE}: {name}: {class_name(module)}.get_extra_state raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, torch.Tensor):
            raise NotImplementedError(
                f"{_WHERE}: {name} is extra state of {class_name(module)}; got a {type(value).__name__}, expected a "
                "tensor: safetensors files hold nothing else; save it by torch.save or distributed checkpointing"
            )
        extras.append(Place([name], value.detach()))
    return [*selection.places, *extras]


def _write(tensors: list[Offered], path: Path | None, ranks: Ranks, limit: int, moved: Callable[[int], None]) -> None:
    """Write one file on the rank that passes a ``path``; all ranks send their parts of it."""
    file = None

    def fill(part: Part, view: torch.Tensor) -> None:
        place = tensors[part.index].place
        if place is not None:
            place.read(part.box, view)

    def drain(part: Part, view: torch.Tensor) -> None:
        if file is not None:
            write_tensor(file, view)
            moved(part.nbytes)

    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            if path is not None:
                file = stack.enter_context(open(path, "xb"))
                write_header(file, [(tensor.names[0], tensor.entry) for tensor in tensors])
        with ranks.agreed(), torch.no_grad():
            transfer([tensor.entry for tensor in tensors], ranks, limit, fill, drain, summed=True)
            if file is not None:
                _to_disk(file)


def _to_disk(file: IO[bytes]) -> None:
    """Flush ``file`` to the disk and close it."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def _commit(target: _Target, files: list[list[Offered]], partial: Path) -> None:
    """Move the files to their final names, in an order that leaves the old or the new model loadable at any time.

    Loading prefers an index to a single file. An index therefore appears after the files that it names, and disappears
    before them.
    """
    folder, stem = target.folder, target.stem
    index, single = folder / f"{stem}{INDEX}", folder / f"{stem}.safetensors"
    old = _pieces_of(index, stem)
    if len(files) == 1:
        os.replace(partial / "0", single)
        obsolete = [index, *old]
    else:
        paths = _free_paths(target, len(files))
        names = {tensor.names[0]: path.name for tensors, path in zip(files, paths) for tensor in tensors}
        nbytes = sum(tensor.entry.nbytes for tensors in files for tensor in tensors)
        content = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(names.items()))}
        with open(partial / "index", "xb") as file:
            file.write(json.dumps(content, indent=2).encode())
            _to_disk(file)
        try:
            for number, path in enumerate(paths):
                os.replace(partial / str(number), path)
            os.replace(partial / "index", index)
        except BaseException:  # no index names these files yet, so no later save would remove them
            for path in paths:
                path.unlink(missing_ok=True)
            raise
        obsolete = [single, *old]
    for path in obsolete:
        path.unlink(missing_ok=True)


def _free_paths(target: _Target, count: int) -> list[Path]:
    """Return Hugging Face's names for the files of a split model, or other names if those are taken."""
    stem, tried = target.stem, 0
    while True:
        names = (f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count))
        paths = [target.folder / name for name in names]
        if not any(path.exists() for path in paths):
            return paths
        tried += 1
        stem = f"{target.stem}-{tried}"


def _pieces_of(index: Path, stem: str) -> list[Path]:
    """Return the files of a split model that ``index`` names; none if there is no such index.

    An index may name any file. Only files with the name of a piece of this model may be removed.
    """
    piece = re.compile(rf"{re.escape(stem)}(-\d+)?-\d{{5,}}-of-\d{{5,}}\.safetensors")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.parent / name for name in sorted(names) if piece.fullmatch(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
