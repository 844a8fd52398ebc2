"""``clip_grad_norm_``: one norm over gradients on any mix of meshes, without an operator on a DTensor.

Every rank adds up what its own elements contribute (powers of norms, in float64), one number for each mesh, which is
then summed over each dimension of the mesh that any of its parameters is cut over. What is the same on all ranks of
such a dimension, because its parameter is not cut over it, is divided by the dimension's size beforehand. Which
collectives there are depends on the parameters alone, never on which of them have gradients.

Parameters on smaller meshes are averaged over the largest in the end. That is right for copies: a norm layer on the
data-parallel mesh alone, beside layers that tensor parallelism cut. Experts that only some data-parallel ranks have
must be summed, so they are multiplied by the number of such sets of ranks beforehand (`_weights`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp2.comm.collectives import all_reduce, all_reduce_max
from fsdp2.engine.index import param_of
from fsdp2.engine.param import is_managed_tensor, is_temporary
from fsdp2.optim.prebuilt import shards_of
from fsdp2.optim.runs import joined, norms_of, scale
from fsdp2.sharding.mesh import Axis, listed_ranks
from fsdp2.sharding.spec import arrived, on_this_rank, placed_alike

__all__ = ["clip_grad_norm_"]

# The mesh of a parameter, its dimensions that cut it, and whether it is a shard; (None, (), False) for a plain one.
_Cut = tuple[DeviceMesh | None, tuple[int, ...], bool]
_PLAIN: _Cut = (None, (), False)
_Buckets = dict[tuple[torch.device, torch.dtype, _Cut], list[torch.Tensor]]


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    pp_mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Scale all gradients down to a total norm of ``max_norm`` if it is larger; return the norm before, on every rank.

    Each rank of a parameter's mesh must call this with that parameter, whether it has a gradient here or not; plain
    parameters must be passed on all ranks or on none. A parameter that is sharded over fewer data-parallel ranks than
    others is taken for an expert, which those other ranks do not have. If they have copies of it, and you sum their
    gradients yourself, each copy counts. Gradients of plain tensors should be equal on all ranks; where they are not,
    ranks use the mean of their powers and still agree. The norm of half-precision gradients is computed in float32.

    Args:
        parameters: Sharded, replicated and plain parameters on any meshes, or a single one. A parameter that
            ``fully_shard`` has replaced, as an optimizer built before it holds them, stands for its shard.
        max_norm: The largest norm that is not scaled down.
        norm_type: The order of the norm: a positive number or ``inf``.
        error_if_nonfinite: Raise if the norm is NaN or infinite, before anything is scaled.
        foreach: False computes with one gradient after the other; otherwise with whole lists at once.
        pp_mesh: The 1D mesh of pipeline stages, each of which calls this with its own parameters; the norm is that of
            all stages.

    Returns:
        A plain 0-d tensor on the device of the first parameter, float64 if a parameter is, else float32.

    Raises:
        ValueError: ``norm_type`` is not positive or ``pp_mesh`` has more than one dimension.
        TypeError: ``parameters`` contains something other than tensors.
        RuntimeError: with ``error_if_nonfinite``, on every rank: the norm is not finite; or a parameter is
            unsharded, so that its reduced gradient is elsewhere.
    """
    params = shards_of([parameters] if isinstance(parameters, torch.Tensor) else list(parameters))
    norm_type = _check(params, float(norm_type), pp_mesh)
    cuts = _cuts(params)
    measured, scaled = _collect(params, cuts)
    device = on_this_rank(params[0]).device if params else torch.device("cpu")
    meshes = _Meshes({_PLAIN if cut is None else cut for cut in cuts})
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
    _scale(scaled, float(max_norm), total, foreach)
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
    """How each parameter is cut; None for one that is itself a partial sum and so is nowhere cut."""
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
    """How many sets of ranks have a shard of their own where this rank has one, by how it is cut.

    Ranks that are data-parallel for any parameter have different data; a shard on some of these ranks alone, whose
    gradients no other of them sums, is trained there alone. Beyond the data-parallel ranks of what tensor parallelism
    cut there are copies.
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
    """(What norms are taken of, what is to be scaled): plain tensors by device, dtype and how they are cut."""
    buckets: _Buckets = {}
    odd: list[tuple[torch.Tensor, torch.Tensor, _Cut]] = []
    for param, cut in zip(params, cuts):
        if (grad := param.grad) is None:
            continue
        local, sharded = on_this_rank(grad), isinstance(grad, DTensor)
        alike = placed_alike(grad, param) or not (sharded or isinstance(param, DTensor))
        if cut is None or not alike or type(local) is not torch.Tensor:
            whole = _settle(grad, None if cut is None else param) if sharded else arrived(grad)
            odd.append((whole, arrived(local), cut or _PLAIN))
        elif local.numel():
            buckets.setdefault((local.device, local.dtype, cut), []).append(local)
    measured = {kind: joined(tensors) for kind, tensors in buckets.items()}
    scaled = {kind: list(tensors) for kind, tensors in measured.items()}
    for values, local, mine in odd:
        for into, tensor in ((measured, values), (scaled, local)):
            if tensor.numel():
                into.setdefault((tensor.device, tensor.dtype, mine), []).append(tensor)
    return measured, scaled


def _settle(grad: Any, param: torch.Tensor | None) -> torch.Tensor:
    """A gradient placed otherwise than its parameter, placed like it: whole on every rank for None or a plain one."""
    places = param.placements if isinstance(param, DTensor) else [Replicate()] * grad.device_mesh.ndim
    return arrived(on_this_rank(grad.redistribute(placements=places)))


class _Powers:
    """Norms as numbers that add up over tensors and ranks: their powers; for ``inf`` the largest counts."""

    def __init__(self, norm_type: float, foreach: bool | None, device: torch.device) -> None:
        self._order = norm_type
        self._foreach = foreach
        self._device = device

    def of(self, tensors: list[torch.Tensor], copies: float) -> torch.Tensor:
        """What ``tensors`` (of one device and dtype) contribute, if as many ranks as ``copies`` contribute the same."""
        found = norms_of(tensors, self._order, at_once=self._foreach is not False).to(self._device, torch.float64)
        return found.max() if math.isinf(self._order) else found.pow(self._order).sum() / copies

    def zero(self) -> torch.Tensor:
        """What nothing contributes."""
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def combined(self, one: torch.Tensor, other: torch.Tensor, copies: int = 1) -> torch.Tensor:
        """Both contributions, the other of which ``copies`` ranks contribute."""
        return torch.maximum(one, other) if math.isinf(self._order) else one + other / copies

    def reduced(self, value: torch.Tensor, axis: Axis, device_type: str) -> torch.Tensor:
        """The contributions of all ranks of ``axis`` together."""
        value = value.to(device_type, copy=True)
        if not math.isinf(self._order):
            all_reduce(value, axis, average=False, async_op=False)
            return value.to(self._device)
        # What a backend's maximum makes of NaN depends on the order of ranks, so it travels as a number.
        both = torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf), value.isnan().to(value.dtype)])
        all_reduce_max(both, axis)
        return torch.where(both[1] > 0, math.nan, both[0]).to(self._device)

    def norm(self, value: torch.Tensor) -> torch.Tensor:
        """The norm whose power ``value`` is."""
        return value if math.isinf(self._order) else value.pow(1 / self._order)


class _Meshes:
    """The meshes to reduce over, in one order on all ranks, so that ranks never wait for each other in a circle.

    If there is more than one, or plain tensors, everything is averaged over the largest in the end: what should be
    equal on its ranks then is, whoever has summed it up, and ranks agree also where it is not.
    """

    def __init__(self, cuts: set[_Cut]) -> None:
        dims: dict[DeviceMesh, set[int]] = {}
        for mesh, own, _ in cuts:
            if mesh is not None:
                dims.setdefault(mesh, set()).update(own)
        order = sorted(dims, key=_size_and_ranks)
        self._last: DeviceMesh | None = None
        if order and (len(order) > 1 or _PLAIN in cuts):
            largest = [mesh for mesh in order if mesh.size() == order[-1].size()]
            if len({tuple(sorted(listed_ranks(mesh))) for mesh in largest}) == 1:
                self._last = order[-1]
                dims[order[-1]].update(range(order[-1].ndim))
        self._dims = {mesh: sorted(dims[mesh]) for mesh in order}

    @property
    def averages(self) -> bool:
        """Whether what lies on smaller meshes is averaged over the largest."""
        return self._last is not None and len(self._dims) > 1

    def copies(self, cut: _Cut) -> int:
        """How many of the ranks that are reduced over have the same of a parameter that is cut so."""
        mesh, dims, _ = cut
        return 1 if mesh is None else math.prod(mesh.size(dim) for dim in self._dims[mesh] if dim not in dims)

    def reduce(self, parts: dict[DeviceMesh | None, torch.Tensor], powers: _Powers) -> torch.Tensor:
        """The contributions of all ranks of all meshes together, from this rank's to each mesh."""
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
    """The place of a mesh in the order: largest last, those of one dimension after others of that size."""
    return mesh.size(), -mesh.ndim, listed_ranks(mesh), tuple(mesh.shape), str(mesh.mesh_dim_names)


def _scale(grads: _Buckets, max_norm: float, total: torch.Tensor, foreach: bool | None) -> None:
    """Scale gradients of norm ``total`` to at most ``max_norm``, by torch's formula, without waiting for a device."""
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for tensors in grads.values():
        scale(tensors, factor, at_once=foreach is not False)
