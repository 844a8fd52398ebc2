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
def test_without_a_policy_nothing_is_cast(dtype: torch.dtype) -> None:
    assert compute_dtype(dtype, MixedPrecisionPolicy()) is dtype
    assert reduce_dtype(dtype, MixedPrecisionPolicy()) is dtype


@pytest.mark.parametrize("dtype", FLOATING)
def test_param_dtype_is_for_computing_and_by_default_for_reducing(dtype: torch.dtype) -> None:
    """As torch's policy means it: since 2.15 its default is to reduce in the parameter's own dtype."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert compute_dtype(dtype, policy) is torch.bfloat16
    assert reduce_dtype(dtype, policy) is (dtype if torch_since("2.15") else torch.bfloat16)


@pytest.mark.parametrize("dtype", FLOATING)
def test_reduce_dtype_is_for_reducing_alone(dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    assert compute_dtype(dtype, policy) is dtype
    assert reduce_dtype(dtype, policy) is torch.float32


@pytest.mark.parametrize("dtype", OTHER)
def test_what_is_not_floating_point_keeps_its_dtype_in_compute(dtype: torch.dtype) -> None:
    assert compute_dtype(dtype, MixedPrecisionPolicy(param_dtype=torch.bfloat16)) is dtype


def test_a_complex_gradient_is_not_summed_in_a_real_dtype() -> None:
    assert reduce_dtype(torch.complex64, MixedPrecisionPolicy(reduce_dtype=torch.float32)).is_complex
