"""A group's memory: one flat buffer for its shards, one for its full parameters, and the views that connect them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch import local_tensor, version_of
from fsdp2.comm.gather import Buffer, GatherBuffers
from fsdp2.runtime.codec import compute_dtype
from fsdp2.runtime.options import GroupOptions
from fsdp2.runtime.param import FSDPParam
from fsdp2.sharding.mesh import DataParallelMesh
from fsdp2.sharding.packing import FlatPlan, Item, plan_flat

__all__ = ["ShardStore", "note_optimizer_step"]

# Optimizers change shards without touching a version counter that can be read, so their steps are counted.
_optimizer_steps = 0


def note_optimizer_step(*unused: object) -> None:
    """Some optimizer of this process has stepped."""
    global _optimizer_steps
    _optimizer_steps += 1


class ShardStore:
    """Where the shards and full parameters of one group live.

    As long as a parameter is on the meta device there is no flat buffer and every shard is a tensor of its own.
    """

    def __init__(
        self,
        params: list[FSDPParam],
        mesh: DataParallelMesh,
        pieces: Sequence[torch.Tensor],
        options: GroupOptions,
    ) -> None:
        self.params = params
        self.mesh = mesh
        self.options = options
        self._flat: torch.Tensor | None = None
        self._plan: FlatPlan | None = None
        self._items: list[Item] = []
        self._placed: list[torch.Tensor] = []
        self._full: Buffer | None = None
        self._gather: GatherBuffers | None = None
        self._place(pieces)

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards, padding included."""
        return sum(local.nbytes for local in self._placed) if self._plan is None else self._plan.shard_bytes

    @property
    def full_bytes(self) -> int:
        """Bytes of the full parameters as computed with."""
        return sum(item.full_bytes for item in self._items)

    def stamp(self) -> object:
        """A value that changes when the shards may have changed."""
        flat = 0 if self._flat is None else version_of(self._flat)
        return (_optimizer_steps, flat, sum(version_of(param.sharded) for param in self.params))

    def set_options(self, options: GroupOptions) -> None:
        """Follow changed transfer sizes; the shards move to a new buffer."""
        moved = options.sizes != self.options.sizes
        self.options = options
        if moved:
            self._plan = None
            self._place([param.local for param in self.params])

    # ---- shards ----

    def adopt(self) -> bool:
        """Take in shards that were replaced or whose local tensors changed; whether there were any.

        Raises:
            RuntimeError: a parameter was removed from its module, or replaced by something that is no such shard.
        """
        changed = False
        for param, placed in zip(self.params, self._placed):
            shown = param.module._parameters.get(param.attribute)
            if shown is param.sharded and local_tensor(shown) is placed:
                continue
            _check_replacement(param, shown)
            param.adopt_shard(shown)  # type: ignore[arg-type]
            param.show_shard()
            changed = True
        if changed:
            self._place([param.local for param in self.params])
        return changed

    def check_materialized(self) -> None:
        """Raise RuntimeError that names the parameters still on the meta device."""
        names = [param.name for param in self.params if param.local.is_meta]
        if names:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {names}\nFor example, call module.to_empty(device) to materialize to device and call "
                "module.reset_parameters() on each module to initialize values."
            )

    def _place(self, pieces: Sequence[torch.Tensor]) -> None:
        """Copy ``pieces`` into the flat buffer (made anew where dtypes or the device changed) and show them there."""
        if any(piece.is_meta for piece in pieces) or not pieces:
            self._plan = self._flat = self._full = self._gather = None
            self._set([_own(piece, param) for piece, param in zip(pieces, self.params)])
            return
        items = [
            Item(param.spec.layout, piece.dtype, compute_dtype(piece.dtype, self.options.mp_policy))
            for param, piece in zip(self.params, pieces)
        ]
        with torch.inference_mode(False), torch.no_grad():
            if (
                self._plan is None
                or items != self._items
                or self._flat is None
                or self._flat.device != pieces[0].device
            ):
                self._items = items
                self._plan = plan_flat(items, self.options.sizes)
                flat = torch.zeros(self._plan.shard_bytes, dtype=torch.uint8, device=pieces[0].device)
                self._flat, self._full, self._gather = flat, None, None
            views = [self._view(i) for i in range(len(items))]
            for view, piece in zip(views, pieces):
                if view.data_ptr() != piece.data_ptr() or not view.numel():
                    view.copy_(piece)
            self._set(views)

    def _view(self, i: int) -> torch.Tensor:
        """Parameter ``i``'s shard in the flat buffer."""
        assert self._flat is not None and self._plan is not None
        spec, dtype, start = self.params[i].spec, self._items[i].dtype, self._plan.shard_offset[i]
        flat = self._flat[start : start + spec.shard_numel * dtype.itemsize].view(dtype)
        return flat.as_strided(spec.shard_shape, spec.shard_stride)

    def _set(self, locals_: list[torch.Tensor]) -> None:
        self._placed = locals_
        for param, local in zip(self.params, locals_):
            param.set_shard(local)

    # ---- full parameters ----

    def gather_buffers(self) -> GatherBuffers:
        """What a gather reads and writes, with the full parameters made on first use."""
        if self._gather is not None:
            return self._gather
        assert self._plan is not None and self._flat is not None
        with torch.inference_mode(False), torch.no_grad():
            self._full = Buffer(self._plan.full_bytes, self.mesh.device)
            self._gather = GatherBuffers(self._items, self._plan, self._flat, self.mesh.shard.size, self._full)
            for i, (param, item) in enumerate(zip(self.params, self._items)):
                param.set_full(
                    self._full.view(self._plan.full_offset[i], item.layout.full_storage_numel, item.wire_dtype)
                )
        self._full.free()
        return self._gather

    def free_full(self) -> None:
        """Give back the memory of the full parameters."""
        if self._full is not None:
            self._full.free()


def _own(piece: torch.Tensor, param: FSDPParam) -> torch.Tensor:
    """``piece`` as a tensor with the layout's strides and no part in the original's storage."""
    spec = param.spec
    own = torch.empty_strided(spec.shard_shape, spec.shard_stride, dtype=piece.dtype, device=piece.device)
    return own if piece.is_meta else own.copy_(piece.detach())


def _check_replacement(param: FSDPParam, shown: object) -> None:
    expected = (
        f"a DTensor parameter of shape {tuple(param.spec.layout.shape)} placed as {param.spec.dtensor.placements}"
    )
    if not isinstance(shown, DTensor):
        got = (
            f"{type(shown).__name__} of shape {tuple(shown.shape)}" if isinstance(shown, torch.Tensor) else repr(shown)
        )
    elif shown.shape != torch.Size(param.spec.layout.shape) or shown.placements != param.spec.dtensor.placements:
        got = f"a DTensor of shape {tuple(shown.shape)} placed as {shown.placements}"
    else:
        return
    raise RuntimeError(
        f"{param.name}: the sharded parameter was replaced on its module; got {got}; expected {expected}. Load values "
        "with load_state_dict or copy_ them into the sharded parameter, or replace parameters before fully_shard"
    )
