"""Operators that read every element of a list of tensors, in few calls and without accumulating rounding errors."""

from __future__ import annotations

import torch

from fsdp2._torch.optimizers import check_finite_and_unscale, foreach_mul, foreach_norm
from fsdp2._torch.tensors import address_of, storages_of

__all__ = ["joined", "norms_of", "scale", "split_for_norms", "unscale"]

# On a CPU torch sums a whole tensor in a few float32 accumulators: a norm of 10 million elements is wrong in the fourth
# digit, a norm of 64 Ki elements in the seventh. Calls of that size cost no more than two percent.
_ELEMENTS = 1 << 16


def joined(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same elements in fewer tensors: small neighbours in memory become flat views of up to 64 Ki elements.

    ``tensors`` have one dtype and one device, and none is empty. Only neighbours in the list are joined: the gradients
    of a group are there in the order of its parameters.
    """
    found: list[torch.Tensor] = []
    run: list[torch.Tensor] = []
    end = length = 0
    for tensor in tensors:
        start, size = address_of(tensor), tensor.numel()
        if start != end or length + size > _ELEMENTS or not tensor.is_contiguous():
            found += _join(run, length)
            run, length = [], 0
        run.append(tensor)
        length += size
        end = start + tensor.nbytes if tensor.is_contiguous() else 0
    return found + _join(run, length)


def _join(run: list[torch.Tensor], length: int) -> list[torch.Tensor]:
    """Return one view of ``length`` elements, or ``run`` if its tensors lie in different allocations."""
    if len(run) < 2 or len(set(storages_of((run[0], run[-1])))) > 1:
        return run
    return [run[0].as_strided((length,), (1,))]


def split_for_norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same elements with large dense tensors on a CPU split, so that norms are exact."""
    if tensors[0].device.type != "cpu":
        return tensors
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel() > _ELEMENTS and tensor.is_contiguous():
            found += tensor.view(-1).split(_ELEMENTS)
        else:
            found.append(tensor)
    return found


def norms_of(tensors: list[torch.Tensor], order: float, *, at_once: bool) -> torch.Tensor:
    """Return a 1D tensor of the norms of ``tensors`` (of one device and dtype) or of pieces of them.

    Norms of half precision are computed in float32.
    """
    tensors = split_for_norms(tensors)
    dtype = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    if at_once:
        return torch.stack(list(foreach_norm(tensors, order, dtype=dtype)))
    return torch.stack([torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors])


def scale(tensors: list[torch.Tensor], factor: torch.Tensor, *, at_once: bool) -> None:
    """Multiply ``tensors``, which lie on one device, by ``factor``, a 0-d tensor on any device."""
    factor = factor.to(tensors[0].device)
    if at_once:
        foreach_mul(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def unscale(
    tensors: list[torch.Tensor], found_inf: torch.Tensor, factor: torch.Tensor
) -> dict[torch.device, torch.Tensor]:
    """Multiply by ``factor`` in place; return ``found_inf`` by device, set to 1.0 if an element is not finite."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    found = {found_inf.device: found_inf}
    for (device, _), same in alike.items():
        here = found.setdefault(device, torch.zeros_like(found_inf, device=device))
        check_finite_and_unscale(same, here, factor.to(device))
    return found
