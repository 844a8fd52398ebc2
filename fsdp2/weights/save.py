"""``save_safetensors``: a sharded model in the files that everybody else reads, written as its blocks arrive."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.sharding.boxes import Entry, Part
from fsdp2.weights.progress import Progress, showing
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.safetensors import DTYPE_NAMES, INDEX, RESERVED, write_header, write_tensor
from fsdp2.weights.select import Place, Selection, ranks_of, select
from fsdp2.weights.temporary import temporary_folder
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
    written. Ranks may hold parameters of different names (experts); all of them are written.

    Files are written to a temporary folder and moved when all are complete, so an interrupted save leaves the old
    files. A complete one removes the files of the same name that it replaces, and the temporary folders that killed
    saves have left.

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
        RuntimeError: a parameter is on the meta device, or has another shape or dtype on another rank.
        NotImplementedError: a dtype or a name that the format lacks, or extra state that is not a tensor.
        TypeError, ValueError: an argument is wrong.

    Errors are raised on every rank.
    """
    ranks = ranks_of(model) or Ranks.alone()
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            limit = bucket_bytes(bucket_mb)
            selection = select(model, _WHERE)
            selection.check(_WHERE, idle=False)
            target = _Target.of(Path(path), max_shard_bytes)
            mine = _tensors(selection, dtype)
        # Ranks that cut the same tensors differently would send each other the wrong bytes.
        limit, target = ranks.share((limit, target))
        everybodys = _everybodys(mine, ranks)
        with ranks.agreed():
            files = target.files(_joined(mine, everybodys, ranks))
            total = sum(tensor.entry.nbytes for file in files for tensor in file)
            moved = stack.enter_context(showing(progress, _WHERE, total, here=ranks.first))
        partial, made = None, stack.enter_context(contextlib.ExitStack())
        with ranks.agreed():
            if ranks.first:
                target.folder.mkdir(parents=True, exist_ok=True)
                partial = made.enter_context(temporary_folder(target.folder, target.stem))
        for number, tensors in enumerate(files):
            _write(tensors, partial and partial / str(number), ranks, limit, moved)
        with ranks.agreed():
            if partial is not None:
                _commit(target, files, partial)
                made.close()  # before other ranks go on


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a file: its name, its shape and dtype there, and the place to read this rank's part from.

    ``place`` is None where other ranks have all of it, or where this rank holds a copy that is not the one to write.
    """

    name: str
    entry: Entry
    place: Place | None


@dataclass(frozen=True)
class _Target:
    """Where the files go: ``folder``, how their names begin, and how large each may become."""

    folder: Path
    stem: str
    max_bytes: int

    @classmethod
    def of(cls, path: Path, max_shard_bytes: int | None) -> _Target:
        """What ``path`` and ``max_shard_bytes`` of ``save_safetensors`` ask for; raises as it does."""
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

    def files(self, tensors: list[_Tensor]) -> list[list[_Tensor]]:
        """Which of ``tensors`` go into which file, in the order they are written in."""
        files: list[list[_Tensor]] = [[]]
        size = 0
        for tensor in tensors:
            if files[-1] and size + tensor.entry.nbytes > self.max_bytes:
                files.append([])
                size = 0
            files[-1].append(tensor)
            size += tensor.entry.nbytes
        # The widest dtypes first, so that every tensor is aligned.
        return [sorted(file, key=lambda tensor: -tensor.entry.dtype.itemsize) for file in files]


_Mine = dict[Place, Entry]
_Offer = list[tuple[list[str], Entry]]
"""The names of each tensor of a rank, and its shape and dtype in the file."""


def _tensors(selection: Selection, dtype: torch.dtype | None) -> _Mine:
    """What this rank has to write; raises what ``save_safetensors`` does."""
    check_cast(_WHERE, dtype)
    mine: _Mine = {}
    for place in _with_extras(selection):
        if RESERVED in place.names:
            raise NotImplementedError(
                f"{_WHERE}: a tensor is named {RESERVED}, which the safetensors format keeps for itself; got the names "
                f"{place.names}, expected others; rename it"
            )
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
        mine[place] = Entry(place.shape, as_written)
    return mine


def _everybodys(mine: _Mine, ranks: Ranks) -> dict[int, _Offer]:
    """What each rank has to write, the first rank's first; that one alone where all ranks have the same."""
    offer: _Offer = [(place.names, entry) for place, entry in mine.items()]
    digest = hashlib.sha256(repr(offer).encode()).digest()
    if len(set(ranks.gather(digest))) == 1:
        return {ranks.first_rank: offer}
    here = dist.get_rank()
    return dict(sorted(ranks.gather((here, offer)), key=lambda offered: offered[0]))


def _joined(mine: _Mine, everybodys: dict[int, _Offer], ranks: Ranks) -> list[_Tensor]:
    """Every tensor that some rank has, in the order of the first rank that has it.

    Raises:
        RuntimeError: ranks disagree about the shape or the dtype of one.
    """
    places = {name: place for place in mine for name in place.names}
    known: dict[str, tuple[Entry, int]] = {}
    tensors: list[_Tensor] = []
    for rank, offer in everybodys.items():
        for names, entry in offer:
            earlier = next((known[name] for name in names if name in known), None)
            if earlier is not None and earlier[0] != entry:
                raise RuntimeError(
                    f"{_WHERE}: ranks differ in {names[0]}; got {entry} on rank {rank}, expected {earlier[0]} as on "
                    f"rank {earlier[1]}; give parameters of different shapes different names"
                )
            if earlier is None:
                place = next((places[name] for name in names if name in places), None)
                writes = place is not None and place.speaks_for_all(ranks, rank)
                tensors.append(_Tensor(names[0], entry, place if writes else None))
            for name in names:
                known.setdefault(name, earlier or (entry, rank))
    return tensors


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


def _write(tensors: list[_Tensor], path: Path | None, ranks: Ranks, limit: int, moved: Callable[[int], None]) -> None:
    """Write a file, on the rank that has a ``path`` for it."""
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
                write_header(file, [(tensor.name, tensor.entry) for tensor in tensors])
        with ranks.agreed(), torch.no_grad():
            transfer([tensor.entry for tensor in tensors], ranks, limit, fill, drain, summed=True)
            if file is not None:
                _to_disk(file)


def _to_disk(file: IO[bytes]) -> None:
    """Close ``file`` when the disk has it."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def _commit(target: _Target, files: list[list[_Tensor]], partial: Path) -> None:
    """Give the files their names, in an order in which either the earlier ones or the new ones can be loaded.

    Loading prefers an index to a single file. So an index appears after all that it names, and disappears before.
    """
    folder, stem = target.folder, target.stem
    index, single = folder / f"{stem}{INDEX}", folder / f"{stem}.safetensors"
    old = _pieces_of(index, stem)
    if len(files) == 1:
        os.replace(partial / "0", single)
        obsolete = [index, *old]
    else:
        paths = _free_paths(target, len(files))
        names = {tensor.name: path.name for tensors, path in zip(files, paths) for tensor in tensors}
        nbytes = sum(tensor.entry.nbytes for tensors in files for tensor in tensors)
        content = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(names.items()))}
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
        obsolete = [single, *old]
    for path in obsolete:
        path.unlink(missing_ok=True)


def _free_paths(target: _Target, count: int) -> list[Path]:
    """HuggingFace's names for the files of a split model; others where an earlier one has these."""
    stem, tried = target.stem, 0
    while True:
        names = (f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count))
        paths = [target.folder / name for name in names]
        if not any(path.exists() for path in paths):
            return paths
        tried += 1
        stem = f"{target.stem}-{tried}"


def _pieces_of(index: Path, stem: str) -> list[Path]:
    """The files of a split model that ``index`` names; none where there is no such index.

    An index may name anything. What does not have the name of a piece of this model is not ours to remove.
    """
    piece = re.compile(rf"{re.escape(stem)}(-\d+)?-\d{{5,}}-of-\d{{5,}}\.safetensors")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return [index.parent / name for name in sorted(names) if piece.fullmatch(name)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
