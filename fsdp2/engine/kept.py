"""What stays in memory beyond its use: full parameters after an evaluation, between micro-batches, after ``unshard()``.

A later forward may compute with them only if the shards are still what they were. That decides whether a collective
runs, so it must follow from what all ranks see alike: the steps of optimizers that hold these parameters, the version
counters of DTensors (every rank counts an operation, also one whose shard is empty), and which passes ran. What is
written through ``to_local()`` only this rank sees.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch

from fsdp2._torch.tensors import local_tensors, storages_of, versions_of
from fsdp2.engine.param import FSDPParam, is_managed_tensor, lie_in

__all__ = ["Kept", "note_optimizer_step", "writes_to_shards"]

_alive: weakref.WeakSet[Kept] = weakref.WeakSet()


def note_optimizer_step(optimizer: torch.optim.Optimizer, *unused: object) -> None:
    """``optimizer`` has stepped: optimizers change shards without touching a version counter that can be read.

    Neither do ``torch._foreach_lerp_`` and the like, with which a teacher follows the model that was stepped: what an
    evaluation kept is not used after a step of any sharded model.
    """
    if not _alive:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    stepped, sharded = {id(param) for param in params}, any(map(is_managed_tensor, params))
    for kept in _alive:
        kept.stepped = kept.stepped or (sharded and kept.by_evaluation) or kept.holds_any(stepped)


def writes_to_shards(params: Sequence[FSDPParam]) -> int:
    """A number that changes when a shard is written in place, also through its local tensor."""
    shards = [param.sharded for param in params]
    return sum(versions_of([*shards, *local_tensors(shards)]))


class Kept:
    """What the shards of a group, and its full parameters, were like when these were kept."""

    def __init__(self, params: Sequence[FSDPParam], *, by_evaluation: bool, before: Kept | None) -> None:
        """``before`` is what was noted earlier of the same full parameters."""
        self.by_evaluation = by_evaluation
        self.stepped: bool = before is not None and before.stepped
        self._params = params
        self._ids: set[int] | None = None
        self._pieces = local_tensors([param.sharded for param in params])
        self._shards, self._locals, self._fulls = self._shard_versions(), self._local_versions(), self._full_versions()
        _alive.add(self)

    def _shard_versions(self) -> list[int]:
        return versions_of([param.sharded for param in self._params])

    def _local_versions(self) -> list[int]:
        return versions_of(self._pieces)

    def _full_versions(self) -> list[tuple[int, int]]:
        fulls = [param.sharded if param.full is None else param.full for param in self._params]
        return [*zip(versions_of(fulls), storages_of(local_tensors(fulls)))]

    def holds_any(self, ids: set[int]) -> bool:
        """Whether one of the shards is among the tensors with these ids."""
        if self._ids is None:
            self._ids = {id(param.sharded) for param in self._params}
        return not self._ids.isdisjoint(ids)

    @property
    def outdated(self) -> bool:
        """Whether the shards changed, or others are in their place, as all ranks know."""
        if self.stepped or self._shards != self._shard_versions():
            return True
        return not lie_in(self._params, self._pieces)

    def written_here(self) -> list[FSDPParam]:
        """Parameters whose shards this rank has written through their local tensors; others may not have."""
        return self._changed(self._locals, self._local_versions())

    def written_full(self) -> list[FSDPParam]:
        """Parameters that were changed in place, or assigned other data, while they were shown full."""
        return self._changed(self._fulls, self._full_versions())

    def take_writes(self, extensions: Collection[FSDPParam]) -> str:
        """Let shards have what was written to full parameters, ``extensions`` apart; why they cannot, or empty."""
        for param in [param for param in self.written_full() if param not in extensions]:
            param.return_to_buffer()
            if self.outdated or param in self.written_here():
                why = "and so was its shard since, and which came first is not known"
            elif not param.follow_full():
                form = param.formats.gather
                sent = param.compute_dtype if form is None else f"values gathered in {form.kind}"
                why = f"in {sent}, which would round its shard, in {param.dtype}"
            else:
                continue
            return (
                f"{param.name}: the full parameter that an evaluation or unshard() left on the module was changed in "
                f"place, {why}. Call reshard() on the module first, then change its parameters"
            )
        return ""

    def _changed(self, before: Sequence[object], now: Sequence[object]) -> list[FSDPParam]:
        if before == now:
            return []
        return [param for param, old, new in zip(self._params, before, now) if old != new]
