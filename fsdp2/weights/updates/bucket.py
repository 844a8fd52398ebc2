"""``WeightBucket``: one message of an update, a flat buffer and what is in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2.sharding.boxes import Box, narrow, numel, whole
from fsdp2.weights.buckets import Entry
from fsdp2.weights.updates.delta import Form, bits, decode, nbytes_of

__all__ = ["Part", "Update", "WeightBucket", "from_plain", "to_plain", "whole_part"]


@dataclass(frozen=True)
class Part:
    """A box of a tensor, given by its number among those of the update, and its place in the buffer."""

    tensor: int
    box: Box
    form: int
    count: int
    offset: int


@dataclass(frozen=True)
class Update:
    """What the buckets of one update have in common.

    ``version`` counts the updates of a ``session``, one ``WeightSender``. ``base`` is the version that changes are
    relative to, or None if all tensors are sent whole. With ``tracked``, later updates may be relative to this one.
    """

    session: str
    version: int
    base: int | None
    tracked: bool
    buckets: int
    names: tuple[str, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class WeightBucket:
    """One message of an update: a flat buffer of bytes, and the tensors, or the changes of tensors, that are in it.

    It can be pickled. To send it by other means, send ``buffer`` and ``metadata``, a string, and make it again with
    ``WeightBucket.from_metadata(metadata, buffer)``.

    Attributes:
        buffer: The bytes, one contiguous tensor of uint8.
        parts: What is where in the buffer.
        update: What all buckets of the update have in common: the version, and all tensors.
        number: The number of the bucket in the update, from 0.
    """

    buffer: torch.Tensor
    parts: tuple[Part, ...]
    update: Update
    number: int

    @property
    def full(self) -> bool:
        """True if the tensors of this bucket are whole; False if it has changes only."""
        return self.update.base is None

    @property
    def last(self) -> bool:
        """True for the last bucket of an update."""
        return self.number == self.update.buckets - 1

    @property
    def names(self) -> list[str]:
        """The names of the tensors in this bucket."""
        return [self.update.names[i] for i in dict.fromkeys(part.tensor for part in self.parts)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Their whole shapes, in the order of ``names``."""
        return [self.update.entries[i].shape for i in dict.fromkeys(part.tensor for part in self.parts)]

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Their dtypes, in the order of ``names``."""
        return [self.update.entries[i].dtype for i in dict.fromkeys(part.tensor for part in self.parts)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor, a view of the buffer, of each whole tensor.

        Raises:
            RuntimeError: The bucket has changes only.
        """
        if not self.full:
            raise RuntimeError(
                f"WeightBucket.tensors: bucket {self.number} of update {self.update.version} has changes of "
                f"{self.names[:3]}; got no whole tensors. Write it to tensors with WeightReceiver.apply, or read "
                "changes()"
            )
        for part in self.parts:
            entry = self.update.entries[part.tensor]
            yield self.update.names[part.tensor], self._data(part).view(entry.dtype).view(entry.shape)

    def changes(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield name, positions in the flattened whole tensor (int64, ascending) and values, for each part.

        A tensor has a part for each rank that holds changes of it, or one if it is whole. A position may have the
        value that the tensor has there already.
        """
        for part in self.parts:
            entry = self.update.entries[part.tensor]
            positions, values = self._read(part, entry)
            yield self.update.names[part.tensor], _in_whole(positions, part.box, entry, values.device), values

    def write(self, part: Part, target: torch.Tensor) -> None:
        """Write one part to the tensor that it is a part of."""
        entry = self.update.entries[part.tensor]
        positions, values = self._read(part, entry)
        # An inference tensor may be written in that mode only.
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            if positions is None:
                narrow(target, part.box).copy_(values.view([length for _, length in part.box]))
            else:
                at = _in_whole(positions, part.box, entry, values.device).to(target.device)
                bits(target).put_(at, bits(values).to(target.device))

    def _read(self, part: Part, entry: Entry) -> tuple[torch.Tensor | None, torch.Tensor]:
        return decode(part.form, self._data(part), part.count, numel(part.box), entry.dtype)

    def _data(self, part: Part) -> torch.Tensor:
        itemsize = self.update.entries[part.tensor].dtype.itemsize
        return self.buffer[part.offset : part.offset + nbytes_of(part.form, part.count, numel(part.box), itemsize)]

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer and of the header."""
        return self.buffer.numel() + len(json.dumps(self.header, separators=(",", ":")))

    @property
    def metadata(self) -> str:
        """All of the bucket but its buffer, as JSON."""
        return json.dumps({**self.header, "update": to_plain(self.update)}, separators=(",", ":"))

    @property
    def header(self) -> dict[str, Any]:
        """What is in the buffer, in plain values, without what all buckets of the update have in common."""
        parts = [[part.tensor, part.box, part.form, part.count, part.offset] for part in self.parts]
        return {"number": self.number, "nbytes": self.buffer.numel(), "parts": parts}

    @classmethod
    def from_metadata(cls, metadata: str, buffer: torch.Tensor) -> WeightBucket:
        """Return the bucket that has this ``metadata`` and this ``buffer``.

        Raises:
            ValueError: ``metadata`` is not that of a bucket, or ``buffer`` that of another, or a part of it.
        """
        try:
            plain = json.loads(metadata)
            update = from_plain(plain["update"], None)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"WeightBucket.from_metadata: got {metadata!r:.60}, which is not the metadata of a bucket "
                f"({type(error).__name__}: {error}); expected the string as the sender's bucket has it; send "
                "bucket.metadata unchanged"
            ) from error
        got, expected = (buffer.dtype, tuple(buffer.shape)), (torch.uint8, (plain["nbytes"],))
        if got != expected:
            raise ValueError(
                f"WeightBucket.from_metadata: bucket {plain['number']} of update {update.version}: got a buffer of "
                f"dtype and shape {got}, expected {expected}; send bucket.buffer whole, with its own metadata"
            )
        return cls.from_header(plain, update, buffer)

    @classmethod
    def from_header(cls, header: dict[str, Any], update: Update, buffer: torch.Tensor) -> WeightBucket:
        """Return the bucket of ``update`` that has this ``header`` and this ``buffer``."""
        parts = tuple(
            Part(tensor, tuple((start, length) for start, length in box), form, count, offset)
            for tensor, box, form, count, offset in header["parts"]
        )
        return cls(buffer, parts, update, header["number"])


def whole_part(tensor: int, entry: Entry, offset: int) -> Part:
    """Return the part that is a whole tensor."""
    return Part(tensor, whole(entry.shape), Form.WHOLE, numel(whole(entry.shape)), offset)


def to_plain(update: Update, *, tensors: bool = True) -> dict[str, Any]:
    """Return ``update`` in plain values, without its ``tensors`` if the receiver knows them."""
    described = [
        [name, list(entry.shape), str(entry.dtype).removeprefix("torch.")]
        for name, entry in zip(update.names, update.entries)
    ]
    return {
        "session": update.session,
        "version": update.version,
        "base": update.base,
        "tracked": update.tracked,
        "buckets": update.buckets,
        "tensors": described if tensors else None,
    }


def from_plain(plain: dict[str, Any], known: Update | None) -> Update:
    """Return the update that ``to_plain`` described; tensors that it left out are those of ``known``."""
    plain = dict(plain)
    tensors = plain.pop("tensors")
    if tensors is None:
        assert known is not None
        return Update(**plain, names=known.names, entries=known.entries)
    names = tuple(name for name, _, _ in tensors)
    entries = tuple(Entry(tuple(shape), getattr(torch, dtype)) for _, shape, dtype in tensors)
    return Update(**plain, names=names, entries=entries)


def _in_whole(positions: torch.Tensor | None, box: Box, entry: Entry, device: torch.device) -> torch.Tensor:
    """Return the positions in the flattened whole tensor of ``positions`` in a flattened box of it."""
    if positions is None:
        positions = torch.arange(numel(box), device=device)
    step, found = 1, torch.zeros_like(positions)
    for (start, length), size in zip(reversed(box), reversed(entry.shape)):
        found += (positions % length + start) * step
        positions = positions // length
        step *= size
    return found
