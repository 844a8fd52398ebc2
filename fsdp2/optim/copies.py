"""Copies of gradients that are on their way to an optimizer: what scales gradients scales them too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from fsdp2.engine.registry import Registry

__all__ = ["GradientCopies", "keep", "scaled_together"]

Scale = Callable[[list[torch.Tensor]], object]


class GradientCopies(Protocol):
    """Copies of the gradients of some parameters."""

    def compare(self, params: Collection[int]) -> None:
        """Note for each parameter with an id in ``params`` whether its copy is still equal to its gradient."""
        ...

    def scale(self, params: Collection[int], scale: Scale) -> None:
        """Scale the copies of these gradients, which have been scaled."""
        ...


_live: Registry[GradientCopies] = Registry()


def keep(copies: GradientCopies) -> None:
    """Let ``copies`` follow their gradients, as long as it lives."""
    _live.add(copies)


@contextmanager
def scaled_together(params: Iterable[torch.Tensor], scale: Scale) -> Iterator[None]:
    """Apply ``scale`` to copies of the gradients of ``params``, if the ``with`` block does so to the gradients.

    ``scale`` gets tensors of one dtype on one device, and changes each element as the block does.
    """
    live = [*_live]
    ids = {id(param) for param in params} if live else set()
    for copies in live:
        copies.compare(ids)
    yield
    for copies in live:
        copies.scale(ids, scale)
