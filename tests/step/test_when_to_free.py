"""When backward may free and reduce: weights that several layers, calls or passes use, and inputs out of reach."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2._trace import listening
from tests.grouping.test_added import Shifted
from tests.support import api
from tests.support.cases import Setup, assert_case
from tests.support.models import Case, Three, mlp, rows
from tests.support.parity import assert_gradients, mesh_of
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
    assert_case(case, Setup(reshard))


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
    assert_case(Case(TiedInAndOutOfCheckpoint, rows(6)), Setup(reshard))


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
    assert_case(case, Setup(reshard), against=("alone",))


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
    assert_case(case, Setup(reshard))


def tied_below() -> Three:
    """Return layers of which the last, a unit, shares its weight with a layer of the root in the middle."""
    module = Three()
    module.last.weight = module.middle.weight
    return module


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_weight_tied_between_a_unit_and_the_one_around_it(rank, world, reshard):
    """The unit's post-backward freed the weight, which the root's layer below still needed to pass its gradient on:
    "out of bounds for storage of size 0". Found by a random plan."""
    case = Case(tied_below, rows(8), lambda model: [model.last], torch_takes_it=False)
    assert_case(case, Setup(reshard))


class Cache:
    """What transformers' layers leave their keys and values in: an object that goes through all of them."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []


class Attending(nn.Module):
    """A layer that leaves a result in the cache, and ``reads`` what the layer before left there, or does not."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.key, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, cache):
        before = cache.kept[-1] if self.reads and cache.kept else 0
        cache.kept.append(torch.tanh(self.key(x)))
        return torch.tanh(self.out(cache.kept[-1] + self.key.weight.detach().sum() * before))


class WithCache(nn.Module):
    """Layers that share a cache, some of which read it."""

    def __init__(self, *reads: bool) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.ModuleList(Attending(reads=one) for one in reads)

    def forward(self, x):
        cache = Cache()
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, cache)
        return x + cache.kept[0]


@on_ranks(1, 2)
@pytest.mark.parametrize("reads", [(False,) * 3, (False, True, True), (True, False, True)])
def test_layers_that_share_a_cache(rank, world, reads):
    """Gradients are right whether a layer uses what an earlier one left in the object or not."""
    case = Case(lambda: WithCache(*reads), rows(6), lambda model: [*model.layers])
    assert_case(case, Setup(None), against=("alone",))


@api.fsdp2_only
@on_ranks(2)
def test_a_layer_that_shares_a_cache_is_freed_when_backward_leaves_it(rank, world):
    """With transformers' default ``use_cache=True`` every block stayed whole until the end of backward: the keys of
    earlier blocks came in through an object, where no hook can be put, so nothing was watched at all. Whether a layer
    reads what another has left there, as the second does, makes no difference."""
    torch.manual_seed(0)
    model = WithCache(False, True, False, False)
    for layer in (*model.layers, model):
        api.ours.fully_shard(layer, mesh=mesh_of(world))
    events: list[str] = []
    for _ in range(2):
        loss = model(torch.ones(2, 6)).sum()
        events.clear()
        with listening(lambda event, name: events.append(f"{event} {name}")):
            loss.backward()
        # Freed as backward leaves it, before the layer two further down is entered.
        for layer, below in (("layers.3", "layers.1"), ("layers.2", "layers.0"), ("layers.1", "layers.0")):
            assert events.index(f"reshard {layer}") < events.index(f"pre_backward {below}"), events


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("option", ["ignored_params", "replicated_params"])
def test_a_group_stays_for_the_backward_of_others(rank, world, option):
    """Of a unit's parameters some are ignored, or on another mesh. The group of the others was freed when its own
    gradients were finished, although the backward of the first still read it: a crash."""
    torch.manual_seed(0)
    alone = Shifted()
    alone.shift = nn.Parameter(torch.full((5,), 3.0))  # which backward needs after its own gradient
    module = copy.deepcopy(alone)
    api.ours.fully_shard(module, mesh=mesh_of(world), **{option: set(module.inner.parameters())})
    for one in (module, alone):
        one(torch.ones(2, 3)).square().sum().backward()
    assert_gradients(module, alone)
