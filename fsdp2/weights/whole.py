"""Gather whole tensors from shards outside a training step, in order and in bounded memory, small ones together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2._torch.tensors import address_of
from fsdp2.comm.collectives import all_gather, gather_bytes
from fsdp2.comm.pieces import copy_all, piece_pairs
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam
from fsdp2.sharding.layout import Cut, ShardLayout
from fsdp2.sharding.mesh import Axis, DataParallelMesh
from fsdp2.sharding.packing import align
from fsdp2.sharding.spec import ShardedSpec, arrived, dtensor_like, on_this_rank
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Selection

__all__ = [
    "Source",
    "check_gatherable",
    "check_same",
    "gather_whole",
    "own_memory",
    "whole_of",
]

_SMALL_BUCKET = 1 << 20


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor to gather. It is sent and returned in ``dtype``.

    ``piece`` is this rank's piece of a tensor that is sharded like ``param``. Without ``param`` it is a plain tensor,
    or a DTensor that gathers itself, in its own dtype.
    """

    piece: torch.Tensor
    param: FSDPParam | None
    dtype: torch.dtype

    @classmethod
    def of(cls, piece: torch.Tensor, param: FSDPParam | None, dtype: torch.dtype | None = None) -> Source:
        """Return the source of ``piece``, sharded like ``param`` if given; a tensor subclass becomes a DTensor."""
        if param is not None and type(piece) is not torch.Tensor:
            piece, param = param.spec.shard_as(piece), None
        return cls(piece, param, dtype or piece.dtype)

    @property
    def spec(self) -> ShardedSpec:
        """The spec of ``param``: how the tensor is sharded."""
        assert self.param is not None
        return self.param.spec

    @property
    def mesh(self) -> DataParallelMesh:
        """The mesh that the tensor is sharded over."""
        assert self.param is not None
        mesh: DataParallelMesh = self.param.group.mesh
        return mesh

    @cached_property
    def cut_over(self) -> dict[Axis, Cut]:
        """The cuts to undo, the last one first, by the axis of the ranks with the other pieces.

        There are none if this rank has the whole tensor, or if it gathers itself.
        """
        if self.param is None or not self.spec.layout.numel:
            return {}
        pairs = zip((self.mesh.shard, self.mesh.replicate), self.spec.cuts)
        return {axis: cut for axis, cut in reversed([*pairs]) if axis.size > 1}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes to gather over, one after the other; none on the meta device, which has no values."""
        return () if self.piece.is_meta else tuple(self.cut_over)

    @property
    def nbytes(self) -> int:
        """The bytes that a gather takes, padding and the parts of other tensor-parallel ranks included."""
        if self.param is None:
            return self.piece.numel() * self.dtype.itemsize
        layout = self.spec.layout
        gathered = layout.slot_numel * (layout.ranks if self.axes else 1)
        whole = 0 if self.spec.full is None else self.spec.dtensor.shape.numel()
        return max(gathered, whole) * self.dtype.itemsize

    def empty(self, layout: ShardLayout) -> torch.Tensor:
        """Return uninitialized memory for a tensor that is cut by ``layout``."""
        return torch.empty_strided(layout.shape, layout.stride, dtype=self.dtype, device=self.mesh.device)


def check_gatherable(selection: Selection, ranks: Ranks) -> None:
    """Raise an error on every rank if a parameter cannot be gathered on one, before anything is sent.

    Raises:
        RuntimeError: Parameters are on the meta device.
        NotImplementedError: The elements of a tensor subclass cannot be found.
    """
    with ranks.agreed():
        for param, place in selection.managed.items():
            if param.local.is_meta:
                raise RuntimeError(
                    f"{place.name}: got a shard on the meta device, expected values. Materialize it first: "
                    "module.to_empty(device=...) and load or initialize it"
                )
            if param.data is None:
                raise NotImplementedError(
                    f"{place.name}: its shard is a {type(param.local).__name__} that does not keep its elements in one "
                    "tensor of the same shape and dtype; expected one that does, or a plain tensor. module.unshard() "
                    "shows what forward computes with"
                )


def check_same(named: Mapping[str, Source], groups: Iterable[FSDPParamGroup], ranks: Ranks) -> None:
    """Raise an error on every rank if the ranks of an axis would gather different tensors, before anything is sent.

    ``groups`` are all groups that the tensors may belong to, the same on every rank.

    Raises:
        RuntimeError: Only some ranks have a tensor, or only some have it on the meta device.
    """
    by_axis: dict[Axis, list[str]] = {}
    for mesh in (group.mesh for group in groups):
        axes = (mesh.shard, mesh.replicate) if mesh.has_portions else (mesh.shard,)
        by_axis.update({axis: [] for axis in axes if axis.size > 1})
    for name, source in named.items():
        for axis in source.cut_over:
            kind = f"{source.dtype}{' on the meta device' if source.piece.is_meta else ''}"
            by_axis[axis].append(f"{name} ({kind}, {tuple(source.spec.layout.shape)})")
    problem = None
    for axis, mine in by_axis.items():
        digest = hashlib.sha256("\n".join(mine).encode()).digest()
        if len(set(gather_bytes(digest, axis, ranks.device))) == 1:
            continue
        everybodys = [row.decode().split("\n") for row in gather_bytes("\n".join(mine).encode(), axis, ranks.device)]
        for entry in dict.fromkeys(entry for entries in everybodys for entry in entries if entry):
            having = [rank for rank, entries in enumerate(everybodys) if entry in entries]
            if len(having) < axis.size:
                problem = problem or RuntimeError(
                    f"{entry}: to be gathered only on ranks {having} of a dimension that cuts it; expected the same on "
                    "all of them. Make parameters, gradients and states the same on every rank first"
                )
    ranks.agree(problem)


def gather_whole(
    sources: Sequence[Source], bucket_bytes: int = 0, *, keep: bool = True, device: torch.device | None = None
) -> Iterator[torch.Tensor | None]:
    """Yield the whole plain tensor of each source in memory of its own, or None if this rank does not ``keep`` it.

    The tensors are on ``device``; by default they stay where they were gathered.

    Sources of the same axes share collectives up to ``bucket_bytes``. The default is the size of the largest source of
    those axes, and at least 1 MiB: a collective for each of thousands of small tensors takes seconds. All ranks must
    iterate in step. No collective is in flight when a tensor is yielded, so the iteration may stop at any item.
    """
    buckets = _plan(sources, bucket_bytes)
    gathered: dict[int, torch.Tensor | None] = {}
    for i, source in enumerate(sources):
        if i in buckets:
            gathered.update(zip(buckets[i], _gather([sources[j] for j in buckets[i]], keep)))
        # Bind no variable to the tensor: it would stay alive during the next gather.
        yield _complete(source, gathered.pop(i, None), keep, device)


def _plan(sources: Sequence[Source], bucket_bytes: int) -> dict[int, list[int]]:
    """Return the sources that share collectives, by the index of the first of them.

    Sources of other axes in between do not influence a bucket: the ranks of an axis need not have the same ones there.
    """
    limits: dict[tuple[Axis, ...], int] = {}
    for source in sources:
        limits[source.axes] = bucket_bytes or max(limits.get(source.axes, _SMALL_BUCKET), source.nbytes)
    buckets: dict[int, list[int]] = {}
    filling: dict[tuple[Axis, ...], tuple[list[int], int]] = {}
    for i, source in enumerate(sources):
        if not source.axes:
            continue
        bucket, size = filling.get(source.axes, ([], 0))
        if not bucket or size + source.nbytes > limits[source.axes]:
            bucket, size = buckets.setdefault(i, []), 0
        bucket.append(i)
        filling[source.axes] = bucket, size + source.nbytes
    return buckets


@torch.no_grad()
def _complete(
    source: Source, full: torch.Tensor | None, keep: bool, device: torch.device | None
) -> torch.Tensor | None:
    """Return the whole tensor of ``source``: ``full`` if it was gathered, else made of this rank's piece.

    It is a collective for DTensors and for tensor-parallel parameters, which it makes plain.
    """
    piece = source.piece
    if isinstance(piece, DTensor):
        full = whole_of(piece)
    elif source.param is None:
        full = piece.clone()
    elif piece.is_meta:
        full = torch.empty(source.spec.dtensor.shape, dtype=piece.dtype, device="meta")
    else:
        if not source.axes:
            full = source.empty(source.spec.layout)
            if full.numel():  # without elements it may still be cut, so that its piece has another shape
                full.copy_(piece)
        if full is not None and source.spec.full is not None:
            wrapped: Any = source.spec.wrap_full(full)
            full = _exact(arrived(wrapped.full_tensor()))
    return full.to(device or full.device, source.dtype) if keep and full is not None else None


@torch.no_grad()
def _gather(sources: list[Source], keep: bool) -> list[torch.Tensor | None]:
    """Gather ``sources``, whose axes are the same, with one collective for each axis.

    Return the full tensor of each, or None if this rank does not need it.
    """
    pieces: list[Any] = [source.piece for source in sources]
    axes = sources[0].axes
    for axis in axes:
        needed = [keep or axis is not axes[-1] or source.spec.full is not None for source in sources]
        pieces = _gather_along(axis, sources, pieces, needed)
    return pieces


def _gather_along(
    axis: Axis, sources: list[Source], pieces: list[torch.Tensor], needed: list[bool]
) -> list[torch.Tensor | None]:
    """Undo the cut along ``axis`` with one collective; return what ``pieces`` are pieces of, as far as it is needed.

    Each rank sends one row of bytes that contains a slot for each tensor. If there is one tensor and it is sharded
    along its slowest dimension, the rows in order are its memory, and only padding costs a copy.
    """
    cuts = [source.cut_over[axis] for source in sources]
    layout = cuts[0].layout
    in_place = len(sources) == 1 and layout.rank_major
    offsets, end = [], 0
    sizes = [cut.layout.slot_numel * source.dtype.itemsize for source, cut in zip(sources, cuts)]
    for size in sizes:
        offsets.append(end)
        end += size if in_place else align(size)
    rows = torch.empty(axis.size, end, dtype=torch.uint8, device=sources[0].mesh.device)
    slots = [rows[:, at : at + size].view(source.dtype) for source, at, size in zip(sources, offsets, sizes)]
    for piece, cut, slot in zip(pieces, cuts, slots):  # the rest of a slot beyond the piece is never read
        slot[axis.rank, : math.prod(cut.shape)].as_strided(cut.shape, cut.stride).copy_(piece)
    all_gather([rows.view(-1)], [rows[axis.rank]], axis, async_op=False)
    if in_place:
        flat = slots[0].view(-1)
        flat = flat[: layout.numel].clone() if flat.numel() > layout.numel else flat
        return [flat.as_strided(layout.shape, layout.stride)]
    fulls = [source.empty(cut.layout) if wants else None for source, cut, wants in zip(sources, cuts, needed)]
    pairs = []
    for full, slot, cut in zip(fulls, slots, cuts):
        pairs += [] if full is None else piece_pairs(full, slot, cut.layout)
    copy_all([target for target, _ in pairs], [piece for _, piece in pairs])
    return fulls


@torch.no_grad()
def whole_of(value: DTensor) -> torch.Tensor:
    """Return the whole tensor of any DTensor in memory of its own. Every rank of its mesh must call it."""
    device, local = value.device_mesh.device_type, on_this_rank(value)
    if local.device.type not in (device, "meta"):  # collectives need tensors on the mesh's device
        local = local.to(device)
    full = arrived(dtensor_like(value, local.detach()).full_tensor())
    shares = not full.is_meta and full.numel() and address_of(full) == address_of(on_this_rank(value))
    return full.clone() if shares else _exact(full)


def _exact(full: torch.Tensor) -> torch.Tensor:
    """Return ``full``, copied if its storage is larger than the tensor, as with padding."""
    if full.is_meta or not full.numel() or full.untyped_storage().nbytes() == full.nbytes:
        return full
    return full.clone()


def own_memory(local: torch.Tensor, spec: ShardedSpec, device: torch.device) -> torch.Tensor:
    """Return a copy of ``local``, this rank's piece, in memory of its own and with the strides of a shard."""
    own = torch.empty_strided(spec.shard_shape, spec.shard_stride, dtype=local.dtype, device=device)
    return own if own.is_meta else own.copy_(local)
