"""Which dtype a parameter is computed with, and its gradient summed in."""

from __future__ import annotations

import pytest
import torch

from fsdp2.engine.casts import compute_dtype, reduce_dtype
from fsdp2.policies import MixedPrecisionPolicy
from tests.support.api import torch_since

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OTHER = (torch.int64, torch.uint8, torch.bool, torch.complex64)


@pytest.mark.parametrize("dtype", [*FLOATING, *OTHER])
@pytest.mark.parametrize("param", [None, torch.bfloat16])
@pytest.mark.parametrize("reduce", [None, torch.float32])
def test_dtypes_of_a_parameter(dtype: torch.dtype, param: torch.dtype | None, reduce: torch.dtype | None) -> None:
    """What is not floating-point keeps its own. Where the policy has no ``reduce_dtype``, torch reduces in the dtype of
    the parameter since 2.15, and before in that of computation."""
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    computed = param if param and dtype.is_floating_point else dtype
    default = dtype if torch_since("2.15") else computed
    assert compute_dtype(dtype, policy) is computed
    assert reduce_dtype(dtype, policy) is (reduce if reduce and dtype.is_floating_point else default)
