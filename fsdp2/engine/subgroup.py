"""The pieces that a group keeps after forward under ``reshard_after_forward=<int>``, on a few neighbouring ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fsdp2.comm.gather import Buffer, GatherBuffers
from fsdp2.comm.pieces import copy_all
from fsdp2.engine.param import FSDPParam, parameter_of
from fsdp2.sharding.mesh import Axis, DataParallelMesh, regroup
from fsdp2.sharding.packing import TransferSizes, plan_flat

__all__ = ["SubgroupShards"]


class SubgroupShards:
    """A group's parameters in the dtype of computation, cut over ``size`` neighbours, to be gathered again from them.

    Meanwhile the modules show the pieces, as DTensors on a mesh of (number of subgroups, ``size``).
    """

    def __init__(
        self,
        params: list[FSDPParam],
        gather: GatherBuffers,
        fulls: Sequence[torch.Tensor],
        mesh: DataParallelMesh,
        size: int,
        sizes: TransferSizes,
    ) -> None:
        """``gather`` is the group's usual gather; ``fulls`` are the plain full tensors in its full buffer."""
        full, places = gather.full, gather.plan  # the second gather writes to the same places as the first
        self.params = params
        self.axis = Axis.of(regroup(mesh.mesh, size), 1)
        specs = [param.spec.on_subgroup(mesh, size) for param in params]
        # Without a format: encoded a second time, values could differ from those that forward computed with.
        items = [
            replace(item, layout=spec.layout, dtype=item.wire_dtype, form=None)
            for item, spec in zip(gather.items, specs)
        ]
        plan = plan_flat(items, sizes, coalesced=self.axis.coalesces)
        plan = replace(plan, full_offset=places.full_offset, full_bytes=places.full_bytes)
        self._flat = Buffer(plan.shard_bytes, full.bytes.device)
        self.gather_buffers = GatherBuffers(items, plan, self._flat.bytes, full)
        self._specs, self._pieces, self._sources = specs, [], []
        for i, (param, spec, item) in enumerate(zip(params, specs, items)):
            flat = self._flat.view(plan.shard_offset[i], spec.shard_numel, item.dtype)
            piece = flat.as_strided(spec.shard_shape, spec.shard_stride)
            self._pieces.append(piece)
            self._sources.append(spec.cut(fulls[i]))
            param.piece = parameter_of(spec.shard_as(piece), requires_grad=param.requires_grad)
            param.piece.__dict__.update(_fsdp2_managed=True, _fsdp2_temporary=True)
        self._flat.free()

    def copy_from_full(self) -> None:
        """Copy this rank's pieces from the full parameters, which must be in memory."""
        self._flat.allocate()
        with torch.no_grad():
            copy_all(self._pieces, self._sources)

    def write(self, values: Mapping[FSDPParam, torch.Tensor]) -> None:
        """Write this rank's pieces of new whole plain ``values``, cast to the dtype of computation."""
        for param, spec, piece in zip(self.params, self._specs, self._pieces):
            if param in values:
                piece.copy_(spec.cut(spec.of_plain(values[param])))

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in the pieces' memory."""
        return self._flat.has(tensor)

    def free(self) -> None:
        """Give back the memory of the pieces."""
        self._flat.free()
