"""Read slices of safetensors files, and write files tensor by tensor."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch

from fsdp2.sharding.boxes import Box
from fsdp2.weights.buckets import Entry
from fsdp2.weights.names import clean_names

__all__ = ["DTYPE_NAMES", "INDEX", "RESERVED", "WeightFiles", "path_of", "write_header", "write_tensor"]

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The format's names of dtypes."""
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""The format's name of each dtype."""

INDEX = ".safetensors.index.json"
RESERVED = "__metadata__"
"""The one key of a header that does not name a tensor."""


class WeightFiles:
    """The tensors of the files at ``path``: ``given`` lists them by their plain names, ``read`` returns parts of them.

    ``path`` is a safetensors file, the index of several files, or a folder with either. The files are mapped, and stay
    open until ``stack`` is closed.
    """

    def __init__(self, path: str | os.PathLike[str], where: str, stack: contextlib.ExitStack) -> None:
        """Read the headers of all files.

        Raises:
            ImportError: The package safetensors is missing.
            TypeError: ``path`` is no path.
            FileNotFoundError: A file is missing.
            ValueError: A file is not a complete safetensors file, an index is wrong or names a file outside its folder,
                a folder has several candidates, or a tensor of the plain model appears twice.
        """
        self._found: dict[str, tuple[Any, str]] = {}
        self.given: dict[str, Entry] = {}
        file = _locate(path_of(path, where), where)
        listed: Mapping[Path, list[str] | None] = {file: None}
        if file.suffix == ".json":
            listed = _index(file, where)
        for path, keys in listed.items():
            self._add(path, keys, where, stack.enter_context(_open(path, where)))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return the values in ``box`` of the tensor ``name``, mapped from its file."""
        handle, key = self._found[name]
        part = handle.get_slice(key)
        return part[tuple(slice(start, start + length) for start, length in box)] if box else part[...]

    def _add(self, path: Path, keys: list[str] | None, where: str, handle: Any) -> None:
        """Add the tensors of one file: those that the index lists, or all if ``keys`` is None."""
        there = set(handle.keys())
        for name, key in clean_names(sorted(there) if keys is None else keys, f"{where}: {path}").items():
            if key not in there:
                raise ValueError(f"{where}: {path} lacks {key}, which the index lists; write both again")
            part = handle.get_slice(key)
            dtype = _DTYPES.get(part.get_dtype())
            if dtype is None:
                raise ValueError(
                    f"{where}: {key} in {path} has the dtype {part.get_dtype()}, expected one of "
                    f"{', '.join(_DTYPES)}; convert it first"
                )
            self.given[name] = Entry(tuple(part.get_shape()), dtype)
            self._found[name] = (handle, key)


def path_of(path: str | os.PathLike[str], where: str) -> Path:
    """Return ``path`` as a Path; raise TypeError if it is none."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{where}: path must be a str or os.PathLike, got {path!r}")
    return Path(path)


def _locate(path: Path, where: str) -> Path:
    """Return the file or index that ``path`` stands for."""
    if path.is_dir():
        for pattern in (f"model{INDEX}", "model.safetensors", f"*{INDEX}", "*.safetensors"):
            found = sorted(path.glob(pattern))
            if len(found) == 1:
                return found[0]
            if found:
                names = ", ".join(file.name for file in found)
                raise ValueError(f"{where}: {path} has several candidates; got {names}; pass one of them")
        raise FileNotFoundError(f"{where}: {path} has no weights; expected *.safetensors or *{INDEX} in it")
    index = path.with_name(path.name.removesuffix(".safetensors") + INDEX)
    if not path.exists() and path.suffix == ".safetensors" and index.exists():
        return index
    if not path.exists():
        raise FileNotFoundError(f"{where}: {path} does not exist; expected a safetensors file, its index, or a folder")
    return path


def _index(path: Path, where: str) -> dict[Path, list[str]]:
    """Return the files that an index names, each with its tensors."""
    try:
        weight_map = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
        names = {key: PurePath(name) for key, name in weight_map.items()}
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{where}: {path} is not an index of safetensors files; got {type(error).__name__}: {error}; expected JSON "
            "with a weight_map from names to files; write it again"
        ) from error
    clean_names(names, f"{where}: {path}")
    files: dict[Path, list[str]] = {}
    for key, name in names.items():
        # Judge the name itself, not the target of a link: a Hugging Face cache consists of links out of the folder.
        if name.is_absolute() or name.drive or ".." in name.parts:
            raise ValueError(
                f"{where}: {path} names a file outside its folder; got {str(name)!r} for {key}, expected the name of a "
                "file beside the index; if you trust it, copy that file there and correct the index"
            )
        files.setdefault(path.parent / name, []).append(key)
    return files


def _open(path: Path, where: str) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            f"{where}: reading needs the package safetensors, which is not installed; pip install safetensors"
        ) from error
    if not path.is_file():
        got = "is a folder, not a file" if path.is_dir() else "is missing"
        raise FileNotFoundError(f"{where}: {path} {got}; its index names it; copy it there as well")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except OSError:
        raise
    except Exception as error:
        raise ValueError(
            f"{where}: {path} is not a complete safetensors file; got {error}, expected a header and all the bytes "
            "that it lists; copy or write it again"
        ) from error


def write_header(file: Any, tensors: Sequence[tuple[str, Entry]]) -> None:
    """Write the header of a file whose ``tensors`` follow in this order (widest dtypes first, which aligns all)."""
    header: dict[str, Any] = {RESERVED: {"format": "pt"}}
    start = 0
    for name, entry in tensors:
        end = start + entry.nbytes
        header[name] = {"dtype": DTYPE_NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def write_tensor(file: Any, tensor: torch.Tensor) -> None:
    """Append the bytes of ``tensor``, in row-major order."""
    data = tensor.cpu().contiguous()
    if data.nbytes:
        file.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))
