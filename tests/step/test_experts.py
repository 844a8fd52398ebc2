"""Mixtures of experts: dense parameters on all data-parallel ranks, experts on a mesh of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp2
from tests.support import api
from tests.support.composition import composes, refuses
from tests.support.counting import Collectives
from tests.support.parity import (
    SEED,
    STEPS,
    WIDTH,
    Prepare,
    Run,
    assert_parity,
    assert_same,
    mesh_1d,
    mesh_2d,
    mesh_of,
    train,
)
from tests.support.pool import on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HIDDEN = 4
Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]


class Exchanged(torch.autograd.Function):
    """Rows that ``there`` takes from the ranks of a group; their gradients go ``back``.

    ``gathered`` and ``summed`` are each other's way back.
    """

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, there: Exchange, back: Exchange) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def gathered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of all ranks."""
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of the sum over ranks."""
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total.chunk(group.size())[group.rank()]


class Experts(nn.Module):
    """Feed-forward networks of which every row passes one; with a group, each of its ranks has some of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.up = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / 3)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        first = 0
        if self.group is not None:
            first = self.group.rank() * -(-self.count // self.group.size())
            x, chosen = Exchanged.apply(x, self.group, gathered, summed), gathered(chosen, self.group)
        mask = F.one_hot(chosen, self.count)[:, first : first + up.shape[0]].to(x.dtype)
        hidden = torch.einsum("nd,edh->neh", x, up).relu()
        y = torch.einsum("neh,ehd,ne->nd", hidden, down, mask)
        return y if self.group is None else Exchanged.apply(y, self.group, summed, gathered)


class Mixture(nn.Module):
    """Dense layers around experts that a gate chooses between."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.before, self.gate, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, count), nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(count)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        return self.after(x + weight[:, None] * self.experts(x, chosen))


def spread_experts(module: Mixture, mesh) -> None:
    """Give every rank of ``mesh`` some of the experts, as DTensors."""
    module.experts.group = mesh.get_group()
    for name in ("up", "down"):
        whole = getattr(module.experts, name).detach()
        setattr(module.experts, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))


def divide(module, fsdp, factor: int) -> None:
    """Divide the sums of this module's groups by ``factor``; torch's own can do it on gloo by summing only."""
    module.set_gradient_divide_factor(float(factor))
    if fsdp is not api.ours:
        module.set_force_sum_reduction_for_comms(True)


def on_their_own(mesh, dense, dim: int = 0, **options) -> Prepare:
    """Return the function that makes experts a unit on ``mesh``, cut along ``dim``, and the rest one on ``dense``."""

    def prepare(module, fsdp):
        spread_experts(module, mesh["ep"])
        fsdp.fully_shard(module.experts, mesh=mesh["edp"], shard_placement_fn=lambda p: Shard(dim))
        divide(module.experts, fsdp, dist.get_world_size())
        fsdp.fully_shard(module, mesh=dense, **options)

    return prepare


ODD = 3 if api.torch_since("2.12") else 4
"""Before, the backward of a DTensor with uneven shards communicated on some of its ranks only."""
MORE = [pytest.param(*one, marks=pytest.mark.slow) for one in [(2, 0, False), (8, 1, False)]]
cases = pytest.mark.parametrize(
    ("count", "dim", "other"), [(2, 1, True), (ODD, 0, True), (4, 1, False), (8, 0, True), *MORE]
)
"""Fewer experts than ranks, as many, more; the dimension they are cut along; a mesh or policy of another kind."""


@composes("experts", "divide factor", "SGD")
@composes("experts", "divide factor", "shard dim")
@composes("experts", "divide factor", "hybrid sharding")
@on_ranks(4)
@cases
def test_experts_as_a_unit_of_their_own(rank, world, count, dim, other):
    """Experts cut over two ranks, their shards over the other two; dense parameters over all four or two by two.

    An expert's gradient is the sum over all ranks however few of them hold it, so it is divided by their number.
    """
    mesh, dense = mesh_of(2, 2, names=("edp", "ep")), mesh_2d() if other else mesh_1d()
    run = assert_parity(on_their_own(mesh, dense, dim), build=lambda: Mixture(count))
    assert run.module.experts.up.device_mesh.mesh_dim_names == ("edp", "ep")


@composes("experts", "several meshes", "divide factor")
@composes("experts", "several meshes", "divide factor", "shard dim")
@composes("experts", "several meshes", "divide factor", "mixed precision")
@on_ranks(4)
@cases
def test_experts_in_the_unit_of_the_dense_parameters(rank, world, count, dim, other):
    """One call, two groups: a placement function sends the experts to their own mesh."""
    mesh = mesh_of(2, 2, names=("edp", "ep"))

    def prepare(module, fsdp):
        spread_experts(module, mesh["ep"])
        ours = fsdp is api.ours and api.name == "fsdp2"
        there = mesh["edp"] if ours else FSDPMeshInfo(mesh["edp"], 0)
        result = (fsdp2 if ours else _fsdp_common).ShardPlacementResult(Shard(dim), there)
        experts = set(module.experts.parameters())
        place = lambda p: result if p in experts else None
        fsdp.fully_shard(module, mesh=mesh_1d(), shard_placement_fn=place, mp_policy=policy)
        divide(module, fsdp, world)

    policy = replace(BF16, output_dtype=torch.float32) if other else MixedPrecisionPolicy()
    against, tolerance = api.against("2.12"), 0.05 if other else 2e-5
    how = {"policy": policy, "against": against, "tolerance": tolerance}
    run = assert_parity(prepare, build=lambda: Mixture(count), **how)
    with Collectives() as seen:
        run.module.unshard()
    assert sorted(group.size() for group in seen.groups["gather"]) == [2, 4]


@composes("experts", "uneven")
@composes("experts", "shard dim")
@on_ranks(4)
@cases
def test_experts_on_the_mesh_of_the_dense_parameters(rank, world, count, dim, other):
    """Without expert parallelism experts are cut like any parameter: some ranks have none, or all have parts of all."""

    def prepare(module, fsdp):
        reshard = False if other else None
        fsdp.fully_shard(
            module.experts, mesh=mesh_1d(), shard_placement_fn=lambda p: Shard(dim), reshard_after_forward=reshard
        )
        fsdp.fully_shard(module, mesh=mesh_1d())

    run = assert_parity(prepare, build=lambda: Mixture(count))
    pieces = run.module.experts.up.to_local().shape
    assert pieces[dim] == (len(range(count)[rank * -(-count // 4) :][: -(-count // 4)]) if dim == 0 else WIDTH // 4)


class Apiece(nn.Module):
    """A mixture in which every rank of a group has two experts of its own, each a module by its number."""

    def __init__(self, first: int = 0, count: int = 4, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.gate, self.first, self.group = nn.Linear(WIDTH, 4), first, group
        experts = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        self.experts = nn.ModuleDict({str(i): experts[i] for i in range(first, first + count)})

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        rows = x if self.group is None else Exchanged.apply(x, self.group, gathered, summed)
        picked = chosen if self.group is None else gathered(chosen, self.group)
        parts = [expert(rows) * (picked == int(i))[:, None] for i, expert in self.experts.items()]
        y = torch.stack(parts).sum(0)
        return x + weight[:, None] * (y if self.group is None else Exchanged.apply(y, self.group, summed, gathered))


@composes("experts", "several meshes", "divide factor")
@on_ranks(4)
def test_experts_of_other_names_on_other_ranks(rank, world):
    """Units that only some ranks have, under names that only they know, beside dense parameters that all have."""
    mesh = mesh_of(2, 2, names=("edp", "ep"))
    first = 2 * mesh.get_local_rank("ep")
    seen = []
    for fsdp in (api.ours, api.theirs, None):
        torch.manual_seed(SEED)
        module = Apiece() if fsdp is None else Apiece(first, 2, mesh.get_group("ep"))
        for expert in module.experts.values() if fsdp else ():
            fsdp.fully_shard(expert, mesh=mesh["edp"])
            divide(expert, fsdp, world)
        if fsdp:
            fsdp.fully_shard(module, mesh=mesh_1d())
        run = Run(module, fsdp, (rank, world) if fsdp else (0, 1))
        train(run)
        seen.append(run.finish().seen)
    ours, theirs, alone = seen
    assert_same(ours, theirs, "torch's")
    weights = [name for name in ours if name.startswith("weight")]
    assert len(weights) == 6
    assert_same({name: ours[name] for name in weights}, {name: alone[name] for name in weights}, "a single process's")


class Residual(nn.ModuleList):
    """Experts that compute one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        for expert in self:
            x = x + torch.tanh(expert(x))
        return x


@composes("experts", "several meshes")
@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_ranks_with_other_experts_in_one_unit(rank, world, frozen):
    """Another number of them, or other ones ``frozen``: no other rank reduces their gradients."""
    torch.manual_seed(SEED)
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Residual(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    if not frozen:
        del module[1][1 + rank :]
    module[1][0].weight.requires_grad_(not frozen or rank == 0)
    alone = copy.deepcopy(module)
    fsdp2.fully_shard(module[1], mesh=mesh_of(world, 1, names=("ep", "shard"))["shard"])
    fsdp2.fully_shard(module, mesh=mesh_1d())
    for step in range(3):
        if step == 1:
            module.set_reshard_after_forward(False)  # after which ranks compare their units
        for model in (module, alone):
            model.zero_grad()
            model(torch.full((2, WIDTH), rank + 1.0)).square().sum().backward()
        for mine in alone[0].parameters():
            dist.all_reduce(mine.grad)
            mine.grad /= world
        for got, expected in zip(module.parameters(), alone.parameters(), strict=True):
            assert (got.grad is None) == (expected.grad is None)
            if got.grad is not None:
                torch.testing.assert_close(got.grad.full_tensor(), expected.grad)


@composes("experts", "several meshes", "clipping", "divide factor")
@refuses("experts", "clipping", by="torch", reason="`torch.nn.utils.clip_grad_norm_` of several meshes")
@on_ranks(4)
def test_clipping(rank, world):
    """One norm of gradients on several meshes."""
    prepare = on_their_own(mesh_of(2, 2, names=("edp", "ep")), mesh_1d())

    def program(run):
        for step in range(STEPS):
            run.backward(step)
            if step == 0 and run.fsdp is not None:
                with pytest.raises((RuntimeError, ValueError), match="mesh"):
                    torch.nn.utils.clip_grad_norm_(run.module.parameters(), 1.0)
            clip = torch.nn.utils.clip_grad_norm_ if run.fsdp is None else fsdp2.clip_grad_norm_
            run.seen[f"norm {step}"] = clip(run.module.parameters(), 0.1)
            run.update()

    run = assert_parity(prepare, build=lambda: Mixture(4), program=program, against=("alone",))
    assert all(run.seen[f"norm {step}"] > 0.1 for step in range(STEPS))
