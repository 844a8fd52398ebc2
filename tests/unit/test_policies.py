"""Classes of ours for a torch that lacks them are used, shown and stored as torch's are."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

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
