"""A few bytes of tensors in memory of the host, by which a write shows that no version counter does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

from fsdp2._torch.autograd import functorch_active, lasting_tensors

__all__ = ["Sample"]

K = TypeVar("K")

_BYTES = 64
"""About how many bytes of a tensor a sample has; it has fewer than twice as many."""


class Sample(Generic[K]):
    """Reads a few bytes of each of several spans of a buffer, all of them by one operator."""

    def __init__(self, buffer: torch.Tensor, spans: Mapping[K, tuple[int, int]]) -> None:
        """``buffer`` is a 1D tensor of bytes on the host; ``spans`` has the first byte of each, and their number."""
        self._buffer = buffer
        places = [_spread(start, size) for start, size in spans.values()]
        with lasting_tensors():
            flat = [place for some in places for place in some]
            self._places = torch.tensor(flat, dtype=torch.long, device=buffer.device)
        self._keys = [key for key, some in zip(spans, places) for _ in some]

    def take(self) -> torch.Tensor:
        """Return what these bytes are now, for a later ``unlike``."""
        if not functorch_active():
            return self._buffer.index_select(0, self._places)
        with lasting_tensors():  # a transform would wrap them; a call costs four times what the bytes do
            return self._buffer.index_select(0, self._places)

    def unlike(self, earlier: torch.Tensor) -> list[K]:
        """Return the keys of the spans of which bytes are others now than ``earlier``."""
        now = self.take()
        if torch.equal(now, earlier):
            return []
        return list(
            dict.fromkeys(key for key, one, other in zip(self._keys, now.tolist(), earlier.tolist()) if one != other)
        )


def _spread(start: int, size: int) -> range:
    """Return places all over a span. The step is odd, so they are in all columns, and show all bytes of a number."""
    return range(start, start + size, max(1, size // _BYTES) | 1)
