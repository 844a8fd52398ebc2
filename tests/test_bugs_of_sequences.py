"""Bugs that random programs brought to light; each test opens with the story of its bug."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fsdp2
from tests.support import api
from tests.support.models import mlp
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


class Empty(nn.Module):
    """Has an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


@on_ranks(1, 2)
def test_a_unit_of_empty_parameters(rank, world):
    """A single process has nothing to copy where all parameters of a unit are empty; torch's foreach copy refuses an
    empty list, with an error that names nothing."""
    module = nn.Sequential(nn.Linear(3, 3), Empty())
    for unit in (module[1], module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    module(torch.ones(1, 3)).sum().backward()
    assert module[0].weight.grad is not None
    assert module[1].weight.grad is not None and module[1].weight.grad.shape == (2, 0)


@on_ranks(1, 2)
@pytest.mark.parametrize("show", ["unshard", "unshard without waiting", "waited for late", "again", "use_weights"])
def test_gathered_by_hand_around_a_step(rank, world, show):
    """A gather by hand that an optimizer step overtook was taken for one of the new weights by the forward after it,
    and one after the step showed what had been kept since before it."""
    torch.manual_seed(0)
    module = api.ours.fully_shard(mlp(4, 4, 4), mesh=cpu_mesh(world))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    inputs = torch.ones(1, 4)
    module(inputs).square().sum().backward()
    handle = module.unshard(async_op=True) if show in ("unshard without waiting", "waited for late") else None
    if show == "unshard":
        module.unshard()
    elif show in ("again", "use_weights"):
        with torch.no_grad():
            module(inputs)  # the root keeps its full parameters
    optimizer.step()
    expected = [parameter.full_tensor() for parameter in optimizer.param_groups[0]["params"]]
    if handle is not None and show == "waited for late":
        handle.wait()
    elif show == "again":
        module.unshard()
        for parameter, whole in zip(module.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.detach(), whole, rtol=0, atol=0)
    elif show == "use_weights":
        with fsdp2.use_weights(module):
            for parameter, whole in zip(module.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.detach(), whole, rtol=0, atol=0)
    got = module(inputs)
    plain = mlp(4, 4, 4)
    plain.load_state_dict(dict(zip(plain.state_dict(), expected, strict=True)))
    torch.testing.assert_close(got, plain(inputs))


@on_ranks(2)
def test_a_copy_of_a_compiled_module(rank, world):
    """``module.compile()`` keeps what it made on the module, and a deep copy took it over: the copy computed with the
    weights of the original, and its own got no gradients."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].compile(backend="eager")
    for unit in (module[0], module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    clone = copy.deepcopy(module)
    clone(torch.ones(1, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in clone.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())


@on_ranks(2)
def test_an_ignored_parameter_that_is_replaced(rank, world):
    """Ignored parameters were known as objects: loading with ``assign=True`` puts another object there, which the
    next forward took for a parameter that was added, and sharded."""
    module = mlp(4, 4, 4)
    ignored = module.get_parameter("0.weight")
    api.ours.fully_shard(module, mesh=cpu_mesh(world), ignored_params={ignored})
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    replaced = module.get_parameter("0.weight")
    assert replaced is not ignored
    module(torch.full((1, 4), rank + 1.0)).sum().backward()
    module.reshard()
    assert module.get_parameter("0.weight") is replaced and type(replaced) is nn.Parameter
    assert replaced.grad is not None and replaced.grad.shape == (4, 4)


class Stumbles(nn.Module):
    """Passes its input on, but for once."""

    stumbles = False

    def forward(self, x: Tensor) -> Tensor:
        if self.stumbles:
            self.stumbles = False
            raise KeyError
        return x


@on_ranks(1, 2)
@pytest.mark.parametrize("where", range(4))
@pytest.mark.parametrize("reshard", [None, False])
def test_a_step_after_a_forward_that_raised(rank, world, where, reshard):
    """Whoever catches an error of a forward goes on with the next batch: what the broken forward had gathered, or was
    still gathering, was taken for the weights that the optimizer made afterwards. torch does the same in part."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(Stumbles(), nn.Linear(4, 4)) for _ in range(3)), Stumbles())
    expected = copy.deepcopy(module)
    for unit in (*module[:3], module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), reshard_after_forward=reshard)
    inputs, losses = torch.ones(1, 4), []
    for model in (module, expected):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        stumbling = model[3] if where == 3 else model[where][0]
        for stumble in (False, True, False, True):
            model(inputs).square().sum().backward()
            stumbling.stumbles = stumble
            if stumble:
                with pytest.raises(KeyError):
                    model(inputs)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(model(inputs).square().sum())
    torch.testing.assert_close(losses[0], losses[1])
