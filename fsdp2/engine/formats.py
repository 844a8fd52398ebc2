"""The formats in which a parameter and its gradient are sent, as custom collectives choose them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from fsdp2.engine.options import FormatsOf
from fsdp2.policies import FormatOf, WireFormat
from fsdp2.sharding.layout import ShardLayout

__all__ = ["ENCODED", "Formats", "choose_formats", "digest"]

ENCODED = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that are encoded; all others are sent as they are."""


class Formats(NamedTuple):
    """The formats in which a parameter is gathered and its gradient reduced on each axis; None: as it is."""

    gather: WireFormat | None = None
    reduce: WireFormat | None = None
    replicate: WireFormat | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name}={_describe(form)}" for name, form in zip(self._fields, self) if form is not None)


def choose_formats(formats_of: FormatsOf, name: str, param: Any, layout: ShardLayout) -> Formats:
    """Return the formats of a parameter cut by ``layout``, called ``name`` in its unit."""
    cut = layout.dim is not None and layout.ranks > 1

    def choose(format_of: FormatOf | None) -> WireFormat | None:
        return None if format_of is None else format_of(name, param, layout.numel, layout.slot_numel)

    return Formats(
        choose(formats_of.gather) if cut else None,
        choose(formats_of.reduce) if cut else None,
        choose(formats_of.replicate),
    )


def digest(chosen: Iterable[tuple[str, Formats]]) -> tuple[int, ...]:
    """Return a number for the formats of parameters, which ranks compare; an empty tuple if nothing is encoded."""
    encoded = [(name, str(formats)) for name, formats in chosen if any(formats)]
    return (zlib.crc32(repr(encoded).encode()),) if encoded else ()


def _describe(form: WireFormat) -> str:
    """Return a text that is the same on every rank: ``object.__repr__`` would contain an address."""
    kind = type(form)
    plain = kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__
    return kind.__qualname__ if plain else str(form)
