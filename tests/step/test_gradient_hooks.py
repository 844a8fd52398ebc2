"""Hooks on the gradients of shards: they get a DTensor where a plain model gives a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from tests.support import api
from tests.support.parity import assert_gradients, beside_one_process, mesh_1d, mesh_2d, sharded, stack
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

MASK = torch.tensor([[row < 3 or column == 1 for column in range(8)] for row in range(8)])
"""Some rows, and one element of the others, so that it differs between ranks."""

RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "product": lambda grad: grad * MASK,
    "rows": lambda grad: grad * MASK[:, :1],
    "columns": lambda grad: grad * MASK[5],
    "masked_fill": lambda grad: grad.masked_fill(MASK, 0),
    "where": lambda grad: torch.where(MASK, grad, torch.zeros(8, 8)),
    "sum": lambda grad: grad + MASK,
    "clamp": lambda grad: grad.clamp(-1, 1),
    "norm": lambda grad: grad / grad.norm(),
    "nothing": lambda grad: None,
    "a plain tensor": lambda grad: torch.arange(64.0).view(8, 8),
    "a whole tensor": lambda grad: (grad.full_tensor() if isinstance(grad, DTensor) else grad) * MASK,
    "a piece": lambda grad: 2 * (grad.to_local() if isinstance(grad, DTensor) else grad),
}


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("returned", RETURNED)
def test_a_hook_returns_another_gradient(rank, world, returned):
    """Masks are how parts of a parameter are frozen, and a plain mask raised torch's "got mixed torch.Tensor and
    DTensor". A plain tensor became the gradient as it was, with which no optimizer could step."""
    module, alone = beside_one_process(stack, mesh=mesh_2d() if world == 4 else mesh_1d())
    for one in (module, alone):
        one[1].weight.register_hook(RETURNED[returned])
        one(torch.ones(2, 8)).square().sum().backward()
    grad = module[1].weight.grad
    assert isinstance(grad, DTensor) and grad.placements == module[1].weight.placements
    assert_gradients(module, alone)


WRITTEN: dict[str, tuple[Callable[[Tensor], Any], bool]] = {  # what is written, and whether DTensor does it right
    "product": (lambda grad: grad.mul_(MASK), True),
    "masked_fill": (lambda grad: grad.masked_fill_(MASK, 0), True),
    "columns": (lambda grad: grad[:, :2].mul_(0), True),
    "a column": (lambda grad: grad.t()[1].zero_(), True),
    "rows": (lambda grad: grad.__setitem__(slice(5), 0), False),
    "a row": (lambda grad: grad[0].zero_(), False),
    "a part of rows": (lambda grad: grad[:4][:, 1].mul_(0), False),
    "other rows": (lambda grad: grad[1:3].copy_(torch.ones(2, 8)), False),
    "an element": (lambda grad: grad[2, 2].mul_(0), False),
    "by a mask": (lambda grad: grad.__setitem__(MASK, 0), False),
    "a flat part": (lambda grad: grad.view(-1)[:3].zero_(), False),
}


@on_ranks(2)
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("how", ["in place", "on a copy", "after accumulation"])
def test_a_hook_writes_to_a_part_of_the_gradient(rank, world, written, how):
    """``grad[0].zero_()``, ``grad[2, 2] = 0`` and ``grad[1:3] *= 0`` were lost without a word, because DTensor makes a
    copy of a row where a plain tensor's is a view; other writes raised what names no parameter. Each is right now, or
    raises an error on every rank that names the parameter and a remedy."""
    write, right = WRITTEN[written]

    def in_place(grad: Tensor) -> None:
        write(grad)

    def on_a_copy(grad: Tensor) -> Tensor:
        write(copied := grad.clone())
        return copied

    module, alone = beside_one_process(stack)
    for one in (module, alone):
        weight = one[1].weight
        if how == "after accumulation":
            weight.register_post_accumulate_grad_hook(lambda parameter: in_place(parameter.grad))
        else:
            weight.register_hook(in_place if how == "in place" else on_a_copy)
    alone(torch.ones(2, 8)).square().sum().backward()
    loss = module(torch.ones(2, 8)).square().sum()
    if right:
        loss.backward()
        assert_gradients(module, alone)
        return
    with pytest.raises(
        RuntimeError, match=r"1\.weight: its gradient hook .* got a DTensor of shape \(8, 8\)(.|\n)*mask"
    ):
        loss.backward()
    module.reset_iter_state()


@on_ranks(2)
@pytest.mark.parametrize("returned", [torch.ones(3, 3), 3], ids=["another shape", "a number"])
def test_a_hook_returns_what_is_no_gradient(rank, world, returned):
    """The error names the parameter."""
    module = sharded()
    module[1].weight.register_hook(lambda grad: returned)
    with pytest.raises(RuntimeError, match=r"1\.weight: its gradient hook returned .*expected None, or a gradient"):
        module(torch.ones(2, 8)).sum().backward()
    module.reset_iter_state()


@on_ranks(2)
def test_errors_of_hooks_stay_what_they_are(rank, world):
    """An error that is not DTensor's passes unchanged, and mixing tensors is refused again outside of the hook."""
    module = sharded()

    def fail(grad: Tensor) -> None:
        raise RuntimeError("mine")

    module[1].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="^mine$"):
        module(torch.ones(2, 8)).sum().backward()
    module.reset_iter_state()
    with pytest.raises(RuntimeError, match="mixed"):
        module[1].weight * torch.ones(8, 8)


@on_ranks(2)
def test_a_block_of_implicit_replication_goes_on_after_hooks(rank, world):
    """torch's context manager, used for hooks, would have ended the caller's around it."""
    module = sharded()
    module[1].weight.register_hook(lambda grad: grad * MASK)
    with implicit_replication():
        module(torch.ones(2, 8)).sum().backward()
        module[1].weight * torch.ones(8, 8)
