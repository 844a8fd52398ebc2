"""Choose the block format in which each parameter of a unit travels, as a policy asks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from fsdp2.policies import CompressionPolicy
from fsdp2.sharding.layout import ShardLayout
from fsdp2.sharding.packing import BlockFormat, align

__all__ = ["ENCODED", "Formats", "choose_formats", "digest"]

ENCODED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are encoded; all others travel as they are."""
_PADDING = 1 / 32  # of a piece at most may be padding; otherwise it is not encoded, as its blocks would be half empty


class Formats(NamedTuple):
    """The block formats in which a parameter is gathered and its gradient reduced on each axis; None: not encoded."""

    gather: BlockFormat | None = None
    reduce: BlockFormat | None = None
    replicate: BlockFormat | None = None

    def __str__(self) -> str:
        return ", ".join(
            f"{name}={form.kind} in blocks of {form.block}"
            for name, form in zip(self._fields, self)
            if form is not None
        )


def choose_formats(policy: CompressionPolicy | None, name: str, param: Any, layout: ShardLayout) -> Formats:
    """Return the formats of a parameter cut by ``layout``, called ``name`` in its unit."""
    if policy is None or layout.numel < policy.min_numel:
        return Formats()
    if align(layout.slot_numel, policy.block) > (1 + _PADDING) * layout.slot_numel:
        return Formats()
    if policy.skip is not None and policy.skip(name, param):
        return Formats()
    cut = layout.dim is not None and layout.ranks > 1
    gather, reduce, replicate = (
        None if kind is None else BlockFormat(kind, policy.block)
        for kind in (policy.gather, policy.reduce, policy.replicate)
    )
    return Formats(gather if cut else None, reduce if cut else None, replicate)


def digest(chosen: Iterable[tuple[str, Formats]]) -> tuple[int, ...]:
    """Return a number for the formats of parameters, which ranks compare; an empty tuple if nothing is encoded."""
    encoded = [(name, str(formats)) for name, formats in chosen if formats != Formats()]
    return (zlib.crc32(repr(encoded).encode()),) if encoded else ()
