"""Models with a root of their own that compute inside a pass of another, or share units with it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._trace import listening
from tests.support import api
from tests.support.composition import composes
from tests.support.parity import SEED, beside_one_process, mesh_1d, stack, step_alike
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only

INPUTS = torch.ones(2, 8)


class Trunk(nn.Module):
    """Blocks that are units between layers that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


class Headed(nn.Module):
    """A trunk, which others have too, and a head."""

    def __init__(self, trunk: Trunk, outputs: int) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(8, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.trunk(x))


class Both(nn.Module):
    """An actor and a critic, for a single process to compare with."""

    def __init__(self) -> None:
        super().__init__()
        trunk = Trunk()
        self.actor, self.critic = Headed(trunk, 4), Headed(trunk, 1)


ORDERS = {
    "one after the other": lambda both: (both.actor(INPUTS) + both.critic(INPUTS)).square().mean(),
    "critic first": lambda both: (both.critic(INPUTS) + both.actor(INPUTS)).square().mean(),
    "actor twice": lambda both: (both.actor(INPUTS) * both.actor(2 * INPUTS) + both.critic(INPUTS)).square().mean(),
    "actor alone": lambda both: both.actor(INPUTS).square().mean(),
}


def actor_and_critic(*ends: str, **options: Any) -> tuple[Any, Any]:
    """Return two models with roots of their own around one trunk, of which ``ends`` are units as its blocks are, and
    the same in one process."""
    torch.manual_seed(SEED)
    alone = Both()
    both = copy.deepcopy(alone)
    trunk = both.actor.trunk
    for unit in (*trunk.blocks, *(getattr(trunk, name) for name in ends), both.actor, both.critic):
        fsdp2.fully_shard(unit, mesh=mesh_1d(), **options)
    return both, alone


@on_ranks(1, 2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("reshard", [None, False])
def test_two_roots_around_one_trunk(rank, world, order, reshard):
    """An actor and a critic, whose trunk's blocks are units. From the second forward on a pass of one root freed what
    the other computed with: "mixed torch.Tensor and DTensor"."""
    both, alone = actor_and_critic(reshard_after_forward=reshard)
    for step in range(3):
        step_alike(both, alone, ORDERS[order], f"step {step}")
        with torch.no_grad():
            torch.testing.assert_close(both.critic(INPUTS), alone.critic(INPUTS))


@on_ranks(1, 2)
@pytest.mark.parametrize("evaluated", [False, True])
def test_two_roots_around_a_trunk_of_units(rank, world, evaluated):
    """Nothing ties the roots: every parameter of the trunk belongs to one of its units. Each root waited for its own
    lanes, while these units communicated on those of the root that ran first last: the gradients of the first unit
    came after the step, silently."""
    both, alone = actor_and_critic("embed", "norm")
    for name in ("critic", "actor", "critic", "actor"):
        if evaluated:
            with torch.no_grad():
                both.critic(INPUTS)
        step_alike(getattr(both, name), getattr(alone, name), lambda model: model(INPUTS).square().mean(), name)


class Nested(nn.Module):
    """The actor's forward asks the critic, which shares its trunk."""

    def __init__(self, both: Both) -> None:
        super().__init__()
        self.actor = both.actor
        self.ask = [both.critic]  # not a child

    def forward(self, x: torch.Tensor, graph: bool) -> torch.Tensor:
        x = self.actor.trunk.embed(x)
        with torch.set_grad_enabled(graph):
            value = self.ask[0](x)
        return self.actor(x) * value


@on_ranks(1, 2)
@pytest.mark.parametrize("graph", [False, True])
def test_a_pass_of_one_root_inside_another(rank, world, graph):
    """A root that shares units with the one that runs computes inside its forward; it frees nothing of it."""
    torch.manual_seed(SEED)
    alone = Both()
    both = copy.deepcopy(alone)
    nets = {both: Nested(both), alone: Nested(alone)}
    for unit in (*both.actor.trunk.blocks, both.critic, nets[both]):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    for step in range(3):
        step_alike(both, alone, lambda model: nets[model](INPUTS, graph).square().mean(), f"step {step}")


class Asks(nn.Module):
    """A model whose forward asks another one, and then computes with a head that it ties to that one's."""

    def __init__(self, other: nn.Sequential) -> None:
        super().__init__()
        self.body, self.head, self.ask = nn.Linear(8, 8), nn.Linear(8, 8), [other]
        self.head.weight = other[-1].weight

    def forward(self, x: torch.Tensor, graph: bool) -> torch.Tensor:
        with torch.set_grad_enabled(graph):
            y = self.ask[0](x)
        return self.head(self.body(x) + y)


@on_ranks(1, 2)
@pytest.mark.parametrize("graph", [False, True])
def test_a_tied_head_of_a_root_that_runs_inside_another(rank, world, graph):
    """Users of a tied parameter were counted in each pass, so the inner forward freed what the outer one had gathered:
    an error about a shard. Found by random programs with several roots."""
    torch.manual_seed(SEED)
    alone = Asks(stack(8))
    module = copy.deepcopy(alone)
    for unit in (module.ask[0], module):
        fsdp2.fully_shard(unit, mesh=mesh_1d(), reshard_after_forward=True)
    for step in range(3):
        step_alike(module, alone, lambda model: model(INPUTS, graph).square().mean(), f"step {step}")


@on_ranks(1, 2)
def test_a_forward_that_was_interrupted_uses_no_tied_head(rank, world):
    """Nothing reports Ctrl-C. A model with a tied head that trains on must not take it for one that the other computes
    with: it would compute with the values of that time."""
    torch.manual_seed(SEED)
    alone = Asks(stack(8))
    module = copy.deepcopy(alone)
    for unit in (module.ask[0], module):
        fsdp2.fully_shard(unit, mesh=mesh_1d(), reshard_after_forward=True)
    step_alike(module, alone, lambda model: model(INPUTS, True).square().mean(), "first step")

    def stop(*unused: object) -> None:
        raise KeyboardInterrupt

    with module.body.register_forward_pre_hook(stop), pytest.raises(KeyboardInterrupt):
        module(INPUTS, True)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(*[model.ask[0](INPUTS) for model in (module, alone)])
            for parameter in (*module.ask[0].parameters(), *alone.ask[0].parameters()):
                parameter.mul_(0.5)
    assert isinstance(module.head.weight, DTensor)
    step_alike(module, alone, lambda model: model(INPUTS, True).square().mean(), "last step")


class Distilled(nn.Module):
    """A student whose loss, which is recomputed in backward, asks a teacher that is a model of its own."""

    def __init__(self, teacher: nn.Module, *, checkpointed: bool) -> None:
        super().__init__()
        self.student, self.ask, self.checkpointed = stack(), [teacher], checkpointed

    def loss(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Compare with the teacher."""
        with torch.no_grad():
            wanted = self.ask[0](inputs)
        return (x - wanted).square().mean()

    def compare(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Compare with the teacher, and perhaps once more in backward."""
        if self.checkpointed:
            return checkpoint(self.loss, x, inputs, use_reentrant=False)
        return self.loss(x, inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.compare(self.student(inputs), inputs)


@on_ranks(1, 2)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_teacher_with_a_root_of_its_own(rank, world, checkpointed, where):
    """Its forward is recomputed inside the student's backward. That was taken for a backward of the teacher's, which
    never ended: ``synchronize_gradients`` was refused, and ``unshard()`` did not outlive an evaluation."""
    teachers = beside_one_process(stack)
    alone = Distilled(teachers[1], checkpointed=checkpointed)
    module = copy.deepcopy(alone)
    module.ask = [teachers[0]]
    for unit in (*module.student, module):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    outside = lambda model: model.compare(model.student(INPUTS), INPUTS)  # the layers are roots themselves
    for step in range(3):
        step_alike(module, alone, outside if where == "outside" else lambda model: model(INPUTS), f"step {step}")
    teachers[0].synchronize_gradients()
    teachers[0][0].unshard()
    weight = teachers[0][0].weight
    with torch.no_grad():
        torch.testing.assert_close(*[teacher(INPUTS) for teacher in teachers])
    assert teachers[0][0].weight is weight and weight.untyped_storage().size() > 0
    teachers[0][0].reshard()
    step_alike(*teachers, lambda teacher: teacher(INPUTS).square().mean())  # it can train as well


def tower() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def trained_in_turn(actor: Any, critic: Any) -> list[torch.Tensor]:
    """Train a critic, then an actor by what the critic says; return the losses."""
    losses = []
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False) for model in (actor, critic)]
    for step in range(3):
        states = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        (critic(states) - 1).square().mean().backward()
        fsdp2.clip_grad_norm_(critic.parameters(), 0.1)
        optimizers[1].step()
        optimizers[1].zero_grad()
        handle = critic[0].unshard(async_op=True) if isinstance(critic, fsdp2.FSDPModule) else None
        actions = actor(states)
        if handle is not None:
            handle.wait()
        loss = -critic(actions).mean()
        loss.backward()
        fsdp2.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 0.1)
        if handle is not None:
            critic[0].reshard()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@on_ranks(1, 2)
@composes("several roots", "Adam", "clipping")
@pytest.mark.parametrize("share", [False, True])
def test_models_that_are_trained_in_turn(rank, world, share):
    """Two roots with losses and optimizers of their own; the loss of one goes through the other, whose first unit is
    gathered while the first model computes."""
    torch.manual_seed(SEED)
    alone = nn.ModuleList([tower(), tower()])
    alone[1].append(nn.Linear(8, 64))
    both: Any = copy.deepcopy(alone)
    for model in both:
        for unit in (*model, model):
            fsdp2.fully_shard(unit, mesh=mesh_1d())
    if share:
        fsdp2.share_comm_ctx([*both])
    torch.testing.assert_close(torch.stack(trained_in_turn(*both)), torch.stack(trained_in_turn(*alone)))
    for sharded_param, param in zip(both.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(sharded_param.full_tensor(), param)


@on_ranks(2)
def test_sharing_while_gradients_are_on_their_way(rank, world):
    """``share_comm_ctx`` between a backward and ``finalize_backward``: this waited on the new lanes, and returned
    without the gradients that were in flight on the old ones. A handle that was not waited for is refused by name."""
    torch.manual_seed(SEED)
    models: list[Any] = [tower()]
    models += [copy.deepcopy(models[0]) for _ in range(2)]
    for model in models:
        for unit in (*model, model):
            fsdp2.fully_shard(unit, mesh=mesh_1d())
        model.set_manual_backward_finalization(True)
        model(INPUTS).sum().backward()
    shares, apart, other = models
    other.finalize_backward()
    fsdp2.share_comm_ctx([other, shares])
    for model in (shares, apart):
        model.finalize_backward()
    for one, two in zip(shares.parameters(), apart.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), two.grad.to_local())
    other(INPUTS).sum().backward()
    handle = other.finalize_backward(async_op=True)
    for roots in ([other, apart], [apart, other]):
        with pytest.raises(RuntimeError, match=r"share_comm_ctx: a gradient reduction is under way.*Call wait\(\)"):
            fsdp2.share_comm_ctx(roots)
    handle.wait()
    fsdp2.share_comm_ctx([other, apart])
    for model in (other, apart):
        model(INPUTS).sum().backward()
        model.finalize_backward()
    assert all(param.grad is not None for model in models for param in model.parameters())


class Towers(nn.Module):
    """Two models under one root."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = tower(), tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.image(x) @ self.text(x).T


@on_ranks(2)
def test_one_root_gathers_ahead_across_its_models(rank, world):
    """As docs/several_roots.md says: under one root each tower is gathered while the other one computes."""
    torch.manual_seed(SEED)
    towers: Any = Towers()
    for unit in (*towers.image, *towers.text, towers):
        fsdp2.fully_shard(unit, mesh=mesh_1d())
    found: list[tuple[str, str]] = []
    for _ in range(2):
        with listening(lambda event, name: found.append((event, name))):
            found.clear()
            towers(torch.ones(2, 8)).sum().backward()
    assert found.index(("unshard", "text.0")) < found.index(("post_forward", "image.2"))
    backward = found[found.index(("pre_backward", "text.2")) :]
    assert backward.index(("unshard", "image.2")) < backward.index(("post_backward", "text.0"))


def towers_on(mesh: Any, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    """Return two towers that are two roots, two that share lanes, or one root, and an optimizer."""
    model: Any = Towers()
    roots = [model] if kind == "one" else [model.image, model.text]
    for tower_of in (model.image, model.text):
        for i in range(len(tower_of)):
            tower_of[i] = fsdp2.fully_shard(nn.Linear(2048, 2048, bias=False), mesh=mesh)
    for root in roots:
        fsdp2.fully_shard(root, mesh=mesh)
    if kind == "shared":
        fsdp2.share_comm_ctx(roots)
    return model, torch.optim.SGD(model.parameters())


def test_what_several_roots_reserve():
    """Roots that share lanes give each other memory, and one root keeps one unit between forward and backward."""

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model(torch.empty(8, 2048)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    kinds = ("apart", "shared", "one")
    found = [fsdp2.forecast(partial(towers_on, kind=kind), step, mesh={"shard": 8}) for kind in kinds]
    apart, shared, one = (result.reserved_bytes for result in found)
    assert apart > shared > one, (apart, shared, one)
