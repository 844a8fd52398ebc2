"""Gradients that backwards left unreduced, and what finishes, drops or refuses them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import fsdp2
from tests.support import api
from tests.support.counting import Collectives
from tests.support.parity import Run, assert_parity, full, mesh_1d, mesh_2d, play, shard_each
from tests.support.pool import on_ranks

LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WITH_TORCH = ("torch", "alone") if hasattr(api.theirs.FSDPModule, "synchronize_gradients") else ("alone",)


def plain(module, fsdp, **options) -> None:
    """Shard each layer over all ranks."""
    shard_each(module, fsdp, mesh=mesh_1d(), **options)


def hybrid(module, fsdp, **options) -> None:
    """Shard each layer on a mesh of two axes."""
    shard_each(module, fsdp, mesh=mesh_2d(), **options)


def accumulate(run: Run, setter: str, batches: int = 2) -> None:
    """Train on micro-batches that are all alike: none of them reduces, or all-reduces."""
    for step in range(3):
        run.configure(lambda module, fsdp: getattr(module, setter)(False))
        for part in range(batches):
            run.backward(step * batches + part)
        run.configure(lambda module, fsdp: module.synchronize_gradients())
        run.configure(lambda module, fsdp: module.synchronize_gradients())  # nothing is left
        run.update()


SETTERS = ("set_requires_gradient_sync", "set_requires_all_reduce")


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("prepare", [plain, hybrid])
def test_synchronize_gradients(rank, world, prepare, setter):
    """A loop that reduces after its micro-batches, and not in the last of them, trains like one process."""
    prepare = plain if world == 1 else prepare
    assert_parity(prepare, program=partial(accumulate, setter=setter), against=WITH_TORCH)


@on_ranks(2)
@pytest.mark.parametrize("options", [{"offload_policy": CPUOffloadPolicy()}, {"reshard_after_forward": False}])
def test_where_parameters_are(rank, world, options):
    """Shards on the CPU, and full parameters that stay after forward, get the same gradients."""
    assert_parity(partial(plain, **options), program=partial(accumulate, setter=SETTERS[0]), against=WITH_TORCH)


@on_ranks(2, 4)
@pytest.mark.parametrize("setter", SETTERS)
def test_mixed_precision(rank, world, setter):
    """Micro-batches accumulate in the reduce dtype until they are reduced."""
    prepare = partial(hybrid, mp_policy=LOW)
    program = partial(accumulate, setter=setter)
    assert_parity(prepare, program=program, policy=LOW, against=WITH_TORCH, tolerance=2e-2)


class Two(nn.Module):
    """Two units, each of which is used or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, use: str) -> torch.Tensor:
        for name in use:
            x = getattr(self, name)(x).tanh()
        return x


def marked(mesh) -> Two:
    """Return the sharded model, whose units ranks may skip."""
    module = Two()
    for unit in (module.a, module.b, module):
        fsdp2.fully_shard(unit, mesh=mesh)
    module.set_reduce_scatter_unused_params(True)
    return module


def expect_sums(module: Two, uses: list[list[str]], world: int) -> None:
    """Expect the mean over ranks of what one process computes; ``uses`` has the units of each micro-batch per rank."""
    alone = Two()
    for batches in uses:
        for use in batches:
            alone(torch.ones(2, 8), use).square().sum().backward()
    for (name, mine), its in zip(module.named_parameters(), alone.parameters(), strict=True):
        expected = torch.zeros_like(its) if its.grad is None else its.grad / world
        torch.testing.assert_close(full(mine.grad), expected, msg=name)


@on_ranks(2, 4)
@pytest.mark.parametrize("setter", SETTERS)
def test_units_that_some_ranks_skip(rank, world, setter):
    """A rank that used other units than the others sends zeros for those, and gets their gradients."""
    mesh = mesh_2d() if world == 4 else mesh_1d()
    module = marked(mesh)
    uses = [["ab", "b", "a"] if r % 2 else ["a", "a", "b"] for r in range(world)]
    getattr(module, setter)(False)
    for _ in range(3):
        for use in uses[rank]:
            module(torch.ones(2, 8), use).square().sum().backward()
        module.synchronize_gradients()
        expect_sums(module, uses, world)
        module.synchronize_gradients()  # adds nothing, and keeps no rank waiting
        expect_sums(module, uses, world)
        module.zero_grad()


@on_ranks(2)
def test_the_last_micro_batch_is_empty_everywhere(rank, world):
    """Micro-batches whose number is known only afterwards: the backward that should have reduced them does not come."""
    module, alone = play(api.ours, plain, program=lambda run: None).module, play(None, plain, program=lambda run: None)
    for step in range(2):
        module.set_requires_gradient_sync(False)
        rows = [torch.full((2, 8), 1.0 + r + step) for r in range(world)]
        module(rows[rank]).square().sum().backward()
        module.set_requires_gradient_sync(True)  # for the micro-batch that has no rows
        with Collectives() as seen:
            module.synchronize_gradients()
        assert seen.reductions == 3
        for row in rows:
            alone.module(row).square().sum().backward()
        for mine, its in zip(module.parameters(), alone.module.parameters(), strict=True):
            torch.testing.assert_close(full(mine.grad), its.grad / world)


@on_ranks(2)
def test_some_units_alone(rank, world):
    """With ``recurse=False`` only the module's own parameters, which is nothing where units below have them all."""
    module = play(api.ours, plain, program=lambda run: None).module
    module.set_requires_gradient_sync(False)
    module(torch.ones(2, 8)).square().sum().backward()
    module.synchronize_gradients(recurse=False)
    assert all(p.grad is None for p in module.parameters())
    module[1].synchronize_gradients()
    assert [p.grad is not None for p in module.parameters()] == [False, False, True, True, False, False]
    module.synchronize_gradients()
    assert all(p.grad is not None for p in module.parameters())


@on_ranks(2)
def test_between_a_forward_and_its_backward(rank, world):
    """A synchronization of earlier micro-batches neither frees nor disturbs what the next backward needs."""

    def program(run: Run) -> None:
        for step in range(2):
            run.configure(lambda module, fsdp: module.set_requires_gradient_sync(False))
            run.backward(2 * step)
            loss = run.loss(2 * step + 1)
            run.configure(lambda module, fsdp: module.synchronize_gradients())
            run.configure(lambda module, fsdp: module.set_requires_gradient_sync(True))
            loss.backward()
            run.update()

    assert_parity(plain, program=program, against=("alone",))


@on_ranks(2)
def test_calls_that_make_no_sense(rank, world):
    """Inside a forward or backward, inside ``summon_full_params`` and before ``finalize_backward`` it is refused."""
    module = play(api.ours, plain, program=lambda run: None).module
    module.synchronize_gradients()  # before the first forward: nothing was left
    rows, refused = torch.ones(2, 8), []

    def call(*unused: object) -> None:
        with pytest.raises(RuntimeError, match="while a forward or backward runs"):
            module.synchronize_gradients()
        refused.append(unused)

    handle = module[1].register_forward_hook(call)
    module.set_requires_gradient_sync(False)
    loss = module(rows).square().sum()
    handle.remove()
    loss.register_hook(call)
    loss.backward()
    assert len(refused) == 2
    with fsdp2.summon_full_params(module), pytest.raises(RuntimeError, match="summon_full_params"):
        module.synchronize_gradients()
    module.synchronize_gradients()
    module.set_manual_backward_finalization(True)
    module(rows).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"call finalize_backward\(\)"):
        module.synchronize_gradients()
    module.finalize_backward()
    module.synchronize_gradients()
