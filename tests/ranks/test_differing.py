"""Ranks that differ: in what they run, in what they were built from, and in how they end."""

from __future__ import annotations

import atexit
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.parity import beside_one_process, mesh_1d, shard_each, sharded, stack
from tests.support.report import check, full_grads, refused, report, same

ODD = 1
"""The rank that differs."""


class SeesOrNot(nn.Module):
    """Text layers, and a vision unit that only batches with images use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.vision, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, images: bool):
        x = torch.tanh(self.first(x))
        if images:
            x = x + torch.tanh(self.vision(x))
        return self.last(x)


def data(rank: int, step: int) -> torch.Tensor:
    """Return one rank's rows."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def train_with_some_images(rank, world, fsdp, reshard) -> None:
    """Train with images on some ranks, on none and on all; the gradients are those of the mean over ranks."""
    module, alone = beside_one_process(SeesOrNot, fsdp=fsdp, reshard_after_forward=reshard)
    module.set_reduce_scatter_unused_params(True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, alone)]
    have = [lambda r: r == 0, lambda r: r != 0, lambda r: True, lambda r: False, lambda r: r == 0]
    for step, images in enumerate(have):
        module(data(rank, step), images(rank)).square().mean().backward()
        sum(alone(data(r, step), images(r)).square().mean() / world for r in range(world)).backward()
        for name, gradient in full_grads(module).items():
            expected = alone.get_parameter(name).grad
            expected = torch.zeros_like(alone.get_parameter(name)) if expected is None else expected
            same(torch.zeros_like(expected) if gradient is None else gradient, expected, f"gradient of {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@report("Some ranks skip a unit, with set_reduce_scatter_unused_params(True)", fresh=True)
def test_some_ranks_skip_a_unit(rank, world, fsdp):
    """In a vision model some ranks draw a batch of text alone and never call the vision unit, whose gathers and
    reductions the other ranks enter. With the option for unused parameters every rank takes part."""
    train_with_some_images(rank, world, fsdp, True)


@report("The same with parameters kept after forward", fresh=True)
def test_some_ranks_skip_a_kept_unit(rank, world, fsdp):
    """With ``reshard_after_forward=False`` there is no gather in backward that could help."""
    train_with_some_images(rank, world, fsdp, False)


@report(
    "Some ranks skip a unit, without the option", fresh=True, promise="error on every rank that names units and ranks"
)
def test_skipped_without_the_option(rank, world, fsdp):
    """The same without the option used to be a hang until the backend's timeout of half an hour, in which nobody says
    who waits for whom. The error comes soon, everywhere, and names the unit each rank is in."""
    module = sharded(SeesOrNot, fsdp)
    with refused("vision", "rank", otherwise="silently wrong: gathers of different units are mixed up"):
        for step in range(3):
            module(data(rank, step), rank != ODD).square().mean().backward()


@report("The forward of one rank uses no unit", fresh=True, promise="error on every rank that names a unit of others")
def test_a_forward_that_uses_nothing(rank, world, fsdp):
    """No backward follows on that rank, so nothing else could tell before its next step, which is one behind."""

    class Gate(nn.Module):
        """A unit that may be skipped, in a root without parameters of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
            return self.layer(x) if used else x

    module = sharded(Gate, fsdp)
    for step in range(3):
        module(data(rank, step), True).square().mean().backward()
    with refused("layer", "end of forward", otherwise="silently wrong: trains on"):
        module(data(rank, 3), rank != ODD)


def built_differently(rank, fsdp, build, *words: str, **options) -> None:
    """Build and shard a model that is another on one rank; the first forward must say so on every rank."""
    torch.manual_seed(0)
    module = build(rank == ODD)
    shard_each(module, fsdp, mesh=mesh_1d(), **options)
    with refused(f"rank {ODD}", *words, otherwise="silently wrong: trains on"):
        module(torch.randn(4, 8)).square().mean().backward()


@report("A layer has another shape on one rank", fresh=True, promise="error on every rank that names the parameter")
def test_other_shape(rank, world, fsdp):
    """A vocabulary padded differently, a configuration file that one node did not get."""

    def build(odd: bool):
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16 if odd else 8), nn.Linear(16 if odd else 8, 8))

    built_differently(rank, fsdp, build, "1.weight", "(16, 8)", "(8, 8)")


@report("A layer has another dtype on one rank", fresh=True, promise="error on every rank that names the parameter")
def test_other_dtype(rank, world, fsdp):
    """One node loaded a checkpoint in another dtype; what its ranks send is twice as long."""

    def build(odd: bool):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        return model.to(torch.float64) if odd else model

    built_differently(rank, fsdp, lambda odd: Casts(build(odd)), "weight", "float64", "float32")


class Casts(nn.Sequential):
    """Casts its input to the dtype of its layers."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__(*model)

    def forward(self, x):
        return super().forward(x.to(next(self.parameters()).dtype))


@report("Parameters are in another order on one rank", fresh=True, promise="error on every rank that names them")
def test_other_order(rank, world, fsdp):
    """Modules built from a set or from the order of files differ from process to process; their sizes add up to the
    same."""

    class Unordered(nn.Module):
        def __init__(self, odd: bool) -> None:
            super().__init__()
            for name in ("up", "gate") if not odd else ("gate", "up"):
                setattr(self, name, nn.Linear(8, 8))

        def forward(self, x):
            return self.up(x) * torch.tanh(self.gate(x))

    built_differently(rank, fsdp, lambda odd: nn.Sequential(Unordered(odd)), "gate")


@report("One rank has another mixed precision policy", fresh=True, promise="error on every rank that names the unit")
def test_other_policy(rank, world, fsdp):
    """A flag given on one node only: what it sends has half the size."""
    policy = MixedPrecisionPolicy(torch.bfloat16 if rank == ODD else None)
    build = lambda odd: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    built_differently(rank, fsdp, build, "bfloat16", mp_policy=policy)


@report("One rank was seeded differently", fresh=True, promise="warns, names the parameter and the rank")
def test_other_seed(rank, world, fsdp):
    """Every rank keeps its piece of its own initialisation, so the model is a patchwork, and what is replicated never
    agrees again."""

    def build(odd: bool):
        torch.manual_seed(1 if odd else 0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    module = build(rank == ODD)
    shard_each(module, fsdp, mesh=mesh_1d())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module(torch.randn(4, 8)).square().mean().backward()
    told = [text for text in map(str, (one.message for one in caught)) if f"rank {ODD}" in text and "weight" in text]
    check(told or rank != 0, "trains on")


def ending(rank, world, fsdp, end) -> None:
    """Train until one rank ends; the others must be told which one."""
    module = sharded(stack, fsdp)
    for step in range(3):
        module(data(rank, step)).square().mean().backward()
    dist.barrier()
    if rank == ODD:
        end()
    with refused(f"rank {ODD}", otherwise="silently wrong: trains on"):
        for step in range(3):
            module(data(rank, step)).square().mean().backward()


@report("A rank dies", fresh=True, dying=(ODD,), promise="error on the others that names it")
def test_rank_dies(rank, world, fsdp):
    """A process is killed for its memory. The others are waiting for it in a collective."""
    ending(rank, world, fsdp, lambda: os._exit(3))


@report("A rank raises", fresh=True, dying=(ODD,), promise="error on the others that names it")
def test_rank_raises(rank, world, fsdp):
    """A broken sample makes one rank raise, and its process ends as Python's do."""

    def end() -> None:
        try:
            raise ValueError("a broken sample")
        except ValueError:
            sys.excepthook(*sys.exc_info())
        atexit._run_exitfuncs()
        os._exit(1)

    ending(rank, world, fsdp, end)


@report("Some ranks have an empty batch", 2, 4)
def test_empty_batches(rank, world, fsdp):
    """The last batch of an epoch leaves nothing for some ranks, or all rows of a rank are filtered out."""
    module, alone = beside_one_process(stack, fsdp=fsdp)
    for step in range(3):
        rows = data(0, step)[: 4 if rank == 0 else 0]
        module(rows).square().sum().backward()
        (alone(data(0, step)).square().sum() / world).backward()
        for name, gradient in full_grads(module).items():
            same(gradient, alone.get_parameter(name).grad, f"gradient of {name}")
        module.zero_grad()
        alone.zero_grad()
