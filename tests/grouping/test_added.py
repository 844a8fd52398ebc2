"""Parameters that appear on a sharded module: made of shards, tied, or in another way than the unit can manage."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

import fsdp2
from fsdp2._trace import listening
from fsdp2.autograd import hooks
from tests.support import api
from tests.support.counting import Collectives, gathers
from tests.support.fake import fake_mesh
from tests.support.inside import options_of
from tests.support.parity import (
    Run,
    assert_gradients,
    assert_parity,
    beside_one_process,
    mesh_1d,
    mesh_of,
    shard_each,
    stack,
    step_alike,
)
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Scaled(nn.Module):
    """A linear layer whose weight is scaled by one that may be added later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = getattr(self, "scale", 1)
        return nn.functional.linear(x, self.linear.weight * scale, self.linear.bias)


def sharded(**options) -> tuple[nn.Module, nn.Module]:
    """Such a layer as one unit, and the same without sharding."""
    return beside_one_process(Scaled, lambda module: (), **options)


@on_ranks(1, 2)
@pytest.mark.parametrize("asked", ["unshard", "use_weights"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_parameter_that_is_gathered_before_the_next_forward(rank, world, trained, asked):
    """The groups to gather were listed before the unit took the parameter in, so it alone was a shard: an error about
    "mixed torch.Tensor and DTensor" where it was computed with."""
    module, alone = sharded()
    if trained:
        module(torch.ones(2, 3)).sum().backward()
    for one in (module, alone):
        one.scale = nn.Parameter(torch.arange(3.0))
    if asked == "unshard":
        module.unshard()
    with torch.no_grad(), fsdp2.use_weights(module) if asked == "use_weights" else nullcontext():
        torch.testing.assert_close(module.linear.weight * module.scale, alone.linear.weight * alone.scale)
    module.reshard()
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("before", [False, True])
def test_a_parameter_made_of_a_shard(rank, world, before):
    """``nn.Parameter(torch.ones_like(shard))`` lies on the unit's own mesh. It was taken for a tensor-parallel one:
    "Cannot concatenate overlapping meshes", or "Invariant encountered: value was None" in the forward."""
    module, alone = sharded()
    inputs = torch.ones(2, 3)
    if not before:
        module(inputs).sum().backward()
        module.zero_grad()
    module.register_parameter("scale", nn.Parameter(2 * torch.ones_like(module.linear.weight)))
    alone.register_parameter("scale", nn.Parameter(2 * torch.ones_like(alone.linear.weight)))
    train_both((module, alone), inputs)
    assert all(p.placements == module.linear.weight.placements for p in module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("when", ["first forward", "later"])
def test_a_parameter_that_is_refused_is_refused_again(rank, world, when):
    """A loop that goes on after the error may not train with a parameter that each rank keeps for itself."""
    module, _ = sharded()
    if when == "later":
        module(torch.ones(2, 3)).sum().backward()
    whole = module.linear.weight.detach().redistribute(placements=[Replicate()])
    module.register_parameter("scale", nn.Parameter(whole))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"scale: got a DTensor on .* Register it before fully_shard"):
            module(torch.ones(2, 3))


class Refused(ValueError):
    """An exception of the user's own, from ``shard_placement_fn``."""


@on_ranks(2)
@pytest.mark.parametrize("error", [Refused, AssertionError])
def test_a_parameter_that_one_rank_refuses(rank, world, error):
    """``shard_placement_fn`` raises on one rank for a parameter that was added before the first forward. The other
    rank waited until that process ended, and the first one went on with a root whose units were not prepared."""
    odd = True

    def placement(parameter):
        if odd and rank == 0 and parameter.shape == (1,):
            raise error("no place for scale")

    build = lambda: nn.Sequential(Scaled(), nn.Linear(5, 5))
    module, alone = beside_one_process(build, shard_placement_fn=placement)
    for one in (module, alone):
        one[0].register_parameter("scale", nn.Parameter(torch.full((1,), 2.0)))
    expected = (error, "no place for scale") if rank == 0 else (RuntimeError, f"rank 0: {error.__name__}: no place")
    with pytest.raises(expected[0], match=expected[1]):
        module(torch.ones(2, 3))
    odd = False  # both go on from a first forward
    torch.testing.assert_close(module(torch.ones(2, 3)), alone(torch.ones(2, 3)))


@on_ranks(2)
def test_weight_norm_after_sharding(rank, world):
    """It takes the sharded weight away and registers two others: refused by name, in place of an internal text."""
    module, _ = sharded()
    weight_norm(module.linear)
    with pytest.raises((ValueError, RuntimeError), match="linear.*(Register it|apply them) before fully_shard"):
        module(torch.ones(2, 3))


TAKES_AWAY: dict[str, Callable[[nn.Module], object]] = {
    "pruning": lambda linear: prune.identity(linear, "weight"),
    "deleted": lambda linear: delattr(linear, "bias"),
    "none": lambda linear: setattr(linear, "bias", None),
}


@on_ranks(2)
@pytest.mark.parametrize("what", TAKES_AWAY)
@pytest.mark.parametrize("trained", [False, True])
def test_a_parameter_that_is_taken_away(rank, world, what, trained):
    """Pruning moves the parameter to another name, and computes of the shard what it puts in its place. The error
    advised ``load_state_dict``, and called the parameter "weight", of which a model has hundreds. What it advises now
    works."""
    module = stack()
    shard_each(module, api.ours)
    if trained:
        module(torch.ones(2, 8)).sum().backward()
    TAKES_AWAY[what](module[1])
    name = "weight" if what == "pruning" else "bias"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^1\.{name}: .* is not on its module any more.* before fully_shard"):
            module(torch.ones(2, 8))
    module, alone = (changed(TAKES_AWAY[what]) for _ in range(2))
    shard_each(module, api.ours)
    for one in (module, alone):
        one(torch.ones(2, 8)).square().sum().backward()
    assert_gradients(module, alone)


def changed(change: Callable[[nn.Module], object]) -> nn.Sequential:
    """Return layers of which one is changed; a bias that is missing is registered as None."""
    torch.manual_seed(0)
    module = stack()
    change(module[1])
    if "bias" not in module[1]._parameters:
        module[1].register_parameter("bias", None)
    return module


class Half(nn.Module):
    """A parametrization without an inverse, so that it takes the parameter itself."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def train_both(both: Sequence[nn.Module], inputs: torch.Tensor, steps: int = 2) -> None:
    """Train a sharded module and the same in one process, and assert that they have the same parameters then."""
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in both]
    for _ in range(steps):
        for one, optimizer in zip(both, optimizers):
            optimizer.zero_grad()
            one(inputs).square().mean().backward()
            optimizer.step()
    module, alone = both
    for (name, got), (own, expected) in zip(module.named_parameters(), alone.named_parameters(), strict=True):
        assert name == own
        torch.testing.assert_close(got.full_tensor(), expected)


@on_ranks(2, 4)
@pytest.mark.parametrize("where", ["0", "1.0"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_a_parametrization_that_comes_and_goes(rank, world, where, left, before):
    """It moves the parameter to a module of its own and back. After ``fully_shard`` it was refused, and one of a unit
    itself could not be removed: "type object 'FSDPParametrizedLinear' has no attribute 'weight'"."""
    halved = partial(parametrize.register_parametrization, tensor_name="weight", parametrization=Half())

    both = []  # not copies of each other: torch lets a copy share the class that has the property
    for _ in range(2):
        torch.manual_seed(0)
        both.append(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)))
        if before:
            halved(both[-1].get_submodule(where))
    shard_each(both[0], api.ours)
    inputs = torch.ones(2, 4)
    train_both(both, inputs)
    linears = [one.get_submodule(where) for one in both]
    for linear in () if before else linears:
        halved(linear)
    train_both(both, inputs)
    assert parametrize.type_before_parametrizations(linears[0]) is type(both[0][2]) or where != "0"
    states = [one.state_dict() for one in both]
    assert list(states[0]) == list(states[1])
    both[0].load_state_dict({name: value * 2 for name, value in states[1].items()})
    both[1].load_state_dict({name: value * 2 for name, value in states[1].items()})
    train_both(both, inputs)
    for linear in linears:
        parametrize.remove_parametrizations(linear, "weight", leave_parametrized=left)
    train_both(both, inputs)
    assert type(linears[0]) is (type(both[0][2]) if where == "0" else nn.Linear)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize("after", ["forward", "backward"])
def test_a_parametrization_of_each_forward(rank, world, reshard, after):
    """As PEFT's ``target_parameters`` around a sharded model. What is removed between forward and backward leaves the
    full parameter on its module, whose memory backward frees: reading it ended the process. What is removed is freed.
    """
    both = beside_one_process(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), reshard_after_forward=reshard)
    left = []
    for _ in range(3):
        losses = []
        for one in both:
            parametrize.register_parametrization(one[0], "weight", Half())
            losses.append(one(torch.ones(2, 4)).square().mean())
            left.append(weakref.ref(one[0].parametrizations.weight))
        if after == "backward":
            for loss in losses:
                loss.backward()
        for one in both:
            parametrize.remove_parametrizations(one[0], "weight", leave_parametrized=False)
        if after == "forward":
            for loss in losses:
                loss.backward()
        assert_gradients(*both)
        for got, expected in zip(*(one.parameters() for one in both), strict=True):
            torch.testing.assert_close(got.full_tensor(), expected)
        for one in both:
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
    del losses
    both[0](torch.ones(2, 4))
    gc.collect()
    assert [one() for one in left] == [None] * 6


@on_ranks(2)
def test_a_parametrization_from_before_sharding_is_removed_before_the_backward(rank, world):
    """The module gets its parameter back while it is full, at a place where no shard ever was."""

    def build() -> nn.Module:
        linear = nn.Linear(4, 4)
        parametrize.register_parametrization(linear, "weight", Half())
        return nn.Sequential(linear, nn.Tanh())

    both = [beside_one_process(build, lambda module: [], reshard_after_forward=False)[0], build()]
    both[1].load_state_dict({name: value.full_tensor() for name, value in both[0].state_dict().items()})
    losses = [one(torch.ones(2, 4)).square().mean() for one in both]
    for one, loss in zip(both, losses):
        parametrize.remove_parametrizations(one[0], "weight", leave_parametrized=False)
        loss.backward()
    assert_gradients(*both)
    for one in both:
        torch.optim.SGD(one.parameters(), lr=0.1).step()
        one.zero_grad()
    train_both(both, torch.ones(2, 4))


@on_ranks(2)
def test_weight_norm_of_a_unit_is_removed(rank, world):
    """As before a vocoder is exported. What it leaves is another parameter, computed of shards."""
    both = []
    for _ in range(2):
        torch.manual_seed(0)
        both.append(nn.Sequential(weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)))
    shard_each(both[0], api.ours)
    train_both(both, torch.ones(2, 4))
    for one in both:
        parametrize.remove_parametrizations(one[0], "weight")
    train_both(both, torch.ones(2, 4))


class Untied(nn.Module):
    """An embedding and a head whose weights a test ties. It uses a second head, or a scale, from when it gets them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 6, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        extra = getattr(self, "extra", None)
        more = 0 if extra is None else extra(hidden.sin())
        return (self.head(hidden) + more) * getattr(self, "scale", torch.ones(1)).mean()


def tied() -> Untied:
    """Return one whose weights are tied."""
    module = Untied()
    module.head.weight = module.embed.weight
    return module


def weight(number: float = 0) -> nn.Parameter:
    """Return a new weight."""
    return nn.Parameter((torch.arange(24.0).view(6, 4) + number).sin())


# ---- ties that change, each yielding the number of tokens whenever the model is to be trained ----


def tie_head(one: Any) -> Iterator[int]:
    """``model.tie_weights()``: "replaced on its module between forward and backward"."""
    one.head.weight = one.embed.weight
    yield 6


def tie_embedding(one: Any) -> Iterator[int]:
    """The other way round."""
    one.embed.weight = one.head.weight
    yield 6


def end(one: Any) -> Iterator[int]:
    """The head gets a weight of its own: "tied, and its modules show different ones". torch trains on with wrong
    results. The tie may come back, and end again with the weight that the head had before."""
    one.head.weight = weight()
    yield 6
    own, one.head.weight = one.head.weight, one.embed.weight
    yield 6
    one.head.weight = own
    yield 6


def end_at_both(one: Any, first: str = "embed", last: str = "head") -> Iterator[int]:
    """As when a checkpoint that has two is put in place by hand: "tied, and its modules show different ones", with the
    advice to untie between two steps, which had been done. One of the modules may be gone, too."""
    one.get_submodule(first).weight, one.get_submodule(last).weight = weight(), weight(1)
    yield 6
    one.head.weight = one.embed.weight
    torch.manual_seed(1)
    setattr(one, last, nn.Linear(4, 6, bias=False) if last == "head" else nn.Embedding(6, 4))
    one.get_submodule(first).weight = weight(2)
    yield 6


def resize(one: Any, first: str = "embed", last: str = "head") -> Iterator[int]:
    """transformers' ``resize_token_embeddings`` puts a new module in the place of the embedding, and ties the head to
    it: "tied, and its modules show different ones", although the model had no other any more. The smaller one may come
    back, and trains then, too."""
    before = getattr(one, first)
    torch.manual_seed(1)
    larger = nn.Embedding(8, 4) if first == "embed" else nn.Linear(4, 8, bias=False)
    for module, size in ((larger, 8), (before, 6)):
        setattr(one, first, module)
        getattr(one, last).weight = module.weight
        yield size


def add_head(one: Any) -> Iterator[int]:
    """A second head for the token after the next shares the embedding of its unit: its forward got a shard, "mixed
    torch.Tensor and DTensor"."""
    one.extra = nn.Linear(4, 6, bias=False)
    one.extra.weight = one.embed.weight
    yield 6


def add_name(one: Any) -> Iterator[int]:
    """A parameter is registered a second time, on another module."""
    one.scale = one.norm.weight
    yield 6


TIES: dict[str, tuple[Callable[[], Untied], Callable[[Any], Iterator[int]]]] = {
    "begins": (Untied, tie_head),
    "begins the other way": (Untied, tie_embedding),
    "ends": (tied, end),
    "ends at both places": (tied, end_at_both),
    "ends at both places, head first": (tied, partial(end_at_both, first="head", last="embed")),
    "gets another embedding": (tied, resize),
    "gets another head": (tied, partial(resize, first="head", last="embed")),
    "at a new place": (Untied, add_head),
    "of another layer": (Untied, add_name),
}
UNITS = ((), ("embed",), ("head",), ("embed", "head"))
OTHER_UNITS = ((), ("norm",), ("embed", "norm"))
TIES_IN_UNITS = [(t, units) for t in TIES for units in (OTHER_UNITS if t == "of another layer" else UNITS)]


@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize(("tie", "units"), TIES_IN_UNITS)
@pytest.mark.parametrize("when", ["at once", "trained", "evaluated"])
def test_a_tie_after_sharding(rank, world, when, tie, units):
    """It begins, ends or moves in whichever units the places are; a copy and state dicts follow. Where only one of the
    places was in a unit of its own, and the tie came back, or ended at both before the first forward, that unit or the
    root looked for the weight that had gone: "the sharded parameter was replaced on its module"."""
    build, change = TIES[tie]
    both = module, alone = beside_one_process(build, lambda module: map(module.get_submodule, units))
    tokens = torch.arange(6).view(2, 3)
    if when == "trained":
        train_both(both, tokens)
    elif when == "evaluated":
        with torch.no_grad():
            module(tokens)
    for number, (size, _) in enumerate(zip(*map(change, both), strict=True)):
        tokens = torch.arange(size).view(2, -1)
        train_both(both, tokens)
        for one in (module, copy.deepcopy(module)) if number == 0 else (module,):
            with torch.no_grad():
                torch.testing.assert_close(one(tokens), alone(tokens))
    states = [one.state_dict() for one in both]
    assert list(states[0]) == list(states[1])
    for one in both:
        one.load_state_dict({name: value / 2 for name, value in states[1].items()})
    train_both(both, tokens)


@on_ranks(2)
def test_a_weight_that_moves_to_another_layer(rank, world):
    """Its own layer is gone, so that the two of it and of the one that it replaces were at the same places."""
    module, alone = beside_one_process(stack, lambda module: ())
    for one in (module, alone):
        one(torch.ones(2, 8)).sum().backward()
        one.zero_grad()
        one[0].weight, one[1] = one[1].weight, nn.Identity()
        one(torch.ones(2, 8)).square().mean().backward()
    assert_gradients(module, alone)


@on_ranks(2)
@pytest.mark.parametrize("trained", [False, True])
def test_an_original_that_comes_back(rank, world, trained):
    """Somebody has kept the parameter from before sharding, and puts it back. The unit knows it, and takes its value
    over all the same, as that of any whole parameter."""
    alone = stack()
    module = copy.deepcopy(alone)
    original = module[0].weight
    shard_each(module, api.ours, mesh=mesh_of(world))
    if trained:
        train_both((module, alone), torch.ones(2, 8))
    with torch.no_grad():
        for one in (original, alone[0].weight):
            one.copy_(torch.arange(64.0).view(8, 8) / 64)
    module[0].weight = original
    train_both((module, alone), torch.ones(2, 8))
    assert isinstance(module[0].weight, DTensor)


class Scaling(nn.Module):
    """Scales by a parameter that it may get later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * getattr(self, "scale", 1)


def test_a_parameter_of_a_module_that_had_none(caplog):
    """The module was added after ``fully_shard`` too, and a unit sees only what is registered on modules it knows. Its
    log names the unit and the parameter."""
    with fake_mesh(2) as mesh, caplog.at_level("INFO", "fsdp2"):
        module = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
        shard_each(module, api.ours, mesh=mesh)
        module[0].append(Scaling())
        module(torch.ones(2, 4))
        module[0][1].scale = nn.Parameter(torch.ones(4))
        module(torch.ones(2, 4))
    assert isinstance(module[0][1].scale, DTensor)
    assert "0: adopted parameters added after fully_shard: 1.scale" in caplog.messages


@on_ranks(2)
def test_two_ties_and_a_new_parameter_at_once(rank, world):
    """Each is found in the same look: entries were compared by their tensors, which have no single truth value."""
    torch.manual_seed(0)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Untied(), Untied()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            scale = getattr(self, "scale", None)
            out = self.one(tokens) + self.other(tokens)
            return out if scale is None else out * scale

    module, alone = beside_one_process(Both, lambda module: ())
    tokens = torch.arange(6).view(2, 3)
    module(tokens).sum().backward()
    for one in (module, alone):
        one.zero_grad()
        one.one.head.weight, one.other.head.weight = one.one.embed.weight, one.other.embed.weight
        one.scale = nn.Parameter(torch.arange(6.0))
        one(tokens).square().mean().backward()
    assert len(list(module.parameters())) == len(list(alone.parameters())) == 7
    assert_gradients(module, alone)


@on_ranks(2)
@pytest.mark.parametrize("has_others", [True, False])
def test_what_was_set_before_holds_for_added_parameters(rank, world, has_others):
    """They got the options of the ``fully_shard`` call: their gradients were divided by the number of ranks, silently,
    where ``set_gradient_divide_factor`` had asked for the sum. Those of a unit without parameters of its own, which has
    no group to remember that, still did."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for unit in (module,) if has_others else (*module, module):
        api.ours.fully_shard(unit, mesh=mesh_of(world))
    module.set_gradient_divide_factor(1.0)
    module(torch.ones(1, 4)).sum().backward()
    module.append(nn.Linear(4, 4))
    module(torch.ones(1, 4)).sum().backward()
    assert torch.equal(module[2].bias.grad.full_tensor(), torch.full((4,), float(world)))


def test_transfer_sizes_that_were_set_before_hold_for_added_parameters():
    """In a unit without parameters of its own they were forgotten, which no result shows: its gradients left in one
    chunk."""
    with fake_mesh(2) as mesh:
        module = nn.Sequential(nn.Linear(8, 8))
        for unit in (module[0], module):
            fsdp2.fully_shard(unit, mesh=mesh)
        module.set_transfer_sizes(chunk_bytes=1)
        module.set_transfer_sizes(direct_param_bytes=2, recurse=False)
        module.append(nn.Linear(8, 8))
        module(torch.ones(1, 8))
        sizes = options_of(module).sizes
        assert (sizes.chunk_bytes, sizes.direct_param_bytes) == (1, 2)
        assert options_of(module[0]).sizes.chunk_bytes == 1


@on_ranks(2)
@pytest.mark.parametrize("made", ["added", "tied", "copied"])
def test_a_group_of_reductions_that_was_set_before_holds(rank, world, made):
    """Gradients of added parameters, of one that was tied, and of a deep copy went over the group of gathers again."""
    module, _ = beside_one_process(partial(stack, 4), lambda module: module[:1])
    module.set_separate_reduce_scatter_group()
    module(torch.ones(1, 4)).sum().backward()
    if made == "added":
        module.append(nn.Linear(4, 4))
    elif made == "tied":
        module[1].weight = module[0].weight
    else:
        module = copy.deepcopy(module)
    with Collectives() as seen:
        module(torch.ones(1, 4)).sum().backward()
    gathers, reductions = ({group.group_name for group in seen.groups[kind]} for kind in ("gather", "reduction"))
    assert not gathers & reductions


def insert(module: nn.Module) -> None:
    """Containers of torch insert without a registration."""
    module[0].insert(1, nn.Linear(8, 8))
    module.insert(1, nn.Linear(8, 8))


def append_deep(module: nn.Module) -> None:
    """A child that has no parameters yet, below which one appears later."""
    module[0].append(nn.Sequential(nn.Tanh()))


def append_deeper(module: nn.Module) -> None:
    """That one."""
    module[0][-1].append(nn.Linear(8, 8))


def insert_and_delete(module: nn.Module) -> None:
    """There are as many children as before, and deleting makes another dictionary of them."""
    module.insert(0, nn.Linear(8, 8))
    del module[2]


def append_empty(module: nn.Module) -> None:
    """A container without children, into which one is inserted later."""
    module[0].append(nn.Sequential())


def insert_deep(module: nn.Module) -> None:
    """That one."""
    module[0][-1].insert(0, nn.Linear(8, 8))


@on_ranks(2)
@pytest.mark.parametrize(
    "changes",
    [
        (insert, None),
        (None, insert),
        (append_deep, append_deeper),
        (None, insert_and_delete),
        (append_empty, insert_deep),
    ],
)
def test_modules_added_without_a_registration(rank, world, changes):
    """Their parameters stayed as they were, and each rank trained its own: gradients were not averaged, silently. So it
    still was where as many modules were deleted, and in containers that had been empty: only children were counted."""

    def program(run: Run) -> None:
        for step, change in enumerate([*changes, None]):
            if change is not None:
                torch.manual_seed(step)
                change(run.module)
            run.optimizer = torch.optim.SGD(run.module.parameters(), lr=0.1)
            run.backward(step)
            run.update()

    build = lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    run = assert_parity(partial(shard_each, mesh=mesh_of(world)), build=build, program=program, against=("alone",))
    assert all(isinstance(parameter, DTensor) for parameter in run.module.parameters())


@on_ranks(1, 2)
def test_units_inserted_and_removed(rank, world):
    """An inserted unit was a root of its own: it did not follow what the model's root was told, and nothing of it was
    gathered ahead. The shards of a removed one stayed alive."""
    module, alone = beside_one_process(partial(stack, 4))

    def train() -> list[str]:
        seen: list[str] = []
        for one in (module, alone):
            one.zero_grad()
            loss = one(torch.ones(2, 4)).square().mean() + one(torch.full((2, 4), 0.5)).square().mean()
            with listening(lambda event, name: seen.append(f"{event} {name}")):
                loss.backward()
        assert_gradients(module, alone)
        return seen

    for _ in range(2):
        train()
    expected = train()
    block, removed = nn.Linear(4, 4), weakref.ref(module[0].weight)
    alone.append(copy.deepcopy(block))
    module.append(block)
    api.ours.fully_shard(block, mesh=mesh_of(world))
    del module[0], alone[0]
    for _ in range(2):
        train()
    assert train() == expected
    gc.collect()
    assert removed() is None
    removed = weakref.ref(module[0].weight)
    del module[0]
    with torch.no_grad():  # nothing but evaluations follows
        module(torch.ones(2, 4))
    gc.collect()
    assert removed() is None


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, False])
def test_a_unit_is_removed_before_the_backward_on_it(rank, world, reshard):
    """What it kept for a backward that never came stayed in memory as long as the unit, and the next backward of the
    model gathered it ahead. A backward that comes after all gathers it anew."""
    module, alone = beside_one_process(partial(stack, 4), reshard_after_forward=reshard)
    for one in (module, alone, module, alone):
        one(torch.ones(2, 4)).square().sum().backward()
        one.zero_grad()
    losses = [one(torch.ones(2, 4)).square().sum() for one in (module, alone)]
    taken = [module.pop(2), alone.pop(2)]
    gathered: list[str] = []
    with listening(lambda event, name: gathered.append(name) if event == "unshard" else None):
        for one in (module, alone):
            one(torch.ones(2, 4)).square().sum().backward()
    assert "2" not in gathered
    assert isinstance(taken[0].weight, DTensor)
    for loss in losses:
        loss.backward()
    assert_gradients(module, alone)
    assert_gradients(*taken)


@on_ranks(2)
def test_a_unit_is_inserted_after_a_backward_that_raised(rank, world):
    """Recovery ends the backward for other ranks, which had forgotten all passes because of the new unit."""
    module, alone = beside_one_process(partial(stack, 4))
    for one in (module, alone):
        one(torch.ones(2, 4)).square().sum().backward()
    with module[1].register_full_backward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
        module(torch.ones(2, 4)).square().sum().backward()
    block = nn.Linear(4, 4)
    alone.append(copy.deepcopy(block))
    module.append(api.ours.fully_shard(block, mesh=mesh_of(world)))
    with pytest.raises(RuntimeError, match="reset_iter_state"):
        module(torch.ones(2, 4))
    module.reset_iter_state()
    alone.zero_grad()
    step_alike(module, alone, lambda one: one(torch.ones(2, 4)).square().sum())


@on_ranks(1, 2)
def test_an_inserted_unit_that_is_refused_is_refused_again(rank, world):
    """The second forward took the units below for known, and computed with parameters on the meta device."""
    module, _ = beside_one_process(partial(stack, 4))
    module(torch.ones(2, 4)).sum().backward()
    with torch.device("meta"):
        module.append(nn.Linear(4, 4))
    api.ours.fully_shard(module[-1], mesh=mesh_of(world))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="should be materialized"):
            module(torch.ones(2, 4))
    module[-1].to_empty(device="cpu")
    module(torch.ones(2, 4)).sum().backward()


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_removed_unit_runs_by_itself_and_comes_back(rank, world, reshard):
    """It finds in its own forward that it was removed, and is a root from then on, until it is inserted again."""
    both = beside_one_process(partial(stack, 4), reshard_after_forward=reshard)
    taken: list[Any] = [model[1] for model in both]
    changes: list[Callable[[Any, Any], object]] = [
        lambda model, part: None,
        lambda model, part: model.pop(1),
        lambda model, part: model.insert(0, part),
    ]
    for number, change in enumerate(changes):
        for model, part in zip(both, taken):
            change(model, part)
        for models in (taken, both, taken) if number == 1 else (both, both):
            step_alike(*models, lambda one: one(torch.ones(2, 4)).square().mean())
    with pytest.raises(RuntimeError, match="must be called on the root"):
        taken[0].reset_iter_state()


@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_parameters_of_a_removed_module_are_not_gathered(rank, world, reshard):
    """Each head that had been replaced was gathered in each forward and backward, for ever. It may come back, also
    while a backward on it is still to come."""
    both = beside_one_process(partial(stack, 4), lambda module: [module[0]], reshard_after_forward=reshard)
    inputs = torch.ones(2, 4)

    def replace(new: nn.Module) -> list[nn.Module]:
        heads = [model[-1] for model in both]
        for model in both:
            model[-1] = copy.deepcopy(new)
        return heads

    def train() -> None:
        step_alike(*both, lambda model: model(inputs).square().mean())

    train()
    replace(nn.Linear(4, 4))
    train()
    gathered = gathers(train)
    for _ in range(3):
        replace(nn.Linear(4, 4))
        train()
    assert gathers(train) == gathered
    losses = [model(inputs).square().sum() for model in both]
    taken = replace(nn.Linear(4, 5))
    for model in both:
        model(inputs)
    for loss in losses:
        loss.backward()
    assert_gradients(*both)
    assert_gradients(*taken)
    assert isinstance(taken[0].weight, DTensor)
    train()
    for model, head in zip(both, taken):
        model[-1] = head
        head.zero_grad()
    train()
    assert gathers(train) == gathered


@on_ranks(1, 2)
@pytest.mark.parametrize("parametrized", [False, True])
@pytest.mark.parametrize("reshard", [None, False])
def test_a_layer_that_was_replaced_shows_its_parameters_no_more(rank, world, reshard, parametrized):
    """As a layer does that was parametrized just before, or whose memory was given back. Its unit, which has others
    left, said that parameters were missing, for ever."""
    both = beside_one_process(partial(stack, 4), lambda module: [], reshard_after_forward=reshard)
    torch.manual_seed(1)
    head = nn.Linear(4, 4)
    for number in range(3):
        if number == 1:
            for model in both:
                old, model[-1] = model[-1], copy.deepcopy(head)
                if parametrized:
                    parametrize.register_parametrization(old, "weight", nn.Tanh())
                else:
                    del old.weight
                old.bias = None
        step_alike(*both, lambda model: model(torch.ones(2, 4)).square().mean())


class Shifted(nn.Module):
    """Scales and shifts what a unit returns, by a parameter; either may be added later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = getattr(self, "shift", None)
        out = self.inner(x)
        return out if shift is None else out * shift.detach() + shift


@on_ranks(2)
@pytest.mark.parametrize("trained", [False, True])
def test_an_added_parameter_around_a_unit(rank, world, trained):
    """Backward needs it for the gradients of the unit below when its own gradient is finished: it was freed by then."""
    module, alone = beside_one_process(Shifted)
    loss = lambda one: one(torch.ones(2, 3)).square().mean()
    if trained:
        step_alike(module, alone, loss)
    for one in (module, alone):
        one.register_parameter("shift", nn.Parameter(torch.full((5,), 3.0)))
    step_alike(module, alone, loss)


@on_ranks(2)
def test_a_unit_that_is_inserted_below_a_parameter(rank, world):
    """The same for a unit that takes the place of a module without parameters."""
    torch.manual_seed(0)
    alone, linear = Shifted(), nn.Linear(3, 5)
    alone.inner = nn.Identity()
    alone.shift = nn.Parameter(torch.full((5,), 3.0))
    module = copy.deepcopy(alone)
    api.ours.fully_shard(module, mesh=mesh_of(world))
    module(torch.ones(2, 5)).sum().backward()
    module.zero_grad()
    module.inner, alone.inner = api.ours.fully_shard(copy.deepcopy(linear), mesh=mesh_of(world)), linear
    for one in (module, alone):
        one(torch.ones(2, 3)).square().sum().backward()
    assert_gradients(module, alone)


@api.fsdp2_only
def test_modules_that_are_built_beside_a_unit_do_not_count():
    """Units look for added parameters when the count of registrations has grown."""
    with fake_mesh(2) as mesh:
        api.ours.fully_shard(nn.Linear(2, 2), mesh=mesh)
        before = hooks.registrations
        nn.Linear(2, 2)
        assert hooks.registrations == before


@on_ranks(1, 2)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("hybrid", [False, True])
def test_a_plain_parameter_in_the_place_of_a_shard_on_the_meta_device(rank, world, trains, hybrid):
    """DoRA makes its magnitudes so, after a model was sharded on the meta device. The value was copied into the meta
    shard, which loses it, and the forward found "still on meta device"; a shard with memory is filled, so this one has
    to be made anew."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"replicated_params": {module[0].weight}} if hybrid else {}
    for unit in (*module, module):
        api.ours.fully_shard(unit, mesh=mesh_of(world), **options)
    calls: list[int] = []
    module[0].weight.register_hook(lambda grad: calls.append(1))
    alone = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    alone[0].weight.requires_grad_(trains)
    for layer, other in zip(module, alone):
        for name, value in other.named_parameters():
            value.data.copy_(torch.arange(float(value.numel())).view_as(value) / 8)
            setattr(layer, name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad))
            getattr(layer, name).tag = name
    optimizers = [torch.optim.SGD([p for p in one.parameters() if p.requires_grad], 0.1) for one in (module, alone)]
    for _ in range(2):
        for one, optimizer in zip((module, alone), optimizers):
            one(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
            if one is module:
                trained = [p for p, q in zip(module.parameters(), alone.parameters()) if q.requires_grad]
                assert (all(isinstance(p.grad, DTensor) for p in trained) and module[0].weight.grad is None) or trains
            optimizer.zero_grad()
    for got, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected)
        assert not got.is_meta and got.requires_grad == expected.requires_grad
    assert module[1].bias.tag == "bias" and bool(calls) == trains


# ---- gradients that parameters bring with them ----


def warned(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if "gradient" in str(warning.message)]


@on_ranks(2)
@pytest.mark.parametrize("policy", [None, {nn.Linear}])
def test_gradients_from_before_the_call(rank, world, policy):
    """They were dropped without a word. One warning names them, in the module that the call was given.

    Warnings may be errors: everything is sharded by then. Ignored parameters keep theirs.
    """
    module, clean = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)) for _ in range(2))
    module(torch.ones(2, 3)).sum().backward()
    ignored = {module[2].bias}
    options = {"mesh": mesh_1d(), "policy": policy, "ignored_params": ignored}
    with pytest.warns(UserWarning, match="0.weight, 0.bias, 1.weight and 2 more: got a gradient from before the call"):
        fsdp2.fully_shard(module, **options)
    grads = {name: param.grad for name, param in module.named_parameters()}
    assert [name for name, grad in grads.items() if grad is not None] == ["2.bias"]
    clean(torch.ones(2, 3)).sum().backward()
    clean.zero_grad()  # the remedy
    assert not warned(lambda: fsdp2.fully_shard(clean, mesh=mesh_1d(), policy=policy))


@on_ranks(2)
@pytest.mark.parametrize("how", ["added", "replaced"])
def test_gradients_of_parameters_that_are_added(rank, world, how):
    module, _ = sharded()
    if how == "added":
        scale = module.scale = nn.Parameter(torch.ones(5, 3))
    else:
        scale = module.linear.weight = nn.Parameter(torch.ones(5, 3))
    scale.sum().backward()
    name = "scale" if how == "added" else "linear.weight"
    (text,) = warned(lambda: module(torch.ones(2, 3)).sum().backward())
    assert f"fully_shard: {name}: got a gradient" in text
    assert not warned(lambda: module(torch.ones(2, 3)).sum().backward())
