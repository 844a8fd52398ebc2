"""Training equals torch's fully_shard and a single process for every option of ``fully_shard``."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import api
from tests.support.cases import Setup, assert_case
from tests.support.composition import composes, refuses
from tests.support.pool import on_ranks

bf16, fp32 = torch.bfloat16, torch.float32

POLICIES = {
    "param": MixedPrecisionPolicy(param_dtype=bf16),
    "reduce": MixedPrecisionPolicy(reduce_dtype=bf16),
    "param_and_reduce": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32),
    "output": MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32, output_dtype=fp32),
    "output_alone": MixedPrecisionPolicy(output_dtype=torch.float64),
    "half": MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=fp32),
    "double": MixedPrecisionPolicy(param_dtype=torch.float64),
}


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize(
    "case", ["mlp", "transformer", "nested", "mlp_root_only", "mlp_grouped", "transformer_grouped"]
)
def test_reshard_after_forward(rank, world, case, reshard_after_forward):
    """Every choice computes the same, also where several modules of one call communicate together."""
    assert_case(case, Setup(reshard_after_forward))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["mlp", "transformer"])
def test_mixed_precision(rank, world, case, policy):
    """Each policy computes what a single process computes with cast parameters, up to rounding."""
    assert_case(case, Setup(policy=POLICIES[policy]))


@on_ranks(2, 3)
@pytest.mark.parametrize(
    ("case", "policy"),
    [
        *(("wide", "none"), ("wide", "param"), ("large", "param_and_reduce")),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in (("large", "none"), ("large", "param"))),
        pytest.param("wide", "param_and_reduce", marks=pytest.mark.slow),
    ],
)
def test_sizes_at_which_bytes_move_differently(rank, world, case, policy):
    """Units above the sizes at which gathers skip the packing and gradients are sent all to all."""
    policies = {"none": MixedPrecisionPolicy(), **POLICIES}
    assert_case(case, Setup(policy=policies[policy]))


@on_ranks(1, 2, 4)
def test_inputs_are_left_alone_if_asked(rank, world):
    """With ``cast_forward_inputs=False`` the module sees its input as it came."""
    policy = MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=fp32, cast_forward_inputs=False)
    assert_case("casts_its_inputs", Setup(policy=policy))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("case", ["mlp", "transformer", "mlp_grouped"])
def test_shard_on_the_last_dimension(rank, world, case):
    """``shard_placement_fn`` chooses the dimension."""
    assert_case(case, Setup(placement="last"))


@composes("shard dim", "uneven")
@refuses("shard dim", "uneven", by="torch", reason="NotImplementedError when `fully_shard` is called")
@api.fsdp2_only
@on_ranks(2, 3, 4)
@pytest.mark.parametrize(
    "case", ["uneven", "three_dims", "frozen", "smaller_than_world", "lstm", "channels_last", "non_contiguous"]
)
def test_shard_unevenly_on_the_last_dimension(rank, world, case):
    """A dimension that the ranks do not divide is cut like any other."""
    assert_case(case, Setup(placement="last"), against=("alone",))


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("policy", ["param_and_reduce", "output"])
def test_grouped_modules_in_mixed_precision(rank, world, policy):
    """Each module of a group casts its own inputs and outputs."""
    assert_case("mlp_grouped", Setup(policy=POLICIES[policy], units_cast_outputs=True))
