"""``iter_full_params`` yields every parameter in full, for weights that leave the training process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fsdp2._torch.hooks import outside_dynamo, skipped_by_dynamo
from fsdp2.sharding.packing import bucket_bytes
from fsdp2.weights.ranks import Ranks
from fsdp2.weights.select import Place, Selection, ranks_of, select
from fsdp2.weights.transfer import check_cast
from fsdp2.weights.whole import Source, check_gatherable, gather_whole

__all__ = ["iter_full_params"]


@outside_dynamo
def iter_full_params(
    module: nn.Module,
    *,
    bucket_mb: float = 256,
    dtype: torch.dtype | None = None,
    device: torch.device | str | int | None = None,
    buffers: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, full plain tensor) for every parameter, in the order and under the names of ``named_parameters``.

    Use it to send weights to an inference engine. It yields tied parameters once, and undoes tensor parallelism. With
    ``buffers`` the persistent buffers follow, in the order and under the names of ``named_buffers``, so that it yields
    all tensors of ``state_dict()``. Every tensor is a copy that the caller owns. Values always come from the shards,
    even if a module holds full parameters or computes in another precision, and between a forward and its backward.

    Each collective gathers a bucket of several parameters. **Every rank must therefore iterate, and as far as the other
    ranks**; a rank that does not need the weights discards them. All ranks use the first rank's ``bucket_mb`` and
    ``dtype``. No collective is in flight between two items, so all ranks may stop after the same item (``break``,
    ``close``). Do not train, load or shard while you iterate.

    Args:
        module: Any module: a unit, a part of one, or one that contains units.
        bucket_mb: The memory of one bucket in MiB, its receive buffer included. A parameter larger than half of that
            makes a bucket of its own. This bucket takes the parameter's size, or twice the size if the parameter is
            uneven, tensor-parallel, or sharded along a dimension other than the slowest.
        dtype: Cast floating-point values to this dtype before they are sent. Default: the dtype of the shards.
        device: The device of the tensors. Default: the device of the mesh; for plain tensors, their own.
        buffers: Also yield persistent buffers. Plain ones, such as running statistics, are this rank's own. Others
            (rotary frequencies, say) are in no state dict, and an engine computes them: see
            ``module.named_buffers()``.

    Raises:
        TypeError, ValueError: An argument has the wrong type or size.
        RuntimeError: Parameters are on the meta device, or ``summon_full_params`` shows them.
        NotImplementedError: A tensor subclass has an all-gather extension, and its elements cannot be found.

    Example:
        ```python
        for name, tensor in fsdp2.iter_full_params(model, dtype=torch.bfloat16):  # on every rank
            if rank == 0:
                engine.load_weight(name, tensor)
        ```
    """
    selection = select(module, "iter_full_params")
    limit = bucket_bytes("iter_full_params", bucket_mb)
    check_cast("iter_full_params", dtype)
    target = None if device is None else torch.device(device)
    selection.refuse_summoned("iter_full_params")
    return _iterate(module, selection, limit, dtype, target, buffers)


@skipped_by_dynamo
def _iterate(
    module: nn.Module,
    selection: Selection,
    limit: int,
    dtype: torch.dtype | None,
    device: torch.device | None,
    buffers: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    ranks = ranks_of(module, managed=True) or Ranks.alone()
    check_gatherable(selection, ranks)
    # With different buckets, ranks would misread each other's bytes.
    limit, dtype, buffers = ranks.share((limit, dtype, buffers))
    shown = {id(tensor): place for place in selection.places for tensor in _shown(place)}
    named = [(name, shown[id(parameter)]) for name, parameter in module.named_parameters()]
    for name, buffer in module.named_buffers() if buffers else ():
        if id(buffer) in shown:  # it is persistent
            named.append((name, shown[id(buffer)]))
    sources = []
    for _, place in named:
        piece = place.tensor.detach() if place.param is None else place.param.data
        assert piece is not None  # just checked
        sources.append(Source.of(piece, place.param, dtype if place.tensor.is_floating_point() else None))
    gathered = gather_whole(sources, limit // 2, device=device)  # the other half is the receive buffer
    for name, _ in named:
        # Bind no variable to the tensor: it would stay alive during the next gather.
        yield name, next(gathered)  # type: ignore[misc]  # never None: every rank keeps values


def _shown(place: Place) -> list[Any]:
    """Return what modules show of ``place``: a managed parameter may be shown in full."""
    return [place.tensor] if place.param is None else [site.shown for site in place.sites]
