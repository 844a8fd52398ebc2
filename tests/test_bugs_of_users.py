"""Bugs that what users report of torch's fully_shard brought to light; each test opens with the story of its bug."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune

from tests.support import api
from tests.support.models import children
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks

Model = Callable[[], nn.Module]
Loss = Callable[[nn.Module, Tensor], Tensor]


def mean_output(module: nn.Module, inputs: Tensor) -> Tensor:
    """The usual loss."""
    return module(inputs).square().mean()


def trains_like_one_process(
    world: int, rank: int, build: Model, loss: Loss = mean_output, units: Callable = children, **options: object
) -> None:
    """Train three steps, units and the rest sharded, and expect what a single process on all rows comes to."""
    torch.manual_seed(0)
    reference = build()
    torch.manual_seed(0)
    module = build()
    for unit in (*units(module), module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), **options)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (reference, module)]
    for step in range(3):
        batches = [torch.sin(torch.arange(24.0).view(3, 8) * (step + 1) + r) for r in range(world)]
        for rows in batches:
            (loss(reference, rows) / world).backward()
        loss(module, batches[rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, mine), whole in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), whole.detach(), msg=name)


class Recursive(nn.Module):
    """Calls itself, before its own layer or after it, and then the layer below."""

    def __init__(self, *, last: bool) -> None:
        super().__init__()
        self.layer, self.below, self.last = nn.Linear(8, 8), nn.Linear(8, 8), last

    def forward(self, x, times=2):
        if times == 0:
            return self.below(x)
        if self.last:
            return self(self.layer(x).tanh(), times - 1)
        return self.layer(self(x, times - 1).tanh())


class Calling(nn.Module):
    """Its part calls it back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.part = nn.Linear(8, 8), Part()

    def forward(self, x, back=True):
        return self.part(self.layer(x), lambda x: self(x, back=False)) if back else self.layer(x)


class Part(nn.Module):
    """Computes with what a function makes of its input, and with its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, function):
        return self.layer(function(x).tanh()) + self.layer(x)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_module_that_calls_itself(rank, world, inside, last, reshard):
    """Backward through the inner call freed, and reduced, what the outer call's backward still needed: "out of bounds
    for storage of size 0". If the layer came after the inner call, forward found it freed (torch's has the latter)."""
    build = lambda: nn.Sequential(nn.Linear(8, 8), Recursive(last=last)) if inside else Recursive(last=last)
    trains_like_one_process(world, rank, build, reshard_after_forward=reshard)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True])
def test_a_part_that_calls_the_whole(rank, world, reshard):
    """Trainers redirect a model's forward to a training step, which calls the model. The inner forward of the root
    took itself for a new iteration and, at its end, freed the units that the outer one was in."""
    trains_like_one_process(world, rank, Calling, reshard_after_forward=reshard)


@on_ranks(2)
def test_an_interrupted_forward_is_no_outer_one(rank, world):
    """What a KeyboardInterrupt left must not be taken for a call that is still under way: the next forward is a new
    one, which gathers."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def interrupt(*unused: object) -> None:
        raise KeyboardInterrupt

    for unit in (*children(module), module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    expected = module(torch.ones(2, 8)).detach()
    for _ in range(2):
        handle = module[0].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            module(torch.ones(2, 8))
        handle.remove()
        torch.testing.assert_close(module(torch.ones(2, 8)).detach(), expected)


class Routed(nn.Module):
    """Keeps what its router adds to the loss, computed after the output or before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.router, self.kind = nn.Linear(8, 8), nn.Linear(8, 2), kind
        self.kept: object = 0.0

    def forward(self, x):
        before = self.keep(x) if self.kind == "before" else None
        y = self.layer(x).tanh()
        self.kept = before if before is not None else self.keep(y)
        return x if self.kind == "nothing else" else y

    def keep(self, x: Tensor) -> object:
        """What the router adds to the loss, plain or in a container."""
        one = self.router(x).softmax(-1).square().mean()
        return {"list": [one], "dict": {"balance": one}}.get(self.kind, one)


class RoutedBlock(nn.Module):
    """A unit with a unit in it that keeps something."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.routed = nn.Linear(8, 8), Routed("nothing else")

    def forward(self, x):
        self.routed(self.layer(x))
        return x


def and_what_was_kept(module: nn.Module, inputs: Tensor) -> Tensor:
    """The loss with what each router kept, which is taken away."""
    total = mean_output(module, inputs)
    for routed in module.modules():
        if isinstance(routed, Routed):
            kept, routed.kept = routed.kept, None
            total = total + sum(kept.values() if isinstance(kept, dict) else kept if isinstance(kept, list) else [kept])
    return total


@on_ranks(2)
@pytest.mark.parametrize("kind", ["before", "after", "list", "dict", "nothing else"])
def test_a_loss_kept_on_a_module(rank, world, kind):
    """Routers leave their auxiliary loss on themselves. Backward enters by it before it enters by the output if it was
    computed after it, and only then if the output is not used: "out of bounds for storage of size 0" (torch's fails
    likewise)."""
    build = lambda: nn.Sequential(Routed(kind), Routed(kind))
    trains_like_one_process(world, rank, build, and_what_was_kept, reshard_after_forward=True)


@on_ranks(2)
def test_a_loss_kept_on_a_module_inside_of_a_unit_in_a_unit(rank, world):
    """Through the inner unit backward comes to the outer one, whose own output is not used either."""
    build = lambda: nn.Sequential(RoutedBlock(), RoutedBlock())
    units = lambda module: [block.routed for block in module] + [*module]
    trains_like_one_process(world, rank, build, and_what_was_kept, units, reshard_after_forward=True)


@on_ranks(2)
def test_a_kept_tensor_does_not_keep_its_module(rank, world):
    """A hook on it that held the module, which holds it, would be a cycle that no collection finds; the pool looks for
    modules that outlive this test."""
    module = api.ours.fully_shard(Routed("before"), mesh=cpu_mesh(world), reshard_after_forward=True)
    module(torch.ones(2, 8))
    assert isinstance(module.kept, Tensor)


def through_a_copy(module: nn.Module, inputs: Tensor) -> Tensor:
    """The loss of a shallow copy, which is in another mode for a while."""
    other = copy.copy(module).eval()
    assert module.training and not other.training and isinstance(other, type(module))
    return mean_output(other.train(), inputs)


@on_ranks(2)
def test_a_shallow_copy_of_a_model(rank, world):
    """``copy.copy`` of a model, for another mode, was refused as pickling is; torch's fully_shard allows it."""
    trains_like_one_process(world, rank, lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), through_a_copy)


@on_ranks(2)
def test_a_shallow_copy_of_a_unit(rank, world):
    """The copy shares parameters and gathers with the unit, and its forward ends what it began."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for unit in (*children(module), module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), reshard_after_forward=True)
    expected = module[0](torch.ones(2, 8)).detach()
    other = copy.copy(module[0])
    for _ in range(2):
        torch.testing.assert_close(other(torch.ones(2, 8)).detach(), expected)
        assert isinstance(other.weight, DTensor)
    other.unshard()
    assert other.weight is module[0].weight and not isinstance(other.weight, DTensor)
    module[0].reshard()
    assert isinstance(other.weight, DTensor)


@on_ranks(2)
def test_the_name_of_a_parameter_that_was_removed(rank, world):
    """A parametrization registered, or a weight pruned, after sharding takes the parameter from its module. The error
    called it "weight", of which a model has hundreds."""
    module = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    for unit in (module[0][0], module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    prune.random_unstructured(module[0][0], "weight", amount=0.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^0\.0\.weight: the sharded parameter was replaced"):
            module(torch.ones(2, 8))
