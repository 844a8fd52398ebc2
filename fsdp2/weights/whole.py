"""Whole tensors from shards, outside a step: in order, in bounded memory; small neighbours travel together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp2.comm.collectives import all_gather, gather_bytes
from fsdp2.comm.pieces import copy_all, piece_pairs
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.param import FSDPParam
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
    """A tensor to gather: this rank's ``piece`` of what is cut like ``param``, or a plain tensor or DTensor by itself.

    It is sent and returned in ``dtype``.
    """

    piece: torch.Tensor
    param: FSDPParam | None
    dtype: torch.dtype

    @classmethod
    def of(cls, piece: torch.Tensor, param: FSDPParam | None, dtype: torch.dtype | None = None) -> Source:
        """``piece`` is cut like ``param``, if there is one; a subclass gathers itself. Default ``dtype``: its own."""
        if param is not None and type(piece) is not torch.Tensor:
            piece, param = param.spec.shard_as(piece), None
        return cls(piece, param, dtype or piece.dtype)

    @property
    def spec(self) -> ShardedSpec:
        """How it is cut."""
        assert self.param is not None
        return self.param.spec

    @property
    def mesh(self) -> DataParallelMesh:
        """What it is cut over."""
        assert self.param is not None
        return self.param.group.mesh  # type: ignore[no-any-return]

    @property
    def cut_over(self) -> Axis | None:
        """The ranks that hold the other pieces; None where this one has all of it, or it gathers itself."""
        if self.param is None:
            return None
        layout = self.spec.layout
        return None if layout.dim is None or layout.ranks == 1 or not layout.numel else self.mesh.shard

    @property
    def axis(self) -> Axis | None:
        """The ranks to gather from; None for values that do not exist."""
        return None if self.piece.is_meta else self.cut_over

    @property
    def slot_bytes(self) -> int:
        """What one rank sends."""
        return self.spec.layout.slot_numel * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """What a gather of it takes, padding included, and the rest that tensor parallelism holds elsewhere."""
        if self.param is None:
            return self.piece.numel() * self.dtype.itemsize
        whole = 0 if self.spec.full is None else self.spec.dtensor.shape.numel() * self.dtype.itemsize
        return max((1 if self.axis is None else self.axis.size) * self.slot_bytes, whole)

    def empty(self) -> torch.Tensor:
        """Memory for the whole of what is cut."""
        layout = self.spec.layout
        return torch.empty_strided(layout.shape, layout.stride, dtype=self.dtype, device=self.mesh.device)


def check_gatherable(selection: Selection, ranks: Ranks) -> None:
    """Refuse on every rank what cannot be gathered on one, before anything is sent.

    Raises:
        RuntimeError: parameters are on the meta device.
        NotImplementedError: a tensor subclass keeps its elements where only itself can find them.
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
    """Refuse on every rank to gather what differs between the ranks that hold its pieces, before anything is sent.

    ``groups`` are all those that the tensors may belong to, the same on every rank.

    Raises:
        RuntimeError: a tensor is there, or on the meta device, on some of them only.
    """
    by_axis: dict[Axis, list[str]] = {group.mesh.shard: [] for group in groups if group.mesh.shard.size > 1}
    for name, source in named.items():
        if source.cut_over is not None:
            kind = f"{source.dtype}{' on the meta device' if source.piece.is_meta else ''}"
            by_axis[source.cut_over].append(f"{name} ({kind}, {tuple(source.spec.layout.shape)})")
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
                    f"{entry}: to be gathered on ranks {having} of its shard axis, not on the others; expected the "
                    "same on all of them. Make parameters, gradients and states equal on every rank first"
                )
    ranks.agree(problem)


def gather_whole(
    sources: Sequence[Source], bucket_bytes: int = 0, *, keep: bool = True, device: torch.device | None = None
) -> Iterator[torch.Tensor | None]:
    """The whole, plain tensor of each source, in memory of its own; None where this rank does not ``keep`` it.

    It lies on ``device``, by default where it was gathered.

    Those with one axis that are together no larger than ``bucket_bytes`` make one collective; by default no larger than
    the largest with that axis, and 1 MiB at least, since a collective for each of thousands of small tensors takes
    seconds. All ranks must iterate in step. Nothing is in flight whenever a tensor is handed out, so the iteration may
    be left at any point.
    """
    buckets = _plan(sources, bucket_bytes)
    gathered: dict[int, torch.Tensor | None] = {}
    for i, source in enumerate(sources):
        if i in buckets:
            gathered.update(zip(buckets[i], _gather([sources[j] for j in buckets[i]], keep)))
        yield _complete(source, gathered.pop(i, None), keep, device)  # a variable would keep it while the next comes


def _plan(sources: Sequence[Source], bucket_bytes: int) -> dict[int, list[int]]:
    """Which sources travel together, by the first of them.

    What others of another axis have in between, and how large it is, makes no difference: not all ranks of an axis need
    have the same there.
    """
    limits: dict[Axis, int] = {}
    for source in sources:
        if source.axis is not None:
            limits[source.axis] = bucket_bytes or max(limits.get(source.axis, _SMALL_BUCKET), source.nbytes)
    buckets: dict[int, list[int]] = {}
    filling: dict[Axis, tuple[list[int], int]] = {}
    for i, source in enumerate(sources):
        if source.axis is None:
            continue
        bucket, size = filling.get(source.axis, ([], 0))
        if not bucket or size + source.nbytes > limits[source.axis]:
            bucket, size = buckets.setdefault(i, []), 0
        bucket.append(i)
        filling[source.axis] = bucket, size + source.nbytes
    return buckets


@torch.no_grad()
def _complete(
    source: Source, full: torch.Tensor | None, keep: bool, device: torch.device | None
) -> torch.Tensor | None:
    """``full``, gathered, or what this rank has of ``source`` already, without tensor parallelism; collective."""
    piece = source.piece
    if isinstance(piece, DTensor):
        full = whole_of(piece)
    elif source.param is None:
        full = piece.clone()
    elif piece.is_meta:
        full = torch.empty(source.spec.dtensor.shape, dtype=piece.dtype, device="meta")
    else:
        if source.axis is None:
            full = source.empty()
            if full.numel():  # without elements it may still be cut, so that its piece has another shape
                full.copy_(piece)
        if full is not None and source.spec.full is not None:
            wrapped: Any = source.spec.wrap_full(full)
            full = _exact(arrived(wrapped.full_tensor()))
    return full.to(device or full.device, source.dtype) if keep and full is not None else None


@torch.no_grad()
def _gather(sources: list[Source], keep: bool) -> list[torch.Tensor | None]:
    """What every data-parallel rank computes with, in order; None for what nobody needs here.

    Each rank sends one row of bytes, with every tensor's slot in it. The rows of one tensor that is cut along its
    slowest dimension are its memory: only padding costs a copy.
    """
    axis, layout = sources[0].axis, sources[0].spec.layout
    assert axis is not None
    in_place = len(sources) == 1 and layout.rank_major
    offsets, end = [], 0
    for source in sources:
        offsets.append(end)
        end += source.slot_bytes if in_place else align(source.slot_bytes)
    rows = torch.empty(axis.size, end, dtype=torch.uint8, device=sources[0].mesh.device)
    slots = [rows[:, at : at + source.slot_bytes].view(source.dtype) for source, at in zip(sources, offsets)]
    for source, slot in zip(sources, slots):
        spec = source.spec  # what a slot has in excess of the piece is never read
        slot[axis.rank, : spec.shard_numel].as_strided(spec.shard_shape, spec.shard_stride).copy_(source.piece)
    all_gather([rows.view(-1)], [rows[axis.rank]], axis, async_op=False)
    if in_place:
        flat = slots[0].view(-1)
        flat = flat[: layout.numel].clone() if flat.numel() > layout.numel else flat
        return [flat.as_strided(layout.shape, layout.stride)]
    fulls = [source.empty() if keep or source.spec.full is not None else None for source in sources]
    pairs = []
    for full, slot, source in zip(fulls, slots, sources):
        pairs += [] if full is None else piece_pairs(full, slot, source.spec.layout)
    copy_all([target for target, _ in pairs], [piece for _, piece in pairs])
    return fulls


@torch.no_grad()
def whole_of(value: DTensor) -> torch.Tensor:
    """The whole tensor of any DTensor, in memory of its own; every rank of its mesh must call it."""
    device, local = value.device_mesh.device_type, on_this_rank(value)
    if local.device.type not in (device, "meta"):  # what was offloaded cannot be sent
        local = local.to(device)
    full = arrived(dtensor_like(value, local.detach()).full_tensor())
    shares = not full.is_meta and full.numel() and full.data_ptr() == on_this_rank(value).data_ptr()
    return full.clone() if shares else _exact(full)


def _exact(full: torch.Tensor) -> torch.Tensor:
    """``full``, copied if it drags padding along."""
    if full.is_meta or not full.numel() or full.untyped_storage().nbytes() == full.nbytes:
        return full
    return full.clone()


def own_memory(local: torch.Tensor, spec: ShardedSpec, device: torch.device) -> torch.Tensor:
    """A copy of ``local``, this rank's piece, in memory of its own, strided as shards are."""
    own = torch.empty_strided(spec.shard_shape, spec.shard_stride, dtype=local.dtype, device=device)
    return own if own.is_meta else own.copy_(local)
