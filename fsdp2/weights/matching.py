"""Assign the values of a checkpoint to the parameters of a module, and report every mismatch before any change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from fsdp2._torch.tensors import address_of
from fsdp2.sharding.boxes import whole
from fsdp2.weights.buckets import Entry, blocks
from fsdp2.weights.select import Place, Selection

__all__ = ["Loaded", "check_ties", "match", "naming", "partly_loaded"]


class Loaded(NamedTuple):
    """The mismatches that ``strict=False`` ignored: names without a value, and values without a parameter."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def match(
    selection: Selection,
    given: Mapping[str, Entry],
    extras: Collection[str],
    unexpected: Sequence[str],
    *,
    strict: bool,
    where: str,
) -> tuple[dict[Place, str], Loaded]:
    """Return the name in ``given`` for each place of ``selection``, and the names that do not match.

    ``extras`` are names of extra states, and ``unexpected`` are further names. If ``given`` has several names of a tied
    place, the last one counts.

    Raises:
        RuntimeError: A shape or the kind of a dtype differs, or names differ and ``strict`` is set.
    """
    matched = {place: name for place in selection.places for name in place.names if name in given}
    missing = [place.name for place in selection.places if place not in matched]
    missing += [name for name in selection.extras if name not in extras]
    known = selection.by_name
    unknown = [key for key in given if key not in known] + [key for key in extras if key not in selection.extras]
    unexpected = list(dict.fromkeys([*unexpected, *unknown]))
    problems = []
    if strict and missing:
        problems.append(f"Missing key(s): {', '.join(map(repr, missing))}")
    if strict and unexpected:
        problems.append(f"Unexpected key(s): {', '.join(map(repr, unexpected))}")
    for key, place in known.items():
        entry = given.get(key)
        if entry is not None and entry.shape != place.shape:
            problems.append(f"size mismatch for {key}: got {entry.shape}, expected {place.shape}")
        elif entry is not None and not torch.can_cast(entry.dtype, place.dtype):
            problems.append(f"dtype of {key}: got {entry.dtype}, expected {place.dtype} or one that fits in it")
    if problems:
        hint = "; strict=False ignores missing and unexpected keys" if strict and (missing or unexpected) else ""
        shapes = {place.shape for place in matched}
        if strict and missing and not unexpected and all(known[n].shape in shapes for n in missing if n in known):
            hint += (
                "; if what is missing is tied to another weight, as heads to embeddings, tie them before fully_shard "
                "(model.tie_weights() in transformers)"
            )
        raise RuntimeError(f"{where}: " + "\n  ".join([*problems, f"nothing was loaded{hint}"]))
    return matched, Loaded(missing, unexpected)


Reader = Callable[[str, tuple[tuple[int, int], ...]], torch.Tensor]
"""A function that takes a key and a box, and returns the values in that box."""
_BLOCK_NUMEL = 1 << 20


def check_ties(selection: Selection, given: Mapping[str, Entry], read: Reader, where: str) -> None:
    """Compare the values of each tied parameter that has several, block by block.

    Raises:
        RuntimeError: The values differ, so one of them would be lost.
    """
    for place in selection.places:
        keys = [name for name in place.names if name in given and given[name].shape == place.shape]
        for box in blocks(whole(place.shape), _BLOCK_NUMEL) if len(keys) > 1 else ():
            first = read(keys[0], box)
            for key in keys[1:]:
                other = read(key, box)
                same = first.dtype == other.dtype
                if same and (address_of(first), first.stride()) == (address_of(other), other.stride()):
                    continue
                if not same or not torch.equal(_bits(first), _bits(other)):
                    raise RuntimeError(
                        f"{where}: {keys[0]} and {key} are one parameter of the module; got two different values, "
                        "expected one; nothing was loaded; untie them before fully_shard, or pass strict=False to "
                        "take the last"
                    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of ``tensor``, which compare equal for equal values of any dtype, also for NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor


class _AtName(RuntimeError):
    """An error while one tensor, or extra state, was read or written; the text begins with its name."""


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Let errors of the block name what it reads or writes, for ``partly_loaded``."""
    try:
        yield
    except Exception as error:
        raise _AtName(f"{name}: {type(error).__name__}: {error}") from error


def partly_loaded(where: str) -> Callable[[Exception], Exception]:
    """Return a function that turns a problem into an error saying that the module is partly loaded."""

    def explain(problem: Exception) -> Exception:
        got = str(problem) if isinstance(problem, _AtName) else f"{type(problem).__name__}: {problem}"
        error = RuntimeError(f"{where}: loading failed midway, the module is partly loaded; got {got}; load it again")
        error.__cause__ = problem
        return error

    return explain
