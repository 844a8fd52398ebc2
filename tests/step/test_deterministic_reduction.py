"""Gradients that are summed in one order of ranks: the same bits with chunks of any size, and on half as many ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import fsdp2
from tests.support import api
from tests.support.composition import composes
from tests.support.inside import options_of
from tests.support.parity import fulls, mesh_1d, mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

BATCHES = 4


class Net(nn.Module):
    """Sizes that no number of ranks divides, a scalar-like norm, and a matrix that chunks of its own carry."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 67), nn.LayerNorm(67), nn.Linear(67, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def batch(number: int) -> torch.Tensor:
    """One micro-batch."""
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number - 2)


def in_pairs(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """What every number of ranks must compute of the gradients of the micro-batches."""
    first, second, third, fourth = gradients
    return ((first + second) + (third + fourth)) / BATCHES


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    """The same by one process."""
    found: dict[str, list[torch.Tensor]] = {}
    for number in range(BATCHES):
        model.zero_grad()
        model(batch(number).to(next(model.parameters()).dtype)).square().mean().backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            found.setdefault(name, []).append(param.grad.float())
    return {name: in_pairs(gradients) for name, gradients in found.items()}


def train(model: Any, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Each rank takes its share of the micro-batches; the gradients of all."""
    numbers = range(rank * BATCHES // world, (rank + 1) * BATCHES // world)
    for number in numbers:
        model.set_requires_gradient_sync(number == numbers[-1])
        (model(batch(number)).square().mean() / len(numbers)).backward()
    return fulls({name: param.grad for name, param in model.named_parameters()})


def sharded(whole: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """A copy of the model whose ranks sum in order."""
    model: Any = copy.deepcopy(whole)
    for unit in (model.first, model.last, model):
        fsdp2.fully_shard(unit, mesh=mesh, **options)
    model.set_deterministic_reduction(True)
    return model


@on_ranks(2, 4)
@pytest.mark.parametrize("sizes", [{}, {"chunk_bytes": 1}, {"chunk_bytes": 1 << 30, "exchange_bytes": 1 << 30}])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_same_bits_on_two_and_four_ranks(rank, world, sizes, dim):
    """And with every size of chunks."""
    torch.manual_seed(0)
    whole = Net()
    placed = (lambda param: Shard(dim if param.ndim > dim else 0)) if dim else None
    model = sharded(whole, mesh_1d(), shard_placement_fn=placed)
    if sizes:
        model.set_transfer_sizes(**sizes)
    got, right = train(model, rank, world), expected(whole)
    for name, gradient in right.items():
        assert torch.equal(got[name], gradient), name


@on_ranks(4)
@composes("deterministic reduction", "hybrid sharding")
@pytest.mark.parametrize("over_replicas", [False, True])
def test_over_replicas(rank, world, over_replicas):
    """Neighbours are summed over the shard axis first, so that the order is that of one axis."""
    torch.manual_seed(0)
    whole = Net()
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    model = sharded(whole, mesh, shard_over_replicas=over_replicas)
    got, right = train(model, rank, world), expected(whole)
    for name, gradient in right.items():
        assert torch.equal(got[name], gradient), name


@on_ranks(2, 4)
@composes("deterministic reduction", "mixed precision")
def test_in_mixed_precision(rank, world):
    """Gradients in bfloat16 are added up in float32."""
    torch.manual_seed(0)
    whole = Net()
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(whole, mesh_1d(), mp_policy=policy)
    got, right = train(model, rank, world), expected(copy.deepcopy(whole).bfloat16())
    for name, gradient in right.items():
        assert torch.equal(got[name], gradient), name


@on_ranks(2)
def test_what_sums_by_itself_is_refused(rank, world):
    model: Any = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh_1d())
    model.set_compression(fsdp2.CompressionPolicy(reduce=torch.int8))
    with pytest.raises(ValueError, match=r"set_deterministic_reduction: expected the collectives of fsdp2, got"):
        model.set_deterministic_reduction(True)
    model.set_compression(None)
    model.set_deterministic_reduction(True)
    with pytest.raises(ValueError, match="leave one of the two out"):
        model.set_compression(fsdp2.CompressionPolicy(reduce=torch.int8))
    model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_a_refused_setting_changes_no_unit(rank, world):
    """The options of a unit without parameters were checked when those of the units below had changed already: the call
    raised an error, and the model summed in another way from then on."""
    module = nn.Sequential(Net())
    for unit in (module[0], module):
        fsdp2.fully_shard(unit, mesh=mesh_1d(), compression=fsdp2.CompressionPolicy(reduce=torch.int8))
    module[0].set_compression(None)
    with pytest.raises(ValueError, match="set_deterministic_reduction: expected the collectives of fsdp2"):
        module.set_deterministic_reduction(True)
    assert not options_of(module[0]).in_pairs
    module.set_compression(None)
    module.set_deterministic_reduction(True)
    assert options_of(module[0]).in_pairs
