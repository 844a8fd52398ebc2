"""Block formats: numbers of eight or four bits in blocks, each with a float32 scale, and back; plain operations.

A block's scale is its largest magnitude over the largest number of the format. A block with a value that is not finite
has such a scale, and all of it decodes to values that are not finite. Everything is done in pieces, so that what is
computed with in between stays small, and in a processor's cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from fsdp2.comm.scaling import divide_
from fsdp2.sharding.packing import align

__all__ = ["BlockFormat", "Draw", "Encoded", "Noise", "decode", "decode_sum", "encode", "encoded_views"]

Draw = Callable[[torch.Tensor], torch.Tensor]
"""Returns random numbers for as many elements: float32, odd multiples of 2**-15 between -0.5 and 0.5."""

_READS = 16  # how often a table of random numbers is read on a CPU
_CPU_PIECE, _PIECE = 1 << 17, 1 << 21  # elements
_INTEGERS: dict[torch.dtype | str, float] = {torch.int8: 127.0, "int4": 7.0}
"""The largest number of each format of integers."""
_FLOATS: dict[torch.dtype | str, tuple[float, int, int]] = {
    torch.float8_e4m3fn: (448.0, 3, -6),
    torch.float8_e5m2: (57344.0, 2, -14),
}
"""Of each floating-point format: the largest number, bits behind the leading one, smallest normal exponent."""
_SMALLEST = torch.finfo(torch.float32).tiny  # scale: the inverse of a smaller one would be infinite
_TO_INTEGER = 1.5 * 2**23  # floats of this size are integers, and their lowest bits are those of the integer
_SCALE_BYTES = 4  # a block's scale is a float32


@dataclass(frozen=True)
class BlockFormat:
    """Numbers of ``kind`` in blocks of ``block`` elements, with a float32 scale each: all numbers, then all scales.

    ``kind`` is int8, a float8 dtype, or "int4", of which two share a byte. This is a ``WireFormat``. It rounds to the
    nearest, or if it is ``stochastic`` by chance, where it has a state.
    """

    kind: torch.dtype | str
    block: int
    stochastic: bool = False

    def __str__(self) -> str:
        return f"{self.kind} in blocks of {self.block}"

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` encoded elements, without their scales."""
        return numel // 2 if self.kind == "int4" else numel

    def nbytes(self, numel: int) -> int:
        """Return the bytes of ``numel`` elements (whole blocks) with scales, aligned so that another row can follow."""
        return align(self.payload_bytes(numel) + numel // self.block * _SCALE_BYTES)

    def new_state(self, stream: int) -> Noise:
        """Return random numbers of this rank to round by on a stream, seeded from ``torch.initial_seed()``."""
        return Noise(torch.initial_seed() + 2 * dist.get_rank() + stream)

    def encode(self, values: torch.Tensor, sent: torch.Tensor, state: Draw | None = None) -> None:
        """Write ``values`` (rows, elements) to ``sent`` (rows, bytes)."""
        encode(values, encoded_views(sent, values.shape[1], self), self, state if self.stochastic else None)

    def decode(self, sent: torch.Tensor, numel: int, values: torch.Tensor, first: int = 0) -> None:
        """Write to ``values`` (rows, elements) the elements from ``first`` on of ``numel`` in each row of ``sent``."""
        blocks = -(-values.shape[1] // self.block)
        decode(encoded_views(sent, numel, self, first // self.block, blocks), values, self)

    def add(self, sent: torch.Tensor, total: torch.Tensor, divisor: int = 1) -> None:
        """Add the rows of ``sent`` to ``total`` (elements, float32), and divide it by ``divisor``."""
        decode_sum(encoded_views(sent, total.numel(), self), total, self, divisor)


class Encoded(NamedTuple):
    """Views of encoded rows: ``payload`` is (rows, blocks, bytes of a block), ``scales`` is (rows, blocks, 1)."""

    payload: torch.Tensor
    scales: torch.Tensor

    def part(self, rows: slice, blocks: slice) -> Encoded:
        """Return some of the blocks of some of the rows."""
        return Encoded(self.payload[rows, blocks], self.scales[rows, blocks])


def encoded_views(rows: torch.Tensor, numel: int, form: BlockFormat, first: int = 0, blocks: int = -1) -> Encoded:
    """Return the numbers and scales in ``rows`` (rows, bytes), each of which has ``numel`` encoded elements.

    They are those of ``blocks`` blocks from block ``first`` on, or of all blocks. This takes few operations, because
    each gather does it again.
    """
    size, count = form.payload_bytes(form.block), numel // form.block if blocks < 0 else blocks
    numbers = rows.narrow(1, first * size, count * size).view(rows.shape[0], count, size)
    scales = rows.view(torch.float32).narrow(1, form.payload_bytes(numel) // _SCALE_BYTES + first, count)
    return Encoded(numbers, scales.unsqueeze(-1))


def encode(values: torch.Tensor, into: Encoded, form: BlockFormat, draw: Draw | None = None) -> None:
    """Write ``values`` (rows, elements) to ``into``, rounded to nearest; with ``draw`` by chance, without bias."""
    blocks = values.unflatten(1, (-1, form.block))
    scratch = None
    for part in _pieces(blocks):
        payload, scales = into.part(*part)
        # From the host they are copied and then widened, both on the device: the host must not wait for the copy.
        numbers = blocks[part].to(device=scales.device, dtype=torch.float32, non_blocking=True)
        scratch = _memory(scratch, numbers)
        peaks = torch.abs(numbers, out=scratch).amax(-1, keepdim=True)
        scales.copy_(peaks.div_(_largest(form)).clamp_(min=_SMALLEST))
        # Multiplied by the inverse, which is far cheaper than a division, a number that the format has is off by less
        # than 2**-15 of a step: with any drawn number it is still nearest to what it was.
        _write(torch.mul(numbers, peaks.reciprocal_(), out=scratch), payload, form, draw)


def decode(encoded: Encoded, values: torch.Tensor, form: BlockFormat) -> None:
    """Write what was encoded to ``values`` (rows, elements), which may have less than a whole block at the end."""
    whole, rest = divmod(values.shape[1], form.block)
    blocks = values[:, : whole * form.block].unflatten(1, (whole, form.block))
    for part in _pieces(blocks):
        _read(encoded.part(*part), blocks[part], form)
    if rest:
        tail = values.new_empty(values.shape[0], 1, form.block)
        _read(encoded.part(slice(None), slice(whole, whole + 1)), tail, form)
        values[:, whole * form.block :].copy_(tail[:, 0, :rest])


def decode_sum(encoded: Encoded, total: torch.Tensor, form: BlockFormat, divisor: int = 1) -> None:
    """Add the rows of what was encoded to ``total`` (elements, float32), and divide it by ``divisor``."""
    rows = encoded.scales.shape[0]
    blocks = total.view(-1, form.block)
    decoded = None
    for part in _pieces(blocks.expand(rows, *blocks.shape)):
        decoded = _memory(decoded, blocks.expand(rows, *blocks.shape)[part])
        _read(encoded.part(*part), decoded, form)
        piece = blocks[part[1]].add_(decoded[0] if len(decoded) == 1 else decoded.sum(0))
        if divisor != 1 and part[0].stop >= rows:
            divide_(piece, divisor)


def _memory(last: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor shaped ``like`` this one: ``last`` if it fits, since new memory costs more than the work."""
    if last is not None and last.shape == like.shape:
        return last
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _pieces(blocks: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the (rows, blocks) of each piece of ``blocks`` (rows, blocks, elements): part of a row, or short rows."""
    rows, count, size = blocks.shape
    count_at_once = min(max(_piece_numel(blocks) // size, 1), max(count, 1))
    rows_at_once = max(_piece_numel(blocks) // (count_at_once * size), 1)
    for first in range(0, count, count_at_once):
        for row in range(0, rows, rows_at_once):
            yield slice(row, row + rows_at_once), slice(first, first + count_at_once)


def _piece_numel(tensor: torch.Tensor) -> int:
    """Return the elements of a piece: what fits in a cache, or many if each piece is a launch, as in a forecast."""
    launches = tensor.device.type != "cpu" or tensor.untyped_storage().device.type == "meta"
    return _PIECE if launches else _CPU_PIECE


def _largest(form: BlockFormat) -> float:
    return _FLOATS[form.kind][0] if form.kind in _FLOATS else _INTEGERS[form.kind]


def _write(numbers: torch.Tensor, payload: torch.Tensor, form: BlockFormat, draw: Draw | None) -> None:
    """Round ``numbers`` (rows, blocks, elements), which are overwritten, to numbers of the format."""
    if isinstance(form.kind, torch.dtype) and form.kind in _FLOATS:
        if draw is not None:
            _, bits, smallest = _FLOATS[form.kind]
            # The power of two below each number is its bits without sign and fraction.
            spacing = numbers.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
            spacing = spacing.clamp_(min=2.0**smallest).mul_(2.0**-bits)
            numbers = numbers.div_(spacing).add_(draw(numbers)).round_().mul_(spacing)
        payload.view(form.kind).copy_(numbers)
        return
    if draw is not None:
        numbers.add_(draw(numbers))
    integers = numbers.add_(_TO_INTEGER).view(torch.int32)
    if form.kind == "int4":
        low, high = integers.chunk(2, -1)
        integers = (low & 15) | (high << 4)
    payload.view(torch.int8).copy_(integers)  # the lowest byte


def _read(encoded: Encoded, values: torch.Tensor, form: BlockFormat) -> None:
    payload, scales = encoded
    if isinstance(form.kind, torch.dtype):
        values.copy_(payload.view(form.kind))
    else:
        both, half = payload.view(torch.int8), form.block // 2
        values[..., :half].copy_((both << 4) >> 4)
        values[..., half:].copy_(both >> 4)
    values.mul_(scales)


class Noise:
    """Random numbers for rounding: a linear congruential generator in every element of a tensor.

    On a CPU it costs a fraction of torch's generators, it leaves the state of these alone, and it goes on when a graph
    is replayed. It belongs to one lane. Seeds differ between ranks: equal errors would add up. On a CPU, where
    generating a number costs more than rounding by it, a table of them is read several times, from random offsets.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._state = torch.empty(0)
        self._table = torch.empty(0)
        self._offsets = random.Random(seed)
        self._reads = 0

    def __call__(self, like: torch.Tensor) -> torch.Tensor:
        """Return random numbers for as many elements: this is a ``Draw``."""
        numel = like.numel()
        if numel > _CPU_PIECE or _piece_numel(like) != _CPU_PIECE:
            return self._next(like, numel).view(like.shape)
        if self._reads % _READS == 0:
            self._table = self._next(like, 2 * _CPU_PIECE)
        self._reads += 1
        first = self._offsets.randrange(2 * _CPU_PIECE - numel + 1)
        return self._table[first : first + numel].view(like.shape)

    def _next(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Return the next random number of each of ``numel`` elements."""
        if self._state.numel() < numel:
            generator = torch.Generator().manual_seed(self._seed % (1 << 62))
            size = (max(numel, _piece_numel(like)),)
            state = torch.randint(-(2**31), 2**31, size, generator=generator, device="cpu")
            self._state = state.to(device=like.device, dtype=torch.int32)
        state = self._state[:numel].mul_(747796405).add_(-1403630843)
        # The upper bits alone: lower ones have short periods.
        return (state >> 18).to(torch.float32).mul_(2.0**-14).add_(2.0**-15)
