"""Under hybrid sharding one replica may evaluate while the other does not, and training goes on as before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import Layers
from tests.support.parity import beside_one_process, fulls, mesh_2d
from tests.support.pool import on_ranks


def rows(step: int, rank: int) -> torch.Tensor:
    """The batch of one rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """What training minimises."""
    return model(rows(step, rank)).square().mean()


Evaluate = Callable[[], None]


def before_all(model: nn.Module, evaluate: Evaluate, step: int, rank: int) -> None:
    """A look at the model before it is trained, while the other replica waits, and before each step."""
    evaluate()
    dist.barrier()
    loss_of(model, step, rank).backward()


def after_backward(model: nn.Module, evaluate: Evaluate, step: int, rank: int) -> None:
    """Weights have not changed since the last forward."""
    loss_of(model, step, rank).backward()
    evaluate()


def before_backward(model: nn.Module, evaluate: Evaluate, step: int, rank: int) -> None:
    """Backward is still to come for what the forward kept."""
    loss = loss_of(model, step, rank)
    evaluate()
    loss.backward()


def between_micro_batches(model: nn.Module, evaluate: Evaluate, step: int, rank: int) -> None:
    """Full parameters and gradients are kept from one micro-batch to the next."""
    for micro, last in enumerate((False, True)):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        (loss_of(model, step + 100 * micro, rank) / 2).backward()
        evaluate()


def reference(model: nn.Module, program: Callable[..., None], step: int, world: int) -> None:
    """The same gradients in a single process."""
    micro = (0, 1) if program is between_micro_batches else (0,)
    for part in micro:
        for rank in range(world):
            (loss_of(model, step + 100 * part, rank) / world / len(micro)).backward()


@on_ranks(4)
@pytest.mark.parametrize(
    "program", [before_all, after_backward, before_backward, between_micro_batches], ids=lambda one: one.__name__
)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_one_replica_evaluates(rank, world, program, reshard):
    """The losses it sees and the gradients of all are right, and nobody is taken for one that has parted."""
    units = lambda model: [*model][:3]
    model, alone = beside_one_process(lambda: Layers(4), units, mesh=mesh_2d(), reshard_after_forward=reshard)
    shards = dict(model.named_parameters())  # what a forward without backward keeps is shown in their place
    optimizers = [torch.optim.SGD(one, lr=0.1) for one in (shards.values(), alone.parameters())]

    def evaluate() -> None:
        if (step % 3 == 1) == (rank < 2):  # one replica, then, twice, the other
            with torch.no_grad():
                for order in ((0, 1, 2, 3), (2, 0, 3)):  # a unit may also be left out
                    torch.testing.assert_close(model(rows(0, rank), order), alone(rows(0, rank), order))

    for step in range(6):
        program(model, evaluate, step, rank)
        reference(alone, program, step, world)
        gradients = fulls({name: shard.grad for name, shard in shards.items()})
        for (name, got), expected in zip(gradients.items(), alone.parameters(), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(got, expected.grad, msg=lambda t, n=name: f"{n}: {t}")
        if step % 2:  # in the others evaluation finds weights as training left them
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
