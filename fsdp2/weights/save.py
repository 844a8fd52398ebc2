"""``save_safetensors``: a sharded model in the files that everybody else reads, written as its blocks arrive."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import torch
from torch import nn

from fsdp2.sharding.boxes import Entry, Part
from fsdp2.weights.progress import Progress, showing
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.safetensors import DTYPE_NAMES, INDEX, write_header, write_tensor
from fsdp2.weights.select import Place, Selection, ranks_of, select
from fsdp2.weights.transfer import bucket_bytes, check_cast, transfer

__all__ = ["save_safetensors"]

_WHERE = "save_safetensors"
_SHARD_BYTES = 5 * 10**9
"""The size of files in a folder, HuggingFace's."""


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

    Every rank of the model's mesh must call it; rank 0 (the first of the mesh) writes. A model that is not sharded is
    written by every process that calls it: call it on one. Values are sent in one bucket at a time, which is all the
    memory it takes on any rank. Tied parameters are written once, under the first of their names. Of a parameter that
    is replicated (such as one without tensor parallelism in a tensor-parallel model) the copy of rank 0's mesh is
    written.

    Files are written to a temporary folder and moved when all are complete, so an interrupted save leaves the old
    files. A complete one removes the files of the same name that it replaces.

    Args:
        model: A module. Keys are those of the plain model: without prefixes of torch.compile and checkpoint_wrapper.
        path: ``name.safetensors``, or a folder (made if need be) for ``model.safetensors``.
        max_shard_bytes: Split weights that are larger into ``name-00001-of-0000N.safetensors`` with an index
            ``name.safetensors.index.json``. Default: 5 GB in a folder, no limit for a file.
        dtype: The dtype in which floating-point values are written. Default: their own.
        bucket_mb: The size of the bucket in MiB.
        progress: True shows a bar (of the package tqdm) on rank 0; a function is called there with the bytes done and
            the bytes in total.

    Raises:
        OSError: rank 0 cannot write.
        RuntimeError: a parameter is on the meta device.
        NotImplementedError: a dtype that the format lacks, or extra state that is not a tensor.
        TypeError, ValueError: an argument is wrong.

    Errors are raised on every rank.
    """
    ranks = ranks_of(model) or Ranks.alone()
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            limit = bucket_bytes(bucket_mb)
            selection = select(model, _WHERE)
            selection.check(_WHERE, idle=False)
            plan = _make_plan(selection, Path(path), max_shard_bytes, dtype)
            moved = stack.enter_context(showing(progress, _WHERE, plan.nbytes, here=ranks.first))
        partial = None
        with ranks.agreed():
            if ranks.first:
                plan.folder.mkdir(parents=True, exist_ok=True)
                made = TemporaryDirectory(prefix=f".{plan.stem}-", suffix=".partial", dir=plan.folder)
                partial = Path(stack.enter_context(made))
        for number, entries in enumerate(plan.files):
            _write(entries, partial and partial / str(number), ranks, limit, moved)
        with ranks.agreed():
            if partial is not None:
                _commit(plan, partial)
                partial.rmdir()  # before other ranks go on


@dataclass
class _Plan:
    """What goes into which file of ``folder``, in the order it is written in, and how it is written."""

    files: list[dict[Place, Entry]]
    folder: Path
    stem: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as written."""
        return sum(entry.nbytes for file in self.files for entry in file.values())


def _make_plan(selection: Selection, path: Path, max_shard_bytes: int | None, dtype: torch.dtype | None) -> _Plan:
    """Which places go into which file; raises what ``save_safetensors`` does."""
    one_file = path.suffix == ".safetensors"
    if max_shard_bytes is None:
        max_shard_bytes = 1 << 62 if one_file else _SHARD_BYTES
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"{_WHERE}: max_shard_bytes must be a positive number of bytes, got {max_shard_bytes!r}")
    check_cast(_WHERE, dtype)
    folder, stem = (path.parent, path.name.removesuffix(".safetensors")) if one_file else (path, "model")
    files: list[dict[Place, Entry]] = [{}]
    size = 0
    for place in _with_extras(selection):
        if place.local.is_meta:
            raise RuntimeError(
                f"{_WHERE}: {place.name} has no values; got the meta device, expected memory; load or initialise it "
                "first"
            )
        as_written = dtype if dtype is not None and place.dtype.is_floating_point else place.dtype
        if as_written not in DTYPE_NAMES:
            raise NotImplementedError(
                f"{_WHERE}: {place.name} has the dtype {as_written}, which safetensors files lack; convert it first"
            )
        entry = Entry(place.shape, as_written)
        if files[-1] and size + entry.nbytes > max_shard_bytes:
            files.append({})
            size = 0
        files[-1][place] = entry
        size += entry.nbytes
    # aligned by their order
    files = [dict(sorted(file.items(), key=lambda item: -item[1].dtype.itemsize)) for file in files]
    return _Plan(files, folder, stem)


def _with_extras(selection: Selection) -> list[Place]:
    """All places, and extra states as such."""
    extras = []
    for name, module in selection.extras.items():
        value = module.get_extra_state()
        if not isinstance(value, torch.Tensor):
            raise NotImplementedError(
                f"{_WHERE}: {name} is extra state of {type(module).__name__}; got a {type(value).__name__}, expected a "
                "tensor: safetensors files hold nothing else; save it by torch.save or distributed checkpointing"
            )
        extras.append(Place([name], value.detach()))
    return [*selection.places, *extras]


def _write(
    entries: dict[Place, Entry], path: Path | None, ranks: Ranks, limit: int, moved: Callable[[int], None]
) -> None:
    """Write a file, on the rank that has a ``path`` for it."""
    places, file = list(entries), None

    def fill(part: Part, view: torch.Tensor) -> None:
        place = places[part.index]
        if place.speaks_for_all(ranks):
            place.read(part.box, view)

    def drain(part: Part, view: torch.Tensor) -> None:
        if file is not None:
            write_tensor(file, view)
            moved(part.nbytes)

    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            if path is not None:
                file = stack.enter_context(open(path, "xb"))
                write_header(file, [(place.name, entry) for place, entry in entries.items()])
        with ranks.agreed(), torch.no_grad():
            transfer(list(entries.values()), ranks, limit, fill, drain, summed=True)
            if file is not None:
                _to_disk(file)


def _to_disk(file: IO[bytes]) -> None:
    """Close ``file`` when the disk has it."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def _commit(plan: _Plan, partial: Path) -> None:
    """Give the files their names, in an order in which either the earlier ones or the new ones can be loaded."""
    folder, stem = plan.folder, plan.stem
    index, single = folder / f"{stem}{INDEX}", folder / f"{stem}.safetensors"
    old = [folder / name for name in _files_of(index)]
    if len(plan.files) == 1:
        os.replace(partial / "0", single)
        obsolete = {index, *old} - {single}
    else:
        paths = _free_paths(plan)
        names = {place.name: path.name for entries, path in zip(plan.files, paths) for place in entries}
        content = {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(names.items()))}
        with open(partial / "index", "xb") as file:
            file.write(json.dumps(content, indent=2).encode())
            _to_disk(file)
        try:
            for number, path in enumerate(paths):
                os.replace(partial / str(number), path)
            os.replace(partial / "index", index)
        except BaseException:  # no index names them
            for path in paths:
                path.unlink(missing_ok=True)
            raise
        obsolete = {single, *old}
    for path in obsolete:
        path.unlink(missing_ok=True)


def _free_paths(plan: _Plan) -> list[Path]:
    """HuggingFace's names for the files of a split model; others where an earlier one has these."""
    stem, count, tried = plan.stem, len(plan.files), 0
    while True:
        names = (f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count))
        paths = [plan.folder / name for name in names]
        if not any(path.exists() for path in paths):
            return paths
        tried += 1
        stem = f"{plan.stem}-{tried}"


def _files_of(index: Path) -> list[str]:
    """The files beside an index that it names, none where there is no index of ours to replace."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(name for name in names if Path(name).name == name and name.endswith(".safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
