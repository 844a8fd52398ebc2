"""The gradients of a group that backwards have left for a later reduction.

After ``set_requires_gradient_sync(False)`` they accumulate on full parameters. After ``set_requires_all_reduce(False)``
they are sums over the shard axis, which wait for their all-reduce. In both cases they are on no shard, so optimizers
and clipping do not see them (``optim/unseen.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from fsdp2.engine.buffers import ShardStore
from fsdp2.engine.param import FSDPParam, have_gradients
from fsdp2.engine.registry import Registry

__all__ = ["Unreduced", "UnreducedGradient", "any_unreduced", "drop_unreduced", "unreduced_params"]

UnreducedGradient = tuple[torch.Tensor | None, torch.Tensor | None]

_noted: Registry[Unreduced] = Registry()  # those that may have unreduced gradients


def any_unreduced() -> bool:
    """Return whether some backward may have left gradients of any parameters unreduced."""
    return len(_noted) > 0


def unreduced_params(shard_ids: Collection[int]) -> list[FSDPParam]:
    """Return the parameters with shards of these ids whose gradients are unreduced; equal on all ranks."""
    return [param for unreduced in _noted for param in unreduced.params() if param.is_one_of(shard_ids)]


def drop_unreduced(shard_ids: Collection[int]) -> None:
    """Drop the unreduced gradients of parameters with shards of these ids."""
    for unreduced in _noted:
        unreduced.drop(shard_ids)


class Unreduced:
    """Unreduced gradients of one group. All ranks have those of the same parameters, since they run equal backwards."""

    def __init__(self, store: ShardStore, in_use: Callable[[], bool], wait: Callable[[], object]) -> None:
        """``in_use()`` returns whether a backward computes gradients of the group, or they are being reduced.

        ``wait()`` waits for reductions under way.
        """
        self._store = store
        self._in_use = in_use
        self._wait = wait
        # Parameters whose gradients a backward has left on full parameters, in the reduce dtype; a rank may have none.
        self.accumulated: set[FSDPParam] = set()
        # Sums over the shard axis that are still to be all-reduced, each with its divisor.
        self.sums: dict[FSDPParam, tuple[torch.Tensor, float]] = {}
        # Parameters of a backward that ``finalize_backward`` will end: their reductions may be under way.
        self.unfinished: set[FSDPParam] = set()

    def __bool__(self) -> bool:
        return bool(self.accumulated or self.sums)

    def await_finalization(self) -> None:
        """Refuse the gradients to optimizers and clipping until ``end_finalization``: a part may be delivered only."""
        self.unfinished.update(param for param in self._store.params if param.requires_grad)
        self.register()

    def end_finalization(self) -> None:
        """Note that the backward was finalized."""
        self.unfinished.clear()

    def register(self) -> None:
        """Let optimizers and clipping find these gradients, which are not on the shards."""
        _noted.add(self)

    def params(self) -> list[FSDPParam]:
        """Return the parameters whose gradients are unreduced; none while they are being reduced.

        If ranks may skip units, these are all parameters that accumulate, since ranks without gradients send zeros.
        """
        if self._in_use():
            return []
        params, unused = self._store.params, self._store.options.reduce_unused
        found = [
            param
            for param, there in zip(params, have_gradients(params))
            if there
            or param in self.sums
            or param in self.unfinished
            or (unused and param in self.accumulated and param.requires_grad)
        ]
        if not found and not self:
            _noted.discard(self)
        return found

    def by_param(self) -> dict[FSDPParam, UnreducedGradient]:
        """Return, for each parameter that has one of them, its accumulated gradient and its sum over the shard axis."""
        found, rank = {}, self._store.mesh.shard.rank
        for param in self._store.params:
            accumulated, layout, summed = None if param.full is None else param.full.grad, param.spec.layout, None
            if param in self.sums:
                slot, _ = self.sums[param]  # 1D, with padding
                summed = slot.as_strided(layout.shard_shape(rank), layout.shard_stride(rank))
            if accumulated is not None or summed is not None:
                found[param] = accumulated, summed
        return found

    def drop(self, shard_ids: Collection[int]) -> None:
        """Drop the unreduced gradients of parameters with shards of these ids, unless a backward is computing them."""
        if self._in_use():
            return
        params = [param for param in self._store.params if param.is_one_of(shard_ids)]
        self.forget(params)
        for param in params:
            param.drop_unreduced_gradient()

    def forget(self, params: Collection[FSDPParam]) -> None:
        """Forget the gradients of ``params``. The caller drops those on full parameters and shards."""
        if not self.unfinished.isdisjoint(params):
            self._wait()  # otherwise reductions under way would deliver gradients after they were dropped
        for param in params:
            self.sums.pop(param, None)
            self.accumulated.discard(param)
            self.unfinished.discard(param)

    def take_over(self, earlier: Unreduced) -> None:
        """Take over unreduced gradients of parameters that were in another group before."""
        own = set(self._store.params)
        self.accumulated |= earlier.accumulated & own
        self.sums.update((param, entry) for param, entry in earlier.sums.items() if param in own)
        if self:
            self.register()
