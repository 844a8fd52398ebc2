"""``use_full_params``: the state that an optimizer has is kept when its parameters are sharded, saved and loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fsdp2
from tests.optim.test_full_params import (
    OPTIMIZERS,
    assert_equal,
    assert_same_state,
    rows,
    shard,
    stack,
    step_both,
    train,
    whole,
)
from tests.optim.test_offload import Pairs
from tests.support.counting import Collectives
from tests.support.parity import assert_weights, mesh_1d, placed_like
from tests.support.pool import on_ranks


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Shampoo"])
@pytest.mark.parametrize("when", ["before the steps", "after the steps", "after sharding"])
def test_training_begins_before_sharding(rank, world, name, when):
    """State that an optimizer has when its parameters are sharded is kept: as matrices, factors, and counts.

    It was dropped, because the owners that were known had no such parameters; factors were refused.
    """
    module, reference = stack(), stack()
    optimizer, plain = OPTIMIZERS[name](module.parameters()), OPTIMIZERS[name](reference.parameters())
    for step in range(4):
        if when == ("before the steps", "after the steps", "after sharding")[min(step, 2)]:
            fsdp2.use_full_params(optimizer)
        if step == 2:
            shard(module, mesh_1d())
            if when == "after sharding":
                fsdp2.use_full_params(optimizer)
        module(rows(step)).square().sum().backward()
        for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            theirs.grad = whole(mine.grad).clone()
        step_both(optimizer, plain)
        assert_equal(module.parameters(), reference.parameters())
    assert_same_state(optimizer.state_dict(), plain.state_dict())


@on_ranks(2)
def test_state_that_is_made_of_other_tensors(rank, world):
    """As the codes and scales of torchao's optimizers are. Steps are right, and a state dict would need its pieces:
    the owner alone raised an error, of the class, and the other ranks waited."""
    module, reference = nn.Sequential(nn.Linear(6, 4, bias=False)), nn.Linear(6, 4, bias=False)
    reference.load_state_dict(module[0].state_dict())
    shard(module, mesh_1d())
    optimizer, plain = fsdp2.use_full_params(Pairs(module.parameters())), Pairs(reference.parameters())
    for step in range(2):
        module(rows(step)).square().sum().backward()
        reference.weight.grad = module[0].weight.grad.full_tensor()
        step_both(optimizer, plain)
        assert_equal(module.parameters(), reference.parameters())
    with pytest.raises(NotImplementedError, match="is of the class TwoTensor.*call use_local_shards"):
        optimizer.state_dict()
    on_shards = fsdp2.use_local_shards(Pairs(module.parameters()), elementwise=True)
    module(rows(2)).square().sum().backward()
    on_shards.step()
    another = fsdp2.use_full_params(Pairs(module.parameters()))
    with pytest.raises(NotImplementedError, match="is of the class TwoTensor.*call use_local_shards"):
        another.load_state_dict(on_shards.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("loaded", [False, True])
def test_state_dicts_between_sharding_and_the_first_step(rank, world, loaded):
    """They have the form that the state has on shards, and what is loaded is used."""
    module, reference = stack(), stack()
    optimizer, plain = (fsdp2.use_full_params(OPTIMIZERS["Muon"](one.parameters())) for one in (module, reference))
    for one, other in ((module, optimizer), (reference, plain)):
        one(rows(0)).square().sum().backward()
        other.step()
        other.zero_grad()
    shard(module, mesh_1d())
    saved = optimizer.state_dict()
    assert_same_state(saved, plain.state_dict())
    assert all(isinstance(entry["momentum_buffer"], DTensor) for entry in saved["state"].values())
    if loaded:
        optimizer.load_state_dict(copy.deepcopy(saved))
    train(module, optimizer, reference, plain, range(1, 3))
    assert_same_state(optimizer.state_dict(), plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD])
def test_numbers_beside_a_parameter_that_is_a_number(rank, world, kind):
    """A product of momenta or a rate is a plain number in a state dict, as after any other step. Beside a parameter
    without dimensions it was a DTensor, as a moment is."""
    module = shard(nn.ParameterDict({"scale": torch.tensor(0.7)}), mesh_1d())
    optimizers = kind(module.parameters()), fsdp2.use_full_params(kind(module.parameters()))
    for optimizer in optimizers:
        module["scale"].grad = torch.ones_like(module["scale"])
        optimizer.step()
    ours, theirs = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert {key: type(value) for key, value in ours.items()} == {key: type(value) for key, value in theirs.items()}
    assert DTensor in map(type, ours.values())
    numbers = [key for key, value in theirs.items() if not isinstance(value, DTensor)]
    assert len(numbers) > 1 and all(torch.equal(ours[key], theirs[key]) for key in numbers)


@on_ranks(1, 2)
@pytest.mark.parametrize("full", [False, True])
def test_a_parameter_without_elements(rank, world, full):
    """It has state as with any other step. It had none, as on no rank there is something of its gradient, so torch
    refused to load what the optimizer itself had saved: "Missing optimizer state for parameter"."""
    options = StateDictOptions(full_state_dict=full)
    plain = nn.ParameterDict({"none": torch.empty(0, 4), "some": torch.ones(3, 4)})
    module = shard(plain, mesh_1d())
    optimizer = fsdp2.use_full_params(torch.optim.AdamW(module.parameters()))
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()  # torch makes no state where there are gradients
    saved = get_optimizer_state_dict(module, optimizer, options=options)
    assert saved["state"]["none"]["exp_avg"].shape == (0, 4) and saved["state"]["none"]["step"] == 1
    for again in (fsdp2.use_full_params(torch.optim.AdamW(module.parameters())), torch.optim.AdamW(plain.parameters())):
        set_optimizer_state_dict(module, again, copy.deepcopy(saved), options=options)
        assert_same_state(again.state_dict(), optimizer.state_dict())


@on_ranks(2)
def test_loading_many_small_parameters(rank, world):
    """Their state travels together, as it does when it is saved; it went one parameter at a time."""
    torch.manual_seed(0)
    module = shard(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(20))), mesh_1d())
    optimizer = fsdp2.use_full_params(OPTIMIZERS["Adafactor"](module.parameters()))
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    again = fsdp2.use_full_params(torch.optim.AdamW(module.parameters()))
    moments = {"step": torch.tensor(1.0)}
    groups = again.state_dict()["param_groups"]
    state = {
        i: {**moments, "exp_avg": p.detach() + i, "exp_avg_sq": p.detach() - i}
        for i, p in enumerate(module.parameters())
    }
    for other, given in ((optimizer, saved), (again, {"state": state, "param_groups": groups})):
        with Collectives() as seen:
            other.load_state_dict(given)
        assert sum(seen.counts.values()) <= 2, seen.counts
        for index, entry in other.state_dict()["state"].items():
            for key, value in given["state"][index].items():
                assert torch.equal(whole(entry[key]), whole(value))


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["del", "pop"])
def test_state_that_is_dropped(rank, world, how):
    """All ranks drop the state of a parameter, to begin anew: the same lines raised a KeyError on all ranks but the
    owner, and that of a stack, whose matrices have states of their own, was kept."""
    torch.manual_seed(3)
    alone = nn.ParameterList([torch.randn(6, 5), torch.randn(3, 4, 4), torch.randn(5)])
    module = fsdp2.fully_shard(copy.deepcopy(alone), mesh=mesh_1d())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (alone, module)]
    fsdp2.use_full_params(optimizers[1], stacked=lambda param: param.ndim == 3)
    for step in range(4):
        for model, optimizer in zip((alone, module), optimizers, strict=True):
            for number, param in enumerate(model):
                whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + number))
                param.grad = placed_like(whole, param)
                if step == 2 and how == "del":
                    del optimizer.state[param]
                elif step == 2:
                    assert set(optimizer.state.pop(param)) == {"step", "exp_avg", "exp_avg_sq"}
                    assert optimizer.state.pop(param, None) is None
                    with pytest.raises(KeyError):
                        optimizer.state.pop(param)
            optimizer.step()
    assert_weights(module, alone)
    for mine, theirs in zip(*(one.state_dict()["state"].values() for one in reversed(optimizers)), strict=True):
        assert int(mine["step"]) == int(theirs["step"]) == 2


class Stacked(nn.Module):
    """A stack of matrices and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.layer = nn.Parameter(torch.randn(3, 6, 6)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(x @ self.stack.sum(0)))


@on_ranks(2)
def test_a_stack_that_replaces_another_one(rank, world):
    """It was added to the optimizer of the old one, and its matrices were stepped on with the old moments."""
    torch.manual_seed(3)
    alone = Stacked()
    module = fsdp2.fully_shard(copy.deepcopy(alone), mesh=mesh_1d())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (alone, module)]
    fsdp2.use_full_params(optimizers[1], stacked=lambda param: param.ndim == 3)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))  # of all ranks
    for step in range(4):
        for model, optimizer in zip((alone, module), optimizers, strict=True):
            if step == 2:
                model.stack = nn.Parameter(torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(2)))
                optimizer.add_param_group({"params": [model.stack]})
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_weights(module, alone)
