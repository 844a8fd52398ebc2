"""Whether NCCL would take every collective, on one rank of many and without a GPU.

The shapes are those whose slices are no multiple of 16 bytes, or that leave a unit with one gradient to send. What a
training loop does is tried in ``test_scenarios.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

import fsdp2
from tests.support import api
from tests.support.cases import TRANSFERS
from tests.support.counting import Collectives
from tests.support.fake import fake_mesh
from tests.support.nccl import NAMES, strict_nccl

pytestmark = api.fsdp2_only

HIDDEN = [(2880, 16), (2880, 32), (3584, 128), (5120, 256), (4096, 1024)]
"""Widths of published models, each with ranks that cut a norm into slices of no multiple of 16 bytes."""
DTYPES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy]] = {
    "bf16": (torch.bfloat16, MixedPrecisionPolicy()),
    "fp32": (torch.float32, MixedPrecisionPolicy()),
    "mixed": (torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
}
VOCABULARY = 96
dtypes = pytest.mark.parametrize("dtype", DTYPES)


class Units(nn.Module):
    """A narrow model whose ``head`` reads ``hidden`` features behind a ``norm``; gates and a bias are on their own."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden, dtype=dtype)
        self.gate, self.odd_gate = Scale(8, dtype), Scale(24, dtype)
        self.bias = Scale(hidden, dtype)
        self.norm = nn.RMSNorm(hidden, dtype=dtype)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bias(self.embed(tokens))
        return self.head(self.norm(self.odd_gate(self.gate(x)))).float().square().mean()


class Scale(nn.Module):
    """One parameter and nothing else, on the first features."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        size = self.weight.numel()
        return torch.cat([x[..., :size] * self.weight, x[..., size:]], -1)


def train(model: Any, steps: int = 2) -> None:
    """Run steps with gradients that are averaged."""
    for _ in range(steps):
        model(torch.randint(VOCABULARY, (1, 3))).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
        model.zero_grad()


def sharded(model: Units, mesh: Any, units: list[Any], sizes: dict[str, int] | None = None, **options: Any) -> Units:
    """Shard ``units`` and then the root; set ``sizes`` of transfers."""
    for unit in (*units, model):
        fsdp2.fully_shard(unit, mesh=mesh, **options)
    model.set_transfer_sizes(**(sizes or {}))
    return model


@pytest.mark.parametrize(("hidden", "ranks"), HIDDEN)
@pytest.mark.parametrize("kind", ["together", "one by one", "last dimension"])
@dtypes
def test_slices_of_odd_sizes(hidden, ranks, kind, dtype):
    """Together: a grouped call whose large gradient leaves alone, so that the small one is what is left.

    One by one: a norm, gates of a few elements and a lone bias, each a unit of its own: one gradient is all that is
    sent. Last dimension: ``Shard(1)`` for matrices, where slices are not what lies together in memory.
    """
    kept, policy = DTYPES[dtype]
    with strict_nccl(), fake_mesh(ranks) as mesh:
        model = Units(hidden, kept)
        units: list[Any] = [[model.norm, model.head]]
        if kind == "one by one":
            units = [model.norm, model.gate, model.odd_gate, model.bias, model.head]
        sizes = {"chunk_bytes": model.head.weight.numel() * 2} if kind == "together" else {}
        place = (lambda p: Shard(p.ndim - 1)) if kind == "last dimension" else None
        train(sharded(model, mesh, units, sizes, mp_policy=policy, shard_placement_fn=place))


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_weights_of_several_dtypes_in_one_launch(transfer):
    """An embedding in bfloat16 beside a norm and a head in float32: the unit's gather is one launch, which had
    tensors of several dtypes. Not every version of torch and NCCL may take that."""
    with strict_nccl(), fake_mesh(16) as mesh:
        model = Units(2880, torch.float32)
        model.embed.to(torch.bfloat16)
        train(sharded(model, mesh, [[model.embed, model.norm, model.head]], TRANSFERS[transfer]))


@pytest.mark.parametrize("transfer", TRANSFERS)
@dtypes
def test_hybrid(transfer, dtype):
    """Sums over the shard axis that are then all-reduced."""
    kept, policy = DTYPES[dtype]
    with strict_nccl(), fake_mesh(64):
        mesh = init_device_mesh("cpu", (4, 16), mesh_dim_names=("replicate", "shard"))
        model = Units(2880, kept)
        train(sharded(model, mesh, [[model.norm, model.head], model.gate], TRANSFERS[transfer], mp_policy=policy))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_nccl(name):
    """The same code runs whatever the process group calls its NCCL."""
    with strict_nccl(name), fake_mesh(16) as mesh:
        model = Units(2880, torch.bfloat16)
        sharded(model, mesh, [model.norm, model.gate], TRANSFERS["direct"])
        with Collectives() as seen:
            model(torch.randint(VOCABULARY, (1, 3)))
        assert seen.gathers == 3  # one coalesced launch for a unit


# ---- the double itself ----


def zeros(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an aligned tensor."""
    return torch.zeros(numel, dtype=dtype)


REFUSED: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "sizes that do not fit": (ValueError, lambda group: group.all_gather_single(zeros(36), zeros(8))),
    "rows that do not fit": (ValueError, lambda group: group.reduce_scatter_single(zeros(8), zeros(28))),
    "two dtypes": (TypeError, lambda group: group.all_gather_single(zeros(32), zeros(8, torch.float64))),
    "complex": (TypeError, lambda g: g.all_gather_single(zeros(32, torch.complex64), zeros(8, torch.complex64))),
    "int16": (TypeError, lambda g: g.all_gather_single(zeros(32, torch.int16), zeros(8, torch.int16))),
    "a sum of float8": (
        TypeError,
        lambda g: g.reduce_scatter_single(zeros(16, torch.float8_e5m2), zeros(64, torch.float8_e5m2)),
    ),
    "strides": (ValueError, lambda group: group.all_gather_single(zeros(32), zeros(16)[::2])),
    "two devices": (ValueError, lambda g: g.all_gather_single(zeros(32), torch.zeros(8, device="meta"))),
    "nothing": (ValueError, lambda group: group.all_gather_single_coalesced([], [])),
    "uneven exchange": (ValueError, lambda group: group.all_to_all_single(zeros(18), zeros(18), [], [])),
    "odd exchange": (AssertionError, lambda group: group.all_to_all_single(zeros(20), zeros(20), [], [])),
    "odd slices": (AssertionError, lambda group: group.all_gather_single(zeros(28), zeros(7))),
    "odd address": (AssertionError, lambda group: group.all_gather_single(zeros(36)[4:], zeros(9)[1:])),
    "in place, of another rank": (AssertionError, lambda group: in_place(group, 8)),
    "two dtypes in a launch": (
        TypeError,
        lambda group: group.reduce_scatter_single_coalesced(
            [zeros(4), zeros(8, torch.bfloat16)], [zeros(16), zeros(32, torch.bfloat16)]
        ),
    ),
    "two dtypes in a gather": (
        TypeError,
        lambda group: group.all_gather_single_coalesced(
            [zeros(16), zeros(32, torch.bfloat16)], [zeros(4), zeros(8, torch.bfloat16)]
        ),
    ),
    "several to sum": (ValueError, lambda group: group.allreduce([zeros(4), zeros(4)])),
}


def in_place(group: Any, offset: int) -> None:
    """Gather a piece that lies in the output."""
    output = zeros(32)
    group.all_gather_single(output, output[offset : offset + 8])


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "all_gather_single"), reason="named otherwise before torch 2.13")
@pytest.mark.parametrize("case", REFUSED)
def test_the_double_refuses(case):
    """What NCCL refuses, or is slow at, raises."""
    error, call = REFUSED[case]
    with fake_mesh(4) as mesh, strict_nccl(), pytest.raises(error):
        call(mesh.get_group())


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "all_gather_single"), reason="named otherwise before torch 2.13")
def test_the_double_accepts():
    """What is right passes; outside of the block everything does, and a mesh is what it was."""
    with fake_mesh(4) as mesh:
        group: Any = mesh.get_group()
        with strict_nccl():
            group.all_gather_single(zeros(32), zeros(8))
            group.reduce_scatter_single(zeros(8), zeros(32))
            group.all_to_all_single(zeros(32), zeros(32), [], [])
            group.allreduce([zeros(1)])
            in_place(group, 0)
            assert fsdp2.sharding.mesh.Axis.of(mesh, 0).backend == "nccl"
        in_place(group, 8)
        assert fsdp2.sharding.mesh.Axis.of(mesh, 0).backend == "fake"
