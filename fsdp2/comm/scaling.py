"""Turn a sum of gradients into the mean without overflow: pure arithmetic on sizes, dtypes and backends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Scaling", "choose_scaling", "divide_"]

_SAFE_RANGE = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Scaling:
    """How a sum becomes a mean: divide by ``pre`` before it, let the backend average or not, then divide by ``post``.

    ``average`` applies to both collectives: each divides by the size of its own axis.
    """

    pre: float = 1.0
    average: bool = False
    post: float = 1.0

    @property
    def divisor(self) -> float:
        """The divisor of ``pre`` and ``post`` together."""
        return self.pre * self.post


def choose_scaling(
    reduce_dtype: torch.dtype,
    shard_size: int,
    replicate_size: int,
    *,
    factor: float | None = None,
    force_sum: bool = False,
) -> Scaling:
    """Return how to divide by ``factor`` (default: the data-parallel ranks) when reducing in ``reduce_dtype``.

    A range as wide as float32's lets the backend average. A narrow one (float16) divides by about sqrt(factor) before
    the sum and by the rest after it. A custom factor is applied once, after the sum, with every backend and size:
    NCCL's PREMUL_SUM would save one small kernel, but gloo's raises, and leaves its process group unusable.
    """
    world = shard_size * replicate_size
    divisor = float(world) if factor is None else float(factor)
    if reduce_dtype not in _SAFE_RANGE:
        pre = 1.0
        while divisor % pre == 0 and divisor / pre > pre:
            pre *= 2
        return Scaling(pre=pre, post=divisor / pre)
    if divisor == world and not force_sum:
        return Scaling(average=world > 1)
    return Scaling(post=divisor)


def divide_(tensor: torch.Tensor, divisor: float) -> None:
    """Divide ``tensor`` in place. For a power of two, multiply: same bits, in a third of the time."""
    if math.frexp(divisor)[0] == 0.5:
        tensor.mul_(1 / divisor)
    else:
        tensor.div_(divisor)
