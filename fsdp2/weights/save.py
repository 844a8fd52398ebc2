"""``save_safetensors`` writes a sharded model as safetensors files, block by block."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
from torch import nn

from fsdp2.sharding.boxes import intersect
from fsdp2.weights.buckets import Entry, Part
from fsdp2.weights.progress import Progress, showing
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.safetensors import DTYPE_NAMES, INDEX, RESERVED, write_header, write_tensor
from fsdp2.weights.select import Place, Selection, ranks_of, select
from fsdp2.weights.temporary import temporary_folder
from fsdp2.weights.transfer import bucket_bytes, check_cast, transfer

__all__ = ["save_safetensors"]

_WHERE = "save_safetensors"
_SHARD_BYTES = 5 * 10**9
"""The largest size of a file in a folder, as with Hugging Face."""
_COMPARED = 4
"""How many elements of each dimension are compared where several meshes have a tensor of one name."""


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
            limit = bucket_bytes(bucket_mb)
            selection = select(model, _WHERE)
            selection.check(_WHERE, idle=False)
            target = _Target.of(Path(path), max_shard_bytes)
            mine = _tensors(selection, dtype)
        # With different buckets or files, ranks would misread each other's bytes.
        limit, target = ranks.share((limit, target))
        offers = _gather_offers(mine, ranks)
        with ranks.agreed():
            files = target.files(_joined(mine, offers, ranks))
            total = sum(tensor.entry.nbytes for file in files for tensor in file)
            moved = stack.enter_context(showing(progress, _WHERE, total, here=ranks.first))
        _check_copies(mine, ranks)
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
class _Tensor:
    """A tensor of a file: its name, its shape and dtype in the file, and the place to read this rank's part from.

    ``place`` is None if this rank has no part of the tensor, or if another rank's copy is written.
    """

    name: str
    entry: Entry
    place: Place | None


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

    def files(self, tensors: list[_Tensor]) -> list[list[_Tensor]]:
        """Distribute ``tensors`` over files; return each file's tensors in the order in which they are written."""
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
    """Return the tensors that this rank holds, as written; raise the errors of ``save_safetensors``."""
    check_cast(_WHERE, dtype)
    mine: _Mine = {}
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


def _gather_offers(mine: _Mine, ranks: Ranks) -> dict[int, _Offer]:
    """Return every rank's tensors in the order of ranks, or only the first rank's if all ranks have the same."""
    offer: _Offer = [(place.names, entry) for place, entry in mine.items()]
    digest = hashlib.sha256(repr(offer).encode()).digest()
    if len(set(ranks.gather(digest))) == 1:
        return {ranks.first_rank: offer}
    here = dist.get_rank()
    return dict(sorted(ranks.gather((here, offer)), key=lambda offered: offered[0]))


def _joined(mine: _Mine, offers: dict[int, _Offer], ranks: Ranks) -> list[_Tensor]:
    """Return every tensor that any rank has, in the order of the first rank that has it.

    Raises:
        RuntimeError: Ranks disagree about the shape or the dtype of a tensor.
    """
    places = {name: place for place in mine for name in place.names}
    known: dict[str, tuple[Entry, int]] = {}
    tensors: list[_Tensor] = []
    for rank, offer in offers.items():
        for names, entry in offer:
            earlier = next((known[name] for name in names if name in known), None)
            if earlier is not None and earlier[0] != entry:
                raise RuntimeError(
                    f"{_WHERE}: ranks differ in {names[0]}; got {entry} on rank {rank}, expected {earlier[0]} as on "
                    f"rank {earlier[1]}; give parameters of different shapes different names"
                )
            if earlier is None:
                place = next((places[name] for name in names if name in places), None)
                writes = place is not None and place.is_sender(ranks, rank)
                tensors.append(_Tensor(names[0], entry, place if writes else None))
            for name in names:
                known.setdefault(name, earlier or (entry, rank))
    return tensors


@dataclass(frozen=True)
class _Copy:
    """What is compared of one copy of a tensor: its first elements, and sums over all of it (values, magnitudes)."""

    first: torch.Tensor
    sums: torch.Tensor

    def __add__(self, other: _Copy) -> _Copy:
        """Join the parts of two ranks of a mesh: each has zeros for what the other has."""
        return _Copy(self.first + other.first, self.sums + other.sums)

    def is_near(self, other: _Copy) -> bool:
        """Return whether the first elements differ by no more than rounding during training may explain."""
        largest = float(other.first.abs().nan_to_num(0.0, 0.0).max())
        return torch.allclose(self.first, other.first, rtol=0.1, atol=0.1 * largest, equal_nan=True)

    def is_same(self, other: _Copy) -> bool:
        """Return whether the sums differ by no more than the order in which they were added."""
        total = float(other.sums[1].nan_to_num(0.0, 0.0))
        return torch.allclose(self.sums, other.sums, rtol=0, atol=1e-9 * total, equal_nan=True)


def _check_copies(mine: _Mine, ranks: Ranks) -> None:
    """Compare tensors of one name that ranks, or meshes of some ranks, have for themselves: a file can hold only one.

    Such a name stands for copies of one parameter, or for different ones: each rank's, or each mesh's, experts. Copies
    that differ by rounding count as one tensor, with a warning.

    Raises:
        RuntimeError: A name stands for several tensors, on every rank.
    """
    found: dict[str, dict[int, _Copy]] = {}
    for values in ranks.gather({place.name: _described(place) for place in mine if _has_others(place, ranks)}):
        for name, entry in values.items():
            if entry is not None:
                mesh, part = entry
                parts = found.setdefault(name, {})
                parts[mesh] = parts[mesh] + part if mesh in parts else part
    unlike = []
    for name, copies in found.items():
        (holder, expected), *others = sorted(copies.items())
        for other, got in others:
            if not got.is_near(expected):
                raise RuntimeError(
                    f"{_WHERE}: ranks have different tensors under the name {name}; got the mesh of rank {holder} with "
                    f"{_some(expected)} and the mesh of rank {other} with {_some(got)}, expected one tensor of a name. "
                    "Give the modules names that differ between these ranks (an expert's number among all experts). "
                    "Plain copies that have drifted apart are made equal by fsdp2.sync_module_states(model)"
                )
        if not all(got.is_same(expected) for _, got in others):
            unlike.append(name)
    if unlike and ranks.first:
        warnings.warn(
            f"{_WHERE}: the copies of {unlike} on different ranks are not equal; the first one is written. If they are "
            "different tensors (experts that began with the same values), give the modules names that differ between "
            "these ranks",
            stacklevel=3,
        )


def _has_others(place: Place, ranks: Ranks) -> bool:
    """Return whether other ranks may have another tensor of this name: it lies on this rank, or a mesh, alone."""
    if place.mesh is None:
        return ranks.size > 1 and isinstance(place.tensor, torch.nn.Parameter)
    return place.mesh.size() < ranks.size and place.copies.first


def _described(place: Place) -> tuple[int, _Copy] | None:
    """Return this rank's part of what is compared, and the first rank of its mesh; None if it holds nothing."""
    local = place.local.detach()
    if not local.numel() or not (place.dtype.is_floating_point or place.mesh is not None):
        return None
    corner = tuple((0, min(length, _COMPARED)) for length in place.shape)
    first = torch.zeros([length for _, length in corner], dtype=place.dtype, device=local.device)
    if intersect(place.box, corner) is not None:
        place.read(corner, first)
    sums = torch.zeros(2, dtype=torch.float64)
    if place.dtype.is_floating_point and type(local) is torch.Tensor:
        plain = local if local.element_size() > 1 else local.float()  # float8 has no sums
        sums[0] = plain.sum(dtype=torch.float64)
        sums[1] = torch.linalg.vector_norm(plain, 1, dtype=torch.float64)
    mesh = dist.get_rank() if place.mesh is None else int(place.mesh.mesh.min())
    return mesh, _Copy(first.cpu().double(), sums)


def _some(copy: _Copy) -> str:
    return f"{copy.first.flatten()[:3].tolist()}"


def _with_extras(selection: Selection) -> list[Place]:
    """Return all places, and a place for each extra state."""
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
                write_header(file, [(tensor.name, tensor.entry) for tensor in tensors])
        with ranks.agreed(), torch.no_grad():
            transfer([tensor.entry for tensor in tensors], ranks, limit, fill, drain, summed=True)
            if file is not None:
                _to_disk(file)


def _to_disk(file: IO[bytes]) -> None:
    """Flush ``file`` to the disk and close it."""
    with file:
        file.flush()
        os.fsync(file.fileno())


def _commit(target: _Target, files: list[list[_Tensor]], partial: Path) -> None:
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
