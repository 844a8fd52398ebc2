"""``clip_grad_norm_`` computes one norm over gradients on any mix of meshes, without operators on DTensors.

Every rank adds up the contributions of its own elements (powers of norms, in float64) to one number for each mesh. The
number is then summed over each mesh dimension that shards any parameter, and over all dimensions of the largest mesh. A
parameter that is not sharded over such a dimension contributes the same on all its ranks, so its contribution is first
divided by the dimension's size. The collectives depend on the parameters alone, not on which of them have gradients.

Finally the contributions of parameters on smaller meshes are averaged over the largest mesh. That is right for copies,
such as a norm layer on the data-parallel mesh beside tensor-parallel layers. Experts on some of the data-parallel ranks
must be summed instead, so their contribution is first multiplied by the number of such sets of ranks (`_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp2._torch.hooks import outside_dynamo
from fsdp2.comm.collectives import all_reduce, all_reduce_max
from fsdp2.engine.index import mesh_around, param_of
from fsdp2.engine.param import is_managed_tensor, is_temporary
from fsdp2.optim.copies import scaled_together
from fsdp2.optim.prebuilt import shards_of
from fsdp2.optim.runs import joined, norms_of, scale
from fsdp2.optim.unseen import refuse_unreduced
from fsdp2.sharding.mesh import Axis, listed_ranks
from fsdp2.sharding.spec import arrived, on_this_rank, placed_alike

__all__ = ["clip_grad_norm_"]

# The mesh of a parameter, the dimensions that shard it, and True for a managed shard; _PLAIN for a plain parameter.
_Cut = tuple[DeviceMesh | None, tuple[int, ...], bool]
_PLAIN: _Cut = (None, (), False)
_Buckets = dict[tuple[torch.device, torch.dtype, _Cut], list[torch.Tensor]]


@outside_dynamo  # a compiled step calls it: meshes and collectives are not for Dynamo
@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Scale all gradients in place if their total norm exceeds ``max_norm``; return the norm before scaling.

    Each rank of a parameter's mesh must call this with that parameter, with or without a gradient. Plain parameters
    must be passed on all ranks or on none. A parameter that is sharded over fewer data-parallel ranks than others
    counts as an expert, which the other ranks do not have. If the other ranks have copies of it, and you sum the
    copies' gradients yourself, each copy counts. Gradients of plain tensors should be equal on all ranks. If they
    differ, all ranks use the mean of their powers. The norm of half-precision gradients is computed in float32.

    Args:
        parameters: Sharded, replicated and plain parameters on any meshes, or a single one. A parameter that
            ``fully_shard`` has replaced (an optimizer built before may hold it) stands for its shard.
        max_norm: The largest norm that is not scaled down.
        norm_type: The order of the norm: a positive number or ``inf``.
        error_if_nonfinite: Raise an error if the norm is NaN or infinite, before anything is scaled.
        foreach: False computes with one gradient at a time, None or True with lists of gradients.
        pp_mesh: The 1D mesh of pipeline stages. Each stage calls this with its own parameters, and the norm is that of
            all stages.

    Returns:
        A plain 0-d tensor on the device of the first parameter, the same on every rank: float64 if a parameter has that
        dtype, else float32.

    Raises:
        ValueError: ``norm_type`` is not positive, or ``pp_mesh`` has more than one dimension.
        TypeError: ``parameters`` contains something other than tensors.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set (on every rank), a parameter is
            unsharded, so its reduced gradient is on its shard, or a gradient has not been reduced.

    Example:
        ```python
        loss.backward()
        norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        ```
    """
    params = shards_of([parameters] if isinstance(parameters, torch.Tensor) else list(parameters))
    norm_type = _check(params, float(norm_type), pp_mesh)
    max_norm = float(max_norm)  # here and not where it is used, behind collectives
    refuse_unreduced(params, "clip_grad_norm_")
    cuts = _cuts(params)
    measured, scaled = _collect(params, cuts)
    device = on_this_rank(params[0]).device if params else torch.device("cpu")
    sharded = any(isinstance(param, DTensor) for param in params)
    meshes = _Meshes({_PLAIN if cut is None else cut for cut in cuts}, None if sharded else mesh_around(params))
    powers = _Powers(norm_type, foreach, device)
    parts: dict[DeviceMesh | None, torch.Tensor] = {}
    weights = _weights(params, cuts) if meshes.averages else {}
    for (_, _, cut), tensors in measured.items():
        mesh = cut[0]
        part = powers.of(tensors, meshes.copies(cut) / weights.get(cut, 1))
        parts[mesh] = powers.combined(parts[mesh], part) if mesh in parts else part
    total = meshes.reduce(parts, powers)
    if pp_mesh is not None:
        total = powers.reduced(total, Axis.of(pp_mesh, 0), pp_mesh.device_type)
    double = not {param.dtype for param in params}.isdisjoint((torch.float64, torch.complex128))
    total = powers.norm(total).to(torch.float64 if double else torch.float32)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"clip_grad_norm_: the total norm of order {norm_type} of the gradients is {total.item()}, expected a "
            "finite one; nothing was scaled. Pass error_if_nonfinite=False to scale the gradients by it anyway"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's formula, without waiting for a device
    multiply = partial(scale, factor=factor, at_once=foreach is not False)
    with scaled_together(params, multiply):
        for tensors in scaled.values():
            multiply(tensors)
    return total


def _check(params: list[Any], norm_type: float, pp_mesh: DeviceMesh | None) -> float:
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be a positive number or inf, got {norm_type}")
    if pp_mesh is not None and pp_mesh.ndim != 1:
        raise ValueError(f"clip_grad_norm_: pp_mesh must have one dimension, got {pp_mesh}; pass a slice of it")
    for i, param in enumerate(params):
        if not isinstance(param, torch.Tensor):
            raise TypeError(f"clip_grad_norm_: parameters must be tensors, got {type(param).__name__} at index {i}")
        if is_temporary(param):
            raise RuntimeError(
                f"clip_grad_norm_: parameter {i}, of shape {tuple(param.shape)}, is shown unsharded, and its reduced "
                "gradient is on its shard; call reshard() on its module before model.parameters()"
            )
    return norm_type


def _cuts(params: list[torch.Tensor]) -> list[_Cut | None]:
    """Return how each parameter is sharded; None for a parameter that is itself a partial sum."""
    keys = [(p.device_mesh, p.placements, is_managed_tensor(p)) if isinstance(p, DTensor) else None for p in params]
    found: dict[Any, _Cut | None] = {}
    for key in dict.fromkeys(keys):
        if key is None or key[0].get_coordinate() is None:
            found[key] = _PLAIN
        elif any(placement.is_partial() for placement in key[1]):
            found[key] = None
        else:
            dims = tuple(i for i, place in enumerate(key[1]) if not isinstance(place, Replicate))
            found[key] = key[0], dims, key[2]
    return [found[key] for key in keys]


def _weights(params: list[torch.Tensor], cuts: list[_Cut | None]) -> dict[_Cut, float]:
    """Return the number of sets of data-parallel ranks that train parameters of their own, for each kind of shard.

    Ranks that are data-parallel for any parameter have different data. A parameter that lies on some of these ranks
    only is an expert: each such set of ranks trains its own. Beyond the data-parallel ranks of tensor-parallel
    parameters, all ranks hold copies.
    """
    one_of_each = {cut: param for param, cut in zip(params, cuts) if cut is not None and cut[2]}
    ranks: dict[_Cut, frozenset[int]] = {}
    tensor_parallel: list[frozenset[int]] = []
    for cut, param in one_of_each.items():
        shard = param_of(param)
        if shard is None:  # its module is gone
            continue
        ranks[cut] = frozenset(listed_ranks(shard.group.mesh.mesh))
        if shard.spec.full is not None:
            tensor_parallel.append(ranks[cut])
    found = {}
    for cut, own in ranks.items():
        around = [other for other in tensor_parallel if own <= other] or [o for o in ranks.values() if own <= o]
        found[cut] = max(map(len, around)) / len(own)
    return found


def _collect(params: list[torch.Tensor], cuts: list[_Cut | None]) -> tuple[_Buckets, _Buckets]:
    """Return the tensors to take norms of, and the tensors to scale, by device, dtype and sharding.

    They differ for a gradient that is not sharded like its parameter: its norm is that of the redistributed gradient.
    They also differ for a sparse one.
    """
    buckets: _Buckets = {}
    odd: list[tuple[torch.Tensor, torch.Tensor, _Cut]] = []
    for param, cut in zip(params, cuts):
        if (grad := param.grad) is None:
            continue
        local, sharded = on_this_rank(grad), isinstance(grad, DTensor)
        alike = placed_alike(grad, param) or not (sharded or isinstance(param, DTensor))
        if cut is None or not alike or type(local) is not torch.Tensor or local.is_sparse:
            whole = _redistribute(grad, None if cut is None else param) if sharded else arrived(grad)
            if whole.is_sparse:  # of an ignored embedding: it may have a row several times, of which the sum counts
                whole = whole.coalesce().values()
            odd.append((whole, arrived(local), cut if cut is not None and sharded else _PLAIN))
        elif local.numel():
            buckets.setdefault((local.device, local.dtype, cut), []).append(local)
    measured = {kind: joined(tensors) for kind, tensors in buckets.items()}
    scaled = {kind: list(tensors) for kind, tensors in measured.items()}
    for values, local, mine in odd:
        for into, tensor in ((measured, values), (scaled, local)):
            if tensor.numel():
                into.setdefault((tensor.device, tensor.dtype, mine), []).append(tensor)
    return measured, scaled


def _redistribute(grad: Any, param: torch.Tensor | None) -> torch.Tensor:
    """Return ``grad`` with the placements of ``param``, or whole on every rank for None or a plain parameter."""
    places = param.placements if isinstance(param, DTensor) else [Replicate()] * grad.device_mesh.ndim
    return arrived(on_this_rank(grad.redistribute(placements=places)))


class _Powers:
    """Powers of norms, which add up over tensors and ranks; for ``inf`` the maximum is used instead of the sum."""

    def __init__(self, norm_type: float, foreach: bool | None, device: torch.device) -> None:
        self._order = norm_type
        self._foreach = foreach
        self._device = device

    def of(self, tensors: list[torch.Tensor], copies: float) -> torch.Tensor:
        """Return the power of ``tensors`` (of one device and dtype), divided by the number of ranks with ``copies``."""
        found = norms_of(tensors, self._order, at_once=self._foreach is not False).to(self._device, torch.float64)
        return found.max() if math.isinf(self._order) else found.pow(self._order).sum() / copies

    def zero(self) -> torch.Tensor:
        """Return the power of no tensors."""
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def combined(self, one: torch.Tensor, other: torch.Tensor, copies: int = 1) -> torch.Tensor:
        """Return both powers combined; ``copies`` ranks contribute ``other``."""
        return torch.maximum(one, other) if math.isinf(self._order) else one + other / copies

    def reduced(self, value: torch.Tensor, axis: Axis, device_type: str) -> torch.Tensor:
        """Return the combined powers of all ranks of ``axis``."""
        value = value.to(device_type, copy=True)
        if not math.isinf(self._order):
            all_reduce(value, axis, average=False, async_op=False)
            return value.to(self._device)
        # A backend's maximum may drop NaN, depending on the order of ranks, so a second number says if there is one.
        both = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf), value.isnan().to(value.dtype)])
        all_reduce_max(both, axis)
        return torch.where(both[1] > 0, math.nan, both[0]).to(self._device)

    def norm(self, value: torch.Tensor) -> torch.Tensor:
        """Return the norm with the power ``value``."""
        return value if math.isinf(self._order) else value.pow(1 / self._order)


class _Meshes:
    """The meshes to reduce over, in one order on all ranks, so that ranks cannot wait for each other in a circle.

    The total is averaged over the largest mesh at the end. This makes all ranks agree, also when values that should be
    equal on all ranks are not.
    """

    def __init__(self, cuts: set[_Cut], around: DeviceMesh | None) -> None:
        """``around`` is the mesh of the units around plain parameters, if all are plain (ignored)."""
        dims: dict[DeviceMesh, set[int]] = {} if around is None else {around: set()}
        for mesh, own, _ in cuts:
            if mesh is not None:
                dims.setdefault(mesh, set()).update(own)
        order = sorted(dims, key=_size_and_ranks)
        self._last: DeviceMesh | None = None
        if order:  # also if it is one mesh: other ranks may have others, of experts that this rank does not have
            largest = [mesh for mesh in order if mesh.size() == order[-1].size()]
            if len({tuple(sorted(listed_ranks(mesh))) for mesh in largest}) == 1:
                self._last = order[-1]
                dims[order[-1]].update(range(order[-1].ndim))
        self._dims = {mesh: sorted(dims[mesh]) for mesh in order}

    @property
    def averages(self) -> bool:
        """True if the contributions of smaller meshes are averaged over the largest."""
        return self._last is not None and len(self._dims) > 1

    def copies(self, cut: _Cut) -> int:
        """Return the number of ranks in the reduction that hold the same elements of a parameter sharded as ``cut``."""
        mesh, dims, _ = cut
        return 1 if mesh is None else math.prod(mesh.size(dim) for dim in self._dims[mesh] if dim not in dims)

    def reduce(self, parts: dict[DeviceMesh | None, torch.Tensor], powers: _Powers) -> torch.Tensor:
        """Return the combined powers of all ranks of all meshes; ``parts`` are this rank's powers by mesh."""
        total = parts.get(None, powers.zero())
        for mesh, dims in self._dims.items():
            part = parts.get(mesh, powers.zero())
            if mesh is self._last:
                part, total = powers.combined(part, total, mesh.size()), powers.zero()
            for dim in dims:
                part = powers.reduced(part, Axis.of(mesh, dim), mesh.device_type)
            total = powers.combined(total, part)
        return total


def _size_and_ranks(mesh: DeviceMesh) -> Any:
    """Return a key that sorts meshes: the largest last, and of equal sizes the one with fewer dimensions last."""
    return mesh.size(), -mesh.ndim, listed_ranks(mesh), tuple(mesh.shape), str(mesh.mesh_dim_names)
