"""Classes of ours for a torch that lacks them are used, shown and stored as torch's are."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

import fsdp2
from fsdp2 import policies

KINDS = [kind for kind in (policies._DataParallelMeshDims, getattr(torch_fsdp, "DataParallelMeshDims", None)) if kind]


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_dimensions(kind: Any) -> None:
    dims = kind(shard=("a", "b"), replicate="r")
    assert (dims.shard_names, dims.replicate_names) == (("a", "b"), ("r",))
    assert (kind(shard="a").shard_names, kind(shard="a").replicate_names) == (("a",), ())
    assert dims == kind(("a", "b"), "r") and dims != kind(("a", "b"))
    assert repr(dims) == "DataParallelMeshDims(shard=('a', 'b'), replicate='r')"
    with pytest.raises(ValueError, match="At least one of shard or replicate must be set in DataParallelMeshDims"):
        kind()


def test_torchs_class_is_used_where_there_is_one() -> None:
    assert fsdp2.DataParallelMeshDims is KINDS[-1]
    dims = fsdp2.DataParallelMeshDims(shard="a")
    assert pickle.loads(pickle.dumps(dims)) == dims


def test_dtypes_of_single_parameters() -> None:
    """``param_dtype_override_fn`` was promised on every torch, but ``fsdp2.MixedPrecisionPolicy`` was torch's class,
    which has had the field since 2.15 only: TypeError."""
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=_of_vectors)
    assert isinstance(policy, torch_fsdp.MixedPrecisionPolicy)
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    assert policies.policy_for(matrix, policy) is policy
    assert policies.policy_for(vector, policy).param_dtype is torch.float32
    assert pickle.loads(pickle.dumps(policy)) == policy != fsdp2.MixedPrecisionPolicy(torch.bfloat16)
    assert repr(policy).startswith("MixedPrecisionPolicy(param_dtype=torch.bfloat16, ")


def _of_vectors(param: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if param.ndim == 1 else None
