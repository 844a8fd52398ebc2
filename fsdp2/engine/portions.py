"""Portions: the pieces for the shard axis of parameters that are sharded over replicas too (``shard_over_replicas``).

A rank's *portion* of a parameter is its piece for the shard axis, in the dtype of computation. Its shard is a part of
that. The first forward of an iteration gathers portions over the replicate axis. Until gradients are reduced over that
axis, all forwards and backwards gather full parameters from portions, over the shard axis only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from fsdp2.comm.gather import Buffer, GatherBuffers, Gathering
from fsdp2.comm.streams import Lane
from fsdp2.engine.param import FSDPParam
from fsdp2.sharding.mesh import DataParallelMesh
from fsdp2.sharding.packing import FlatPlan, Item, TransferSizes, plan_flat

__all__ = ["Portions", "portion_items"]


class _Mark(Protocol):
    """The versions of the shards that portions were gathered from."""

    @property
    def changed(self) -> bool:
        """True if the shards were written since."""


def portion_items(params: Sequence[FSDPParam], items: Sequence[Item], mesh: DataParallelMesh) -> list[Item]:
    """Return the items of portions, which are gathered over the shard axis; ``items`` are those of the shards."""
    found = []
    for param, item in zip(params, items):
        layout = param.spec.layout
        # The first rank's portion is the largest. A gather over the replicate axis writes padding behind it.
        room = layout.within(0, mesh.replicate.size).full_storage_numel
        found.append(Item(layout, item.wire_dtype, item.wire_dtype, form=param.formats.gather, room=room))
    return found


class Portions:
    """This rank's portions of one group, and the gather that fills them."""

    def __init__(
        self,
        shards: torch.Tensor,
        items: Sequence[Item],
        plan: FlatPlan,
        gathered: Sequence[Item],
        sizes: TransferSizes,
        mesh: DataParallelMesh,
        lane: Lane,
    ) -> None:
        """Allocate the portions ``gathered`` on ``lane``. Their shards, ``items``, lie in ``shards`` by ``plan``."""
        self.plan = plan_flat(gathered, sizes, coalesced=mesh.shard.coalesces)
        with lane.after():
            self._memory = Buffer(self.plan.shard_bytes, mesh.device)
            self._memory.bytes.zero_()  # what lies between portions is encoded with them, so it must be numbers
            places = replace(plan, full_offset=self.plan.shard_offset, full_bytes=self.plan.shard_bytes)
            self.gather = GatherBuffers(items, places, shards, self._memory)
        self.arriving: Gathering | None = None
        self.filled = False  # a gather has written them, or is writing them; a backward needs no more than that
        self.mark: _Mark | None = None  # of the shards as gathered; without it a forward gathers anew
        self.lasting = False  # they outlive the pass that gathered them

    @property
    def bytes(self) -> torch.Tensor:
        """The portions, one behind the other."""
        return self._memory.bytes

    @property
    def outdated(self) -> bool:
        """True if a forward must gather them anew."""
        return self.mark is None or self.mark.changed

    def forget(self) -> None:
        """Let the next forward gather anew."""
        self.mark, self.lasting = None, False
