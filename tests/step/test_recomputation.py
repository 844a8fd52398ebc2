"""Activation checkpointing of every kind around, inside and across units, with no gather more than torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.step.test_extensions import patch
from tests.support import api
from tests.support.composition import composes, refuses
from tests.support.counting import Collectives, Operators
from tests.support.models import mlp
from tests.support.parity import (
    WIDTH,
    Run,
    accumulate,
    assert_gradients,
    assert_parity,
    assert_same,
    beside_one_process,
    mesh_1d,
    mesh_2d,
    play,
)
from tests.support.pool import on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
Function = Callable[[Tensor], Tensor]


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what matrix products gave; compute the rest again."""
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(function: Function, x: Tensor) -> Tensor:
    """Recompute what the policy does not keep."""
    contexts = partial(create_selective_checkpoint_contexts, keep_products)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def offloaded(function: Function, x: Tensor) -> Tensor:
    """Keep what autograd saves on the CPU, which here is where it is."""
    with save_on_cpu():
        return function(x)


def copied(function: Function, x: Tensor) -> Tensor:
    """Keep copies of what autograd saves, weights included, as offloading from an accelerator does."""
    with saved_tensors_hooks(torch.clone, lambda saved: saved):
        return function(x)


COPIED = "copied and recomputed"
HOWS: dict[str, Callable[[Function, Tensor], Tensor]] = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "selective": selectively,
    "offloaded": offloaded,
    "copied": copied,
    COPIED: lambda function, x: copied(partial(checkpoint, function, use_reentrant=False), x),
}


class Unit(nn.Module):
    """Two layers, the first of which may be a unit inside this one; ``how`` it runs what is inside."""

    def __init__(self, how: Callable[[Function, Tensor], Tensor] | None) -> None:
        super().__init__()
        self.inner, self.outer, self.how = mlp(WIDTH, 6, WIDTH), nn.Linear(WIDTH, WIDTH), how

    def run(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) if self.how is None else self.how(self.run, x)


class Model(nn.Module):
    """A layer, units that run in a certain way, and a layer."""

    def __init__(self, how: str, where: str) -> None:
        super().__init__()
        self.where, self.how = where, HOWS[how]
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        inside = self.how if where == "inside" else None
        self.units = nn.ModuleList(Unit(inside) for _ in range(1 if where == "used twice" else 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.where == "across":
            x = self.how(lambda y: self.units[1](self.units[0](y)), x)
        for unit in () if self.where == "across" else (*self.units, *self.units)[:2]:
            x = unit(x) if self.where == "inside" else self.how(unit, x)
        return self.last(x)


def shard(where: str, **options: Any) -> Callable[[Any, Any], None]:
    """Return the function that makes units, for ``nested`` also inside units."""

    def prepare(module: Model, fsdp: Any) -> None:
        inner = [unit.inner for unit in module.units] if where == "nested" else []
        for unit in (*inner, *module.units, module):
            fsdp.fully_shard(unit, **{"mesh": mesh_1d(), "reshard_after_forward": True, **options})

    return prepare


def counted(run: Run) -> None:
    """Train two steps, the second of two forwards before one backward, and note how many gathers there were."""
    run.backward(0)
    run.update()
    with Collectives() if run.fsdp else nullcontext() as seen:
        loss = run.loss(1)
        if run.fsdp:
            run.notes.append(seen.gathers)
        loss.backward()
    run.notes += [seen.gathers, seen.reductions] if run.fsdp else []
    run.update()
    (run.loss(2) - 0.5 * run.loss(3)).backward()
    run.update()


@composes("recomputation")
@composes("recomputation", "used twice")
@composes("reentrant recomputation")
@composes("reentrant recomputation", "used twice")
@refuses(
    "reentrant recomputation", "used twice", by="torch", reason="gradients are lost where a unit is recomputed twice"
)
@composes("selective recomputation")
@composes("selective recomputation", "used twice")
@composes("activations on the CPU")
@composes("activations on the CPU", "used twice")
@composes("activations on the CPU", "recomputation")
@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "where"),
    [
        pytest.param(how, where, marks=[] if how == "selective" or where == "used twice" else pytest.mark.slow)
        for how in HOWS
        for where in ("around", "inside", "across", "nested", "used twice")
    ],
)
def test_every_kind_everywhere(rank, world, how, where):
    """Losses, gradients and weights are torch's and a single process's; no gather more than torch's, no reduction.

    torch's own loses gradients of a unit that reentrant checkpointing recomputes twice in a backward.
    """
    build = lambda: Model(how, where)
    ours = play(api.ours, shard(where), build, counted)
    theirs = play(api.theirs, shard(where), build, counted)
    alone = play(None, shard(where), build, counted)
    assert_same(ours.seen, alone.seen, "a single process's")
    if how == "reentrant" and where != "inside":
        return
    assert_same(ours.seen, theirs.seen, "torch's")
    names = ("gathers in forward", "gathers", "reductions")
    for name, mine, whole in zip(names, ours.notes, theirs.notes, strict=True):
        assert mine <= whole, f"{name}: {mine}, torch's has {whole}"


WRAPPERS = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "offload_wrapper": offload_wrapper,
    "composable": composable_checkpoint,
}


@composes("recomputation", "hybrid sharding", "mixed precision", "accumulation")
@composes("activations on the CPU", "hybrid sharding", "mixed precision", "accumulation")
@composes("recomputation", "over replicas", "mixed precision", "accumulation")
@composes("activations on the CPU", "over replicas", "mixed precision", "accumulation")
@on_ranks(4)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("over", [False, pytest.param(True, marks=api.fsdp2_only)])
def test_wrappers_on_hybrid_meshes(rank, world, wrapper, over):
    """torch's wrappers around sharded units, in mixed precision, two backwards to a reduction."""

    def build():
        module = Model("offloaded", "inside")
        for index, unit in enumerate(module.units):
            unit.how = None
            module.units[index] = WRAPPERS[wrapper](unit)
        return module

    def prepare(module, fsdp, **options):
        for unit in (*module.units, module):
            fsdp.fully_shard(unit, mesh=mesh_2d(), mp_policy=BF16, **options)

    if over:
        ours = play(api.ours, partial(prepare, shard_over_replicas=True), build, accumulate)
        assert_same(ours.seen, play(api.ours, prepare, build, accumulate).seen, "hybrid sharding's", 1e-3)
    else:
        assert_parity(prepare, build=build, program=accumulate, against=("torch",), tolerance=1e-3)


@composes("recomputation", "tensor parallel")
@composes("reentrant recomputation", "tensor parallel")
@composes("selective recomputation", "tensor parallel")
@composes("activations on the CPU", "tensor parallel", "recomputation")
@on_ranks(4)
@pytest.mark.parametrize(
    "how",
    ["reentrant", "selective", *(pytest.param(how, marks=pytest.mark.slow) for how in ("not reentrant", COPIED))],
)
def test_over_tensor_parallelism(rank, world, how):
    """Recomputed units of DTensors."""
    mesh = mesh_2d("dp", "tp")

    def prepare(module, fsdp):
        for unit in module.units:
            parallelize_module(unit.inner, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        shard("around", mesh=mesh["dp"])(module, fsdp)

    assert_parity(prepare, build=lambda: Model(how, "around"), part=(mesh.get_local_rank("dp"), 2))


@composes("recomputation", "SGD")
@composes("reentrant recomputation", "SGD")
@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, False])
@pytest.mark.parametrize(
    ("how", "where"), [("not reentrant", "inside"), ("reentrant", "inside"), ("not reentrant", "around")]
)
def test_parameters_that_stay_after_forward(rank, world, how, where, reshard):
    """The root's, by default, or all of them."""
    prepare = shard(where, reshard_after_forward=reshard)
    assert_parity(prepare, build=lambda: Model(how, where), program=counted)


@composes("recomputation", "mixed precision")
@on_ranks(2)
def test_mixed_precision(rank, world):
    """Recomputation casts inputs and outputs as the first computation did."""
    prepare = shard("around", mp_policy=replace(BF16, output_dtype=torch.bfloat16))
    build = lambda: Model("not reentrant", "around")
    assert_parity(prepare, build=build, against=("torch",), tolerance=0.05)


@composes("recomputation")
@composes("reentrant recomputation")
@on_ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_several_roots(rank, world, reentrant):
    """``torch.utils.checkpoint`` called on a slice of sharded modules, each its own root."""
    module, alone = beside_one_process(lambda: mlp(4, 8, 8, 4))
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    alone(data).square().mean().backward()
    mine = data.detach()[rank * 4 : rank * 4 + 4].requires_grad_()
    assert not isinstance(module[:4], api.ours.FSDPModule)
    module[4](checkpoint(module[:4], mine, use_reentrant=reentrant)).square().mean().backward()
    assert_gradients(module, alone)


# ---- what a checkpoint sees ----


class Routed(nn.Module):
    """A block whose experts are a unit of their own, checkpointed as a whole: torchtitan's mixture of experts."""

    def __init__(self, contexts: Callable[[], Any]) -> None:
        super().__init__()
        self.router, self.experts, self.contexts = nn.Linear(WIDTH, WIDTH), mlp(WIDTH, 6, WIDTH), contexts

    def run(self, x: Tensor) -> Tensor:
        return x + self.experts(self.router(x).sigmoid() * x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.run, x, use_reentrant=False, context_fn=self.contexts)


def keep_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep everything."""
    return CheckpointPolicy.MUST_SAVE


@composes("selective recomputation")
@on_ranks(1, 2)
@api.fsdp2_only
@pytest.mark.parametrize("policy", [keep_products, keep_all, None])
@pytest.mark.parametrize("prefetch, extension", [(False, False), (True, False), (True, True)])
def test_a_unit_inside_a_selective_checkpoint(rank, world, policy, prefetch, extension):
    """Gathers, casts and views of the experts, which the forward and the recomputation need not do alike, were seen by
    the checkpoint that keeps results by operation: "aten._foreach_copy_.default encountered during backward but not
    found in storage" (torch: "fsdp.all_gather_copy_in"). No mode of a checkpoint sees anything but the model now."""
    modes: list[Operators] = []  # somebody's own in a checkpoint

    def contexts() -> Any:
        if policy is not None:
            return create_selective_checkpoint_contexts(policy)
        modes.extend([Operators(), Operators()])
        return modes[-2:]

    torch.manual_seed(0)
    model = nn.Sequential(*(Routed(contexts) for _ in range(3)), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    for block in plain[:3]:
        block.contexts = lambda: (nullcontext(), nullcontext())
    for module in (model, plain):
        for block in module[:3]:
            api.ours.fully_shard(block.experts, mesh=mesh_1d(), mp_policy=BF16)
            api.ours.fully_shard(block, mesh=mesh_1d(), mp_policy=BF16)
        api.ours.fully_shard(module, mesh=mesh_1d(), mp_policy=BF16)
        if extension:
            patch([layer for block in module[:3] for layer in block.experts[::2]], [])
        for block, following in zip(module[:2], module[1:3]) if prefetch else ():
            block.set_modules_to_forward_prefetch([following, following.experts])
            following.set_modules_to_backward_prefetch([block, block.experts])
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(world * step + rank))
        outputs = [module(x) for module in (model, plain)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.sum().backward()
        for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(got.grad.full_tensor(), expected.grad.full_tensor()), name
    names = {name for mode in modes for name in mode.seen}
    assert not any(part in name for name in names for part in ("copy", "view", "sub")), names
