"""Which optimizers may step on local shards, and what they are told who may not."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2 import fully_shard, use_local_shards
from fsdp2.optim.local.local_step import _ELEMENTWISE, _NOT_ELEMENTWISE
from tests.support.api import torch_since
from tests.support.fake import fake_mesh


class OwnAdam(torch.optim.Adam):
    """Nobody knows what it does."""


class OwnMuon(torch.optim.Muon):
    """Whatever it does, it is Muon."""


def matrix() -> list[nn.Parameter]:
    """Return one matrix as a list of parameters."""
    return [nn.Parameter(torch.ones(4, 2))]


def test_every_optimizer_of_torch_is_decided_upon() -> None:
    found = {
        kind for kind in vars(torch.optim).values() if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    }
    assert found - {torch.optim.Optimizer} == _ELEMENTWISE | set(_NOT_ELEMENTWISE)


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.Muon, "orthogonalizes whole matrices.*use_full_params"),
        (OwnMuon, "orthogonalizes whole matrices.*use_full_params"),
        (torch.optim.LBFGS, "products over all elements.*it steps on DTensors if .* the same size"),
        (torch.optim.Adafactor, "averages over whole rows and columns.*use_full_params"),
        (torch.optim.SparseAdam, "sparse gradients.*ignored_params"),
    ],
)
def test_what_is_not_elementwise_is_refused(kind: Any, reason: str, elementwise: bool) -> None:
    """The error says what works instead; Adafactor was sent to DTensors, on which torch's raises."""
    optimizer = kind(matrix(), lr=0.1)
    with pytest.raises(ValueError, match=rf"{kind.__name__} cannot step on local shards.*{reason}"):
        use_local_shards(optimizer, elementwise=elementwise)
    assert "step" not in vars(optimizer) and "_init_group" not in vars(optimizer)


def test_what_is_unknown_is_refused_unless_it_is_said_to_be_elementwise() -> None:
    optimizer = OwnAdam(matrix())
    with pytest.raises(ValueError, match=r"not known whether .*OwnAdam is elementwise"):
        use_local_shards(optimizer)
    assert use_local_shards(optimizer, elementwise=True) is optimizer
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, got Linear"):
        use_local_shards(nn.Linear(1, 1))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OwnAdam])
def test_a_second_call_changes_nothing(kind: Any) -> None:
    optimizer = kind(matrix())
    use_local_shards(optimizer, elementwise=True)
    before = dict(vars(optimizer))
    use_local_shards(optimizer, elementwise=True)
    assert vars(optimizer) == before


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_plain_parameters_alone_are_stepped_as_ever(kind: Any) -> None:
    params, reference = matrix(), matrix()
    for one, use in ((params, True), (reference, False)):
        one[0].grad = torch.ones(4, 2)
        optimizer = kind(one, lr=0.1, foreach=True)
        if use:
            use_local_shards(optimizer)
        optimizer.step()
    assert torch.equal(params[0], reference[0])


def test_an_optimizer_dies_without_garbage_collection() -> None:
    gc.disable()
    try:
        optimizer = use_local_shards(torch.optim.SGD(matrix(), lr=0.1, momentum=0.9))
        reference = weakref.ref(optimizer)
        del optimizer
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_what_changes_between_steps_is_noticed(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = kind._init_group
    monkeypatch.setattr(kind, "_init_group", lambda self, *lists: calls.append(1) or original(self, *lists))
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    with fake_mesh(2) as mesh:
        modules, optimizers, asked = [nn.Linear(4, 6) for _ in range(2)], [], []
        modules[1].load_state_dict(modules[0].state_dict())
        for use, module in enumerate(modules):
            fully_shard(module, mesh=mesh)
            optimizer = kind([module.weight], lr=0.1, **options)
            optimizers.append(use_local_shards(optimizer) if use else optimizer)

        def step(change: Callable[[Any, Any], object] = lambda module, optimizer: None, bias: bool = False) -> None:
            for module, optimizer in zip(modules, optimizers, strict=True):
                module.weight.grad = torch.ones_like(module.weight)
                module.bias.grad = torch.ones_like(module.bias) if bias else None
                change(module, optimizer)
                calls.clear()
                optimizer.step()
            asked.append(len(calls))
            for name in ("weight", "bias"):
                one, other = (getattr(module, name).to_local() for module in modules)
                assert torch.equal(one, other)

        step()
        step()  # SGD has its momentum from here on
        step()
        step(lambda _, o: o.param_groups[0].update(lr=0.01))
        assert asked[2:] == [0, 0]
        step(lambda _, o: o.param_groups[0].update(weight_decay=0.5))
        step(lambda _, o: o.param_groups[0].update(maximize=True))
        assert asked[4:] == [1, 1]
        if kind is not torch.optim.Adagrad or torch_since("2.12"):  # before, it makes its state only when it is built
            step(lambda _, o: o.state.clear())
            step(lambda m, o: o.add_param_group({"params": [m.bias]}), bias=True)
            assert asked[6] == 1 and asked[7] >= 1
            step(bias=True)
            step(bias=True)
            assert asked[-1] == 0
        step()
        step(lambda _, o: o.load_state_dict(copy.deepcopy(o.state_dict())))
        step(lambda _, o: o.param_groups[0].update(lr=torch.tensor(0.1)))
        assert asked[-1] >= 1


def test_an_optimizer_built_before_sharding() -> None:
    steps = []
    for use in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(4, 6)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if use:
            use_local_shards(optimizer)
        with fake_mesh(2) as mesh:
            fully_shard(module, mesh=mesh)
            for _ in range(2):
                for parameter in module.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
        assert {type(key) for key in optimizer.state} == {DTensor}
        state = [optimizer.state[p]["momentum_buffer"].to_local() for p in module.parameters()]
        steps.append([p.to_local() for p in module.parameters()] + state)
    assert all(torch.equal(one, other) for one, other in zip(*steps, strict=True))


def test_a_step_that_failed_half_way_has_its_momentum_saved() -> None:
    """By parameter, as after other steps; the group that failed came after one that had stepped."""
    with fake_mesh(2) as mesh:
        module = fully_shard(nn.Linear(4, 6), mesh=mesh)
        groups = [{"params": [module.weight]}, {"params": [module.bias], "lr": "none"}]
        optimizer = use_local_shards(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(TypeError):
            optimizer.step()
        assert type(optimizer.state_dict()["state"][0]["momentum_buffer"]) is DTensor
