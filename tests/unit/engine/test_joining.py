"""Units that some ranks skip, and collectives that only other ranks need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2 import fully_shard
from fsdp2.engine.agreement import Answer, CanJoin
from fsdp2.engine.collective import Collective
from fsdp2.engine.observer import Observer
from fsdp2.engine.passes import Pass
from tests.support.parity import shard_each


class Elsewhere:
    """The agreement with ranks that launch the second of three units first, then the first in another format."""

    def __init__(self, groups: list[Any]) -> None:
        self.groups, self.seen = groups, list[Any]()

    def next(self, collective: Collective, *, optional: bool, can_join: CanJoin) -> Answer | Collective:
        """Ask for the first unit, and inside its join for the second and for the first again."""
        first, second, _ = self.groups
        if collective.group is first and second not in self.seen:
            return Collective("gather", second)
        wanted = Collective("gather", first, (1,))  # in another format than this rank's
        if collective.group is not second and first not in self.seen and can_join(wanted, True):
            return wanted
        self.seen.append(collective.group)
        return Answer.LAUNCH


def test_a_unit_that_is_being_joined_is_not_joined_in_itself(mesh: DeviceMesh) -> None:
    """It was, after another one had been joined in it, without end."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh).set_reduce_scatter_unused_params(True)
    groups = [layer._get_fsdp_state().groups[0] for layer in model]
    elsewhere = Elsewhere(groups)
    run = Pass(groups, cast(Observer, SimpleNamespace(agreement=elsewhere)))
    run.prefetch(groups[2])
    assert elsewhere.seen == [groups[1], groups[0], groups[2]]


def test_gradients_of_a_unit_that_all_ranks_use_wait_for_its_own_backward(mesh: DeviceMesh) -> None:
    """Ranks that skip a unit come earlier to the reductions of the others, but these join only with their gradients."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    shard_each(model, fsdp2, mesh=mesh)
    model[1].set_reduce_scatter_unused_params(True)
    root = model._get_fsdp_state().root
    seen: list[bool] = []

    def ask(grad: torch.Tensor) -> None:
        run = root.backward
        assert run is not None and run.joining is not None
        for layer in model:
            seen.append(run.joining.can_join(run, Collective("reduce", layer._get_fsdp_state().groups[0]), True))

    model[1].register_forward_hook(lambda module, args, output: output.register_hook(ask) and None)
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [False, False, False]


@pytest.mark.parametrize("marked", [False, True])
def test_who_is_asked_about_a_collective(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch, marked: bool) -> None:
    """The observer is shown it, and answers nothing. Only models with units that ranks may skip ask an agreement."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_each(model, fsdp2, mesh=mesh)
    model[1].set_reduce_scatter_unused_params(marked)
    model(torch.ones(2, 4)).sum().backward()
    observer = mock.Mock()
    observer.agreement.next.return_value, observer.agreement.next_before_end.return_value = Answer.LAUNCH, None
    monkeypatch.setattr(model._get_fsdp_state().root, "observer", observer)
    model(torch.ones(2, 4)).sum().backward()
    assert observer.before.called is not marked and observer.agreement.next.called is marked
