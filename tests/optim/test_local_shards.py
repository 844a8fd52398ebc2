"""``use_local_shards``: a step on plain local tensors is the step on DTensors, bit for bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from tests.optim.stepping import (
    BUCKET,
    OPTIMIZERS,
    ROWS,
    WIDTH,
    Model,
    assert_equal,
    assert_same_training,
    batch,
    build,
    host_apart,
    local,
    make,
    on_host,
    train,
)
from tests.support.composition import composes
from tests.support.parity import assert_weights, mesh_1d, mesh_2d
from tests.support.pool import on_ranks

FUSED = {"SGD", "SGD with momentum", "SGD with Nesterov", "Adam", "AdamW", "Adagrad"}
FOUR = pytest.param(4, marks=pytest.mark.slow)
"""Four ranks in long loops over optimizers; two have an empty shard as well."""


def names(way: str) -> list[str]:
    """Return the optimizers that have an implementation."""
    return [name for name in OPTIMIZERS if way != "fused" or name in FUSED]


@on_ranks(1, 2, FOUR)
@pytest.mark.parametrize("way", ["plain", "foreach", "fused"])
def test_steps_are_those_on_plain_tensors(rank, world, way):
    """Weights and state are, bit for bit after every step, those of an optimizer of plain copies of the shards, also
    where torch refuses DTensors. Some parameters have no gradient, some shards are empty."""
    for name in names(way):
        module = build()
        optimizer = fsdp2.use_local_shards(make(name, way)(module.parameters()))
        copies = [nn.Parameter(local(p).detach().clone(), p.requires_grad) for p in module.parameters()]
        reference = make(name, way)(copies)
        for step in range(5):  # from the fourth on, groups are collected as in the step before
            module(batch(step), rare=step == 1 and way != "fused").square().mean().backward()
            for one, parameter in zip(copies, module.parameters(), strict=True):
                one.grad = None if parameter.grad is None else local(parameter.grad).clone()
            for one in (optimizer, reference):
                one.step()
                one.zero_grad(set_to_none=step != 1)
            for one, parameter in zip(copies, module.parameters(), strict=True):
                assert torch.equal(one, local(parameter)), name
                state = {key: local(value) for key, value in optimizer.state[parameter].items()}
                assert_equal(state, reference.state[one])


def three_ways(name: str, models: list[Any], groups: Callable[[Any], Any] = nn.Module.parameters) -> list[Any]:
    """Return optimizers of equal models: on DTensors, on local shards, and on these with its state on the host."""
    optimizers = [make(name, "foreach")(groups(model)) for model in models]
    fsdp2.use_local_shards(optimizers[1])
    fsdp2.offload_optimizer_state(optimizers[2], bucket_mb=BUCKET)
    return optimizers


@composes("state on the host", "hybrid sharding", "Adam")
@composes("state on the host", "over replicas", "Adam")
@composes("state on the host", "CPU offload", "Adam")
@on_ranks(4)
@pytest.mark.parametrize("name", [pytest.param("SGD with momentum", marks=pytest.mark.slow), "AdamW"])
def test_hybrid_sharding_and_cpu_offload(rank, world, name):
    """Neither the mesh nor the place of shards matters. State of parameters on the host stays where it is."""
    over, offloaded = {"shard_over_replicas": True}, {"offload_policy": fsdp2.CPUOffloadPolicy()}
    for mesh, options, apart in ((mesh_2d(), {}, True), (mesh_2d(), over, True), (mesh_1d(), offloaded, False)):
        with host_apart(apart):
            modules = [build(mesh, **options) for _ in range(3)]
            optimizers = three_ways(name, modules)
            for module, optimizer in zip(modules, optimizers, strict=True):
                train(module, optimizer)
            for way in (1, 2):
                assert_same_training(modules[::way], optimizers[::way])
            assert bool(on_host(optimizers[2])) is apart


@composes("state on the host", "tensor parallel", "Adam")
@on_ranks(4)
@pytest.mark.parametrize("name", ["SGD with momentum", "AdamW"])
def test_over_tensor_parallelism(rank, world, name):
    """Shards of shards, and parameters that tensor parallelism alone holds, step in one optimizer."""
    mesh = mesh_2d("dp", "tp")
    modules: list[Any] = []
    for _ in range(3):
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH), nn.Linear(WIDTH, WIDTH))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()})
        fsdp2.fully_shard(module[0], mesh=mesh["dp"])
        fsdp2.fully_shard(module[1], mesh=mesh["dp"])
        modules.append(module)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank // 2))
    with host_apart():
        optimizers = three_ways(
            name, modules, lambda m: [{"params": m[:2].parameters()}, {"params": m[2].parameters()}]
        )
        for _ in range(3):
            for module, optimizer in zip(modules, optimizers, strict=True):
                module(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert on_host(optimizers[2])
    assert modules[0][0].weight.placements[0] != Shard(0), "expected a strided shard"
    for way in (1, 2):
        assert_same_training(modules[::way], optimizers[::way])


@on_ranks(2)
@pytest.mark.parametrize("name", ["SGD with momentum", "AdamW"])
def test_gradients_placed_otherwise(rank, world, name):
    """Partial sums are summed and whole gradients cut, as operators on DTensors do it, up to rounding."""
    steps = []
    for use in (False, True):
        weight = nn.Parameter(DTensor.from_local(torch.arange(6.0).view(3, 2) + rank, mesh_1d(), [Shard(0)]))
        whole = nn.Parameter(DTensor.from_local(torch.arange(6.0).view(3, 2), mesh_1d(), [Replicate()]))
        optimizer = make(name)([weight, whole])
        if use:
            fsdp2.use_local_shards(optimizer)
        for _ in range(2):
            weight.grad = DTensor.from_local(torch.arange(12.0).view(6, 2), mesh_1d(), [Replicate()])
            whole.grad = DTensor.from_local(torch.ones(3, 2) * (1 + rank), mesh_1d(), [Partial()])
            optimizer.step()
        steps.append((weight, whole))
    for one, other in zip(*steps, strict=True):
        assert one.placements == other.placements
        torch.testing.assert_close(local(one), local(other))


PLAIN: dict[str, Callable[[torch.optim.Optimizer], torch.optim.Optimizer]] = {
    "local": fsdp2.use_local_shards,
    "proxies": lambda optimizer: fsdp2.use_local_shards(optimizer, elementwise=True),
    "host": fsdp2.offload_optimizer_state,
    "whole": fsdp2.use_full_params,
    "whole, early": lambda o: fsdp2.use_full_params(o, overlap_backward=True, keep_full_params=True),
}


class Derived(torch.optim.SGD):
    """A class derived from one of torch's."""


@on_ranks(2)
@pytest.mark.parametrize("way", PLAIN)
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_plain_gradient_is_refused(rank, world, way, everywhere):
    """It has the whole's shape. Owners of whole parameters took the wrong rows of it, without an error; steps on shards
    raised errors about sizes, or spread one row. Gradients that the remedy makes are those of one process."""
    module = build()
    module.requires_grad_(True)
    with host_apart():
        optimizer = PLAIN[way]((Derived if way == "proxies" else torch.optim.SGD)(module.parameters(), lr=0.1))
        train(module, optimizer, range(2))
        for param in module.parameters():
            param.grad = distribute_tensor(torch.zeros(param.shape), param.device_mesh, param.placements)
        bias, before = module.one.bias, module.one.bias.full_tensor()
        grad = torch.arange(5.0)
        if rank == 0 or everywhere:
            bias.grad = grad
        expected = r"optimizer.step: one\.bias: its \.grad is a plain tensor, expected a DTensor placed as"
        if rank == 0 or everywhere:
            with pytest.raises(RuntimeError, match=expected):
                optimizer.step()
        elif "whole" in way:
            with pytest.raises(RuntimeError, match="have it in another form; the errors of other ranks name it"):
                optimizer.step()
        bias.grad = distribute_tensor(grad, bias.device_mesh, bias.placements)
        optimizer.step()
    torch.testing.assert_close(bias.full_tensor(), before - 0.1 * grad)


@on_ranks(2, 4)
@pytest.mark.parametrize("way", ["plain", "foreach", "fused"])
def test_plain_parameters_in_the_same_group(rank, world, way):
    """Ignored parameters and sharded ones share a group, also with foreach, which torch refuses for DTensors."""
    modules, optimizers = [], []
    for use in (False, True):
        torch.manual_seed(3)
        module = Model()
        fsdp2.fully_shard(module, mesh=mesh_1d(), ignored_params={module.one.weight, module.scale})
        ignored = [module.one.weight, module.scale]
        rest = [p for p in module.parameters() if isinstance(p, DTensor)]
        groups = [{"params": [*ignored, *rest]}] if use else [{"params": ignored}, {"params": rest}]
        optimizer = make("AdamW", way)(groups)
        if use:
            fsdp2.use_local_shards(optimizer)
        train(module, optimizer)
        modules.append(module)
        optimizers.append(optimizer)
    assert_equal(modules[0].state_dict(), modules[1].state_dict())
    states = [{k: o.state[p] for k, p in m.named_parameters()} for o, m in zip(optimizers, modules, strict=True)]
    assert_equal(*states)


@on_ranks(2)
def test_state_that_is_cleared_is_freed(rank, world):
    """What a step had shown of it was remembered until the next one."""
    module = build()
    kind = type("Own", (torch.optim.SGD,), {})
    optimizer = fsdp2.use_local_shards(kind(module.parameters(), lr=0.1, momentum=0.9), elementwise=True)
    train(module, optimizer)
    moments = [weakref.ref(v) for entry in optimizer.state.values() for v in entry.values() if isinstance(v, DTensor)]
    optimizer.state.clear()
    gc.collect()
    assert moments and not any(moment() is not None for moment in moments)


@on_ranks(2)
def test_lbfgs_steps_on_dtensors_of_even_pieces(rank, world):
    """The errors that refuse it say so."""
    torch.manual_seed(0)
    module = nn.Linear(4, 6)
    reference = copy.deepcopy(module)
    fsdp2.fully_shard(module, mesh=mesh_1d())
    x = torch.randn(4, 4)
    for one in (module, reference):
        optimizer = torch.optim.LBFGS(one.parameters(), lr=0.1)

        def closure(one=one, optimizer=optimizer) -> Any:
            optimizer.zero_grad()
            loss = one(x).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    assert_weights(module, reference)
