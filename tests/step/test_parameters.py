"""Training is right for parameters of every ordinary kind, and they look as promised."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import parametrize

import fsdp2
from tests.support import api
from tests.support.cases import (
    CASES,
    PARAMETERS,
    TRANSFERS,
    Setup,
    assert_case,
    build,
    build_sharded,
    chunk,
    parametrize_cases,
)
from tests.support.parity import assert_gradients, beside_one_process, mesh_of, sharded, stack
from tests.support.pool import on_ranks

transfers = pytest.mark.parametrize("transfer", TRANSFERS)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@on_ranks(1, 2, 4)
@parametrize_cases(*PARAMETERS)
def test_training_is_right(rank, world, case):
    """It equals a single process and torch's fully_shard."""
    assert_case(case, Setup())


@on_ranks(3)
@parametrize_cases("uneven", "smaller_than_world", "channels_last", "tied")
def test_training_is_right_on_three_ranks(rank, world, case):
    """A world size that is no power of two."""
    assert_case(case, Setup(reshard_after_forward=True))


@on_ranks(2)
@parametrize_cases("uneven", "channels_last", "non_contiguous", "tied", "frozen", "lstm", "buffers", "scalars")
def test_training_is_right_in_mixed_precision(rank, world, case):
    """Casting the parameters keeps what is special about them."""
    assert_case(case, Setup(policy=BF16))


@on_ranks(1, 2, 4)
@parametrize_cases(*(name for name in PARAMETERS if name != "batch_norm"))
def test_shards_are_chunks_and_full_parameters_are_the_originals(rank, world, case):
    """A shard is a ``torch.chunk`` piece; unsharding gives back values, dtypes, strides and requires_grad."""
    original = dict(build(CASES[case]).named_parameters())
    module = build_sharded(case, world)
    for name, parameter in module.named_parameters():
        expected = original[name]
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, DTensor), name
        assert parameter.placements == (Shard(0) if expected.ndim else Replicate(),)
        assert parameter.device_mesh == mesh_of(world)
        assert (parameter.shape, parameter.dtype) == (expected.shape, expected.dtype)
        assert parameter.requires_grad == expected.requires_grad
        local = parameter.to_local()
        if expected.ndim:
            assert torch.equal(local, chunk(expected.detach(), 0, rank, world)), name
        assert local.is_contiguous() or not expected.is_contiguous()
    for unit in module.modules():
        if isinstance(unit, api.ours.FSDPModule):
            unit.unshard()
    full = dict(module.named_parameters())
    assert full.keys() == original.keys()
    for name, expected in original.items():
        assert not isinstance(full[name], DTensor), name
        assert torch.equal(full[name], expected), name
        # empty_like keeps strides except gaps, which a parameter of its own has no reason to keep
        assert full[name].stride() == torch.empty_like(expected).stride(), name
        assert full[name].requires_grad == expected.requires_grad, name


@on_ranks(2, 4)
@parametrize_cases("uneven", "smaller_than_world", "channels_last", "three_dims", "scalars")
def test_full_tensor_and_redistribute(rank, world, case):
    """The shards are ordinary DTensors to everybody else."""
    original = dict(build(CASES[case]).named_parameters())
    module = build_sharded(case, world)
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter.full_tensor(), original[name]), name
        assert torch.equal((parameter * 2).full_tensor(), original[name] * 2), name


@api.fsdp2_only
@on_ranks(2)
def test_attributes_are_kept(rank, world):
    """Python attributes of the original are on the shard and on the full parameter."""
    module = nn.Linear(4, 4)
    module.weight.sequence_parallel = True
    module.weight.tags = {"name": "w"}
    api.ours.fully_shard(module, mesh=mesh_of(world))
    assert module.weight.tags == {"name": "w"}
    module.weight.late = 3
    module.unshard()
    assert not isinstance(module.weight, DTensor)
    assert module.weight.sequence_parallel is True and module.weight.tags == {"name": "w"}


@on_ranks(2)
def test_gradients_look_like_their_shards(rank, world):
    """A gradient has its shard's dtype, placements and contiguity, under mixed precision too."""
    module = sharded(lambda: nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), mp_policy=BF16)
    module(torch.randn(2, 3)).sum().backward()
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor) and gradient.dtype == parameter.dtype == torch.float32, name
        assert gradient.placements == parameter.placements and gradient.shape == parameter.shape
        assert gradient.to_local().shape == parameter.to_local().shape
        assert gradient.is_contiguous() and gradient.to_local().is_contiguous()


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("frozen", ["before", "between", "until backward"])
@transfers
def test_requires_grad_changed_between_forward_and_backward(rank, world, reshard, frozen, transfer):
    """PEFT freezes adapters while a reference model computes between a forward and its backward. Backward raised a
    KeyError about a weight that was frozen there: autograd calls its hooks, but makes no gradient."""
    module, alone = beside_one_process(partial(stack, 4), reshard_after_forward=reshard)
    module.set_transfer_sizes(**TRANSFERS[transfer])
    for step in range(6):
        for one in (module, alone):
            layer = one[step % 3]
            layer.weight.requires_grad_(frozen != "before")
            output = one(torch.ones(2, 4))
            layer.weight.requires_grad_(frozen == "before")
            if frozen == "until backward":
                with torch.no_grad():
                    one(torch.ones(2, 4))
                layer.weight.requires_grad_(True)
            output.square().sum().backward()
            layer.weight.requires_grad_(True)
        assert_gradients(module, alone, step)
        for one in (module, alone):
            one.zero_grad()


LOOKS = {
    "reset_iter_state": lambda module: module.reset_iter_state(),
    "to": lambda module: module.to("cpu"),
    "state_dict": lambda module: module.state_dict(),
    "deepcopy": lambda module: copy.deepcopy(module)(torch.ones(2, 4)),
    "summon": lambda module: summon(module),
}


def summon(module):
    """Look at full parameters."""
    with fsdp2.summon_full_params(module):
        pass


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("freeze", [True, False])
def test_requires_grad_changed_before_shards_are_looked_at(rank, world, look, layers, freeze):
    """Adapters are trained first and the rest later. Where ``reset_iter_state()`` saw the change before a forward did,
    gradients were sent as planned before: weights were freed that backward still had to read."""
    module, alone = beside_one_process(partial(stack, 4), lambda module: [])
    for change in (freeze, not freeze, freeze):
        for one in (module, alone):
            one[:layers].requires_grad_(change)
        LOOKS[look](module)
        for one in (module, alone):
            one(torch.ones(2, 4)).square().sum().backward()
        assert_gradients(module, alone)
        for one in (module, alone):
            one.zero_grad()


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("plain", [False, True])
def test_a_gradient_that_was_made_whole_is_not_added_to(rank, world, plain):
    """A backward added pieces to what a metric had made whole: sizes did not match, or other elements were summed. To
    a plain tensor it was "'Tensor' object has no attribute '_local_tensor'"."""
    module = sharded()
    module(torch.ones(2, 8)).sum().backward()
    parameter = module[0].weight
    whole = parameter.grad.redistribute(placements=[Replicate()])
    parameter.grad = whole.to_local() if plain else whole
    with pytest.raises(RuntimeError, match=r"0\.weight: a backward adds to its \.grad; got a (plain|.*Replicate)"):
        module(torch.ones(2, 8)).sum().backward()
    module.reset_iter_state()
    module(torch.ones(2, 8)).sum().backward()


@api.fsdp2_only
@on_ranks(2)
def test_a_hook_of_a_parameter_that_is_frozen_while_it_is_sharded(rank, world):
    """A tensor that needs no gradient takes no hook, so it was left out, and missing when the parameter was trained."""
    module, calls = nn.Linear(8, 8), []
    module.weight.register_hook(lambda grad: calls.append(1) or grad * 0)
    module.weight.requires_grad_(False)
    api.ours.fully_shard(module, mesh=mesh_of(world))
    assert not module.weight.requires_grad
    module.weight.requires_grad_(True)
    module(torch.ones(2, 8)).sum().backward()
    assert calls and not module.weight.grad.full_tensor().any() and module.bias.grad.full_tensor().any()


@api.fsdp2_only
@on_ranks(1, 2)
@transfers
def test_a_hook_is_removed_after_sharding(rank, world, transfer):
    """Logging for the first steps only: the handle that ``register_hook`` had returned before sharding removed the hook
    of the parameter that was no more, and the shard's went on multiplying gradients without a word. Until then it runs
    once in a backward, with the sharded gradient in place."""
    model = nn.Linear(4, 4, bias=False)
    seen = []
    handles = [model.weight.register_hook(lambda grad: grad * 3)]
    handles.append(model.weight.register_post_accumulate_grad_hook(lambda shard: seen.append(shard.grad.placements)))
    api.ours.fully_shard(model, mesh=mesh_of(world))
    model.set_transfer_sizes(**TRANSFERS[transfer])
    for factor in (3.0, 1.0):
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 4), 2 * factor))
        for handle in handles:
            handle.remove()
    assert seen == [(Shard(0),)]


class Added(nn.Module):
    """What PEFT registers around each forward of a layer whose parameter has an adapter."""

    def __init__(self, factor: nn.Parameter) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + torch.outer(self.factor, self.factor)


class Adapted(nn.Module):
    """A layer with an adapter of its weight, as ``target_parameters`` of PEFT has for stacked experts."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.base, self.factor, self.writes = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), writes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.base.weight.mul_(2)
        parametrize.register_parametrization(self.base, "weight", Added(self.factor))
        output = self.base(inputs)
        parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)
        return output


@api.fsdp2_only
@on_ranks(1, 2)
def test_a_parametrization_for_the_length_of_a_forward(rank, world):
    """PEFT parametrizes experts in each forward. torch then sets the weight to itself, which counts as a change in
    place: the forward was refused, because a change would be lost. A real change is still refused."""
    module, alone = beside_one_process(lambda: nn.Sequential(Adapted(), Adapted()))
    inputs = torch.ones(2, 4)
    for step in range(2):
        for one in (module, alone):
            with torch.no_grad():
                one(inputs)
            one.zero_grad()
            one(inputs).square().mean().backward()
        assert_gradients(module, alone, step)
    writing, _ = beside_one_process(lambda: Adapted(writes=True), lambda _: [])
    with pytest.raises(RuntimeError, match=r"base\.weight: the forward changed it in place"):
        writing(inputs)
