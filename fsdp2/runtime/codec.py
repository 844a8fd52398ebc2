"""What a parameter looks like on the wire: for a plain one a cast, decided by its dtype and the policy."""

from __future__ import annotations

import torch

from fsdp2.policies import MixedPrecisionPolicy

__all__ = ["compute_dtype", "reduce_dtype"]

# What ``reduce_dtype=None`` means is for torch to say, whose class it is: 2.15 made it the parameter's own dtype.
_OWN_DTYPE_BY_DEFAULT = torch.__version__ >= "2.15"


def compute_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype of the full parameter: ``param_dtype`` for floating-point parameters, their own for all others."""
    if policy.param_dtype is None or not dtype.is_floating_point:
        return dtype
    return policy.param_dtype


def reduce_dtype(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> torch.dtype:
    """The dtype gradients are summed in: ``reduce_dtype`` for floating-point ones.

    Without one it is the parameter's from torch 2.15 on, and the gradient's before.
    """
    if not dtype.is_floating_point:
        return dtype
    return policy.reduce_dtype or (dtype if _OWN_DTYPE_BY_DEFAULT else compute_dtype(dtype, policy))
