"""Dtypes of single parameters by a function in the policy, which torch's has had since 2.15."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fsdp2
from tests.support import api
from tests.support.parity import assert_parity, mesh_1d
from tests.support.pool import on_ranks

AGAINST = ("torch",) if api.torch_since("2.15") else ("alone",)


def overriding(override: Callable[[nn.Parameter], torch.dtype | None]) -> fsdp2.MixedPrecisionPolicy:
    """Return a policy of bfloat16 with exceptions."""
    return fsdp2.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, param_dtype_override_fn=override
    )


class Norms(nn.Module):
    """A linear layer and a norm, which notes the dtypes it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8, bias=False), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.dtypes = [parameter.dtype for parameter in self.parameters()]
        return self.linear(self.norm(x.float()).to(self.linear.weight.dtype)).float()


@on_ranks(1, 2)
def test_param_dtype_override_fn(rank, world):
    """Vectors stay in float32, matrices are computed with in bfloat16."""
    policy = overriding(lambda param: torch.float32 if param.ndim == 1 else None)
    prepare = lambda module, fsdp: fsdp.fully_shard(module, mesh=mesh_1d(), mp_policy=policy)
    run = assert_parity(prepare, build=Norms, against=AGAINST, tolerance=2e-5 if "torch" in AGAINST else 0.05)
    assert run.module.dtypes == [torch.bfloat16, torch.float32, torch.float32]


@api.fsdp2_only
@on_ranks(2)
def test_other_dtypes_are_refused(rank, world):
    """Another dtype than the policy's or the parameter's, or no dtype at all; the module stays as it was."""
    for wrong in (torch.float16, "float32"):
        module = Norms()
        with pytest.raises(ValueError, match="param_dtype_override_fn must return"):
            fsdp2.fully_shard(module, mesh=mesh_1d(), mp_policy=overriding(lambda param, wrong=wrong: wrong))
        assert not isinstance(module, fsdp2.FSDPModule)
