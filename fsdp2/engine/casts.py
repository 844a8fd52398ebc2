"""The casts that a policy asks for: of parameters as they are sent, of a forward's inputs, and of its outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fsdp2.policies import MixedPrecisionPolicy

__all__ = ["cast_inputs", "cast_output", "compute_dtype", "move_inputs", "reduce_dtype", "statistics_dtype"]

Tensors = list[torch.Tensor]

# torch 2.15 brought both: this field, and reducing in the parameter's dtype where the policy names none.
_REDUCES_AS_KEPT = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """Return the dtype of the full parameter: ``param_dtype`` if it is floating-point, else its own."""
    if policy.param_dtype is None or not dtype.is_floating_point:
        return dtype
    return policy.param_dtype


def reduce_dtype(
    dtype: torch.dtype, policy: MixedPrecisionPolicy, grad_dtype: tuple[torch.dtype | None, ...] = ()
) -> torch.dtype | None:
    """Return the dtype gradients accumulate and are summed in; None for whichever they have.

    For floating-point parameters it is the policy's, else the ``grad_dtype`` that was set, else the default of the
    installed torch: the parameter's dtype since 2.15, and the gradient's before.
    """
    if not dtype.is_floating_point or policy.reduce_dtype is not None:
        return policy.reduce_dtype if dtype.is_floating_point else dtype
    if grad_dtype:
        return grad_dtype[0]
    return dtype if _REDUCES_AS_KEPT else compute_dtype(dtype, policy)


def statistics_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a batch norm's running statistics, in which its kernels need weights too; else None."""
    statistics = module.running_mean if isinstance(module, _BATCH_NORMS) else None
    return None if statistics is None else statistics.dtype


def cast_inputs(policy: MixedPrecisionPolicy, tensors: Tensors) -> Tensors:
    """Return the inputs of a forward, with floating-point tensors in ``param_dtype`` if the policy casts inputs."""
    dtype = policy.param_dtype
    wanted: Any = policy.cast_forward_inputs  # a function too: which tensors to cast
    if dtype is None or not wanted:
        return tensors
    if callable(wanted):
        return [_cast_floating(t, dtype) if wanted(t) else t for t in tensors]
    return [_cast_floating(t, dtype) for t in tensors]


def move_inputs(device: torch.device, tensors: Tensors) -> Tensors:
    """Return the inputs on the ``device`` of the mesh, as DistributedDataParallel moves them."""
    return [t if t.device == device else t.to(device) for t in tensors]


def cast_output(policy: MixedPrecisionPolicy, tensors: Tensors) -> Tensors:
    """Return the results of a forward, with floating-point tensors in ``output_dtype`` if the policy has one."""
    dtype = policy.output_dtype
    return tensors if dtype is None else [_cast_floating(t, dtype) for t in tensors]


def _cast_floating(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)
