"""A model that is driven in any order computes what a plain one does, call by call.

Every public call that moves parameters or gradients is a rule of one state machine, and a plain model that is driven
alike is what it must agree with. One process, so that hundreds of calls take a second and a failure shrinks to the few
calls that matter. Programs of several ranks are in ``test_random_programs.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.support import api
from tests.unit.meshes import gloo_mesh

pytestmark = api.fsdp2_only

UNITS = ("first", "second", "last", "")
NAMES = ("first.weight", "first.bias", "second.weight", "scale", "last.weight")
units, names = st.sampled_from(UNITS), st.sampled_from(NAMES)


class Net(nn.Module):
    """Layers, one of which runs twice and may be recomputed, and a parameter of the root; a forward may break off."""

    def __init__(self, recompute: bool, tie: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(4))
        if tie:
            self.last.weight = self.first.weight
        self.recompute, self.fails, self.skips = recompute, False, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            y = checkpoint(self.second, x, use_reentrant=False) if self.recompute else self.second(x)
            x = x + torch.tanh(y)
        if self.fails:
            raise ZeroDivisionError
        return x * self.scale if self.skips else self.last(x) * self.scale


def local(value: Any) -> torch.Tensor:
    """What a tensor holds; in one process a shard is the whole."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


class Driven(RuleBasedStateMachine):
    """A sharded model beside a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[list[torch.Tensor]] = []  # of forwards whose backward is to come, ours and the plain one's
        self.number = 0
        self.reduces = True

    @initialize(
        reshard=st.sampled_from([None, True, False]), recompute=st.booleans(), tie=st.booleans(), grouped=st.booleans()
    )
    def build(self, reshard: bool | None, recompute: bool, tie: bool, grouped: bool) -> None:
        torch.manual_seed(0)
        self.plain: Any = Net(recompute, tie)
        self.ours: Any = copy.deepcopy(self.plain)
        self.reshard, self.tie = reshard, tie
        apart = [self.ours.first, self.ours.second, self.ours.last]
        together = [[self.ours.first, self.ours.last], self.ours.second]
        for unit in together if grouped or tie else apart:
            fsdp2.fully_shard(unit, mesh=MESH[0], reshard_after_forward=reshard)
        fsdp2.fully_shard(self.ours, mesh=MESH[0], reshard_after_forward=reshard)
        self.build_optimizers()

    def build_optimizers(self) -> None:
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in self.both]

    @property
    def both(self) -> tuple[Any, Any]:
        return self.ours, self.plain

    def inputs(self) -> torch.Tensor:
        self.number += 1
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(self.number))

    # ---- passes ----

    @precondition(lambda self: len(self.losses) < 2)
    @rule(skips=st.booleans())
    def forward(self, skips: bool) -> None:
        x = self.inputs()
        for model in self.both:
            model.skips = skips
        outputs = [model(x) for model in self.both]
        torch.testing.assert_close(*outputs)
        self.losses.append([output.square().mean() for output in outputs])

    @precondition(lambda self: self.losses)
    @rule(latest=st.booleans())
    def backward(self, latest: bool) -> None:
        losses = self.losses.pop(-1 if latest else 0)
        self.ours.set_is_last_backward(not self.losses)
        for loss in losses:
            loss.backward()

    @precondition(lambda self: self.losses)
    @rule()
    def drop_forwards(self) -> None:
        """No backward comes."""
        self.losses.clear()
        self.ours.reset_iter_state()
        for model in self.both:
            model.zero_grad()

    @rule(skips=st.booleans())
    def evaluate(self, skips: bool) -> None:
        x = self.inputs()
        for model in self.both:
            model.skips = skips
        with torch.no_grad():
            torch.testing.assert_close(*[model(x) for model in self.both])

    @precondition(lambda self: not self.losses)
    @rule(trains=st.booleans())
    def break_off(self, trains: bool) -> None:
        x = self.inputs()
        for model in self.both:
            model.fails = True
            with pytest.raises(ZeroDivisionError), torch.set_grad_enabled(trains):
                model(x)
            model.fails = False

    @rule(name=names)
    def call_with_others(self, name: str) -> None:
        """Other values for one call, with which nothing is trained."""
        value, x = torch.randn(self.plain.get_parameter(name).shape), self.inputs()
        for model in self.both:
            model.skips = False
        ours = self.ours.get_parameter(name)
        if not isinstance(ours, DTensor):
            return  # full parameters are shown: those of a forward, or of unshard()
        other = DTensor.from_local(value, ours.device_mesh, ours.placements, run_check=False)
        with torch.no_grad():
            outputs = [
                torch.func.functional_call(model, {name: given}, x) for model, given in zip(self.both, (other, value))
            ]
        torch.testing.assert_close(*outputs)

    # ---- memory ----

    @rule(unit=units, held=st.booleans())
    def hold(self, unit: str, held: bool) -> None:
        if held:
            self.ours.get_submodule(unit).unshard()
        elif not self.losses or self.reshard is not False:
            self.ours.get_submodule(unit).reshard()

    @rule(name=names)
    def use(self, name: str) -> None:
        with fsdp2.use_weights(self.ours), torch.no_grad():
            torch.testing.assert_close(local(self.ours.get_parameter(name)), self.plain.get_parameter(name).detach())

    # ---- values ----

    def save(self) -> None:
        saved, expected = self.ours.state_dict(), self.plain.state_dict()
        assert {*saved} == {*expected}
        for name, value in saved.items():
            assert isinstance(value, DTensor), name
            torch.testing.assert_close(local(value), expected[name])

    @precondition(lambda self: not self.losses)
    @rule(name=names, way=st.sampled_from(["in place", "state dict", "load", "summoned"]))
    def write(self, name: str, way: str) -> None:
        value = torch.randn(self.plain.get_parameter(name).shape, generator=torch.Generator().manual_seed(self.number))
        self.number += 1
        self._write(name, way, value)
        self.evaluate(skips=False)

    def _write(self, name: str, way: str, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.plain.get_parameter(name).copy_(value)
            if way == "summoned":
                with fsdp2.summon_full_params(self.ours, writeback=True):
                    self.ours.get_parameter(name).copy_(value)
                return
            saved = self.ours.state_dict()
            if way == "load":
                saved[name] = DTensor.from_local(
                    value, saved[name].device_mesh, saved[name].placements, run_check=False
                )
                if self.tie:
                    saved["first.weight"] = saved["last.weight"] = saved[name if name in TIED else "last.weight"]
                self.ours.load_state_dict(saved)
            elif way == "in place":
                for unit in (self.ours.first, self.ours.second, self.ours.last, self.ours):
                    unit.reshard()
                local(self.ours.get_parameter(name)).copy_(value)
                self.ours.get_parameter(name).mul_(1)  # a local tensor has a counter of its own
            else:
                saved[name].copy_(DTensor.from_local(value, saved[name].device_mesh, saved[name].placements))

    @precondition(lambda self: not self.losses and not self.tie)
    @rule(name=names)
    def assign(self, name: str) -> None:
        """Other parameters; their optimizers are built anew."""
        path, _, last = name.rpartition(".")
        value = torch.randn(self.plain.get_parameter(name).shape, generator=torch.Generator().manual_seed(self.number))
        for unit in (self.ours.first, self.ours.second, self.ours.last, self.ours):
            unit.reshard()
        for model in self.both:
            setattr(model.get_submodule(path), last, nn.Parameter(value.clone()))
        x = self.inputs()
        for model in self.both:
            model.skips = False
        with torch.no_grad():
            torch.testing.assert_close(*[model(x) for model in self.both])
        self.build_optimizers()

    @precondition(lambda self: not self.losses and self.reduces)
    @rule()
    def copy(self) -> None:
        self.ours, self.plain = copy.deepcopy(self.ours), copy.deepcopy(self.plain)
        for model in self.both:
            model.zero_grad()
        self.build_optimizers()

    # ---- gradients ----

    @precondition(lambda self: not self.losses)
    @rule(way=st.sampled_from(["step", "clip", "zero", "drop", "accumulate", "reduce", "synchronize"]))
    def settle(self, way: str) -> None:
        if way in ("accumulate", "reduce"):
            self.reduces = way == "reduce"
            self.ours.set_requires_gradient_sync(self.reduces)
            return
        if way in ("zero", "drop"):
            for model in self.both:
                model.zero_grad(set_to_none=way == "drop")
            return
        self.ours.synchronize_gradients(recurse=True)
        self.compare_gradients()
        if way == "clip":
            fsdp2.clip_grad_norm_(self.ours.parameters(), 0.5)
            nn.utils.clip_grad_norm_(self.plain.parameters(), 0.5)
        if way != "synchronize":
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def compare_gradients(self) -> None:
        saved = self.ours.state_dict(keep_vars=True)
        for name, param in self.plain.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            got = torch.zeros_like(param) if saved[name].grad is None else local(saved[name].grad)
            torch.testing.assert_close(got, expected, msg=lambda text, n=name: f"{n}: {text}")

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "ours") and not self.losses:
            self.save()
            if not self.ours.get_pending_gradients():
                self.compare_gradients()


TIED = ("first.weight", "last.weight")
MESH: list[Any] = []


@pytest.fixture(autouse=True)
def mesh() -> Iterator[None]:
    """One rank whose collectives are real."""
    with gloo_mesh() as made:
        MESH[:] = [made]
        yield
    MESH.clear()


class TestDriven(Driven.TestCase):
    """The machine, with the profile of the run."""

    settings = settings(max_examples=settings().max_examples, stateful_step_count=30)
