"""Dtypes: several in one unit, and casts only where they are wanted."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import api
from tests.support.counting import Collectives
from tests.support.models import Layers
from tests.support.parity import Run, beside_one_process, full, mesh_1d, mesh_2d, shard_each
from tests.support.pool import on_ranks
from tests.support.report import Absent, agrees, check, report, thrifty

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = 0.05
"""What may be lost with 8 bits of mantissa in gradients of order one."""


def accumulated(rank: int, fsdp, *, rounded: bool = False) -> Tensor:
    """Return the gradient of an RMSNorm's weight, accumulated over three backwards of which the last one reduces.

    Inputs and gradients of outputs are numbers of bfloat16. Without ``fsdp``, it is computed in float64.
    """
    dtype = torch.float64 if fsdp is None else torch.bfloat16
    norm: Any = nn.RMSNorm(64, eps=1e-5, dtype=dtype if fsdp is None else torch.float32)
    if fsdp is not None:
        fsdp.fully_shard(norm, mesh=mesh_1d(), mp_policy=BF16)
    if rounded:
        round_one = lambda grad: grad.bfloat16().to(grad.dtype)
        norm.register_forward_pre_hook(lambda norm, inputs: norm.weight.register_hook(round_one) and None)
    data = torch.Generator().manual_seed(rank)
    for last in (False, False, True):
        inputs, grads = (torch.randn(32, 64, generator=data).bfloat16().to(dtype) for _ in range(2))
        if fsdp is not None:
            norm.set_requires_gradient_sync(last)
        norm(inputs).backward(grads)
    return full(norm.weight.grad)


@api.fsdp2_only
@on_ranks(1, 2)
def test_what_accumulates_is_not_rounded(rank, world):
    """With torchtitan's chunked loss and its pipelines, gradients of norms differed from torch's. Autograd computes
    them in float32, torch rounds each to bfloat16 before it adds it in float32, and nothing else differs. Ours are
    nearer to those of float64."""
    ours, theirs = accumulated(rank, api.ours), accumulated(rank, api.theirs)
    assert torch.equal(accumulated(rank, api.ours, rounded=True), theirs) and not torch.equal(ours, theirs)
    exact = torch.stack([accumulated(other, None) for other in range(world)]).mean(0)
    far, near = ((found.double() - exact).norm() / exact.norm() for found in (theirs, ours))
    assert near < 1e-5 and far > 100 * near, (near, far)


def whole(module: nn.Module, fsdp) -> None:
    """Everything is one unit."""
    fsdp.fully_shard(module, mesh=mesh_1d())


def whole_in_bf16(module: nn.Module, fsdp) -> None:
    """Everything is one unit, computed in bfloat16."""
    fsdp.fully_shard(module, mesh=mesh_1d(), mp_policy=BF16)


class Mixed(nn.Module):
    """Trainable parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x):
        return self.one(torch.tanh(self.two(x.double()) * self.scale.sum()).float())


@report("Trainable parameters of different dtypes in one unit", 1, 2, 4)
def test_trainable_dtypes(rank, world, fsdp):
    """A float64 scale, a bfloat16 adapter beside float32 layers: a unit's parameters need not have one dtype. Each
    gradient comes back in its parameter's own."""
    run = agrees(fsdp, whole, Mixed)
    run.backward(0)
    wrong = [name for name, p in run.module.named_parameters() if p.grad is None or p.grad.dtype != p.dtype]
    check(not wrong, f"the gradient of {', '.join(wrong)} has another dtype")


@report("Trainable parameters of different dtypes under hybrid sharding", 4)
def test_trainable_dtypes_hybrid(rank, world, fsdp):
    """The same on a mesh of two axes, where gradients are reduced twice."""
    agrees(fsdp, lambda module, fsdp: fsdp.fully_shard(module, mesh=mesh_2d()), Mixed)


class Routed(nn.Module):
    """A layer with a norm and a router that notes the dtypes it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.expert = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.dtypes: dict[str, torch.dtype] = {}

    def forward(self, x):
        self.dtypes = {name: parameter.dtype for name, parameter in self.named_parameters()}
        x = self.norm(x.to(self.norm.weight.dtype))
        gate = self.router(x.to(self.router.weight.dtype)).softmax(-1)
        y = self.expert(x.to(self.expert.weight.dtype))
        return (y.float() * gate.float()).float()


def check_routed(run: Run) -> None:
    """Norm and router compute in float32, the expert in bfloat16, and one gather brings all of it."""
    run.module.reshard()
    with Collectives() as seen, torch.no_grad():
        run.module(run.inputs(0))
    expected = {n: torch.bfloat16 if n.startswith("expert") else torch.float32 for n in run.module.dtypes}
    check(run.module.dtypes == expected, "a parameter computes in another dtype than asked")
    thrifty(seen.gathers == 1, f"{seen.gathers} gathers instead of one")


def routed(policy):
    """Return what shards with a policy per parameter, and says where there is no such thing."""

    def prepare(module, fsdp):
        try:
            fsdp.fully_shard(module, mesh=mesh_1d(), mp_policy=policy)
        except (TypeError, AttributeError) as error:
            raise Absent from error

    return prepare


@report("mp_policy as a function of the parameter's name: norms and routers in float32")
def test_policy_by_function(rank, world, fsdp):
    """In a mixture of experts the router, and often the norms, must compute in float32 inside a bfloat16 block. That
    must not cost a second gather for the block."""
    policy = lambda name: BF16 if "expert" in name else MixedPrecisionPolicy()
    check_routed(agrees(fsdp, routed(policy), Routed, tolerance=LOW))


@report("mp_policy as a mapping from parameter names")
def test_policy_by_name(rank, world, fsdp):
    """The same from a configuration file, which knows names and patterns but no functions."""
    policy = {"norm.*": MixedPrecisionPolicy(), "router.*": MixedPrecisionPolicy(), "": BF16}
    check_routed(agrees(fsdp, routed(policy), Routed, tolerance=LOW))


@report("A parameter gets its first gradient late in an accumulation, in mixed precision", 1, 2, 4)
def test_late_first_gradient(rank, world, fsdp):
    """Micro-batches accumulate in float32 without communication, and a layer that most of them leave out gets its
    bfloat16 gradient only in the last, which reduces."""

    def program(run: Run) -> None:
        for step in range(2):
            for part in range(3):
                run.configure(lambda module, fsdp, part=part: module.set_requires_gradient_sync(part == 2))
                run.module.used = (0, 1) if part == 2 else (0,)
                (run.loss(3 * step + part).float() * 10).backward()
            run.record()
            run.module.zero_grad()

    agrees(fsdp, whole_in_bf16, lambda: Layers(2), program, LOW)


class Normed(nn.Module):
    """A batch norm and a float32 table among layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("table", torch.linspace(1, 2, 8) + 2**-12)

    def forward(self, x):
        return self.two(torch.tanh(self.norm(self.one(x)))).float() * self.table


@report("BatchNorm and float32 buffers in a bfloat16 unit", 1, 2, 4)
def test_batch_norm(rank, world, fsdp):
    """Running statistics in bfloat16 stop moving, so buffers stay in float32; a batch norm whose weights are cast to
    bfloat16 then has two dtypes, which its kernel refuses."""
    module, alone = beside_one_process(Normed, lambda module: (), fsdp, mp_policy=BF16)
    data = torch.randn(16, 8)
    for _ in range(3):
        got, expected = module(data), alone(data)
    got.sum().backward()
    expected.sum().backward()
    check(torch.allclose(got.float(), expected, atol=LOW, rtol=LOW), "the output is wrong")
    for name, buffer in module.named_buffers():
        wanted = alone.get_buffer(name)
        check(buffer.dtype == wanted.dtype, f"{name} became {buffer.dtype}")
        check(torch.allclose(buffer.double(), wanted.double(), atol=0.02, rtol=0.02), f"{name} is wrong")
    module.reshard()
    check(all(p.grad is not None and p.grad.dtype == torch.float32 for p in module.parameters()), "no gradient")


class Timed(nn.Module):
    """Takes features and a time that needs all its bits; notes the dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x, times):
        self.seen = {"x": x.dtype, "times": times.dtype}
        return self.linear(x).float() * torch.cos(times)


@report("cast_forward_inputs for some inputs only")
def test_cast_of_some_inputs(rank, world, fsdp):
    """Diffusion times, positions and rotary angles are float inputs that bfloat16 ruins, beside activations that are to
    be cast. All or nothing is not enough."""
    features = lambda tensor: tensor.size(-1) == 8
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=features)
    module = fsdp.fully_shard(Timed(), mesh=mesh_1d(), mp_policy=policy)
    module(torch.randn(2, 8), times=torch.full((2, 1), 1000.3))
    check(module.seen == {"x": torch.bfloat16, "times": torch.float32}, f"times arrive as {module.seen['times']}")


@report("output_dtype of the root only", 1, 2)
def test_output_dtype(rank, world, fsdp):
    """A user wants float32 logits of a bfloat16 model: the root's output is cast, outputs between units are not."""
    module, seen = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), []
    for layer in module:
        layer.register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    shard_each(module[:2], fsdp, mesh=mesh_1d(), mp_policy=BF16)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fsdp.fully_shard(module, mesh=mesh_1d(), mp_policy=policy)
    output = module(torch.randn(2, 8))
    check(output.dtype == torch.float32, f"the root returns {output.dtype}")
    check(seen[:2] == [torch.bfloat16] * 2, "outputs of units are cast")
    F.mse_loss(output, torch.zeros_like(output)).backward()
