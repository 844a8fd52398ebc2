"""Optimizers, schedules, scaling and averaging of torch.optim on every kind of mesh."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support import api
from tests.support.composition import composes, refuses
from tests.support.parity import STEPS, WIDTH, Run, assert_parity, full, mesh_1d, mesh_2d, shard_each
from tests.support.pool import on_ranks

MESHES = ("line", "hybrid", "tp", pytest.param("over replicas", marks=api.fsdp2_only))
meshes = pytest.mark.parametrize("kind", MESHES)
PLANES = (pytest.param("line", marks=pytest.mark.slow), *MESHES[1:])
"""Those of two dimensions, one of which is a line: what steps there steps on a line alone."""
planes = pytest.mark.parametrize("kind", PLANES)


def uneven(last: int = 3) -> nn.Sequential:
    """Return layers whose sizes four ranks do not divide."""
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, last))


def on_mesh(kind: str, **options):
    """Return the function that shards a model on a mesh of one kind, and which part of a batch this rank takes."""
    if kind != "tp":

        def shard(module, fsdp):
            over = {"shard_over_replicas": True} if kind == "over replicas" and fsdp is api.ours else {}
            shard_each(module, fsdp, mesh=mesh_1d() if kind == "line" else mesh_2d(), **over, **options)

        return shard, None
    mesh = mesh_2d("dp", "tp")

    def prepare(module, fsdp):
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard_each(module, fsdp, mesh=mesh["dp"], **options)

    return prepare, (mesh.get_local_rank("dp"), mesh["dp"].size())


def assert_trains(kind: str, program, *, against=("torch", "alone"), tolerance=2e-5, build=uneven, **options) -> Run:
    """Assert parity of a program on a mesh of one kind."""
    prepare, part = on_mesh(kind, **options)
    if kind == "over replicas" and "alone" in against:
        against = ("alone",)  # torch's shards lie elsewhere
    return assert_parity(prepare, build=build, program=program, part=part, against=against, tolerance=tolerance)


def steps(run: Run, *optimizers: torch.optim.Optimizer, count: int = STEPS) -> None:
    """Train with these optimizers."""
    for step in range(count):
        run.backward(step)
        run.record()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@composes("Adam", "uneven")
@composes("Adam", "hybrid sharding")
@composes("Adam", "over replicas")
@composes("Adam", "tensor parallel")
@on_ranks(4)
@meshes
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_adam(rank, world, kind, options):
    """Every implementation of AdamW, also where some parameters lie on more mesh dimensions than others."""

    def program(run):
        steps(run, torch.optim.AdamW(run.module.parameters(), lr=0.01, **options))

    # Gradients near zero make AdamW's first steps of either sign; a summation in another order shows in them.
    assert_trains(kind, program, tolerance=1e-4)


@composes("Muon", "uneven")
@composes("Muon", "hybrid sharding")
@composes("Muon", "over replicas")
@composes("Muon", "tensor parallel")
@on_ranks(4)
@pytest.mark.parametrize(
    "kind", ["tp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("line", "hybrid", "over replicas"))]
)
def test_muon(rank, world, kind):
    """Matrices by Muon, whose orthogonalisation multiplies whole matrices; the rest by AdamW."""

    def program(run):
        matrices = [p for p in run.module.parameters() if p.ndim == 2]
        rest = [p for p in run.module.parameters() if p.ndim != 2]
        steps(run, torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.01, foreach=False))

    assert_trains(kind, program, build=lambda: uneven(5), tolerance=0.05)  # Muon computes in bfloat16


@refuses("Muon", "uneven", by="both", reason="DTensor's dispatch: a matrix with fewer rows than ranks")
@on_ranks(4)
def test_what_dtensors_refuse(rank, world):
    """Optimizers work on DTensors, whose operators have limits, whoever made the shards."""
    for fsdp in (api.ours, api.theirs):
        module = uneven()
        shard_each(module, fsdp, mesh=mesh_1d())
        module(torch.ones(1, WIDTH)).sum().backward()
        optimizer = torch.optim.Muon([module[3].weight])
        if api.torch_since("2.12"):  # before, it was not refused
            with pytest.raises(RuntimeError, match="placement"):
                optimizer.step()


@composes("optimizer in backward", "SGD", "uneven")
@composes("optimizer in backward", "SGD", "hybrid sharding", "accumulation")
@composes("optimizer in backward", "SGD", "over replicas", "accumulation")
@composes("optimizer in backward", "SGD", "tensor parallel", "accumulation")
@on_ranks(4)
@planes
def test_optimizer_in_backward(rank, world, kind):
    """A hook on each sharded parameter steps once per reduction, not once per backward, and drops the gradient."""

    def program(run):
        fired = []
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in run.module.parameters()}

        def step_now(parameter):
            fired.append(parameter)
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        if run.fsdp is not None:
            for parameter in optimizers:
                parameter.register_post_accumulate_grad_hook(step_now)
        for step in range(4):
            run.configure(lambda module, fsdp, last=step % 2 == 1: module.set_requires_gradient_sync(last))
            run.backward(step)
            if run.fsdp is None and step % 2:
                for parameter in optimizers:
                    step_now(parameter)
            if step % 2:
                assert len(fired) == len(set(fired)) == len(optimizers)
                fired.clear()

    assert_trains(kind, program)


@composes("GradScaler", "mixed precision", "hybrid sharding")
@composes("GradScaler", "mixed precision", "over replicas")
@composes("GradScaler", "mixed precision", "tensor parallel")
@composes("GradScaler", "mixed precision", "SGD")
@on_ranks(4)
@planes
def test_grad_scaler(rank, world, kind):
    """In float16 an overflow on one rank makes every rank skip the step and lower the scale."""

    def program(run):
        scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for step in range(4):
            loss = run.loss(step)
            scaler.scale(loss * 1e6 if step == 1 and run.part[0] == 0 else loss).backward()
            scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            run.seen[f"scale {step}"] = torch.tensor(scaler.get_scale())

    policy = MixedPrecisionPolicy(torch.float16, torch.float16, torch.float32)
    run = assert_trains(kind, program, against=("torch",), tolerance=1e-3, mp_policy=policy)
    assert [run.seen[f"scale {step}"].item() for step in range(4)] == [256.0, 128.0, 128.0, 256.0]


@composes("LR schedule", "SGD", "hybrid sharding")
@composes("LR schedule", "SGD", "over replicas")
@composes("LR schedule", "SGD", "tensor parallel")
@composes("LR schedule", "SGD", "CPU offload")
@on_ranks(4)
@pytest.mark.parametrize("kind", [*PLANES, "offload"])
def test_schedules(rank, world, kind):
    """Rates that change per step, also momenta, and by how the loss goes."""

    def program(run):
        one = OneCycleLR(run.optimizer, max_lr=0.2, total_steps=4)
        other = torch.optim.SGD(run.module[0].parameters(), lr=0.05)
        halving, plateau = LambdaLR(other, lambda epoch: 0.5**epoch), ReduceLROnPlateau(run.optimizer, patience=0)
        for step in range(4):
            run.backward(step)
            other.step()
            run.update()
            one.step() if step < 3 else plateau.step(step)
            halving.step()

    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind == "offload" else {}
    assert_trains("line" if kind == "offload" else kind, program, **options)


@composes("averaged model", "uneven", "SGD")
@composes("averaged model", "hybrid sharding", "SGD")
@composes("averaged model", "over replicas", "SGD")
@composes("averaged model", "tensor parallel", "SGD")
@on_ranks(4)
@planes
@pytest.mark.parametrize("exponential", [False, True])
def test_averaged_model(rank, world, kind, exponential):
    """The average is a sharded copy of its own: it follows the weights, computes, saves and loads."""

    def program(run):
        how = {"multi_avg_fn": get_ema_multi_avg_fn(0.7)} if exponential else {}
        average = AveragedModel(run.module, use_buffers=True, **how)
        for step in range(STEPS):
            run.backward(step)
            run.update()
            average.update_parameters(run.module)
            with torch.no_grad():
                run.note_loss(average(run.inputs(step)).square().mean())
        again = AveragedModel(run.module, use_buffers=True, **how)
        again.load_state_dict(average.state_dict())
        for name, parameter in again.module.named_parameters():
            assert isinstance(parameter, DTensor) == (run.fsdp is not None)
            run.seen[f"average {name}"] = full(parameter)

    assert_trains(kind, program, against=("alone",))


class Normed(nn.Sequential):
    """Layers with float buffers, and a bias that is left out: plain tensors beside shards."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.eval()


@composes("averaged model")
@on_ranks(2)
@pytest.mark.parametrize("exponential", [False, True])
def test_an_average_with_plain_tensors(rank, world, exponential):
    """``use_buffers=True`` puts shards and running statistics into one list: "_foreach_lerp_ got mixed torch.Tensor and
    DTensor"."""
    how = {"multi_avg_fn": get_ema_multi_avg_fn(0.7)} if exponential else {}
    torch.manual_seed(0)
    alone = Normed()
    module = copy.deepcopy(alone)
    api.ours.fully_shard(module, mesh=mesh_1d(), ignored_params={module[2].bias})
    both = [(one, AveragedModel(one, use_buffers=True, **how)) for one in (module, alone)]
    for step in range(3):
        for one, average in both:
            with torch.no_grad():
                for number, tensor in enumerate([*one.parameters(), one[1].running_mean]):
                    tensor.mul_(step + 0.5 / (number + 1))
            average.update_parameters(one)
    for got, expected in zip(*(average.state_dict().values() for _, average in both), strict=True):
        torch.testing.assert_close(full(got), expected)


@refuses("averaged model", by="torch", reason="FSDP does not support deepcopy")
@on_ranks(2)
def test_torchs_own_has_no_average(rank, world):
    """Since that is a deep copy."""
    module = uneven()
    shard_each(module, api.theirs, mesh=mesh_1d())
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        AveragedModel(module)
