"""Fingerprints: whether a tensor has the same bits as before, without a copy of it."""

from __future__ import annotations

import torch

from fsdp2._torch.tensors import address_of
from fsdp2.comm.pieces import INTEGERS

__all__ = ["fingerprint"]

_AT_ONCE = 1 << 20
"""Of so many elements the bits are widened at a time."""
_SMALL = 1 << 16
"""Tensors of more elements are summed without that: fewer bytes are read and written."""
_COLUMNS = 4093
"""Of the table in which a large tensor is summed. It is a prime number: the rows of the tensor end at other places."""
_ODD = -0x61C8864680B583EB  # 2**64 over the golden ratio, as a signed number


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Return a number (int64, 0-d) that changes with the bits of elements, and with their places.

    It is the sum of the bits with odd weights, modulo 2**64. A change of one element always shows; several changes hide
    each other with a probability of less than 2**-30. (Sums of floats would hide small ones, such as changed signs.)

    The bits of a large tensor are read twice, and nothing of its size is written: as a table of 64 bits, whose rows and
    columns are summed. Then a change of one element hides with that probability too, and what changes neither sum does
    not show, such as one difference in the four corners of a rectangle, twice with the other sign.
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.reshape(-1).view(INTEGERS[values.itemsize])
    parts = [*bits.split(_AT_ONCE)] if bits.numel() <= _SMALL or not _is_aligned(bits) else _sums(bits)
    weights = _weights(max(part.numel() for part in parts), values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in parts:
        total.mul_(_ODD).add_((weights[: part.numel()] * part).sum())
    return total


def _is_aligned(bits: torch.Tensor) -> bool:
    """Return whether the memory can be read as words of 64 bits."""
    return address_of(bits) % 8 == 0 == bits.storage_offset() * bits.itemsize % 8


def _sums(bits: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of columns and of rows, and the few elements that fill no row."""
    words = bits[: bits.numel() * bits.itemsize // 8 * 8 // bits.itemsize].view(torch.int64)
    count = words.numel() // _COLUMNS * _COLUMNS
    table = words[:count].view(-1, _COLUMNS)
    # An odd weight leaves the highest bit, a sign, as it is: two of them would hide each other. So the halves are mixed
    # first; the product before that keeps changes of both halves from hiding each other there.
    wide = [one * _ODD for one in (table.sum(0), table.sum(1), words[count:])]
    return [*(one ^ (one >> 32) for one in wide), bits[words.numel() * 8 // bits.itemsize :]]


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers of 64 bits that look random."""
    weights = torch.arange(1, count + 1, device=device).mul_(_ODD)
    weights ^= weights >> 32
    return weights.mul_(_ODD).bitwise_or_(1)
