"""The options of a group: frozen, replaced by setters, and checked however they are made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from functools import partial

import pytest
import torch

from fsdp2._torch.collectives import SymmMemReduceScatter
from fsdp2.engine.options import GroupOptions
from fsdp2.policies import MixedPrecisionPolicy
from fsdp2.sharding.packing import TransferSizes

POLICY_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")


def test_the_defaults_are_those_of_torch() -> None:
    options = GroupOptions()
    assert options.mp_policy == MixedPrecisionPolicy()
    assert options.reshard_after_forward is None and options.reshard_after_backward
    assert options.unshard_in_backward
    assert options.reduce_gradients and options.all_reduce_gradients and not options.reduce_unused
    assert options.divide_factor is None and not options.force_sum
    assert options.sizes == TransferSizes(None, 8 << 20, 1 << 20)
    assert (options.all_gather, options.reduce_scatter, options.all_reduce_hook) == (None, None, None)


def test_no_option_can_be_set_in_place() -> None:
    with pytest.raises(FrozenInstanceError):
        GroupOptions().force_sum = True  # type: ignore[misc]


@pytest.mark.parametrize("name", POLICY_DTYPES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "bfloat16", 16])
def test_a_policy_with_anything_but_a_floating_point_dtype_is_refused(name: str, dtype: object) -> None:
    for make in (GroupOptions, partial(replace, GroupOptions())):
        with pytest.raises(ValueError, match=rf"mp_policy.{name}: expected a floating-point torch.dtype or None, got"):
            make(mp_policy=MixedPrecisionPolicy(**{name: dtype}))


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_point_dtypes_are_accepted(dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    assert GroupOptions(mp_policy=policy).mp_policy is policy


@pytest.mark.skipif(SymmMemReduceScatter is None, reason="this torch has no symmetric memory for collectives")
def test_symmetric_memory_has_one_buffer_per_group() -> None:
    options = GroupOptions(reduce_scatter=object.__new__(SymmMemReduceScatter))
    assert options.chunk_sizes.chunk_bytes > 1 << 60 and options.sizes == TransferSizes()
    assert replace(options, reduce_inputs=1).reduce_inputs == 1
    with pytest.raises(ValueError, match="set_reduce_scatter_max_input_buffers: expected 1 with symmetric memory"):
        replace(options, reduce_inputs=2)
