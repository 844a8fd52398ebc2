"""Parameters beside sharded ones: nobody averages their gradients, or DistributedDataParallel does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp2
from tests.support import api
from tests.support.parity import SEED, full, mesh_1d, mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 6, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def blocks_alone(mesh: Any = None) -> Model:
    """Return a model of which the blocks alone are units."""
    torch.manual_seed(SEED)
    model = Model()
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=mesh)
    return model


def train(model: nn.Module, *given: list[nn.Parameter], steps: int = 2) -> list[str]:
    """Train with an optimizer for each list of parameters, by default one for all; return texts of warnings."""
    return take_steps(model, [torch.optim.SGD(params, lr=0.1) for params in given or [list(model.parameters())]], steps)


def take_steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 2) -> list[str]:
    """Train; return texts of warnings."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(steps):
            model(torch.tensor([[dist.get_rank(), 5]])).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [str(one.message) for one in warned if "fully_shard" in str(one.message)]


def apart(model: Model) -> list[nn.Parameter]:
    """Return the parameters of the model's own."""
    return [model.embed.weight, model.head.weight]


@on_ranks(2)
@pytest.mark.parametrize("optimizers", ["one", "two", "of the rest alone"])
def test_a_whole_that_was_not_sharded(rank, world, optimizers):
    """Units on the blocks alone: embedding and head trained apart on each rank, without a word. One warning names them
    and the line to add; with that line the copies stay equal."""
    model = blocks_alone()
    rest, blocks = apart(model), list(model.blocks.parameters())
    given = {"one": [[*rest, *blocks]], "two": [rest, blocks], "of the rest alone": [rest]}[optimizers]
    warned = train(model, *given)
    whole = model.embed.weight.detach().clone()
    dist.all_reduce(whole)
    assert not torch.equal(whole / world, model.embed.weight), "they train apart, or this test shows nothing"
    assert len(warned) == (rank == 0)
    if warned:
        assert warned[0].startswith("embed.weight, head.weight: trained beside sharded parameters")
        assert "fully_shard(model)" in warned[0] and "ignored_params" in warned[0]
    model = blocks_alone()
    fsdp2.fully_shard(model)
    assert train(model) == []
    assert full(model.embed.weight).shape == (6, 8)


@on_ranks(2)
def test_a_group_that_is_added_later(rank, world):
    """Only the first step was looked at, so a head that joined the optimizer later trained apart, without a word."""
    model = blocks_alone()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    assert take_steps(model, [optimizer]) == []
    optimizer.add_param_group({"params": apart(model)})
    warned = take_steps(model, [optimizer])
    assert [text[:34] for text in warned] == ["embed.weight, head.weight: trained"] * (rank == 0)


def ignored(model: Model) -> nn.Module:
    return fsdp2.fully_shard(model, ignored_params=set(apart(model)))


def ignored_modules(model: Model) -> nn.Module:
    return fsdp2.fully_shard(model, ignored_modules=[model.embed, model.head])


def loaded(model: Model) -> nn.Module:
    """Ignored parameters are replaced by loading."""
    ignored(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


def of_ddp(model: Model) -> nn.Module:
    """DistributedDataParallel averages what is not sharded."""
    names = [f"blocks.{name}" for name, _ in model.blocks.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return DistributedDataParallel(model)


def of_hooks(model: Model) -> nn.Module:
    """The caller averages them."""
    for param in apart(model):
        param.register_hook(lambda grad: dist.all_reduce(grad) and None)
    return model


def frozen(model: Model) -> nn.Module:
    for param in apart(model):
        param.requires_grad_(False)
    return model


@on_ranks(2)
@pytest.mark.parametrize("purpose", [ignored, ignored_modules, loaded, of_ddp, of_hooks, frozen])
def test_parameters_that_are_left_out_on_purpose(rank, world, purpose: Callable[[Model], nn.Module]):
    """No warning where somebody said so, averages them, or does not train them."""
    assert train(purpose(blocks_alone())) == []


@on_ranks(1, 2)
def test_other_models_in_the_process(rank, world):
    """A plain model with an optimizer of its own is its user's; so is everything on a single rank."""
    model = blocks_alone() if world == 1 else fsdp2.fully_shard(blocks_alone())
    other = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 8))
    assert train(other) == []
    assert train(model) == []


@on_ranks(2)
@pytest.mark.parametrize("below", [False, True])
def test_ddp_of_a_sharded_model(rank, world, below):
    """It failed with torch's "c10d.broadcast_ ... does not have a sharding strategy registered". The error names the
    parameters; the mesh that it advises makes replicas."""
    model = blocks_alone() if below else fsdp2.fully_shard(blocks_alone())
    first = "blocks.0.weight" if below else "embed.weight"
    with pytest.raises(RuntimeError, match=rf"^DistributedDataParallel: {first}, .*\('replicate', 'shard'\)"):
        DistributedDataParallel(model)
    mesh = mesh_of(world, 1, names=("replicate", "shard"))
    model = fsdp2.fully_shard(blocks_alone(mesh), mesh=mesh)
    assert train(model) == []
    assert model.embed.weight.to_local().shape == (6, 8)


class Unfinished(nn.Module):
    """Its ``__init__`` fails before ``nn.Module``'s, as one that checks its arguments does."""

    def __init__(self) -> None:
        raise ValueError("no such argument")


@on_ranks(2)
def test_modules_that_were_never_made(rank, world):
    """A traceback (a notebook's last error) keeps a module whose ``__init__`` failed, without what nn.Module's gives.
    The first step looked at all modules of the process, and raised "'Unfinished' object has no attribute '_modules'";
    after a refused DistributedDataParallel, that this one has no "module"."""
    model = blocks_alone()
    with pytest.raises(ValueError, match="no such argument") as kept:
        Unfinished()
    with pytest.raises(RuntimeError, match="are sharded by fully_shard") as also_kept:
        DistributedDataParallel(model)
    assert len(train(model)) == (rank == 0)
    del kept, also_kept


@on_ranks(2)
def test_ddp_beside_a_sharded_model(rank, world):
    """Other models may be wrapped."""
    fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh_1d())
    DistributedDataParallel(nn.Linear(4, 4))(torch.ones(1, 4)).sum().backward()
