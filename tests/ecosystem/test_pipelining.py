"""torch.distributed.pipelining: stages sharded by fsdp2 under every schedule train as a single process does."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from tests.api.parity import full, mesh_of
from tests.support import api
from tests.support.pool import on_ranks

LAYERS, MICRO = 4, 4
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}
"""Names of schedules, and how many stages a rank has in each."""


def layers() -> list[nn.Sequential]:
    """Return the parts of the model, each two units big."""
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(LAYERS)]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return a mean over rows."""
    return (output - target).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of one step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 8, generator=generator)


def parts_of(pp_rank: int, count: int, name: str) -> list[tuple[int, list[int]]]:
    """Return (stage index, layers) of a rank: stages in a loop over ranks, or in a V."""
    stages = 2 * count
    indices = [pp_rank, stages - 1 - pp_rank] if name == "ScheduleZBVZeroBubble" else range(pp_rank, stages, 2)
    each = LAYERS // stages
    return [(index, list(range(index * each, (index + 1) * each))) for index in indices]


def pipeline(fsdp, name: str, mesh) -> tuple[dict[int, nn.Module], object, bool, bool]:
    """Return this rank's layers by index, the schedule, and whether it has the first and the last stage."""
    parts, count = layers(), SCHEDULES[name]
    mine = parts_of(mesh.get_local_rank("pp"), count, name)
    stages, owned = [], {}
    for index, chosen in mine:
        for layer in chosen:
            fsdp.fully_shard(parts[layer], mesh=mesh["dp"])
            owned[layer] = parts[layer]
        module = nn.Sequential(*(parts[layer] for layer in chosen))
        fsdp.fully_shard(module, mesh=mesh["dp"])
        group = mesh.get_group("pp")
        stages.append(PipelineStage(module, index, 2 * count, torch.device("cpu"), group=group))
    schedule = getattr(schedules, name)(stages[0] if count == 1 else stages, MICRO, loss_fn=loss_of)
    indices = [index for index, _ in mine]
    return owned, schedule, 0 in indices, 2 * count - 1 in indices


def train(fsdp, name: str, mesh, dp: tuple[int, int]) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses (where the last stage is) and the weights of this rank's layers after two steps."""
    owned, schedule, first, last = pipeline(fsdp, name, mesh)
    optimizer = torch.optim.SGD([p for layer in owned.values() for p in layer.parameters()], lr=0.5)
    means = []
    for step in range(2):
        x, target = (part.chunk(dp[1])[dp[0]] for part in batch(step))
        losses: list[Tensor] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step(*([x] if first else []), target=target if last else None, losses=losses if last else None)
        means += [torch.stack(losses).mean().item()] if last else []
        optimizer.step()
        optimizer.zero_grad()
    for layer in owned.values():
        layer.reshard()
    return means, {f"{i}.{n}": full(p) for i, layer in owned.items() for n, p in layer.named_parameters()}


@on_ranks(4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(rank, world, name):
    """Two pipeline ranks by two data-parallel ranks: losses and weights as with torch's, and as in a single process.

    Under the zero-bubble schedules torch's own does not train these stages as a single process does.
    """
    mesh = mesh_of(2, 2, names=("pp", "dp"))
    dp = mesh.get_local_rank("dp"), 2
    losses, weights = train(api.ours, name, mesh, dp)
    expected_losses, expected = train(api.theirs, name, mesh, dp)
    reference = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        x, target = batch(step)
        loss_of(reference(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = dict(reference.named_parameters())
    assert losses == pytest.approx(expected_losses)
    assert weights.keys() == expected.keys() and len(weights) == 4 * LAYERS // 2
    for key, value in weights.items():
        torch.testing.assert_close(value, expected[key], msg=lambda text, key=key: f"{key} against torch's: {text}")
        if "ZeroBubble" in name:
            continue
        torch.testing.assert_close(value, alone[key].detach(), msg=lambda text, key=key: f"{key}: {text}")
