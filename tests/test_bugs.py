"""Bugs that were found and must not come back; each test opens with the story of its bug."""

from __future__ import annotations

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2.engine.group import FSDPParamGroup
from tests.support import api
from tests.support.models import Case, children, mlp, rows
from tests.support.oracle import Setup, assert_parity, cpu_mesh
from tests.support.pool import on_ranks


class AroundFrozen(nn.Module):
    """A frozen layer of the root between a trainable unit and the root's trainable last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = mlp(6, 6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        return self.last(torch.tanh(self.frozen(self.unit(x))))


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_frozen_weights_below_the_last_gradient_of_their_group(rank, world, reshard):
    """The root's input needs no gradient, so its post-backward ran as soon as its trainable parameters had theirs. It
    freed the whole group, but backward still had to pass through the root's frozen layer on its way to the unit below,
    and died with "out of bounds for storage of size 0". Found by a random program."""
    case = Case(AroundFrozen, rows(6), lambda model: [model.unit])
    assert_parity(rank, world, case, Setup(reshard))


@api.fsdp2_only  # torch's refuses ties across calls
@on_ranks(2)
def test_tying_to_a_unit_that_was_cast(rank, world):
    """``Module.to`` swaps what a shard is, its mark as a managed parameter included. A later ``fully_shard`` that met
    it as a tie took it for a parameter of tensor parallelism and died inside torch."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    api.ours.fully_shard(module[0], mesh=cpu_mesh(world))
    module[0].to(torch.float64)
    module[1].weight = module[0].weight
    api.ours.fully_shard(module[1], mesh=cpu_mesh(world))
    api.ours.fully_shard(module, mesh=cpu_mesh(world))
    assert module[1].weight is module[0].weight and module[1].weight.to_local().shape == (2, 4)
    module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert module[0].weight.grad is not None


class TiedInAndOutOfCheckpoint(nn.Module):
    """Two layers of one unit share their weight; the upper one is recomputed by a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = nn.Linear(6, 6), nn.Linear(6, 6)
        self.upper.weight = self.lower.weight

    def forward(self, x):
        return checkpoint(self.upper, torch.tanh(self.lower(x)), use_reentrant=True)


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_weight_shared_with_a_reentrantly_checkpointed_layer(rank, world, reshard):
    """The inner backward finished its part of the weight's gradient, which counted as all of it: once the lower bias
    had its gradient the unit was reduced, and the lower layer's part of the weight's gradient was lost. Found by a
    random program."""
    assert_parity(rank, world, Case(TiedInAndOutOfCheckpoint, rows(6)), Setup(reshard))


class MembersInACheckpoint(nn.Module):
    """Three layers of one unit, of which the last is recomputed by a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.layers = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.below(x))
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return checkpoint(self.layers[2], x, use_reentrant=True)


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_grouped_call_whose_last_member_is_checkpointed_reentrantly(rank, world, first, reshard):
    """The first computation of the last member runs without grad, and only the last member's output told backward to
    gather. So the others' backward found freed weights, or finished gradients after the unit was reduced, which were
    then lost. Found by a random program."""
    case = Case(MembersInACheckpoint, rows(6), lambda model: [list(model.layers)[first:]])
    assert_parity(rank, world, case, Setup(reshard), against_torch=False)


@on_ranks(2)
def test_unshard_twice(rank, world):
    """The second ``unshard`` took the full parameters shown on the module for parameters that somebody had put there,
    and refused them."""
    module = api.ours.fully_shard(nn.Linear(4, 4), mesh=cpu_mesh(world))
    module.unshard()
    weight = module.weight
    module.unshard()
    assert module.weight is weight and weight.shape == (4, 4)


@on_ranks(2)
def test_first_forward_inside_jvp(rank, world):
    """The buffers of the first gather were made while ``torch.func.jvp`` was active, so they were functorch's wrappers
    without a storage."""
    torch.manual_seed(0)
    reference = mlp(4, 4, 4)
    torch.manual_seed(0)
    module = mlp(4, 4, 4)
    for unit in (*children(module), module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    inputs, tangent = torch.ones(1, 4), torch.full((1, 4), 0.5)
    expected = torch.func.jvp(reference, (inputs,), (tangent,))
    torch.testing.assert_close(torch.func.jvp(module, (inputs,), (tangent,)), expected)


@api.fsdp2_only
@on_ranks(4)
@pytest.mark.parametrize("prefetched", [False, True])
def test_evaluation_between_backward_and_step(rank, world, prefetched):
    """With ``reshard_after_forward=2`` the evaluation left pieces on two ranks each, cut from the weights before the
    step, and the forward after the step gathered those; torch's does so too. The units' pieces are gathered ahead."""
    inputs, layers = torch.ones(1, 4), 3
    module, reference = (nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    for unit in (*module, module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), reshard_after_forward=2)
    if prefetched:
        module(inputs).sum().backward()  # records the order
        module.zero_grad()
    for one in (module, reference):
        optimizer = torch.optim.SGD(one.parameters(), lr=1.0)
        one(inputs).sum().backward()
        with torch.no_grad():
            one(inputs)
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(module(inputs), reference(inputs))
        module[0].unshard()
    torch.testing.assert_close(module[0].weight, reference[0].weight)


class Stack(nn.Module):
    """A layer of the root's own, then three units."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@on_ranks(2)
def test_prefetch_lists_of_some_units(rank, world):
    """Units with prefetch lists of their own were left out of the recorded order, so the units before them took the
    next one without a list for their successor: the root gathered the last layer first. Found by torch's own tests."""
    module, started = Stack(), []
    for unit in (*module.layers, module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), reshard_after_forward=True)
    for layer, following in zip(module.layers[:-1], module.layers[1:]):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    original = FSDPParamGroup.unshard

    def noting(group, *args):
        if group.is_sharded and group.gathering is None:
            started.append(group.name)
        return original(group, *args)

    with mock.patch.object(FSDPParamGroup, "unshard", noting):
        for _ in range(3):
            started.clear()
            module(torch.ones(2, 4)).sum().backward()
            assert started == ["", "layers.0", "layers.1", "layers.2", "", "layers.2", "layers.1", "layers.0"]


class Boxed(nn.Module):
    """A unit with a frozen layer in front, whose input is where autograd's hooks cannot be put."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.kept, self.hidden = kept, None
        self.first, self.unit = nn.Linear(6, 6), nn.Module()
        self.unit.frozen, self.unit.last = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.unit.forward = self.compute

    def compute(self, given):
        x = self.hidden if self.kept else given.x
        return self.unit.last(torch.tanh(self.unit.frozen(x)))

    def forward(self, x):
        self.hidden = self.first(x)
        return self.unit(None if self.kept else Box(self.hidden))


class Box:
    """A plain object that holds a tensor and cannot be copied."""

    __slots__ = ("x",)

    def __init__(self, x) -> None:
        self.x = x


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("kept", [False, True])
def test_inputs_out_of_reach_behind_frozen_weights(rank, world, kept, reshard):
    """An input inside a plain object counted as one that needs no gradient, and a tensor kept on the module is seen by
    nobody; the unit was freed when its last trainable parameter had its gradient, and backward died in the frozen
    layer in front of it with "out of bounds for storage of size 0"."""
    case = Case(lambda: Boxed(kept=kept), rows(6), lambda model: [model.unit])
    assert_parity(rank, world, case, Setup(reshard))


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("given", ["captured", "captured needing a gradient", "dual"])
def test_backward_through_a_jvp(rank, world, given, reshard):
    """Inside ``torch.func.jvp`` outputs say that they need no gradient, so nothing was hooked to them: backward outside
    found freed parameters, or left gradients full. A single input that was captured and needs a gradient failed at
    once, its view having no node. Found by torch's own tests."""
    torch.manual_seed(0)
    reference = mlp(4, 4, 4)
    module = copy.deepcopy(reference)
    for unit in (*children(module), module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), reshard_after_forward=reshard)
    before, tangent = nn.Linear(4, 4), torch.full((2, 4), 0.5)
    for _ in range(2):
        sources = []
        for one in (reference, module):
            source = torch.ones(2, 4, requires_grad=True)
            captured = before(source) if "needing" in given else torch.ones(2, 4)
            function = one if given == "dual" else lambda _, one=one, captured=captured: one(captured)
            output, out_tangent = torch.func.jvp(function, (torch.ones(2, 4),), (tangent,))
            (output.sum() + out_tangent.sum()).backward()
            sources.append(source.grad)
        assert (sources[0] is None) == ("needing" not in given)
        torch.testing.assert_close(sources[0], sources[1])
        for got, expected in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got.grad.to_local(), expected.grad.chunk(world)[rank])


@on_ranks(1)
def test_classes_made_in_a_function_are_freed(rank, world):
    """The sharded classes were remembered for good, each with the class it was made of, and that with all its methods
    can reach: a model that a class in a notebook or a function refers to was never freed."""

    def build() -> nn.Module:
        class Local(nn.Linear):
            def forward(self, x):
                return super().forward(x) + 0 * len(list(model.children()))

        model = api.ours.fully_shard(Local(4, 4), mesh=cpu_mesh(world))
        return model

    module = build()
    original = type(module).__bases__[1]
    again = api.ours.fully_shard(original(2, 2), mesh=cpu_mesh(world))
    assert type(again) is type(module) and issubclass(type(module), original)
    freed = weakref.ref(original)
    del original, again
    del module
    for _ in range(2):
        gc.collect()
    assert freed() is None


class TiedBelow(nn.Module):
    """The last layer, a unit, shares its weight with a layer of the root in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.middle.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_weight_tied_between_a_unit_and_the_one_around_it(rank, world, reshard):
    """The unit's post-backward freed the weight, which the root's layer below still needed to pass its gradient on:
    "out of bounds for storage of size 0". Found by a random plan."""
    case = Case(TiedBelow, rows(6), lambda model: [model.last], torch_takes_it=False)
    assert_parity(rank, world, case, Setup(reshard))
