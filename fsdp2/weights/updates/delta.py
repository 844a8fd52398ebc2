"""Which elements of a part changed since it was sent, and the smallest exact form in which to send these.

A part is a box of a tensor, flattened in row-major order. Elements are compared by their bits: -0.0 is not 0.0, and a
NaN equals itself.
"""

from __future__ import annotations

from enum import IntEnum

import torch

from fsdp2.comm.pieces import INTEGERS
from fsdp2.sharding.packing import align

__all__ = ["Form", "bits", "changed", "counted", "decode", "encode", "nbytes_of", "reachable", "smallest"]

_FARTHEST = 65_535
"""The largest step between two changed elements: what 16 bits hold."""


class Form(IntEnum):
    """How a part is sent: not at all, all values, or changed values and where they are: as steps, or as a bit each."""

    NOTHING = 0
    WHOLE = 1
    STEPS = 2
    BITS = 3


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of ``tensor`` as integers of its size."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def changed(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return for each element of two flat tensors of one dtype whether their bits differ."""
    return bits(new).ne(bits(old))


def reachable(mask: torch.Tensor) -> torch.Tensor:
    """Return ``mask`` with one element in every 65,535 added: from each to the next is a step that 16 bits hold.

    An element that is added has its value already; sending it again costs less than wider steps.
    """
    if mask.numel() <= _FARTHEST:
        return mask
    mask = mask.clone()
    mask[::_FARTHEST] = True
    return mask


def counted(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many elements ``mask`` marks, and how many with those that ``reachable`` adds."""
    marked = mask.count_nonzero()  # much faster than a sum on a CPU
    if mask.numel() <= _FARTHEST:
        return marked, marked
    every = mask[::_FARTHEST]
    return marked, marked + every.numel() - every.count_nonzero()


def nbytes_of(form: int, count: int, numel: int, itemsize: int) -> int:
    """Return the bytes of a part of ``numel`` elements in ``form``, of which ``count`` are sent."""
    if form == Form.NOTHING:
        return 0
    if form == Form.WHOLE:
        return numel * itemsize
    return _index_bytes(form, count, numel) + count * itemsize


def _index_bytes(form: int, count: int, numel: int) -> int:
    return align(2 * count if form == Form.STEPS else -(-numel // 8))


def smallest(marked: int, reached: int, numel: int, itemsize: int) -> tuple[Form, int]:
    """Return the form with the fewest bytes, and how many elements are sent in it.

    ``marked`` and ``reached`` are what ``counted`` returns.
    """
    if not marked:
        return Form.NOTHING, 0
    forms = [(Form.WHOLE, numel), (Form.STEPS, reached), (Form.BITS, marked)]
    return min(forms, key=lambda one: nbytes_of(one[0], one[1], numel, itemsize))


@torch.no_grad()
def encode(form: Form, new: torch.Tensor, mask: torch.Tensor | None, into: torch.Tensor) -> None:
    """Write the flat part ``new`` to ``into``, bytes of the size of ``nbytes_of``; ``mask`` marks what has changed."""
    if form == Form.WHOLE:
        into.view(new.dtype).copy_(new)
        return
    assert mask is not None
    mask = reachable(mask) if form == Form.STEPS else mask
    at = mask.nonzero().view(-1)
    index = into[: _index_bytes(form, len(at), len(new))]
    into[len(index) :].view(new.dtype).copy_(new[at])
    if form == Form.STEPS:
        steps = torch.diff(at, prepend=at.new_zeros(1))
        index[: 2 * len(at)].view(torch.int16).copy_(steps.to(torch.int32).to(torch.int16))  # wraps
    else:
        padded = torch.zeros(8 * len(index), dtype=torch.bool, device=mask.device)
        padded[: len(mask)] = mask
        index.copy_(_packed(padded))


@torch.no_grad()
def decode(
    form: int, data: torch.Tensor, count: int, numel: int, dtype: torch.dtype
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the positions in the flat part (int64; None: all of them) and the values that ``data`` has for them."""
    if form == Form.WHOLE:
        return None, data.view(dtype)
    index = data[: _index_bytes(form, count, numel)]
    values = data[len(index) :].view(dtype)
    if form == Form.STEPS:
        steps = index[: 2 * count].view(torch.int16).to(torch.int64) & _FARTHEST
        return steps.cumsum(0), values
    return _unpacked(index)[:numel].nonzero().view(-1), values


def _packed(mask: torch.Tensor) -> torch.Tensor:
    """Return a bit for each element of ``mask``, the first of eight in the lowest place of a byte.

    A product of eight bytes that are 0 or 1, as one integer, with this constant has byte i as bit i of its highest
    byte, and no two of its terms meet in one bit. Bytes are in little-endian order.
    """
    return ((mask.view(torch.int64) * 0x0102_0408_1020_4080) >> 56).to(torch.uint8)


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return the mask of which ``packed`` has the bits."""
    values, places = torch.arange(256, device=packed.device), torch.arange(8, device=packed.device)
    eight = ((values.view(-1, 1) >> places) & 1).to(torch.uint8).view(torch.int64).view(-1)  # of each possible byte
    return eight[packed.to(torch.int64)].view(torch.bool)
