"""Whether pairs of tensors on a device have the same values in a few places. The host waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch

from fsdp2._torch.autograd import lasting_tensors
from fsdp2.comm.pieces import INTEGERS, Pair

__all__ = ["Comparison"]

K = TypeVar("K")

_COMPARED = 8
"""The largest number of elements compared along each dimension; of contiguous tensors, its square in one row."""


class Comparison(Generic[K]):
    """Compares a few elements of pairs of tensors of one shape, in the dtype of the first."""

    def __init__(self, pairs: Mapping[K, Pair]) -> None:
        self._pairs = pairs

    @cached_property
    def _on_device(self) -> list[tuple[list[tuple[K, int]], _Bits, _Bits]]:
        """Of pairs with the same dtypes: the keys and how many elements each has, and the elements."""
        found: dict[tuple[torch.dtype, torch.dtype], list[tuple[K, Pair]]] = {}
        for key, (one, other) in self._pairs.items():
            if one.device != other.device:
                continue  # the host would read a shard that the device may write just now
            if one.is_contiguous() and other.is_contiguous():
                few = _neighbours(one), _neighbours(other)
            else:
                few = _few_elements(one, other)
            found.setdefault((few[0].dtype, few[1].dtype), []).append((key, few))
        return [
            (
                [(key, one.numel()) for key, (one, _) in some],
                _Bits(dtype, [_bits(one) for _, (one, _) in some]),
                _Bits(another, [_bits(two) for _, (_, two) in some]),
            )
            for (dtype, another), some in found.items()
        ]

    def on_device(self) -> list[tuple[list[tuple[K, int]], torch.Tensor]]:
        """Return keys, how many elements of each are compared, and on the device whether these differ, in their order.

        The host waits for nothing, and a few kernels compare all pairs of the same dtypes. Pairs on two devices are
        left out.
        """
        with lasting_tensors():
            return [(counts, _differ(ones.joined(), others.joined())) for counts, ones, others in self._on_device]


class _Bits(NamedTuple):
    """Elements of several tensors of one ``dtype``, as integers that show their bits."""

    dtype: torch.dtype
    tensors: list[torch.Tensor]

    def joined(self) -> torch.Tensor:
        """Return all elements in one row. Integers are joined, because autocast would cast floats, or refuse them."""
        return torch.cat([tensor.reshape(-1) for tensor in self.tensors]).view(self.dtype)


def _few_elements(one: torch.Tensor, other: torch.Tensor) -> Pair:
    """Return a few elements, spread over all dimensions."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    spread = tuple(slice(None, None, max(1, -(-size // _COMPARED))) for size in one.shape)
    return one.detach()[spread], other.detach()[spread]


def _neighbours(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements from the middle of a contiguous tensor: one kernel joins those of many tensors."""
    some = min(_COMPARED**2, tensor.numel())
    few = tensor.detach().view(-1).narrow(0, (tensor.numel() - some) // 2, some)
    return torch.view_as_real(few).view(-1) if few.is_complex() else few


def _differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    cast = other.to(one.dtype)
    differ = _bits(one) != _bits(cast)
    # A cast of NaN may give several bits.
    return differ if one.dtype == other.dtype else differ & ~(one.isnan() & cast.isnan())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.itemsize])
