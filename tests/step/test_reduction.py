"""Setters that say how gradients are summed, divided and kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support import api
from tests.support.composition import composes
from tests.support.counting import Collectives
from tests.support.fake import fake_mesh
from tests.support.models import Layers
from tests.support.nccl import strict_nccl
from tests.support.parity import (
    Run,
    accumulate,
    assert_gradients,
    assert_parity,
    assert_same,
    beside_one_process,
    mesh_1d,
    mesh_2d,
    mesh_of,
    on_one_axis,
    on_two_axes,
    play,
    setting,
    shard_each,
    sharded,
    stack,
)
from tests.support.pool import on_ranks
from tests.support.report import full_grads

whens = pytest.mark.parametrize("when", ["before", "after"])


over_replicas = partial(on_two_axes, shard_over_replicas=True)
SETTERS = ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor")


@composes("divide factor", "hybrid sharding")
@composes("divide factor", "over replicas")
@on_ranks(1, 2, 4)
@whens
@pytest.mark.parametrize("setter", SETTERS)
@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("prepare", [on_one_axis, on_two_axes, pytest.param(over_replicas, marks=api.fsdp2_only)])
def test_divide_factor(rank, world, prepare, force_sum, setter, when):
    """The sum over ranks is divided by the factor once, on every world size and mesh; only this module's is."""
    if world == 1:
        prepare = on_one_axis  # a mesh of two axes needs two ranks
    module = play(api.ours, prepare, program=lambda run: None).module
    rows = Run(module, api.ours, (rank, world)).inputs(0)

    def choose():
        module[0].set_force_sum_reduction_for_comms(force_sum)
        if setter == SETTERS[1]:
            with pytest.deprecated_call():
                getattr(module[0], setter)(4.0)
        else:
            getattr(module[0], setter)(4.0)

    if when == "before":
        choose()
    module(rows).square().mean().backward()
    if when == "after":
        choose()
        module.zero_grad()
        module(rows).square().mean().backward()
    alone = play(None, on_one_axis, program=lambda run: run.backward(0)).module  # the mean over ranks
    factors = {"0": world / 4.0}
    expected = {name: p.grad * factors.get(name[0], 1.0) for name, p in alone.named_parameters()}
    assert_same(full_grads(module), expected, "the sum's")


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_divide_factor_in_low_precision(rank, world, dtype):
    """In float16 a part of the division comes before the sum, so that the sum does not overflow."""
    module = stack()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    shard_each(module, api.ours, mesh=mesh_1d(), mp_policy=policy)
    for unit in (*module, module):
        unit.set_gradient_divide_factor(64.0)
    (module(torch.ones(1, 8)).sum() * 40000).backward()
    for parameter in module[2].parameters():
        assert parameter.grad.to_local().isfinite().all()
    expected = torch.full((8,), 40000 * world / 64)
    torch.testing.assert_close(module[2].bias.grad.full_tensor(), expected, rtol=0.01, atol=0)


@on_ranks(2)
@whens
def test_force_sum(rank, world, when):
    """Collectives only ever sum; the result is the same mean, as with torch's."""

    def setter(module, fsdp):
        for unit in (*module, module):
            unit.set_force_sum_reduction_for_comms(True)

    assert_parity(on_one_axis, program=setting(setter, when))


@api.fsdp2_only
@pytest.mark.skipif(torch.__version__ < "2.12", reason="the fake group of torch 2.11 scatters nothing")
@pytest.mark.parametrize("forced", [False, True])
def test_what_nccl_is_asked_to_do(forced):
    """It averages unless sums are asked for, which are divided afterwards. Nothing is sent, so this rank's gradient
    counts as the average, or as the sum."""
    with strict_nccl(), fake_mesh(4) as mesh:
        module = api.ours.fully_shard(nn.Linear(8, 8), mesh=mesh)
        module.set_force_sum_reduction_for_comms(forced)
        module(torch.ones(1, 8)).sum().backward()
    assert (module.bias.grad.to_local() == (0.25 if forced else 1.0)).all()


@on_ranks(4)
@whens
@pytest.mark.parametrize("recurse", [True, False])
def test_requires_all_reduce(rank, world, when, recurse):
    """Without it micro-batches keep sums over the shard axis; the last one's all-reduce completes them all."""

    def program(run):
        if when == "after":
            run.backward(5)
            run.update()
        accumulate(run, 3, "set_requires_all_reduce", recurse=recurse)

    assert_parity(on_two_axes, program=program)


@on_ranks(4)
def test_requires_all_reduce_saves_the_all_reduce(rank, world):
    """One reduction less per unit, and no gradient yet."""
    module = sharded(mesh=mesh_2d())
    counts = []
    for required in (True, False, True):
        module.set_requires_all_reduce(required)
        loss = module(torch.ones(1, 8)).sum()
        with Collectives() as seen:
            loss.backward()
        counts.append((seen.reductions, module[0].weight.grad is None))
        module.zero_grad()
    assert counts == [(6, False), (3, True), (6, False)]


@on_ranks(4)
def test_requires_all_reduce_after_a_unit_was_used_for_the_last_time(rank, world):
    """The last micro-batch does not use the first layer, whose sums over the shard axis wait: they were lost, as
    torch's are, since the setters drop what was planned for its gradients."""
    module, alone = beside_one_process(lambda: Layers(2), mesh=mesh_2d())
    for step in range(2):
        for skip in (False, True):
            module.set_requires_all_reduce(skip)
            for one in (alone, module):
                one(torch.ones(1, 8) + step, (1,) if skip else (0, 1)).sum().backward()
    assert_gradients(module, alone)


WAYS = (0, 1), (0, 2)
"""Ranks take different ways: some parameters get a gradient on one rank only."""


def forks() -> Layers:
    """Return the layers, of which each of two ranks uses others."""
    module = Layers()
    module.used = WAYS[dist.get_rank()]
    return module


def one_group(module, fsdp) -> None:
    """Make one unit of everything."""
    fsdp.fully_shard(module, mesh=mesh_1d())


@on_ranks(2)
@whens
def test_reduce_scatter_unused_params(rank, world, when):
    """Parameters that this rank did not use take part with zeros, so that ranks may use different ones."""
    setter = lambda module, fsdp: module.set_reduce_scatter_unused_params(True)

    def program(run):
        if when == "before":
            run.configure(setter)
        else:
            with torch.no_grad():
                run.loss(5)
            run.configure(setter)
        run.backward(0)
        run.update()

    if api.torch_since("2.13"):
        run = assert_parity(one_group, build=forks, program=program, against=("torch",))
    else:
        run = play(api.ours, one_group, forks, program)
    alone = play(None, on_one_axis, build=forks, program=lambda run: None).module
    for index, way in enumerate(WAYS):
        rows = Run(run.module, None, (index, world)).inputs(0)
        (alone(rows, way).square().mean() / world).backward()
    for name, parameter in alone.named_parameters():
        got = next(value for key, value in run.seen.items() if key.startswith(f"gradient of {name} "))
        torch.testing.assert_close(got, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@on_ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_unused_params_of_which_units(rank, world, recurse):
    """Only where it was asked for an unused parameter has a gradient, of zeros."""
    module = Layers(2)
    module.used = (0,)
    for unit in module:
        api.ours.fully_shard(unit, mesh=mesh_1d())
    module.append(nn.ParameterList([nn.Parameter(torch.ones(3))]))
    api.ours.fully_shard(module, mesh=mesh_1d())
    module.set_reduce_scatter_unused_params(True, recurse=recurse)
    module(torch.ones(1, 8)).sum().backward()
    assert torch.equal(module[2][0].grad.full_tensor(), torch.zeros(3))
    assert (module[1].weight.grad is not None) == recurse
    module.zero_grad()
    module.set_reduce_scatter_unused_params(False)
    module(torch.ones(1, 8)).sum().backward()
    module.reshard()
    assert module[2][0].grad is None and module[1].weight.grad is None


@on_ranks(2)
@whens
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("buffers", [1, 2, 7])
def test_reduce_scatter_max_input_buffers(rank, world, buffers, recurse, when):
    """However many chunks may be in flight, results are the same bit for bit."""
    setter = lambda module, fsdp: module.set_reduce_scatter_max_input_buffers(buffers, recurse=recurse)
    run = assert_parity(on_one_axis, program=setting(setter, when), against=api.against("2.13"))
    again = play(api.ours, on_one_axis)
    assert all(torch.equal(run.seen[name], value) for name, value in again.seen.items())


@on_ranks(2)
def test_copies_on_a_shard_axis_of_one_rank_are_summed_in_the_reduce_dtype(rank, world):
    """A mesh of (2, 1) has copies alone. From 256 KiB on gloo exchanged rows with nobody: they were narrowed to the
    dtype that travels, and the copies' sum was taken in bfloat16, where 256 + 1 is 256."""
    module = nn.Linear(256, 256, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    api.ours.fully_shard(module, mesh=mesh_of(2, 1, names=("replicate", "shard")), mp_policy=policy)
    module(torch.full((1, 256), 1.0 if rank else 256.0)).sum().backward()
    assert torch.equal(module.weight.grad.full_tensor(), torch.full((256, 256), 128.5))


@on_ranks(2)
def test_requires_all_reduce_after_a_parameter_was_frozen(rank, world):
    """A sum over the shard axis that waits for its all-reduce belongs to a parameter that is frozen meanwhile: it was
    lost, and added to the gradient of a later step instead."""
    mesh = mesh_of(2, 1, names=("replicate", "shard"))
    module, alone = beside_one_process(partial(stack, layers=2), mesh=mesh)

    def backward(step: int) -> None:
        for one in (module, alone):
            one(torch.ones(1, 8) + step).square().sum().backward()

    for step in range(2):
        module.set_requires_all_reduce(False)
        backward(2 * step)
        module.set_requires_all_reduce(True)
        for one in (module, alone):
            one[1].weight.requires_grad_(False)
        backward(2 * step + 1)
        assert_gradients(module, alone)
        for one in (module, alone):
            one[1].weight.requires_grad_(True)
            one.zero_grad()


@on_ranks(2)
def test_without_replicas_there_is_no_all_reduce_to_leave_out(rank, world):
    """``set_requires_all_reduce(False)`` leaves sums over shards for later where there are replicas, and only there."""
    module = sharded()
    module.set_requires_all_reduce(False)
    module(torch.ones(2, module[0].in_features)).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
