"""Tensor parallelism first, fully_shard on the data-parallel axes after it: 2D and 3D meshes, named dimensions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from examples.llama import Llama, LlamaConfig, loss_context, next_token_loss, tensor_parallel
from fsdp2 import DataParallelMeshDims
from tests.step.test_named_dimensions import OnMesh, ranks_of, spread
from tests.support import api
from tests.support.composition import composes
from tests.support.counting import Operators
from tests.support.parity import STEPS, Run, accumulate, assert_parity, full, mesh_of, shard_each, train
from tests.support.pool import on_ranks

CONFIG = LlamaConfig(vocabulary=16, layers=1, width=8, heads=2, context=4)
BATCH = 4
BOTH = ("torch", "alone")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OTHERS = [((2, 2), False), ((4, 1), True)]


def llama() -> Llama:
    """Return a tiny model: three units, of which a block is one."""
    return Llama(CONFIG)


def language(run: Run) -> None:
    """Train on tokens, the loss in parallel where logits are cut."""
    for step in range(STEPS):
        tokens = torch.randint(16, (BATCH, 5), generator=torch.Generator().manual_seed(step))
        tokens = tokens.chunk(run.part[1])[run.part[0]]
        with loss_context(run.fsdp is not None):
            loss = next_token_loss(run.module(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
        run.note_loss(full(loss))
        run.update()


def sharded(dp, tp, **options):
    """Return the function that spreads a model over ``tp`` and makes every block a unit over ``dp``."""

    def prepare(module, fsdp):
        tensor_parallel(module, tp)
        for unit in (*module.blocks, [module.norm, module.head], module):
            fsdp.fully_shard(unit, mesh=dp, **options)

    return prepare


@composes("tensor parallel", "sequence parallel", "loss parallel", "SGD")
@on_ranks(4)
@pytest.mark.parametrize(
    ("sizes", "reshard"),
    [((2, 2), True), ((4, 1), False), *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)],
)
def test_language_model(rank, world, sizes, reshard):
    """The whole plan: embedding, sequence-parallel norms, attention, gated feed-forward, loss in parallel."""
    mesh = mesh_of(*sizes, names=("dp", "tp"))
    prepare = sharded(mesh["dp"], mesh["tp"], reshard_after_forward=reshard)
    run = assert_parity(prepare, build=llama, program=language, part=(mesh.get_local_rank("dp"), sizes[0]))
    norm = run.module.blocks[0].attention_norm.weight
    assert norm.placements == (Shard(0), Replicate()) and norm.device_mesh.mesh_dim_names == ("dp", "tp")


@composes("tensor parallel", "sequence parallel", "loss parallel", "mixed precision")
@composes("tensor parallel", "sequence parallel", "loss parallel", "CPU offload")
@on_ranks(4)
@pytest.mark.parametrize("options", [{"mp_policy": BF16}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}])
def test_language_model_with_policies(rank, world, options):
    """Casts and offloading do not see that parameters are DTensors."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    cast = "mp_policy" in options
    against, tolerance = (("torch",), 0.05) if cast else (BOTH, 2e-5)
    prepare = sharded(mesh["dp"], mesh["tp"], **options)
    part = (mesh.get_local_rank("dp"), 2)
    assert_parity(prepare, build=llama, program=language, part=part, against=against, tolerance=tolerance)


@composes("tensor parallel", "sequence parallel", "loss parallel", "hybrid sharding")
@composes("tensor parallel", "sequence parallel", "loss parallel", "over replicas")
@on_ranks(8)
@pytest.mark.parametrize("over", [False, pytest.param(True, marks=[pytest.mark.slow, api.fsdp2_only])])
def test_three_dimensions(rank, world, over):
    """Replicate, shard and tensor-parallel axes of two ranks each."""
    mesh = mesh_of(2, 2, 2, names=("replicate", "shard", "tp"))
    part = (2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard"), 4)
    options = {"shard_over_replicas": True} if over else {}
    prepare = sharded(mesh["replicate", "shard"], mesh["tp"], **options)
    run = assert_parity(prepare, build=llama, program=language, part=part, against=("alone",))
    weight = run.module.blocks[0].feed_forward.w1.weight
    if over:
        assert weight.device_mesh.mesh_dim_names == ("shard", "replicate", "tp")
        return
    assert weight.device_mesh.mesh_dim_names == ("replicate", "shard", "tp")
    assert weight.placements[0] == Replicate() and weight.placements[1].split_factor == 2


def dims(*names: str, replicate: str | None = None) -> DataParallelMeshDims:
    """Return which dimensions shard, and which one replicates."""
    return DataParallelMeshDims(shard=names, replicate=replicate)


NAMED = {
    "two shard dimensions": (("a", "b", "tp"), dims("a", "b")),
    "hybrid": (("r", "s", "tp"), dims("s", replicate="r")),
    "tensor parallel first": (("tp", "a", "b"), dims("a", "b")),
}
"""Meshes of three dimensions, and which of them are data-parallel. DTensor needs seconds for each; a usual run has
those of two dimensions (``tests/step/test_named_dimensions.py``)."""


@pytest.mark.slow
@composes("tensor parallel", "named dimensions")
@composes("tensor parallel", "named dimensions", "hybrid sharding")
@on_ranks(8)
@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("cut", [0, 1])
def test_named_dimensions(rank, world, kind, cut):
    """Several shard dimensions become one; a replicate one stays; tensor parallelism cuts the same or another."""
    names, chosen = NAMED[kind]
    mesh = mesh_of(2, 2, 2, names=names)

    def prepare(module, fsdp):
        spread(module, mesh, chosen, {"tp": cut})
        shard_each(module, fsdp, mesh=mesh, dp_mesh_dims=chosen)

    against = ("alone",) if names[0] == "tp" else api.against("2.12")
    assert_parity(prepare, build=OnMesh, part=ranks_of(chosen, mesh), against=against)


@composes("tensor parallel", "uneven")
@composes("tensor parallel", "uneven", "shard dim")
@on_ranks(4)
@pytest.mark.parametrize("widths", [(8, 5, 8), (8, 3, 8), (8, 17, 1, 8), (8, 1, 8)])
@pytest.mark.parametrize("dim", [0, 1])
def test_sizes_that_do_not_divide(rank, world, widths, dim):
    """Neither the tensor-parallel nor the data-parallel size divides the dimension; some ranks have nothing of it.

    torch's own cuts evenly along other dimensions only, and cannot pack a gradient without elements.
    """
    mesh = mesh_of(2, 2, names=("dp", "tp"))

    def prepare(module, fsdp):
        plan = {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
        parallelize_module(module, mesh["tp"], plan)
        place = (lambda p: Shard(dim) if p.ndim > dim else None) if dim and fsdp is api.ours else None
        for unit in (*module, module):
            fsdp.fully_shard(unit, mesh=mesh["dp"], shard_placement_fn=place)

    build = lambda: nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))
    part = (mesh.get_local_rank("dp"), 2)
    against = ("alone",) if dim or widths == (8, 1, 8) else BOTH
    assert_parity(prepare, build=build, part=part, against=against)


class Between(nn.Module):
    """Two parallel layers, and parameters that no plan mentions around and beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.scale * self.down(torch.tanh(self.up(self.before(x))))


@composes("tensor parallel", "accumulation")
@on_ranks(4)
@pytest.mark.parametrize("reshard", [True, False])
def test_parameters_that_no_plan_mentions(rank, world, reshard):
    """Plain parameters and DTensors in one unit, gradients of two backwards reduced once."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))

    def prepare(module, fsdp):
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fsdp.fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard)

    run = assert_parity(prepare, build=Between, program=accumulate, part=(mesh.get_local_rank("dp"), 2))
    assert run.module.scale.device_mesh.ndim == 1 and run.module.up.weight.device_mesh.ndim == 2


class Late(torch.autograd.Function):
    """Identity on a weight whose gradient is still on its way when autograd accumulates it."""

    @staticmethod
    def forward(ctx, weight: Tensor, group: str) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        late = all_reduce(grad, "avg", ctx.group)
        assert isinstance(late, AsyncCollectiveTensor)
        return late, None


class Unsettled(nn.Module):
    """A layer whose gradient arrives as this rank's part of a sum, or as a collective that is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mesh = None
        self.kind = ""
        self.arrived = []

    def forward(self, x):
        weight = self.layer.weight
        if self.mesh is not None and self.kind == "partial":  # every rank of tp computes with its own half of the rows
            x = DTensor.from_local(x.chunk(2)[self.mesh.get_local_rank()], self.mesh, [Shard(0)], run_check=False)
            if weight.requires_grad:
                weight = weight.view_as(weight)
                weight.register_hook(lambda grad: self.arrived.append(grad.placements))
            y = nn.functional.linear(x, weight, self.layer.bias)
            y = y.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        else:
            weight = weight if self.mesh is None else Late.apply(weight, self.mesh.get_group().group_name)
            y = nn.functional.linear(x, weight, self.layer.bias)
        return self.last(y)


@composes("tensor parallel", "accumulation")
@on_ranks(4)
@pytest.mark.parametrize("kind", ["partial", "late"])
@pytest.mark.parametrize("sync", [True, False])
def test_gradients_that_are_not_there_yet(rank, world, kind, sync):
    """Gradients that are partial sums, or that a collective still fills, are settled before they are reduced."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))

    def prepare(module, fsdp):
        module.mesh, module.kind = mesh["tp"], kind
        if kind == "partial":
            parallelize_module(module, mesh["tp"], {"layer": ReplicatedWeights()})
        fsdp.fully_shard(module, mesh=mesh["dp"])

    program = train if sync else accumulate
    run = assert_parity(prepare, build=Unsettled, program=program, part=(mesh.get_local_rank("dp"), 2))
    assert set(run.module.arrived) == ({(Partial(),)} if kind == "partial" else set())


class ReplicatedWeights(ColwiseParallel):
    """Make every parameter a replicated DTensor and leave forward as it is."""

    def _apply(self, module, mesh):
        return distribute_module(module, mesh)


def dtype_of_a_sum(func: Any, args: Any) -> torch.dtype | None:
    """Return the dtype of an all-reduce of tensor parallelism itself."""
    own = func.namespace == "_c10d_functional" and func.__name__.startswith("all_reduce")
    return args[0].dtype if own else None


@composes("tensor parallel", "sequence parallel", "mixed precision", "accumulation")
@on_ranks(4)
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
def test_partial_gradients_are_summed_in_the_reduce_dtype(rank, world, reduce, sync):
    """A norm under sequence parallelism has one share of its gradient on each rank: a sum like any other.

    torch's own computed it in the gradient's dtype before 2.15.
    """
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    seen = []
    for fsdp in api.both("2.15"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.LayerNorm(8))
        parallelize_module(module, mesh["tp"], {"0": SequenceParallel()})
        fsdp.fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        with Operators(dtype_of_a_sum) as sums:
            for step in range(2):
                module.set_requires_gradient_sync(sync or step == 1)
                torch.manual_seed(rank + step)
                rows = DTensor.from_local(torch.randn(2, 3, 8), mesh["tp"], [Shard(1)], run_check=False)
                output = module(rows)
                output = output.to_local() if isinstance(output, DTensor) else output
                (output.float() * torch.randn(2, 3, 8)).sum().backward()
        assert sums.seen and set(sums.seen) == {reduce}
        seen.append([parameter.grad.full_tensor() for parameter in module.parameters()])
    for ours, theirs in zip(seen[0], seen[-1]):
        assert torch.equal(ours, theirs)
