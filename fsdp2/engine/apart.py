"""Full parameters while Dynamo compiles: each has a storage of its own.

The full parameters of a group lie in one storage: one call frees them all, and views that autograd saved are valid
again after the next gather. Dynamo takes tensors in one storage for aliases, and refuses these as inputs of
``torch.cond``, ``while_loop``, ``scan`` and ``nested_compile_region``. Its graphs and guards do not depend on storages.
So while it compiles, full parameters have other storages over the same memory. Nothing is gathered or freed meanwhile,
because hooks run outside of compiled code.
"""

from __future__ import annotations

import torch

from fsdp2._torch.compile import around_compilation
from fsdp2.engine.buffers import live_stores

__all__ = ["share_again", "watch_compilation"]

_apart: list[tuple[torch.Tensor, torch.Tensor]] = []
"""Full parameters, and what they were before."""


def watch_compilation() -> None:
    """Set full parameters apart whenever Dynamo compiles, from now on."""
    around_compilation(_set_apart, share_again)


def _set_apart() -> None:
    share_again()  # what an interrupt has left
    for store in live_stores():
        for tensor, apart in store.full_apart():
            _apart.append((tensor, tensor.data))
            tensor.data = apart


def share_again() -> None:
    """Let full parameters share a storage again, before that is freed: the others would still have its address.

    An interrupt may keep this from ending. So the next forward calls it, too.
    """
    while _apart:
        tensor, before = _apart[-1]
        tensor.data = before
        _apart.pop()
