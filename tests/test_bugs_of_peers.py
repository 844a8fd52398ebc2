"""Bugs that programs written against torch's own ``fully_shard`` found; each test opens with the story of its bug."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp2._trace import listening
from tests.support import api
from tests.support.models import mlp
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


def _units(world: int) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(*[mlp(4, 4) for _ in range(5)])
    for unit in (*module, module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    return module


def _iteration(module: nn.Module) -> list[tuple[str, str]]:
    events: list[tuple[str, str]] = []
    with listening(lambda event, name: events.append((event, name))):
        module(torch.ones(2, 4)).sum().backward()
    return events


@on_ranks(2)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_prefetch_set_between_iterations(rank, world, direction):
    """Units were told what to prefetch after the first iteration, and never did so: a gather that starts earlier than
    in the last pass was left for later, as one that other ranks may not have come to, in every pass from then on. Only
    what was set before the first forward counted. The setters have the ranks agree on the order of gathers anew."""

    def prefetch_others(module):  # the one after the next first, so that the order of gathers is another
        units = list(module) if direction == "forward" else list(module)[::-1]
        for unit, after, last in zip(units, units[1:], units[2:], strict=False):
            setter = getattr(unit, f"set_modules_to_{direction}_prefetch")
            setter([last, after])

    early, late = _units(world), _units(world)
    prefetch_others(early)
    _iteration(early)
    before = _iteration(late)
    expected = _iteration(early)
    prefetch_others(late)
    assert _iteration(late) == expected != before
    prefetch_others(late)  # nothing new: the ranks go on as they agreed
    assert _iteration(late) == expected


@on_ranks(2)
def test_the_event_of_a_stream_of_the_cpu(rank, world):
    """Scripts that run on any device record the event after the optimizer's step with the current stream of theirs. A
    stream of a CPU records None, which ``set_post_optim_event`` refused."""
    module = _units(world)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.register_step_post_hook(
        lambda *_: module.set_post_optim_event(torch.get_device_module("cpu").current_stream().record_event())
    )
    losses = []
    for _ in range(2):
        loss = module(torch.ones(2, 4)).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
