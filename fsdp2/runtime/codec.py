"""What a parameter looks like on the wire: for a plain one a cast, decided by its dtype and the policy."""

from __future__ import annotations

import torch

from fsdp2.policies import MixedPrecisionPolicy

__all__ = ["compute_dtype", "reduce_dtype"]


def compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype of the full parameter: ``param_dtype`` for floating-point parameters, their own for all others."""
    if policy.param_dtype is None or not dtype.is_floating_point:
        return dtype
    return policy.param_dtype


def reduce_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype gradients are summed in: ``reduce_dtype`` for floating-point ones, else that of the gradient itself."""
    if not dtype.is_floating_point:
        return dtype
    return policy.reduce_dtype or compute_dtype(dtype, policy)
