"""Forwards that do not run once and whole: activation checkpointing, partial forwards of a group, functorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from tests.support import api
from tests.support.cases import CASES, DIRECT, Setup, assert_case, build, chunk
from tests.support.composition import composes
from tests.support.models import mlp
from tests.support.parity import Run, mesh_of
from tests.support.pool import on_ranks
from tests.support.shapes import loss_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)


def train(run: Run) -> None:
    """Train as usual."""
    for step in range(5):
        run.loss(step).backward()
        run.update()


def preference_pairs(run: Run) -> None:
    """Two forwards, then one backward through both."""
    for step in range(3):
        (run.loss(step) - 0.5 * run.loss(step + 10)).backward()
        run.update()


@composes("recomputation", "SGD")
@composes("reentrant recomputation", "SGD")
@on_ranks(2)
@pytest.mark.parametrize("program", [train, preference_pairs])
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("case", ["checkpoint_inside", "checkpoint_inside_reentrant", "checkpoint_around"])
def test_checkpointing(rank, world, case, reshard, program):
    """Recomputation inside a unit, around units, and of the reentrant kind computes the same."""
    assert_case(case, Setup(reshard), program)


@composes("recomputation", "mixed precision")
@on_ranks(2)
def test_checkpointing_in_mixed_precision(rank, world):
    """Recomputation casts inputs and outputs as the first computation did."""
    setup = Setup(True, BF16, units_cast_outputs=True)
    assert_case("checkpoint_around", setup, against=("torch",))


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_several_roots(rank, world, reentrant):
    """``torch.utils.checkpoint`` called on a slice of sharded modules, each its own root."""
    module, reference = build(CASES["mlp"]), build(CASES["mlp"])
    for unit in (module[0], module[2], module[4], module):
        api.ours.fully_shard(unit, mesh=mesh_of(world))
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    reference(data).square().mean().backward()
    mine = data.detach()[rank * 4 : rank * 4 + 4].requires_grad_()
    assert not isinstance(module[:4], api.ours.FSDPModule)
    module[4](checkpoint(module[:4], mine, use_reentrant=reentrant)).square().mean().backward()
    for got, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad.to_local(), chunk(expected.grad, 0, rank, world))


def grouped(world: int, **options: object) -> nn.Module:
    """A trunk, and one unit of a norm and a head."""
    torch.manual_seed(5)
    module = nn.ModuleDict({"trunk": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 5)})
    root = Chunked(module)
    for unit in (module["trunk"], [module["norm"], module["head"]], root):
        api.ours.fully_shard(unit, mesh=mesh_of(world), **options)
    return root


class Chunked(nn.Module):
    """The forward stops before the head, which the loss calls on one part of the rows after the other."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x):
        return self.parts["norm"](torch.tanh(self.parts["trunk"](x)))


def reference_gradients(root: Chunked, data: torch.Tensor, times: int) -> dict[str, torch.Tensor]:
    """Return the gradients of ``times`` whole backwards on an unsharded copy."""
    torch.manual_seed(5)
    parts = nn.ModuleDict({"trunk": nn.Linear(6, 6), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 5)})
    copy = Chunked(parts)
    for _ in range(times):
        parts["head"](copy(data)).square().mean().backward()
    return {name: parameter.grad for name, parameter in copy.named_parameters()}


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("direct", [False, True])
def test_skipped_member_is_called_per_chunk(rank, world, reshard, direct):
    """The member that a grouped forward skipped may be called many times; every backward accumulates."""
    root = grouped(world, reshard_after_forward=reshard)
    if direct and api.name == "fsdp2":
        root.set_transfer_sizes(**DIRECT)
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    expected = reference_gradients(root, data, times=1)
    for _ in range(3):
        hidden = root(data[rank * 4 : rank * 4 + 4])
        leaf = hidden.detach().requires_grad_()
        for rows in leaf.split(2):
            (root.parts["head"](rows).square().mean() / 2).backward()
        hidden.backward(leaf.grad)
        for module in (root.parts["head"], root.parts["trunk"], root):
            module.reshard()
        for name, parameter in root.named_parameters():
            torch.testing.assert_close(parameter.grad.to_local(), chunk(expected[name], 0, rank, world))
        root.zero_grad()


@on_ranks(2)
def test_partial_forwards_before_one_backward(rank, world):
    """Two forwards that each run a part of a group, then one backward."""
    root = grouped(world)
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    expected = reference_gradients(root, data, times=2)
    rows = data[rank * 4 : rank * 4 + 4]
    losses = [root.parts["head"](root(rows)).square().mean() for _ in range(2)]
    sum(losses).backward()
    root.parts["head"].reshard()
    for name, parameter in root.named_parameters():
        torch.testing.assert_close(parameter.grad.to_local(), chunk(expected[name], 0, rank, world))


@on_ranks(2)
def test_unused_member_has_no_gradient(rank, world):
    """A member that no forward ran keeps ``grad`` None, and its group is resharded."""
    root = grouped(world, reshard_after_forward=True)
    root(torch.randn(4, 6)).sum().backward()
    head, norm = root.parts["head"], root.parts["norm"]
    assert head.weight.grad is None and head.bias.grad is None
    assert norm.weight.grad is not None and norm.weight.placements == head.weight.placements


@on_ranks(2)
def test_grouped_members_cast_their_own_inputs_and_outputs(rank, world):
    """Each member, also one called alone, takes and returns what the policy says."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    root = grouped(world, mp_policy=policy)
    hidden = root(torch.randn(4, 6))
    assert hidden.dtype == torch.float64
    assert root.parts["head"](hidden).dtype == torch.float64
    assert root.parts["head"](hidden.float()).dtype == torch.float64


@on_ranks(2)
def test_jvp(rank, world):
    """Forward-mode differentiation through a sharded model."""
    torch.manual_seed(5)
    reference = mlp(4, 8, 4)
    torch.manual_seed(5)
    module = mlp(4, 8, 4)
    for unit in (module[0], module[2], module):
        api.ours.fully_shard(unit, mesh=mesh_of(world))
    data, tangent = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(2):
        for got, expected in zip(
            torch.func.jvp(module, (data,), (tangent,)), torch.func.jvp(reference, (data,), (tangent,)), strict=True
        ):
            torch.testing.assert_close(got, expected)
    loss_of(module(data)).backward()
    module.reshard()
    assert all(parameter.grad is not None for parameter in module.parameters())


@on_ranks(2)
def test_checkpoint_wrapper_around_units(rank, world):
    """Names go through the wrapper and training is right."""
    torch.manual_seed(5)
    reference = nn.Sequential(*(mlp(4, 8, 4) for _ in range(3)))
    torch.manual_seed(5)
    module = nn.Sequential(*(checkpoint_wrapper(mlp(4, 8, 4)) for _ in range(3)))
    for unit in (*module, module):
        api.ours.fully_shard(unit, mesh=mesh_of(world), reshard_after_forward=True)
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    reference(data).square().mean().backward()
    module(data[rank * 4 : rank * 4 + 4]).square().mean().backward()
    for got, expected in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad.to_local(), chunk(expected.grad, 0, rank, world))
