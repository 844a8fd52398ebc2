"""A gather and a reduction in block formats, for ``set_custom_all_gather`` and ``set_custom_reduce_scatter``.

``fully_shard(compression=...)`` and ``set_compression`` use them beside the collectives that the user has set.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fsdp2.compression.formats import BlockFormat
from fsdp2.compression.policy import CompressionPolicy
from fsdp2.engine.options import FormatsOf
from fsdp2.sharding.packing import align

__all__ = ["CompressedGather", "CompressedReduction", "compress"]

_PADDING = 1 / 32  # of a piece at most may be padding; otherwise it is not encoded, as its blocks would be half empty


@dataclass(frozen=True)
class CompressedGather:
    """Gathers parameters in the format that ``policy.gather`` asks for."""

    policy: CompressionPolicy

    def format_of(self, name: str, param: nn.Parameter, numel: int, piece_numel: int) -> BlockFormat | None:
        """Return the format of a parameter, rounded to nearest: a second gather then gives the same values."""
        kind = self.policy.gather
        if kind is None or not _is_worth_it(self.policy, name, param, numel, piece_numel):
            return None
        return BlockFormat(kind, self.policy.block)


@dataclass(frozen=True)
class CompressedReduction:
    """Reduces gradients in the formats that ``policy.reduce`` and ``policy.replicate`` ask for."""

    policy: CompressionPolicy

    def format_of(self, name: str, param: nn.Parameter, numel: int, piece_numel: int) -> BlockFormat | None:
        """Return the format of a parameter's gradient on the shard dimension."""
        return self._format(self.policy.reduce, name, param, numel, piece_numel)

    def replica_format_of(self, name: str, param: nn.Parameter, numel: int, piece_numel: int) -> BlockFormat | None:
        """Return the format of a parameter's gradient on the replicate dimension."""
        return self._format(self.policy.replicate, name, param, numel, piece_numel)

    def _format(
        self, kind: torch.dtype | str | None, name: str, param: nn.Parameter, numel: int, piece_numel: int
    ) -> BlockFormat | None:
        if kind is None or not _is_worth_it(self.policy, name, param, numel, piece_numel):
            return None
        return BlockFormat(kind, self.policy.block, self.policy.stochastic)


def compress(policy: CompressionPolicy | None) -> FormatsOf:
    """Return what chooses the formats that ``policy`` asks for."""
    if policy is None:
        return FormatsOf()
    reduction = CompressedReduction(policy)
    return FormatsOf(
        None if policy.gather is None else CompressedGather(policy).format_of,
        None if policy.reduce is None else reduction.format_of,
        None if policy.replicate is None else reduction.replica_format_of,
    )


def _is_worth_it(policy: CompressionPolicy, name: str, param: nn.Parameter, numel: int, piece_numel: int) -> bool:
    if numel < policy.min_numel or align(piece_numel, policy.block) > (1 + _PADDING) * piece_numel:
        return False
    return policy.skip is None or not policy.skip(name, param)
