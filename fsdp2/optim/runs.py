"""Lists of tensors regrouped for operators that read every element: few calls, and no rounding that adds up."""

from __future__ import annotations

import torch

__all__ = ["joined", "split_for_norms"]

# On a CPU torch sums a whole tensor in a handful of float32 lanes: a norm of 10 million elements is wrong in the fourth
# digit, one of 64 Ki in the seventh. A call for that many costs no more than two percent.
_ELEMENTS = 1 << 16


def joined(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same elements in fewer tensors: small neighbours in memory become one flat view of up to 64 Ki elements.

    ``tensors`` have one dtype and one device, and none is empty. Only neighbours in the list are looked at: a group's
    gradients lie there in the order of its parameters.
    """
    found: list[torch.Tensor] = []
    run: list[torch.Tensor] = []
    end = length = 0
    for tensor in tensors:
        start, size = tensor.data_ptr(), tensor.numel()
        if start != end or length + size > _ELEMENTS or not tensor.is_contiguous():
            found += _join(run, length)
            run, length = [], 0
        run.append(tensor)
        length += size
        end = start + tensor.nbytes if tensor.is_contiguous() else 0
    return found + _join(run, length)


def _join(run: list[torch.Tensor], length: int) -> list[torch.Tensor]:
    """One view of ``length`` elements, unless the tensors lie in several allocations that happen to be neighbours."""
    if len(run) < 2 or run[0].untyped_storage().data_ptr() != run[-1].untyped_storage().data_ptr():
        return run
    return [run[0].as_strided((length,), (1,))]


def split_for_norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same elements, in pieces that norms are exact for: large dense tensors on a CPU are split."""
    if tensors[0].device.type != "cpu":
        return tensors
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel() > _ELEMENTS and tensor.is_contiguous():
            found += tensor.view(-1).split(_ELEMENTS)
        else:
            found.append(tensor)
    return found
