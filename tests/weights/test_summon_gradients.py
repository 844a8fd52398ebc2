"""``summon_full_params(with_grads=True)``: full gradients beside full parameters."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import summon_full_params
from tests.support import api
from tests.support.cases import CASES, TRANSFERS, Setup, build, build_sharded
from tests.support.parity import rows_of
from tests.support.pool import on_ranks
from tests.support.shapes import loss_of
from tests.weights.test_summon import BF16, named

pytestmark = api.fsdp2_only
ODD = (
    "transformer",
    "uneven",
    "smaller_than_world",
    "scalars",
    "channels_last",
    "non_contiguous",
    "frozen",
    "skipping",
)


def backward(module: nn.Module, case: str, rank: int = 0, world: int = 1, step: int = 0) -> None:
    """Run forward and backward on a rank's rows."""
    loss_of(CASES[case].call(module, rows_of(CASES[case].inputs(step), rank, world))).backward()


def assert_gradients(got: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    """Assert that both modules show the same gradients, on the same parameters."""
    for (name, one), (_, other) in zip(named(got), named(expected)):
        assert (one.grad is None) == (other.grad is None), name
        if one.grad is not None:
            assert not isinstance(one.grad, DTensor) and one.grad.dtype == one.dtype
            torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=tolerance, msg=name)


def local(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return copies of the pieces of gradients."""
    pieces = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: None if grad is None else grad.to_local().clone() for name, grad in pieces.items()}


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_shows_full_gradients(rank, world, case, transfer):
    """Those of an unsharded model; where there is none there is none."""
    expected, module = build(CASES[case]), build_sharded(case, world, Setup(True, transfer=transfer))
    backward(expected, case), backward(module, case, rank, world)
    with summon_full_params(module, with_grads=True):
        assert_gradients(module, expected)
    with summon_full_params(module):
        assert all(parameter.grad is None for parameter in module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("writeback, offload, reshard", list(itertools.product([True, False], repeat=3)))
def test_changes(rank, world, writeback, offload, reshard):
    """Gradients changed in place, replaced, removed and added last where changes are written back."""
    module = build_sharded("mlp", world, Setup(reshard_after_forward=reshard, policy=BF16))
    backward(module, "mlp", rank, world)
    module[4].bias.grad = None
    before, objects = local(module), {name: p.grad for name, p in module.named_parameters()}
    with summon_full_params(module, writeback=writeback, offload_to_cpu=offload, with_grads=True):
        module[0].weight.grad.mul_(2)
        module[0].bias.grad = torch.full_like(module[0].bias, 3)
        module[2].weight.grad = None
        module[4].bias.grad = torch.full_like(module[4].bias, 4)
    expected = dict(before)
    if writeback:
        expected["0.weight"] = before["0.weight"] * 2
        expected["0.bias"] = torch.full_like(before["0.bias"], 3)
        expected["2.weight"] = None
        expected["4.bias"] = torch.full((2,), 4.0)
    for name, piece in local(module).items():
        assert (piece is None) == (expected[name] is None) and (piece is None or torch.equal(piece, expected[name]))
        if piece is not None and before[name] is not None:
            assert module.get_parameter(name).grad is objects[name]
    torch.optim.AdamW(module.parameters()).step()
    backward(module, "mlp", rank, world, step=1)


@on_ranks(1, 2)
def test_on_one_rank(rank, world):
    """Only the first rank shows them."""
    expected, module = build(CASES["mlp"]), build_sharded("mlp", world)
    backward(expected, "mlp"), backward(module, "mlp", rank, world)
    with summon_full_params(module, writeback=False, rank0_only=True, with_grads=True):
        if rank == 0:
            assert_gradients(module, expected)
        else:
            assert all(isinstance(parameter.grad, DTensor) for parameter in module.parameters())
        module[0].weight.grad.zero_() if rank == 0 else None
    with summon_full_params(module, with_grads=True):
        assert_gradients(module, expected)


@on_ranks(2)
def test_unreduced_gradients_are_left_alone(rank, world):
    """What was accumulated without communication is not shown, and still arrives with the next reduction."""
    expected, module = build(CASES["mlp"]), build_sharded("mlp", world)
    backward(module, "mlp", rank, world, 0), backward(expected, "mlp", step=0)
    with summon_full_params(module, with_grads=True):
        assert_gradients(module, expected)
    module.set_requires_gradient_sync(False)
    backward(module, "mlp", rank, world, 1)
    with summon_full_params(module, with_grads=True):
        assert_gradients(module, expected)
    module.set_requires_gradient_sync(True)
    backward(module, "mlp", rank, world, 2)
    backward(expected, "mlp", step=1), backward(expected, "mlp", step=2)
    with summon_full_params(module, with_grads=True):
        assert_gradients(module, expected)


@on_ranks(2)
def test_clipping_and_stepping_inside(rank, world):
    """A plain computation on full gradients, such as clipping, does the same as on an unsharded model."""
    expected, module = build(CASES["transformer"]), build_sharded("transformer", world)
    backward(expected, "transformer"), backward(module, "transformer", rank, world)
    norms = [torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)]
    with summon_full_params(module, with_grads=True):
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01))
    torch.testing.assert_close(*norms)
    with summon_full_params(module, with_grads=True):
        assert_gradients(module, expected)


@on_ranks(2)
@pytest.mark.parametrize("some", [False, True])
def test_a_backward_inside(rank, world, some):
    """Its gradients were gone after the block, without a word; with ``with_grads`` they are on the shards."""
    module = build_sharded("mlp", world)
    if some:
        backward(module, "mlp", rank, world)
    before = local(module)
    with pytest.raises(RuntimeError, match=r"got a backward inside summon_full_params.*Pass with_grads=True"):
        with summon_full_params(module):
            sum(param.square().sum() for param in module.parameters()).backward()
    for name, grad in local(module).items():
        assert grad is before[name] or torch.equal(grad, before[name])
    with summon_full_params(module):
        penalty = sum(param.square().sum() for param in module.parameters())
        found = torch.autograd.grad(penalty, list(module.parameters()))
    with summon_full_params(module, with_grads=True):
        expected = [2 * p.detach() + (0 if p.grad is None else p.grad) for p in module.parameters()]
        sum(param.square().sum() for param in module.parameters()).backward()
    for param, grad, alone in zip(module.parameters(), expected, found, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad)
        torch.testing.assert_close(alone, 2 * param.full_tensor())
