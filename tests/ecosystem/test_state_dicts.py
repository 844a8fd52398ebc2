"""torch.distributed.checkpoint.state_dict: models and optimizers sharded by fsdp2 are saved and loaded by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.support import api
from tests.support.composition import composes
from tests.support.models import mlp
from tests.support.parity import mesh_1d, mesh_2d, mesh_of, stack
from tests.support.pool import on_ranks


def build(seed: int, *, hybrid: bool = False, meta: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and an optimizer."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        module = nn.Sequential(stack(layers=2), nn.LayerNorm(8), nn.Linear(8, 5))
    for unit in (module[0], module):
        api.ours.fully_shard(unit, mesh=mesh_2d() if hybrid else mesh_1d())
    return module, torch.optim.AdamW(module.parameters(), lr=0.1)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    """Run one iteration and return the loss."""
    loss = module(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


OPTIONS = {
    "sharded": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full_on_cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "broadcast": StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
}


@composes("Adam", "hybrid sharding")
@on_ranks(1, 2, 4)
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("how", OPTIONS)
def test_training_goes_on(rank, world, how, hybrid):
    """A run that is saved and loaded into another model goes on as the run that was not."""
    hybrid = hybrid and world > 1
    module, optimizer = build(1, hybrid=hybrid)
    for seed in range(2):
        step(module, optimizer, seed)
    save = OPTIONS["full_on_cpu" if how == "broadcast" else how]
    saved = get_state_dict(module, optimizer, options=save)
    state, optimizer_state = pytree.tree_map_only(Tensor, torch.clone, saved)  # also what shares memory with the model
    if how == "full_on_cpu" and world > 1:
        assert (rank == 0) == bool(state)
    other, other_optimizer = build(2, hybrid=hybrid)
    load = OPTIONS["broadcast" if how == "full_on_cpu" else how]
    if how in ("full_on_cpu", "broadcast"):  # empty elsewhere, which set_state_dict takes for "no model given"
        set_model_state_dict(other, state, options=load)
        set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=load)
    else:
        set_state_dict(other, other_optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=load)
    for seed in range(2, 4):
        assert torch.equal(step(module, optimizer, seed), step(other, other_optimizer, seed))


@on_ranks(2)
@pytest.mark.parametrize("how", ["sharded", "full"])
def test_values(rank, world, how):
    """Sharded values are the DTensors of the model; full ones are whole plain tensors, by the names of the model."""
    module, optimizer = build(1)
    step(module, optimizer, 0)
    state = get_model_state_dict(module, options=OPTIONS[how])
    assert list(state) == [name for name, _ in module.named_parameters()]
    for name, parameter in module.named_parameters():
        if how == "sharded":
            assert isinstance(state[name], DTensor)
            assert state[name].to_local().data_ptr() == parameter.to_local().data_ptr()
        else:
            assert not isinstance(state[name], DTensor) and torch.equal(state[name], parameter.full_tensor())
    flat = get_optimizer_state_dict(
        module,
        optimizer,
        options=StateDictOptions(flatten_optimizer_state_dict=True, full_state_dict=how == "full"),
    )
    moment = flat["state.0.0.weight.exp_avg"]
    assert isinstance(moment, DTensor) == (how == "sharded") and moment.shape == (8, 8)


@on_ranks(2)
def test_optimizer_state_alone(rank, world):
    """The state of an optimizer, ``initial_lr`` of a scheduler included, moves to a new one."""
    module, optimizer = build(1)
    make: Callable = lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch)
    scheduler = make(optimizer)
    step(module, optimizer, 0)
    scheduler.step()
    state = get_optimizer_state_dict(module, optimizer)
    fresh = torch.optim.AdamW(module.parameters(), lr=0.1)
    make(fresh)
    set_optimizer_state_dict(module, fresh, state)
    for old, new in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        assert (old["lr"], old["initial_lr"]) == (new["lr"], new["initial_lr"]) == (0.05, 0.1)
    for parameter in module.parameters():
        assert torch.equal(
            optimizer.state[parameter]["exp_avg"].to_local(), fresh.state[parameter]["exp_avg"].to_local()
        )


@on_ranks(2)
def test_saving_in_the_background(rank, world, tmp_path):
    """Shards were views further back in one storage. ``dcp.async_save`` takes a DTensor of such a piece for a tensor
    with data and died with "invalid python storage", and saving one parameter wrote the shards of its whole group."""
    module = api.ours.fully_shard(mlp(4, 4, 4), mesh=mesh_of(world))
    for parameter in module.parameters():
        local = parameter.to_local()
        assert parameter.data_ptr() == 0 and local.untyped_storage().nbytes() == local.nbytes
    before = {name: value.full_tensor() for name, value in module.state_dict().items()}
    dcp.async_save(module.state_dict(), checkpoint_id=tmp_path).result()
    other = api.ours.fully_shard(mlp(4, 4, 4), mesh=mesh_of(world))
    dcp.load(other.state_dict(), checkpoint_id=tmp_path)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), before[name])
