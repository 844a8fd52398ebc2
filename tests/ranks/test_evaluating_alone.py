"""Under hybrid sharding one replica may evaluate while the other does not, and training goes on as before."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import fsdp2
from tests.ranks.apart import run_apart
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


class Scaled(nn.Sequential):
    """Layers, and a scalar of the root's own, which is whole on every rank."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@on_ranks(4)
def test_one_replica_gathers_again_what_was_written(rank, world):
    """A second ``unshard()`` behind a write that no counter shows refused that as if nobody compared the ranks of one
    replica. An evaluation gathered again."""
    module = fsdp2.fully_shard(nn.Linear(8, 8), mesh=mesh_2d())
    module(rows(0, rank)).sum().backward()
    if rank < 2:
        shard, before = module.weight, module.weight.full_tensor()
        module.unshard()
        shard.to_local().data.mul_(2)
        with pytest.warns(UserWarning, match="weight: .* no version counter shows"):
            module.unshard()
        torch.testing.assert_close(module.weight.detach(), before * 2)
    dist.barrier()


def sharded(make: Callable[..., nn.Sequential] = nn.Sequential, width: int = 8) -> nn.Module:
    """Three units and a root on two replicas of two ranks."""
    torch.manual_seed(0)
    model = make(nn.Linear(8, 8), nn.Linear(8, width), nn.Linear(width, 8))
    mesh = mesh_2d()
    for unit in (*model, model):
        fsdp2.fully_shard(unit, mesh=mesh)
    return model


def evaluate(model: nn.Module) -> None:
    """What one replica may do alone, but not one of its ranks."""
    with torch.no_grad():
        model(torch.ones(2, 8))


def steps(act: Callable[[nn.Module, int], None], **how: Any) -> None:
    """Six steps of training, before each of which this rank acts."""
    model = sharded(**how)
    for step in range(6):
        act(model, step)
        model(torch.ones(2, 8)).sum().backward()


def evaluates_first(rank: int, world: int) -> None:
    """One rank evaluates before anything else."""
    steps(lambda model, step: evaluate(model) if rank == 0 == step else None)


def evaluates_later(rank: int, world: int) -> None:
    """One rank evaluates when all know what follows what."""
    steps(lambda model, step: evaluate(model) if (rank, step) == (0, 3) else None)


def evaluates_beside_a_scalar(rank: int, world: int) -> None:
    """The same with a parameter that has no shard axis, in front of all others."""
    steps(lambda model, step: evaluate(model) if (rank, step) == (0, 3) else None, make=Scaled)


def has_another_model(rank: int, world: int) -> None:
    """All evaluate first, one rank another model: gloo aborted that."""
    steps(lambda model, step: evaluate(model), width=16 if rank == 1 else 8)


def leaves_one_out(rank: int, world: int) -> None:
    """The replica evaluates before each step, and one of its ranks leaves the fifth evaluation out. Its next forward
    gathers the same."""
    steps(lambda model, step: evaluate(model) if rank == 0 or (rank == 1 and step != 4) else None)


def evaluates_once_more(rank: int, world: int) -> None:
    """Both ranks of the replica evaluate, and one of them does so twice before the fifth step."""

    def act(model: nn.Module, step: int) -> None:
        for _ in range((2 if (rank, step) == (0, 4) else 1) if rank < 2 else 0):
            evaluate(model)

    steps(act)


def breaks_off(rank: int, world: int) -> None:
    """One rank's evaluation raises, is handled, and training goes on."""

    def act(model: nn.Module, step: int) -> None:
        if rank < 2 and step > 1:
            hook = model[1].register_forward_pre_hook(lambda *_: 1 / 0) if (rank, step) == (1, 4) else None
            with suppress(ZeroDivisionError):
                evaluate(model)
            if hook is not None:
                hook.remove()

    steps(act)


def evaluates_another_unit(rank: int, world: int) -> None:
    """Both ranks of the replica evaluate, and use units of one size in another order."""

    def act(model: nn.Module, step: int) -> None:
        if rank < 2 and step == 3:
            with torch.no_grad():
                x = model[rank](torch.ones(2, 8))
                model[1 - rank](x)

    steps(act)


def unshards(rank: int, world: int) -> None:
    """One rank gathers a unit by hand."""
    steps(lambda model, step: model[1].unshard() if (rank, step) == (0, 3) else None)


PARTED = {
    evaluates_first: "rank 1: its first pass is forward, rank 0: its first pass is evaluation",
    evaluates_later: "rank 0: evaluation; rank 1: training",
    evaluates_beside_a_scalar: "rank 0: evaluation; rank 1: training",
    has_another_model: "ranks were given different models: rank 1: 1.weight is (16, 8)",
    leaves_one_out: "rank 0: evaluation; rank 1: training",
    evaluates_once_more: "rank 0: evaluation; rank 1: training",
    breaks_off: "rank 0: training; rank 1: training after a pass that was aborted",
    evaluates_another_unit: "rank 0: gather '0' in evaluation; rank 1: gather '1' in evaluation",
    unshards: "rank 0: unshard(); rank 1: training",
}
"""What a rank of a replica does, or does not, without the other one, and what both say of it."""


@pytest.mark.parametrize("program", PARTED, ids=lambda program: program.__name__)
def test_one_rank_of_a_replica(program):
    """Every rank raises, and says what each rank of the replica does. All waited until the timeout of the process
    group, or computed with other weights."""
    for rank, ended in enumerate(run_apart(program, 4)):
        assert ended.status == 1, ended
        if program in (evaluates_first, has_another_model) and rank > 1:  # the first pass of all is still to come
            assert "RuntimeError: the first collective failed: a rank ended" in ended.error, ended
        else:
            assert PARTED[program] in ended.error and ended.error.startswith("RuntimeError: ranks "), ended


def evaluates_with_experts(rank: int, world: int) -> None:
    """The first two ranks of a replica have experts in their units, on a smaller shard axis, and the others none."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    parts = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "parts", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    if rank % 4 < 2:
        model.append(nn.Linear(8, 8))
    experts = {*model[2:].parameters()}
    smaller = fsdp2.ShardPlacementResult(Shard(0), parts["replicate", "shard"])
    fsdp2.fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: smaller if p in experts else Shard(0))
    for _ in range(3):
        evaluate(model)


def test_experts_of_some_ranks():
    """Nobody waits for ranks that have no experts: none of these evaluations is compared."""
    assert [ended.status for ended in run_apart(evaluates_with_experts, 8)] == [0] * 8


def saves(rank: int, world: int) -> None:
    """Evaluate while a thread saves on the process group of all ranks, which a scalar is reduced on."""
    model = sharded(Scaled)
    model(torch.ones(2, 8)).sum().backward()
    goes_on = Event()

    class Slow(dcp.FileSystemWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            goes_on.wait()
            return super().write_data(*args, **kwargs)

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        saved: Any = dcp.async_save({"model": model.state_dict()}, storage_writer=Slow(folder[0]))
        evaluate(model)
        goes_on.set()
        saved.result()
        dist.barrier()  # the folder is the first rank's
    model(torch.ones(2, 8)).sum().backward()


def test_evaluations_during_a_save():
    """They use the process groups of shard axes alone, on which nobody saves."""
    ended = run_apart(saves, 4)
    assert [one.status for one in ended] == [0] * 4, ended


def dies(rank: int, world: int) -> None:
    """A whole replica is killed, as with its machine."""
    model = sharded()
    for step in range(4):
        if step == 3:
            dist.barrier()
            if rank > 1:
                os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(2, 8)).sum().backward()


def test_a_replica_is_killed():
    """The other one names its ranks, and not one of those that live."""
    for ended in run_apart(dies, 4)[:2]:
        assert "rank 2, 3 did not answer" in ended.error, ended
