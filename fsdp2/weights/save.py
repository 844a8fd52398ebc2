"""``save_safetensors``: a sharded model in the files that everybody else reads, written as its blocks arrive."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import nn

from fsdp2.sharding.boxes import Entry, Part
from fsdp2.weights.progress import Progress, showing
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.safetensors import INDEX, dtype_names, write_header, write_tensor
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

    Files are written under temporary names and renamed when all are complete, so an interrupted save leaves the old
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
    ranks = ranks_of(model) or Ranks.alone(torch.device("cpu"))
    with contextlib.ExitStack() as stack:
        with ranks.agreed():
            limit = bucket_bytes(bucket_mb)
            selection = select(model, _WHERE)
            selection.check(_WHERE, idle=False)
            plan = _make_plan(selection, Path(path), max_shard_bytes, dtype)
            moved = stack.enter_context(showing(progress, _WHERE, plan.nbytes, here=ranks.first))
        written = _Written(plan)
        stack.callback(written.discard)
        for number in range(len(plan.files)):
            _write(plan, number, written, ranks, limit, moved)
        with ranks.agreed():
            if ranks.first:
                written.commit()


@dataclass
class _Plan:
    """``files`` of places in the order they are written in; every place's ``entries`` alike."""

    files: list[list[Place]]
    entries: list[list[Entry]]
    folder: Path
    stem: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as written."""
        return sum(entry.nbytes for entries in self.entries for entry in entries)


def _make_plan(selection: Selection, path: Path, max_shard_bytes: int | None, dtype: torch.dtype | None) -> _Plan:
    """Which places go into which file.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: see ``save_safetensors``.
    """
    one_file = path.suffix == ".safetensors"
    if max_shard_bytes is None:
        max_shard_bytes = 1 << 62 if one_file else _SHARD_BYTES
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise ValueError(f"{_WHERE}: max_shard_bytes must be a positive number of bytes, got {max_shard_bytes!r}")
    check_cast(_WHERE, dtype)
    folder, stem = (path.parent, path.name.removesuffix(".safetensors")) if one_file else (path, "model")
    entries = {}
    for place in _with_extras(selection):
        if place.local.is_meta:
            raise RuntimeError(
                f"{_WHERE}: {place.name} has no values; got the meta device, expected memory; load or initialise it "
                "first"
            )
        as_written = dtype if dtype is not None and place.dtype.is_floating_point else place.dtype
        if as_written not in dtype_names():
            raise NotImplementedError(
                f"{_WHERE}: {place.name} has the dtype {as_written}, which safetensors files lack; convert it first"
            )
        entries[place] = Entry(place.shape, as_written)
    files: list[list[Place]] = [[]]
    size = 0
    for place, entry in entries.items():
        if files[-1] and size + entry.nbytes > max_shard_bytes:
            files.append([])
            size = 0
        files[-1].append(place)
        size += entry.nbytes
    for file in files:  # aligned by their order
        file.sort(key=lambda place: -entries[place].dtype.itemsize)
    return _Plan(files, [[entries[place] for place in file] for file in files], folder, stem)


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


def _write(plan: _Plan, number: int, written: _Written, ranks: Ranks, limit: int, moved: Callable[[int], None]) -> None:
    """Write a file under another name."""
    places, entries = plan.files[number], plan.entries[number]
    with ranks.agreed():
        file = written.start(number) if ranks.first else None
        if file is not None:
            write_header(file, [(place.name, entry) for place, entry in zip(places, entries)])

    def fill(part: Part, view: torch.Tensor) -> None:
        place = places[part.index]
        if place.speaks_for_all(ranks):
            place.read(part.box, view)

    def drain(part: Part, view: torch.Tensor) -> None:
        if file is not None:
            write_tensor(file, view)
            moved(part.nbytes)

    with ranks.agreed(), torch.no_grad():
        transfer(entries, ranks, limit, fill, drain, summed=True)
        written.finish()


class _Written:
    """The files of one save, under other names until all are complete."""

    def __init__(self, plan: _Plan) -> None:
        self.plan = plan
        self.token = f".{uuid.uuid4().hex[:8]}.partial"
        self.partial: list[Path] = []
        self._file: IO[bytes] | None = None

    def start(self, name: object) -> IO[bytes]:
        """Open the file of this number or name."""
        self.plan.folder.mkdir(parents=True, exist_ok=True)
        path = self.plan.folder / f".{self.plan.stem}-{name}{self.token}"
        self.partial.append(path)
        self._file = open(path, "xb")  # noqa: SIM115 (closed by finish)
        return self._file

    def finish(self) -> None:
        """Bring the file that was started to the disk."""
        file, self._file = self._file, None
        if file is not None:
            with file:
                file.flush()
                os.fsync(file.fileno())

    def commit(self) -> None:
        """Give the files their names, in an order in which either the earlier ones or the new ones can be loaded."""
        folder, stem = self.plan.folder, self.plan.stem
        index, single = folder / f"{stem}{INDEX}", folder / f"{stem}.safetensors"
        old = [folder / name for name in _files_of(index)]
        if len(self.plan.files) == 1:
            names = [single.name]
            self._rename(0, single)
            obsolete = [index, *old]
        else:
            names = self._free_names()
            for number, name in enumerate(names):
                self._rename(number, folder / name)
            self.start("index").write(self._index(names).encode())
            self.finish()
            self._rename(-1, index)
            obsolete = [single, *old]
        self.partial.clear()
        for path in obsolete:
            if path.name not in names:
                path.unlink(missing_ok=True)

    def _rename(self, number: int, path: Path) -> None:
        os.replace(self.partial[number], path)
        self.partial[number] = path  # to be discarded as long as no index names it

    def _free_names(self) -> list[str]:
        """HuggingFace's names for the files of a split model; others where an earlier one has these."""
        count = len(self.plan.files)
        for tag in itertools.chain([""], (f"-{i}" for i in itertools.count(1))):
            stem = f"{self.plan.stem}{tag}"
            names = [f"{stem}-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
            if not any((self.plan.folder / name).exists() for name in names):
                return names
        raise AssertionError

    def _index(self, names: list[str]) -> str:
        """The index of a model split over files of these names."""
        plan = self.plan
        files = {place.name: name for places, name in zip(plan.files, names) for place in places}
        return json.dumps(
            {"metadata": {"total_size": plan.nbytes}, "weight_map": dict(sorted(files.items()))}, indent=2
        )

    def discard(self) -> None:
        """Remove what did not get its name."""
        with contextlib.suppress(OSError):
            self.finish()
        for path in self.partial:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _files_of(index: Path) -> list[str]:
    """The files beside an index that it names, none where there is no index of ours to replace."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(name for name in names if Path(name).name == name and name.endswith(".safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
