"""Momentum teachers (MoCo, BYOL, DINO): the forward writes to a teacher in some way, and then computes with it.

Few of these ways show in a version counter: ``.data`` has a counter of its own, and operators on lists of DTensors run
below autograd. So no counter finds them all, and what a forward has gathered of a teacher before it was written may be
old, without a word. A teacher without gradients is not gathered ahead; one with gradients is compared, by the host on a
CPU, and by the device if it has streams.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fsdp2
from fsdp2 import FSDPModule, MixedPrecisionPolicy
from fsdp2.sharding.platform import simulated, using
from tests.support import api
from tests.support.parity import beside_one_process, mesh_of
from tests.support.pool import LIMIT_SECONDS, POOL, on_ranks
from tests.support.streams import Device

pytestmark = api.fsdp2_only

Write = Callable[[list[Any], list[Any]], None]


def by_method(teacher: list[Any], student: list[Any]) -> None:
    """In place, which version counters show."""
    for held, trained in zip(teacher, student):
        held.lerp_(trained, 0.5)


def by_data(teacher: list[Any], student: list[Any]) -> None:
    """As most published code does."""
    for held, trained in zip(teacher, student):
        held.data.mul_(0.5).add_(trained.data, alpha=0.5)


def by_assigned_data(teacher: list[Any], student: list[Any]) -> None:
    """With other memory."""
    for held, trained in zip(teacher, student):
        held.data = held.data * 0.5 + trained.data * 0.5


def by_foreach(teacher: list[Any], student: list[Any]) -> None:
    """As fast code does."""
    torch._foreach_lerp_(teacher, student, 0.5)


def by_local(teacher: list[Any], student: list[Any]) -> None:
    """Each rank writes its own piece."""
    local = lambda tensors: [getattr(tensor.detach(), "_local_tensor", tensor.detach()) for tensor in tensors]
    torch._foreach_lerp_(local(teacher), local(student), 0.5)


def by_optimizer(teacher: list[Any], student: list[Any]) -> None:
    """By an optimizer whose gradients are the differences."""
    for held, trained in zip(teacher, student):
        held.grad = (held - trained).detach()
    torch.optim.SGD(teacher, lr=0.5, foreach=True).step()
    for held in teacher:
        held.grad = None


WRITES: dict[str, Write] = {
    write.__name__: write for write in (by_method, by_data, by_assigned_data, by_foreach, by_local, by_optimizer)
}
SHOWN = ("by_method", "by_optimizer")
"""Those that version counters, or a hook of the optimizer, show."""


class Momentum(nn.Module):
    """A student, and a teacher that the forward updates by ``write`` before it runs; ``graph``: with gradients.

    It may call ``reshard()`` on the units that it has updated.
    """

    def __init__(self, write: str, graph: bool, reshards: bool) -> None:
        super().__init__()
        self.write, self.graph, self.reshards = WRITES[write], graph, reshards
        self.student, self.teacher = (nn.Sequential(*[nn.Linear(4, 4) for _ in range(2)]) for _ in range(2))
        self.teacher.requires_grad_(graph)
        self.weights: tuple[list[Any], list[Any]] = [], []
        self.updates = True

    def keep_weights(self) -> None:
        """Remember the weights, as an optimizer does: between steps the modules show what is kept of them."""
        self.weights = [*self.teacher.parameters()], [*self.student.parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = self.student(x)
        if self.updates:
            with torch.no_grad():
                self.write(*self.weights)
        for unit in self.teacher:
            if self.reshards and isinstance(unit, FSDPModule):
                unit.reshard()
        with torch.set_grad_enabled(self.graph and torch.is_grad_enabled()):
            target = self.teacher(x)
        return (wanted - target).square()


def units(module: Any) -> list[nn.Module]:
    """Every layer."""
    return [*module.student, *module.teacher]


@dataclass(frozen=True)
class Kind:
    """One way to shard the model."""

    world: int = 2
    replicas: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    lists: bool = False  # the student's layers gather the teacher's ahead

    @property
    def evaluates_alone(self) -> bool:
        """True if a replica may evaluate alone, so that nobody may gather again because of what it sees."""
        return self.replicas > 1 and not self.options

    def shard(self, write: str, graph: bool, reshards: bool) -> tuple[Any, Any]:
        """Return the sharded model, and the same in one process."""
        sizes, names = (self.replicas, self.world // self.replicas), ("replicate", "shard")
        mesh = mesh_of(*sizes, names=names) if self.replicas > 1 else mesh_of(self.world)
        module, alone = beside_one_process(partial(Momentum, write, graph, reshards), units, mesh=mesh, **self.options)
        if self.lists:
            module.student[0].set_modules_to_forward_prefetch([module.student[1], module.teacher[0]])
            module.student[1].set_modules_to_forward_prefetch([*module.teacher])
        return module, alone


OVER = {"shard_over_replicas": True}
KINDS = {
    "one rank": Kind(1),
    "two ranks": Kind(),
    "prefetch lists": Kind(lists=True),
    "kept": Kind(options={"reshard_after_forward": False}),
    "kept, prefetch lists": Kind(options={"reshard_after_forward": False}, lists=True),
    "pieces kept": Kind(4, options={"reshard_after_forward": 2}),
    "pieces kept, prefetch lists": Kind(4, options={"reshard_after_forward": 2}, lists=True),
    "replicas": Kind(4, 2),
    "over replicas": Kind(4, 2, OVER),
    "over replicas, kept": Kind(4, 2, OVER | {"reshard_after_forward": False}),
    "over replicas, prefetch lists": Kind(4, 2, OVER, lists=True),
}


def cases() -> list[Any]:
    """Return every kind with every way of writing; few of them with a graph are quick."""
    found = []
    for kind, write, graph in itertools.product(KINDS, WRITES, (False, True)):
        quick = write in ("by_data", "by_foreach", "by_optimizer") and (not graph or kind in ("two ranks", "replicas"))
        marks = [] if quick else [pytest.mark.slow]
        how = f"{kind}: {write}{', with a graph' if graph else ''}"
        found.append(pytest.param(KINDS[kind].world, kind, write, graph, marks=marks, id=how))
    return found


@pytest.mark.parametrize(("world", "kind", "write", "graph"), cases())
def test_a_teacher_that_the_forward_updates(world, kind, write, graph):
    """It computes with the new weights, with a graph and without, in training and in evaluation."""
    POOL.run(world, train_and_compare, {"kind": kind, "write": write, "graph": graph}, LIMIT_SECONDS)


RESHARDED = [
    # In a usual run each kind, and each way of writing.
    pytest.param(kind, write, marks=[] if write == "by_data" or kind == "two ranks" else pytest.mark.slow)
    for kind in ("two ranks", "prefetch lists", "kept", "over replicas")
    for write in ("by_data", "by_foreach", "by_local")
]


@pytest.mark.parametrize(("kind", "write"), RESHARDED)
def test_a_teacher_with_gradients_is_resharded_behind_the_write(kind, write):
    """What docs/differences.md says: the unit's ``reshard()`` after a write that nothing shows makes it right."""
    kwargs = {"kind": kind, "write": write, "graph": True, "reshards": True}
    POOL.run(KINDS[kind].world, train_and_compare, kwargs, LIMIT_SECONDS)


def train_and_compare(rank: int, world: int, kind: str, write: str, graph: bool, reshards: bool = False) -> None:
    """One rank of a case: train both and evaluate between steps."""
    pair = KINDS[kind].shard(write, graph, reshards)
    inputs = torch.ones(2, 4)
    for model in pair:
        model.keep_weights()
    for step in range(3):
        try:
            losses = [model(inputs).mean() for model in pair]
        except RuntimeError as error:
            assert write == "by_assigned_data" and "teacher.0.weight" in str(error), error
            return
        torch.testing.assert_close(*losses, msg=lambda text, s=step: f"step {s}: {text}")
        for loss, model in zip(losses, pair):
            loss.backward()
            torch.optim.SGD(model.weights[1], 0.5).step()
            model.zero_grad()
        for model in pair:
            model.updates = not (graph and KINDS[kind].evaluates_alone)
        with torch.no_grad():
            outputs = [model(inputs) for model in pair]
        for model in pair:
            model.updates = True
        torch.testing.assert_close(*outputs, msg=lambda text, s=step: f"evaluation after step {s}: {text}")


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("grad", [True, False])
@on_ranks(1, 2)
def test_a_write_between_forwards_that_keep_weights_in_memory(rank, world, write, grad):
    """No backward follows, so the weights stay in memory from forward to forward, behind the write of an average.

    They were trusted if no version counter showed the write. One that is trained, and one without gradients whose
    ``reshard()`` nobody calls.
    """
    make = partial(nn.Sequential, nn.Linear(4, 4), nn.Linear(4, 4))
    model, alone = beside_one_process(make, lambda module: [*module], reshard_after_forward=False)
    pairs = [
        ([*module.parameters()], [torch.ones_like(weight) for weight in module.parameters()])
        for module in (model, alone)
    ]
    refused = pytest.raises(RuntimeError, match=r"^0\.weight, 0\.bias: a tensor was assigned to \.data")
    for step in range(3):
        with torch.set_grad_enabled(grad), refused if step and write == "by_assigned_data" else nullcontext():
            torch.testing.assert_close(model(torch.ones(2, 4)), alone(torch.ones(2, 4)))
        with torch.no_grad():
            for held, values in pairs:
                WRITES[write](held, values)


@pytest.mark.parametrize("write", [by_data, by_foreach, by_local])
@on_ranks(1, 2)
def test_a_write_behind_unshard(rank, world, write):
    """Weights that the caller has gathered were trusted, if no version counter showed the write."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fsdp2.fully_shard(model, mesh=mesh_of(world))
    weights = [*model.parameters()]

    def fill(value: float) -> None:
        with torch.no_grad():
            write(weights, [torch.full_like(weight, 2 * value) - weight for weight in weights])

    fill(1)
    model.unshard()
    fill(2)
    with torch.no_grad():
        assert model(torch.ones(1, 4)).tolist() == [[4 * 2 * (4 * 2 + 2) + 2] * 4]
    fill(3)
    model.unshard()
    assert all((weight == 3).all() for weight in model.parameters())


class GathersItsTeacher(nn.Module):
    """Writes to a teacher, and gathers it by hand before that or behind it."""

    def __init__(self, write: Write, gathers: str) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)
        self.write, self.gathers = write, gathers
        self.weights: tuple[list[Any], list[Any]] = [], []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted, teacher, scale = self.student(x), self.teacher, torch.ones(())
        gathers = self.gathers if isinstance(teacher, FSDPModule) else ""
        if gathers.startswith("before"):
            teacher.unshard(async_op=gathers == "before, in the background")
        with torch.no_grad():
            self.write(*self.weights)
        if gathers == "behind":
            teacher.unshard()
        with fsdp2.use_weights(teacher) if gathers == "for a block" else nullcontext():
            if not self.gathers.startswith("before"):
                scale = teacher.weight.detach().sum()
        return (wanted - teacher(x)) * scale


@pytest.mark.parametrize("write", [by_method, by_data])
@pytest.mark.parametrize("gathers", ["before", "before, in the background", "behind", "for a block"])
@on_ranks(1, 2)
def test_a_forward_writes_beside_a_gather_by_hand(rank, world, gathers, write):
    """What ``unshard()`` had gathered before the write was used behind it, and behind the write ``unshard()`` and
    ``use_weights`` trusted what the forward had gathered ahead: the old weights, without a word."""
    pair = beside_one_process(partial(GathersItsTeacher, write, gathers))
    for model in pair:
        model.weights = [*model.teacher.parameters()], [*model.student.parameters()]
    for step in range(3):
        outputs = [model(torch.ones(2, 4)) for model in pair]
        torch.testing.assert_close(*outputs, msg=lambda text, s=step: f"step {s}: {text}")
        for output, model in zip(outputs, pair):
            output.square().mean().backward()
            torch.optim.SGD(model.weights[1], 0.5).step()
            model.zero_grad()


# ---- where the host would have to wait for a gather, or ranks might part ----

STREAMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "kept": {"reshard_after_forward": False},
}
OLD = r"^teacher\.0\.weight, teacher\.0\.bias: .*computed with old values; expected those of the sharded parameter"


@pytest.mark.parametrize("write", ["by_data", "by_foreach", "by_local"])
@pytest.mark.parametrize("options", STREAMED)
@pytest.mark.parametrize("begins", [0, 11])
@on_ranks(1, 2)
def test_on_streams_a_later_forward_raises(rank, world, write, options, begins):
    """The device compares, in the forwards behind the first one and in some later ones. No host waits for it, and every
    rank raises. The units of the student, which nothing writes to, are right; one of their weights is NaN."""
    with Device() as device, using(simulated("streams", device)):
        model, _ = Kind(world, options=STREAMED[options]).shard(write, True, False)
        with torch.no_grad():
            model.student[1].weight.fill_(float("nan"))
        model.keep_weights()
        device.host_waits.clear()
        model.updates = False
        for _ in range(begins):
            model(torch.ones(2, 4)).mean().backward()
        model.updates = True
        with pytest.raises(RuntimeError, match=OLD):
            for _ in range(3 if begins == 0 else 19 - begins):
                model(torch.ones(2, 4)).mean().backward()
        assert not device.host_waits


@on_ranks(1, 2)
def test_on_streams_a_write_to_what_stays_in_memory_is_found(rank, world):
    """No gather comes between the write of an average and the forward that would compute with the old values."""
    with Device() as device, using(simulated("streams", device)):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fsdp2.fully_shard(model, mesh=mesh_of(world))
        weights = [*model.parameters()]
        with pytest.raises(RuntimeError, match=r"^0\.weight, .*computed with old values"):
            for _ in range(4):
                model(torch.ones(2, 4))
                with torch.no_grad():
                    by_data(weights, [torch.ones_like(weight) for weight in weights])


@on_ranks(1)
@pytest.mark.parametrize("turns", ["evaluation, training", "training, evaluation", "two roots"])
def test_on_streams_a_forward_that_takes_turns_is_found(rank, world, turns):
    """Every sixteenth forward was checked: always the evaluation, or always that of the same root."""
    with Device() as device, using(simulated("streams", device)):
        first, second = (Kind(world).shard("by_data", True, False)[0] for _ in range(2))
        for model in (first, second):
            model.keep_weights()
            model.updates = False
        if turns == "two roots":
            fsdp2.share_comm_ctx([first, second])

        def take_turns(step: int) -> None:
            for turn in turns.split(", ") if turns != "two roots" else ("another", "training"):
                with torch.set_grad_enabled(turn != "evaluation"):
                    model = first if turn == "another" else second
                    model.updates = turn == "training" and step > 4
                    output = model(torch.ones(2, 4))
                if turn != "evaluation":
                    output.mean().backward()

        with pytest.raises(RuntimeError, match=OLD):
            for step in range(4 + 17 + 1):
                take_turns(step)


@on_ranks(2)
def test_ranks_that_are_not_compared_raise(rank, world):
    """If one gathered again, and another one saw no difference, nobody would notice."""
    fsdp2.set_rank_checks(False)
    model, _ = Kind(world).shard("by_data", True, False)
    model.keep_weights()
    model.updates = False
    model(torch.ones(2, 4))  # in which the order becomes known
    model.updates = True
    with pytest.raises(RuntimeError, match=r"^teacher\.0\.weight, .*would compute with the old values"):
        model(torch.ones(2, 4))
