"""Random layouts and the tensors that go with them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from fsdp2.sharding.layout import ShardLayout

MAX_RANKS = 6


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor whose dimensions lie in memory in this order, the slowest first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


@st.composite
def layouts(draw: st.DrawFn, *, ranks: int | None = None, nonempty: bool = False, most: int = 6) -> ShardLayout:
    """Layouts of 0 to 4 dimensions in any memory order, cut along any dimension, with up to ``most`` indices each."""
    ranks = ranks or draw(st.integers(1, MAX_RANKS))
    shape = tuple(draw(st.lists(st.integers(1 if nonempty else 0, most), min_size=int(ranks > 1), max_size=4)))
    if not shape:
        return ShardLayout((), (), None, 1)
    order = draw(st.permutations(range(len(shape))))
    return ShardLayout(shape, dense_strides(shape, order), draw(st.integers(0, len(shape) - 1)), ranks)


def counted(layout: ShardLayout, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of this layout whose elements are 1, 2, 3... in memory order."""
    memory = torch.arange(1, layout.numel + 1, dtype=dtype)
    return memory.as_strided(layout.shape, layout.stride)


def chunk(tensor: Tensor, layout: ShardLayout, rank: int) -> Tensor:
    """Return what ``torch.chunk`` gives ``rank``; where it gives fewer pieces than ranks, the rest are empty."""
    if layout.dim is None:
        return tensor
    pieces = tensor.chunk(layout.ranks, layout.dim)
    return pieces[rank] if rank < len(pieces) else tensor.narrow(layout.dim, 0, 0)


def offsets(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return where in memory each element lies, in ascending order."""
    if math.prod(shape) == 0:
        return []
    places = torch.zeros(1, dtype=torch.int64)
    for size, step in zip(shape, stride):
        places = (places[:, None] + step * torch.arange(size)).flatten()
    return sorted(places.tolist())
