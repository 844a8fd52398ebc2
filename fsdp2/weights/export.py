"""``iter_full_params``: every parameter in full, one after the other, for weights that leave the training process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Selection, ranks_of, select
from fsdp2.weights.transfer import bucket_bytes, check_cast
from fsdp2.weights.whole import Source, check_gatherable, gather_whole

__all__ = ["iter_full_params"]


def iter_full_params(
    module: nn.Module,
    *,
    bucket_mb: float = 256,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, full plain tensor) of every parameter, in the order and under the names of ``named_parameters``.

    For passing weights to an inference engine: tied parameters are yielded once, buffers not at all, tensor parallelism
    is undone, and every tensor is a copy that the caller owns. Values are those of the shards, also where a module
    keeps full parameters or computes in another precision, and also between a forward and its backward.

    Parameters are gathered in buckets of several, so **every rank must iterate, and as far as the others**: a rank that
    needs no weights drops them. ``bucket_mb`` and ``dtype`` are the first rank's for all. Nothing is in flight between
    two items, so all ranks may stop after the same one (``break``, ``close``). Do not train, load or shard in between.

    Args:
        module: Any module: a unit, a part of one, or one that contains units.
        bucket_mb: How many MiB a bucket takes, its receive buffer included. A parameter larger than half of that makes
            a bucket of its own; it takes its size, or twice that where it is uneven, sharded along another dimension
            than the slowest, or tensor-parallel.
        dtype: Cast floating-point parameters to it before they are sent. Default: the dtype of the shards.
        device: The device of the tensors. Default: the device of the mesh.

    Raises:
        TypeError, ValueError: an argument of the wrong type or size.
        RuntimeError: parameters on the meta device, or shown by ``summon_full_params``.
        NotImplementedError: a tensor subclass with an all-gather extension whose elements cannot be found.
    """
    selection = select(module, "iter_full_params")
    limit = bucket_bytes(bucket_mb)
    check_cast("iter_full_params", dtype)
    where = None if device is None else torch.device(device)
    selection.refuse_summoned("iter_full_params")
    return _iterate(module, selection, limit, dtype, where)


def _iterate(
    module: nn.Module, selection: Selection, limit: int, dtype: torch.dtype | None, device: torch.device | None
) -> Iterator[tuple[str, torch.Tensor]]:
    ranks = ranks_of(module, managed=True) or Ranks.alone()
    check_gatherable(selection, ranks)
    limit, dtype = ranks.share((limit, dtype))  # ranks with other buckets would read others' bytes
    shown = {id(slot.module._parameters.get(slot.name)): place for place in selection.places for slot in place.slots}
    named = [(name, shown[id(parameter)]) for name, parameter in module.named_parameters()]
    sources = []
    for _, place in named:
        piece = place.tensor.detach() if place.param is None else place.param.data
        assert piece is not None  # just checked
        sources.append(Source.of(piece, place.param, dtype if place.tensor.is_floating_point() else None))
    gathered = gather_whole(sources, limit // 2, device=device)  # the other half is what the bucket is received into
    for name, _ in named:
        yield name, next(gathered)  # type: ignore[misc]  # every rank keeps it; no variable does
