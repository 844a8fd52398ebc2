"""The elements of a tensor that each rank holds: arithmetic without tensors.

There is one idea: a tensor is cut along a dimension into pieces, one per rank, and a piece may be cut again. Tensor
parallelism, the shard axis and the replicate axis cut in this order. Another way to cut (at multiples of a block of
rows, or everything to one rank) would change ``ShardLayout.bounds`` and what follows from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["Cut", "ShardLayout"]


@dataclass(frozen=True)
class ShardLayout:
    """The sharding of a tensor of ``shape`` and dense ``stride`` along ``dim`` over ``ranks`` ranks.

    The pieces are those of ``torch.chunk``: ceil(size / ranks) indices of the dimension each, the last ones shorter or
    empty. A piece keeps the order of dimensions in memory, so a channels_last weight has channels_last pieces.
    A scalar has no dimension to shard: its ``dim`` is None, and ``ranks`` is 1.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dim: int | None
    ranks: int

    def __post_init__(self) -> None:
        if self.dim is not None and not 0 <= self.dim < len(self.shape):
            raise ValueError(f"dim {self.dim} is not a dimension of shape {self.shape}")
        if self.ranks < 1 or (self.dim is None and self.ranks > 1):
            raise ValueError(f"ranks must be at least 1, and 1 without dim, got {self.ranks}")

    @classmethod
    def least_padded(cls, shape: tuple[int, ...], stride: tuple[int, ...], ranks: int) -> ShardLayout:
        """Return the layout with the least padding; on a tie, a ``rank_major`` one or that of the lowest dimension."""
        cuts = [cls(shape, stride, dim, ranks) for dim in range(len(shape))] or [cls(shape, stride, None, ranks)]
        return min(cuts, key=lambda cut: (cut.padding_numel, not cut.rank_major))

    @cached_property
    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return math.prod(self.shape)

    @cached_property
    def memory_order(self) -> tuple[int, ...]:
        """The dimensions from the slowest to the fastest varying in memory."""
        return tuple(sorted(range(len(self.shape)), key=lambda d: (-self.stride[d], d)))

    @cached_property
    def chunk(self) -> int:
        """The number of indices of the sharded dimension on the first rank; other ranks hold as many or fewer."""
        return 0 if self.dim is None else -(-self.shape[self.dim] // self.ranks)

    @cached_property
    def slot_numel(self) -> int:
        """The number of elements in a *slot*, which every rank sends: the largest piece. Smaller pieces are padded."""
        return self.numel if self.dim is None else math.prod(self.shard_shape(0))

    @cached_property
    def rank_major(self) -> bool:
        """True if the slots of all ranks in order are the full tensor's memory, followed by padding.

        An all-gather can then write directly into the parameter, and a gradient is the input of a reduce-scatter
        without a copy.
        """
        if self.ranks == 1:
            return True
        slower = self.memory_order[: self.memory_order.index(self.dim)]
        return all(self.shape[d] == 1 for d in slower)

    @cached_property
    def full_storage_numel(self) -> int:
        """The number of elements in the full tensor's memory, including the padding of a rank-major gather."""
        return max(self.numel, self.ranks * self.slot_numel) if self.rank_major else self.numel

    @cached_property
    def even(self) -> bool:
        """True if every rank holds the same number of elements."""
        return self.dim is None or self.chunk * self.ranks == self.shape[self.dim]

    @property
    def padding_numel(self) -> int:
        """The number of elements gathered beyond the tensor's own."""
        return self.ranks * self.slot_numel - self.numel

    def bounds(self, rank: int) -> tuple[int, int]:
        """Return (start, length) of ``rank``'s piece in the sharded dimension."""
        assert self.dim is not None
        size = self.shape[self.dim]
        start = min(rank * self.chunk, size)
        return start, min(self.chunk, size - start)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of ``rank``'s piece."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.bounds(rank)[1], *self.shape[self.dim + 1 :])

    def shard_stride(self, rank: int) -> tuple[int, ...]:
        """Return the dense strides of ``rank``'s piece, in the full tensor's memory order."""
        shape = self.shard_shape(rank)
        stride, step = [0] * len(shape), 1
        for d in reversed(self.memory_order):
            stride[d] = step
            step *= max(shape[d], 1)
        return tuple(stride)

    def within(self, rank: int, ranks: int) -> ShardLayout:
        """Return the layout of ``rank``'s piece, sharded along the same dimension over ``ranks`` ranks."""
        return ShardLayout(self.shard_shape(rank), self.shard_stride(rank), self.dim, ranks)

    def shard_numel(self, rank: int) -> int:
        """Return the number of elements of ``rank``'s piece."""
        return math.prod(self.shard_shape(rank))


class Cut(NamedTuple):
    """One cut: this process holds the piece of ``rank`` in ``layout``."""

    layout: ShardLayout
    rank: int

    def again(self, ranks: int, rank: int) -> Cut:
        """Return the cut of this piece along the same dimension over ``ranks`` ranks, of which this is ``rank``."""
        return Cut(self.layout.within(self.rank, ranks), rank)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return self.layout.shard_shape(self.rank)

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of the piece."""
        return self.layout.shard_stride(self.rank)
