"""Optimizers that hold other tensors than the shards: all that is done with them before their first step counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.optim.stepping import Model, batch, build
from tests.support import api
from tests.support.parity import assert_weights, full, mesh_1d, mesh_of, placed_like
from tests.support.pool import on_ranks

Make = Callable[[Any], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two moments and a counter."""
    return torch.optim.AdamW(params, lr=0.1)


def shard(module: Any, **options: Any) -> Any:
    """Make ``one`` of a ``Model`` a unit, and the rest another."""
    for unit in (module.one, module):
        fsdp2.fully_shard(unit, mesh=mesh_1d(), **options)
    return module


def prebuilt(make: Make = adamw) -> tuple[Any, torch.optim.Optimizer]:
    """Return a sharded model and an optimizer that was built before it was sharded."""
    torch.manual_seed(3)
    module = Model()
    optimizer = make(module.parameters())
    return shard(module), optimizer


def fresh(make: Make = adamw) -> tuple[Any, torch.optim.Optimizer]:
    """Return an equal model whose optimizer was built afterwards."""
    module = build()
    return module, make(module.parameters())


def backward(module: nn.Module, step: int, scale: float = 1.0) -> None:
    """Compute gradients of every parameter that is trained."""
    (module(batch(step), rare=True).square().mean() * scale).backward()


def assert_same_weights(one: nn.Module, other: nn.Module) -> None:
    """Assert that two sharded models have the same weights, bit for bit."""
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local()), name


@on_ranks(1, 2)
def test_functions_that_read_the_groups_of_an_optimizer(rank, world):
    """Gradients are clipped before the first step, also by functions that know nothing of fsdp2.

    They found originals without gradients in the groups: the norm was 0.0, and nothing was clipped.
    """
    models = [prebuilt(), fresh()]
    for module, optimizer in models:
        backward(module, 0)
        params = optimizer.param_groups[0]["params"]
        assert all(mine is shown for mine, shown in zip(params, module.parameters(), strict=True))
    norms = [full(torch.nn.utils.clip_grad_norm_(one.param_groups[0]["params"], 0.01)) for _, one in models]
    assert torch.equal(*norms) and norms[0] > 0.01
    for _, optimizer in models:
        optimizer.step()
    assert_same_weights(models[0][0], models[1][0])


@on_ranks(2)
def test_gradients_of_originals_reach_the_shards(rank, world):
    """Gradients that somebody gives the optimizer's parameters are what it steps with, as without sharding."""
    models = [prebuilt(), fresh()]
    for module, optimizer in models:
        for param in optimizer.param_groups[0]["params"]:
            if param.requires_grad:
                param.grad = placed_like(torch.ones(param.shape), param)
        optimizer.step()
        assert all(param.grad is not None for param in module.parameters() if param.requires_grad)
    assert_same_weights(models[0][0], models[1][0])


@on_ranks(2, 4)
@pytest.mark.parametrize("kind", ["shards", "replicas", "whole"])
def test_state_that_was_loaded_before_the_first_step(rank, world, kind):
    """State cut like the shards was cut once more, which failed on one rank while the others waited."""
    source, trained = fresh()
    backward(source, 0)
    trained.step()
    saved = copy.deepcopy(trained.state_dict())
    for index, entry in saved["state"].items():
        for key, value in entry.items():
            if kind != "shards" and isinstance(value, DTensor):
                everywhere = value.redistribute(placements=[Replicate()])
                saved["state"][index][key] = everywhere if kind == "replicas" else full(value)
    module, optimizer = prebuilt()
    optimizer.load_state_dict(saved)
    module.load_state_dict(source.state_dict())
    for one, other in ((module, optimizer), (source, trained)):
        one.zero_grad()
        backward(one, 1)
        other.step()
    assert_same_weights(module, source)
    for mine, theirs in zip(optimizer.state.values(), trained.state.values(), strict=True):
        for key, value in mine.items():
            assert type(value) is type(theirs[key]) and torch.equal(full(value), full(theirs[key]))


@on_ranks(4)
@pytest.mark.parametrize("kind", ["shards", "whole"])
def test_state_of_parameters_that_tensor_parallelism_cut(rank, world, kind):
    """The same where the originals are DTensors themselves."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))

    def make(before: bool) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = adamw(module.parameters()) if before else None
        fsdp2.fully_shard(module, mesh=mesh["dp"])
        return module, optimizer or adamw(module.parameters())

    def step(module: Any, optimizer: torch.optim.Optimizer) -> None:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank // 2))
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    source, trained = make(before=False)
    step(source, trained)
    saved = copy.deepcopy(trained.state_dict())
    if kind == "whole":
        for entry in saved["state"].values():
            entry.update({key: full(value) for key, value in entry.items()})
    module, optimizer = make(before=True)
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), source.parameters(), strict=True):
            mine.to_local().copy_(theirs.to_local())
    for one, other in ((module, optimizer), (source, trained)):
        step(one, other)
    assert_same_weights(module, source)


@on_ranks(1, 2)
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("add", [False, True])
def test_an_optimizer_built_while_full_parameters_are_summoned(rank, world, writeback, add):
    """It held tensors that no module shows after the block, and trained nothing, without a word."""
    models = [(build(), None), fresh()]
    with fsdp2.summon_full_params(models[0][0], writeback=writeback):
        params = list(models[0][0].parameters())
        assert not any(isinstance(param, DTensor) for param in params)
        optimizer = adamw(params[:2] if add else params)
        if add:
            optimizer.add_param_group({"params": params[2:]})
    models[0] = (models[0][0], optimizer)
    for step in range(2):
        for module, one in models:
            backward(module, step)
            one.step()
            one.zero_grad()
            assert all(param.grad is None for param in module.parameters())
    assert_same_weights(models[0][0], models[1][0])
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(mine is shown for mine, shown in zip(held, models[0][0].parameters(), strict=True))


@on_ranks(2)
def test_an_optimizer_that_steps_while_full_parameters_are_summoned(rank, world):
    """Its state is whole then; it is cut when the optimizer steps on shards."""
    torch.manual_seed(3)
    reference, module = Model(), build()
    others = adamw(reference.parameters())
    with fsdp2.summon_full_params(module):
        optimizer = adamw(module.parameters())
        for one, model in ((optimizer, module), (others, reference)):
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            one.step()
            one.zero_grad()
    for param, plain in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(full(param), plain)
        plain.grad = torch.ones_like(plain)
        param.grad = torch.distributed.tensor.distribute_tensor(plain.grad, param.device_mesh, param.placements)
    optimizer.step()
    others.step()
    for param, plain in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param), plain.detach())
        moment = optimizer.state[param]["exp_avg"]
        assert isinstance(moment, DTensor) and torch.equal(full(moment), others.state[plain]["exp_avg"])


@on_ranks(2)
@pytest.mark.parametrize("when", ["before the forward", "after the forward"])
@pytest.mark.parametrize("named", [False, True])
def test_a_replaced_parameter_that_is_added_to_its_optimizer(rank, world, when, named):
    """It steps as in one process: once, with new state and the options of its new group.

    The shard stays the same object, so the optimizer that had held the old parameter had it twice, and stepped twice.
    With names, the parameters behind it in its old group then had those of others.
    """

    def add(optimizer: torch.optim.Optimizer, model: Any) -> None:
        optimizer.add_param_group({"params": [("row", model.row)] if named else [model.row], "lr": 0.05})

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))  # of all ranks
    torch.manual_seed(3)
    one = Model()
    module = shard(copy.deepcopy(one))
    for model in (one, module):
        optimizer = adamw(model.named_parameters() if named else model.parameters())
        for step in range(4):
            if step == 2:
                model.row = nn.Parameter(torch.full((1, 6), 0.3))
                added = {"params": [("row", model.row)] if named else [model.row], "lr": 0.05}
                if when == "before the forward":
                    optimizer.add_param_group(added)
            loss = model(x, rare=True).square().mean()
            if step == 2 and when == "after the forward":
                optimizer.add_param_group(added)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[1]["params"] == [model.row]
        for group in optimizer.param_groups if named and model is module else ():
            shown = dict(model.named_parameters())
            assert all(shown[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))
    assert_weights(module, one)


WAYS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "plain": lambda optimizer: optimizer,
    "local": lambda optimizer: fsdp2.use_local_shards(optimizer, elementwise=True),
    "whole": lambda optimizer: fsdp2.use_full_params(optimizer, overlap_backward=True),
}


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_replaced_parameter_is_trained_on(rank, world, way):
    """Its optimizer goes on with the moments that it has, as if the values had been written into the old parameter."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))  # of all ranks
    torch.manual_seed(3)
    one = Model()
    module = shard(copy.deepcopy(one))
    optimizers = [adamw(one.parameters()), WAYS[way](adamw(module.parameters()))]
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                one.row.fill_(0.3)
            module.row = nn.Parameter(torch.full((1, 6), 0.3))
        for model, optimizer in zip((one, module), optimizers, strict=True):
            model(x, rare=True).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_weights(module, one)


class Momentum(torch.optim.Optimizer):
    """Keeps a moment in the dtype of gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param.grad))
                    param.sub_(moment.mul_(0.9).add_(param.grad), alpha=group["lr"])


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("way", WAYS)
def test_checkpoints_of_parameters_with_a_gradient_dtype(rank, world, way):
    """torch makes the state of a new optimizer by a step with gradients in the dtypes of parameters, which these do not
    take: neither saving before the first step nor resuming worked. In one process torch raises that, too."""

    def make() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(3)
        module = Model().to(torch.bfloat16)
        for param in module.parameters():
            param.grad_dtype = torch.float32
        return shard(module), WAYS[way](Momentum(module.parameters()))

    def step(module: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        module(batch(number).bfloat16(), rare=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    module, optimizer = make()
    first = get_optimizer_state_dict(module, optimizer)["state"]["row"]["moment"]
    assert first.dtype == torch.float32 and not full(first).any()
    step(module, optimizer, 0)
    saved = copy.deepcopy(get_state_dict(module, optimizer))
    other, resumed = make()
    set_state_dict(other, resumed, model_state_dict=saved[0], optim_state_dict=saved[1])
    assert all(param.grad is None and param.grad_dtype == torch.float32 for param in other.parameters())
    optimizer.load_state_dict(optimizer.state_dict())  # torch's loading rounds moments to the dtype of parameters
    for one, its in ((module, optimizer), (other, resumed)):
        step(one, its, 1)
    assert_same_weights(module, other)


@api.fsdp2_only
@on_ranks(1)
def test_a_state_that_cannot_be_made(rank, world):
    """An error of the step that makes it leaves the gradient dtypes as they were."""
    module = fresh()[0]
    for param in module.parameters():
        param.grad_dtype = torch.bfloat16
    optimizer = Momentum(module.parameters())

    def fail(*unused: object) -> None:
        raise ArithmeticError

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        get_optimizer_state_dict(module, optimizer)
    assert {param.grad_dtype for param in module.parameters()} == {torch.bfloat16}
    handle.remove()
    optimizer.zero_grad()
    get_optimizer_state_dict(module, optimizer)


class Wrapper(torch.optim.Optimizer):
    """Passes on to another optimizer, and has no hooks: accelerate's, which the Trainer saves, is like that."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def step(self, closure: Any = None) -> None:
        """Take a step of the other one."""
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear its gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return self.optimizer.state_dict()


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_checkpoints_of_a_wrapper(rank, world, grad_dtype):
    """torch.distributed.checkpoint makes the state of what it wraps."""
    module = fsdp2.fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16), mesh=mesh_1d())
    for param in module.parameters() if grad_dtype else ():
        param.grad_dtype = grad_dtype
    state = get_optimizer_state_dict(module, Wrapper(Momentum(module.parameters())))["state"]
    assert {entry["moment"].dtype for entry in state.values()} == {grad_dtype or torch.bfloat16}
