"""Portions: the pieces for the shard axis of parameters that are sharded over replicas too (``shard_over_replicas``).

A rank's *portion* of a parameter is its piece for the shard axis, in the dtype of computation. Its shard is a part of
that. The first forward of an iteration gathers portions over the replicate axis. Until gradients are reduced over that
axis, all forwards and backwards gather full parameters from portions, over the shard axis only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fsdp2.comm.gather import Buffer, GatherBuffers, Gathering, HostCopies, finish_gather, start_gather
from fsdp2.comm.streams import ComputeLane, Lane, Lanes
from fsdp2.engine.param import FSDPParam
from fsdp2.engine.stamp import Stamp
from fsdp2.sharding.mesh import Axis, DataParallelMesh
from fsdp2.sharding.packing import FlatPlan, PlannedParam, TransferSizes, plan_flat

__all__ = ["Portions", "portion_items"]


def portion_items(
    params: Sequence[FSDPParam], items: Sequence[PlannedParam], mesh: DataParallelMesh
) -> list[PlannedParam]:
    """Return the items of portions, which are gathered over the shard axis; ``items`` are those of the shards."""
    found = []
    for param, item in zip(params, items):
        layout = param.spec.layout
        # The first rank's portion is the largest. A gather over the replicate axis writes padding behind it.
        room = layout.within(0, mesh.replicate.size).full_storage_numel
        found.append(PlannedParam(layout, item.wire_dtype, item.wire_dtype, form=param.formats.gather, room=room))
    return found


class Portions:
    """This rank's portions of one group, and the gather that fills them."""

    def __init__(
        self,
        shards: torch.Tensor,
        items: Sequence[PlannedParam],
        plan: FlatPlan,
        gathered: Sequence[PlannedParam],
        sizes: TransferSizes,
        mesh: DataParallelMesh,
        lane: Lane,
    ) -> None:
        """Allocate the portions ``gathered`` on ``lane``. Their shards, ``items``, lie in ``shards`` by ``plan``."""
        self.plan = plan_flat(gathered, sizes, coalesced=mesh.shard.coalesces)
        with lane.after():
            self._memory = Buffer(self.plan.shard_bytes, mesh.device)
            self._memory.bytes.zero_()  # gaps between portions are encoded with them, so they must contain numbers
            offsets = replace(plan, full_offset=self.plan.shard_offset, full_bytes=self.plan.shard_bytes)
            self.gather_buffers = GatherBuffers(items, offsets, shards, self._memory)
        self.arriving: Gathering | None = None
        self.filled = False  # a gather has written the portions, or is writing them, which is enough for a backward
        self.stamp: Stamp | None = None  # of the shards that they were gathered from; if None, a forward gathers again
        self.lasting = False  # they outlive the pass that has gathered them

    @property
    def bytes(self) -> torch.Tensor:
        """The portions, one behind the other."""
        return self._memory.bytes

    @property
    def outdated(self) -> bool:
        """True if a forward must gather them again."""
        return self.stamp is None or self.stamp.changed

    def start_gather(self, lanes: Lanes, replicate: Axis, copies: HostCopies, stamp: Stamp) -> None:
        """Start gathering them over ``replicate``, from shards with this ``stamp``."""
        self.let_read(lanes.gather)  # end the gather of a forward that was aborted
        self.forget()
        self.filled = False  # in case starting the gather raises
        lanes.replicate.wait(lanes.gather)  # which waits for shards, and may still read what these portions overwrite
        self.arriving = start_gather(self.gather_buffers, replicate, copies, lane=lanes.replicate)
        self.filled, self.stamp = True, stamp

    def let_read(self, reader: Lane | ComputeLane) -> None:
        """Let ``reader`` read portions that are being gathered."""
        if self.arriving is not None:
            finish_gather(self.arriving, reader)
            self.arriving = None

    def let_write(self, writer: ComputeLane) -> None:
        """Let ``writer`` write to shards, which may still be gathered."""
        if self.arriving is not None:
            writer.wait(self.arriving.event)

    def end_pass(self, lanes: Lanes, *, keep: bool) -> None:
        """End a forward or a gather by hand.

        With ``keep``, its portions serve the rest of the iteration; otherwise only earlier ones stay. Portions that an
        evaluation has gathered are not used again: shards may be written through ``to_local()`` between two
        evaluations, and a rank without elements would not see that.
        """
        self.let_write(lanes.compute)  # no unit may have used them
        self.let_read(lanes.gather)
        self.lasting |= keep and self.stamp is not None
        self.forget_unless_lasting()

    def forget_unless_lasting(self) -> None:
        """Forget portions of a pass that is over or was aborted."""
        if not self.lasting:
            self.forget()

    def forget(self) -> None:
        """Let the next forward gather again."""
        self.stamp, self.lasting = None, False

    def reset(self, lanes: Lanes) -> None:
        """Forget all portions after an error; the ranks may have stopped at different gathers."""
        self.end_pass(lanes, keep=False)
        self.forget()
        self.filled = False
