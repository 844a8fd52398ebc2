"""Fingerprints: whether a tensor has the same bits as before, without a copy of it."""

from __future__ import annotations

import torch

__all__ = ["fingerprint"]

_AT_ONCE = 1 << 20
"""Of so many elements the bits are widened at a time."""
_ODD = -0x61C8864680B583EB  # 2**64 over the golden ratio, as a signed number
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(values: torch.Tensor) -> torch.Tensor:
    """Return a number (int64, 0-d) that changes with the bits of elements, and with their places.

    It is the sum of the bits with odd weights, modulo 2**64. A change of one element always shows; several changes hide
    each other with a probability of less than 2**-30. (Sums of floats would hide small ones, such as changed signs.)
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    bits = values.reshape(-1).view(_INTEGERS[values.itemsize])
    weights = _weights(min(bits.numel(), _AT_ONCE), values.device)
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for piece in bits.split(_AT_ONCE):
        total.mul_(_ODD).add_((weights[: piece.numel()] * piece).sum())
    return total


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers of 64 bits that look random."""
    weights = torch.arange(1, count + 1, device=device).mul_(_ODD)
    weights ^= weights >> 32
    return weights.mul_(_ODD).bitwise_or_(1)
