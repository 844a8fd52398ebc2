"""torch.distributed.pipelining: stages sharded by fsdp2 under every schedule train as a single process does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.support import api
from tests.support.composition import composes, refuses
from tests.support.counting import Collectives
from tests.support.parity import LocalSGD, full, mesh_of
from tests.support.pool import on_ranks

LAYERS, MICRO, MAX_NORM = 4, 4, 0.1
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleLoopedBFS": 2,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
    "ScheduleDualPipeV": 2,
}
"""Names of schedules, and how many stages a rank has in each."""
SPLITTING = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Those that split backward in two."""
IN_A_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
CHOSEN = [name for name in SCHEDULES if name not in IN_A_V or api.torch_since("2.12")]
"""Before, torch's pipelining could not connect stages in a V over gloo: some follow each other on one rank."""
ALIKE = ("ScheduleLoopedBFS", "ScheduleDualPipeV")
"""GPipe's order on several stages, and zero bubbles in a V once more: a usual run leaves them out."""
PAIR = ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble" if IN_A_V[0] in CHOSEN else "ScheduleInterleavedZeroBubble")
"""One schedule that splits backward in two and one that does not."""
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Layer(nn.Sequential):
    """A part of the model, recomputed in backward if asked; its output is no view, which some schedules require."""

    recomputed = False

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        inside = super().forward
        return x + (checkpoint(inside, x, use_reentrant=False) if self.recomputed else inside(x))


def layers() -> list[Layer]:
    """Return the parts of the model."""
    torch.manual_seed(5)
    return [Layer() for _ in range(LAYERS)]


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
    indices = [pp_rank, stages - 1 - pp_rank] if name in IN_A_V else range(pp_rank, stages, 2)
    each = LAYERS // stages
    return [(index, list(range(index * each, (index + 1) * each))) for index in indices]


@dataclass
class Setup:
    """A schedule, and how its stages are made: over which dimensions, with which options of ``fully_shard``."""

    name: str
    mesh: DeviceMesh
    dp: Sequence[str] = ("dp",)
    share: bool = False
    recomputed: bool = False
    clip: bool = False
    options: dict[str, Any] | None = None

    def shard(self, fsdp: Any, module: nn.Module) -> None:
        """Make a module a unit."""
        fsdp.fully_shard(module, mesh=self.mesh[tuple(self.dp)], **(self.options or {}))

    def stages(self, fsdp: Any) -> tuple[dict[int, nn.Module], list[PipelineStage]]:
        """Return this rank's layers by index, and its stages."""
        parts, count = layers(), SCHEDULES[self.name]
        stages, owned = [], {}
        for index, chosen in parts_of(self.mesh.get_local_rank("pp"), count, self.name):
            for i in chosen:
                parts[i].recomputed = self.recomputed
                if "tp" in self.mesh.mesh_dim_names:
                    parallelize_module(parts[i], self.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
                self.shard(fsdp, parts[i])
                owned[i] = parts[i]
            module = nn.Sequential(*(parts[i] for i in chosen))
            self.shard(fsdp, module)
            group = self.mesh.get_group("pp")
            stages.append(PipelineStage(module, index, 2 * count, torch.device("cpu"), group=group))
        if self.share:
            fsdp.share_comm_ctx([stage.submod for stage in stages])
        return owned, stages

    @property
    def part(self) -> tuple[int, int]:
        """Which part of a batch this rank takes, of how many."""
        index, count = 0, 1
        for name in self.dp:
            size = self.mesh[name].size()
            index, count = index * size + self.mesh.get_local_rank(name), count * size
        return index, count


@dataclass
class Seen:
    """What one run showed: losses (where the last stage is), weights, and the collectives of its second step."""

    losses: list[float]
    weights: dict[str, Tensor]
    counts: Collectives
    units: int


def train(fsdp: Any, setup: Setup) -> Seen:
    """Train for two steps."""
    owned, stages = setup.stages(fsdp)
    multiple = len(stages) > 1
    schedule = getattr(schedules, setup.name)(stages if multiple else stages[0], MICRO, loss_fn=loss_of)
    first, last = (any(getattr(stage, which) for stage in stages) for which in ("is_first", "is_last"))
    optimizer = LocalSGD([p for layer in owned.values() for p in layer.parameters()], lr=0.5)
    means = []
    norms = []
    for step in range(2):
        index, count = setup.part
        x, target = (part.chunk(count)[index] for part in batch(step))
        losses: list[Tensor] = []
        with warnings.catch_warnings(), Collectives() as counts:
            warnings.simplefilter("ignore")
            schedule.step(*([x] if first else []), target=target if last else None, losses=losses if last else None)
        means += [torch.stack(losses).mean().item()] if last else []
        if setup.clip:
            params = [p for layer in owned.values() for p in layer.parameters()]
            norms.append(fsdp2.clip_grad_norm_(params, MAX_NORM, pp_mesh=setup.mesh["pp"]))
        optimizer.step()
        optimizer.zero_grad()
    for layer in owned.values():
        layer.reshard()
    weights = {f"{i}.{n}": full(p) for i, layer in owned.items() for n, p in layer.named_parameters()}
    assert all(norm > MAX_NORM for norm in norms)
    return Seen(means, weights, counts, len(owned))


def alone(clip: bool = False) -> dict[str, Tensor]:
    """Return the weights of a single process after two steps."""
    reference = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(2):
        x, target = batch(step)
        loss_of(reference(x), target).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in reference.named_parameters()}


def assert_weights(got: dict[str, Tensor], expected: dict[str, Tensor], whose: str, tolerance: float = 1e-5) -> None:
    """Assert that this rank's weights are those of another run."""
    for key, value in got.items():
        message = lambda text, key=key: f"{key} against {whose}: {text}"
        torch.testing.assert_close(value, expected[key], rtol=tolerance, atol=tolerance, msg=message)


@composes("pipeline", "accumulation", "SGD")
@composes("pipeline", "zero bubble", "accumulation")
@refuses("pipeline", "zero bubble", by="torch", reason="weights of units that reshard after forward get no gradient")
@on_ranks(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in ALIKE else []) for name in CHOSEN]
)
@pytest.mark.parametrize("reshard", [None, False])
def test_schedules(rank, world, name, reshard):
    """Two pipeline ranks by two data-parallel ranks: losses and weights as with torch's, and as in a single process.

    Gradients are reduced once per step and unit, whatever the number of micro-batches. A schedule that splits backward
    in two looks for parameters on the modules before it differentiates; where torch's own has resharded it finds shards
    there, which no forward computed with.
    """
    setup = Setup(name, mesh_of(2, 2, names=("pp", "dp")), options={"reshard_after_forward": reshard})
    ours, theirs = train(api.ours, setup), train(api.theirs, setup)
    assert len(ours.weights) == 4 * LAYERS // 2
    assert_weights(ours.weights, alone(), "a single process")
    assert ours.counts.reductions == ours.units
    assert ours.counts.gathers <= theirs.counts.gathers or name in SPLITTING
    if reshard is False or name not in SPLITTING:
        assert ours.losses == pytest.approx(theirs.losses)
        assert_weights(ours.weights, theirs.weights, "torch's")
        assert ours.counts.gathers <= theirs.counts.gathers


@composes("pipeline", "accumulation", "recomputation")
@composes("pipeline", "zero bubble", "accumulation", "recomputation")
@on_ranks(4)
@pytest.mark.parametrize("name", ["Schedule1F1B", "ScheduleInterleavedZeroBubble"])
def test_recomputed_stages(rank, world, name):
    """Stages that recompute in backward, several of a rank sharing what communicates."""
    setup = Setup(name, mesh_of(2, 2, names=("pp", "dp")), share=True, recomputed=True)
    assert_weights(train(api.ours, setup).weights, alone(), "a single process")


@composes("pipeline", "accumulation", "clipping")
@composes("pipeline", "zero bubble", "accumulation", "clipping")
@on_ranks(4)
@pytest.mark.parametrize("name", PAIR)
def test_clipping(rank, world, name):
    """The norm of the gradients of all stages, on all of them."""
    setup = Setup(name, mesh_of(2, 2, names=("pp", "dp")), clip=True)
    assert_weights(train(api.ours, setup).weights, alone(clip=True), "a single process")


@composes("pipeline", "accumulation", "mixed precision")
@composes("pipeline", "zero bubble", "accumulation", "mixed precision")
@on_ranks(4)
@pytest.mark.parametrize("name", PAIR)
def test_mixed_precision(rank, world, name):
    """Gradients of micro-batches add up in the dtype they are reduced in, as with torch's.

    Ours shares what communicates among stages; torch's own then loses its place in the recorded order.
    """
    options = {"mp_policy": BF16, "reshard_after_forward": False}
    setup = Setup(name, mesh_of(2, 2, names=("pp", "dp")), options=options)
    ours, theirs = train(api.ours, replace(setup, share=True)), train(api.theirs, setup)
    assert_weights(ours.weights, theirs.weights, "torch's", 1e-2)
    assert_weights(ours.weights, alone(), "a single process", 0.05)


@composes("pipeline", "accumulation", "hybrid sharding")
@composes("pipeline", "accumulation", "tensor parallel")
@composes("pipeline", "zero bubble", "accumulation", "hybrid sharding")
@composes("pipeline", "accumulation", "over replicas")
@composes("pipeline", "zero bubble", "accumulation", "over replicas")
@composes("pipeline", "zero bubble", "accumulation", "tensor parallel")
@on_ranks(8)
@pytest.mark.parametrize(
    ("third", "name"),
    [
        ("replicate", "ScheduleInterleavedZeroBubble"),
        ("tp", "ScheduleInterleavedZeroBubble"),
        pytest.param("replicate", "Schedule1F1B", marks=pytest.mark.slow),
        pytest.param("tp", "Schedule1F1B", marks=pytest.mark.slow),
        pytest.param("over replicas", "Schedule1F1B", marks=[pytest.mark.slow, api.fsdp2_only]),
        pytest.param("over replicas", "ScheduleInterleavedZeroBubble", marks=[pytest.mark.slow, api.fsdp2_only]),
    ],
)
def test_three_dimensions(rank, world, third, name):
    """A pipeline of stages that are replicated and sharded, sharded over replicas too, or tensor-parallel."""
    hybrid = third != "tp"
    mesh = mesh_of(2, 2, 2, names=("pp", "replicate", "dp") if hybrid else ("pp", "dp", "tp"))
    options = {"shard_over_replicas": True} if third == "over replicas" else {}
    setup = Setup(name, mesh, ("replicate", "dp") if hybrid else ("dp",), options=options)
    seen = train(api.ours, setup)
    assert_weights(seen.weights, alone(), "a single process")
    if hybrid:  # over each of the two axes
        assert seen.counts.reductions == 2 * seen.units
