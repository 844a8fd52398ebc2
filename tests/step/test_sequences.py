"""Gathers by hand, evaluations, steps and errors in orders that no single training step has."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from tests.support import api
from tests.support.models import children, mlp
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


@on_ranks(2)
def test_unshard_twice(rank, world):
    """The second ``unshard`` took the full parameters shown on the module for parameters that somebody had put there,
    and refused them."""
    module = api.ours.fully_shard(nn.Linear(4, 4), mesh=cpu_mesh(world))
    module.unshard()
    weight = module.weight
    module.unshard()
    assert module.weight is weight and weight.shape == (4, 4)


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


def sharded(world: int, **options) -> nn.Module:
    torch.manual_seed(0)
    module = mlp(4, 4, 4)
    for unit in (*children(module)[:-1], module):  # the root has parameters of its own
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), **options)
    return module


@api.fsdp2_only
@on_ranks(4)
@pytest.mark.parametrize("reshard", [None, False, 2])
def test_an_optimizer_built_after_an_evaluation(rank, world, reshard):
    """A Trainer evaluates before it trains. The units that keep their parameters after forward then show full ones, so
    an optimizer built now held tensors that are freed at the next backward, and trained nothing, without a word (torch
    has the same)."""
    module, reference = sharded(world, reshard_after_forward=reshard), sharded(world)
    with torch.no_grad():
        module(torch.ones(2, 4))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (module, reference)]
    for step in range(3):
        losses = []
        for m, optimizer in zip((module, reference), optimizers):
            loss = m(torch.full((2, 4), rank + step + 1.0)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for optimizer in optimizers:
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert all(parameter.grad is None for parameter in module.parameters())


@on_ranks(2)
def test_shards_after_a_registered_method(rank, world):
    """``generate``, registered as a forward method, calls ``forward`` for each token; torch's root shows shards after
    it. Ours went on showing full parameters, so what was made from them next, an optimizer or a copy of the weights for
    an inference engine, was made from tensors that are no DTensors."""
    module = sharded(world)

    def generate(inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            inputs = module(inputs)
        return inputs

    module.generate = generate
    api.ours.register_fsdp_forward_method(module, "generate")
    with torch.no_grad():
        expected = module(module(torch.ones(2, 4)))
        torch.testing.assert_close(module.generate(torch.ones(2, 4)), expected)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    module.generate(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in module.parameters())


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
