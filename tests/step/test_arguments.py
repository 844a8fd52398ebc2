"""Arguments of ``fully_shard`` that say where parameters live and which are left alone, and setters of gathers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support import api
from tests.support.composition import composes
from tests.support.counting import Collectives
from tests.support.inside import options_of
from tests.support.models import Three
from tests.support.parity import Run, assert_parity, full, mesh_1d, mesh_2d, play, setting, shard_each, stack
from tests.support.pool import on_ranks

whens = pytest.mark.parametrize("when", ["before", "after"])
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def plain(module, fsdp) -> None:
    """Shard each layer over all ranks, and free after forward."""
    shard_each(module, fsdp, mesh=mesh_1d(), reshard_after_forward=True)


@composes("CPU offload", "hybrid sharding", "mixed precision", "SGD")
@on_ranks(2, 4)
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_cpu_offload(rank, world, hybrid, policy, pin):
    """Shards and gradients are on the CPU; on a machine without accelerator ``pin_memory`` changes nothing."""
    options = {
        "mesh": mesh_2d() if hybrid else mesh_1d(),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin),
        "mp_policy": BF16 if policy == "bf16" else MixedPrecisionPolicy(),
    }
    if not torch.accelerator.is_available():
        prepare = lambda module, fsdp: shard_each(module, fsdp, **(options | pinned(fsdp)))
    else:
        prepare = lambda module, fsdp: shard_each(module, fsdp, **options)
    exact = policy == "fp32"
    run = assert_parity(prepare, against=("torch", "alone") if exact else ("torch",), tolerance=2e-5 if exact else 0.05)
    loss = run.loss(7)
    loss.backward()
    for parameter in run.module.parameters():
        assert parameter.to_local().device.type == parameter.grad.to_local().device.type == "cpu"


def pinned(fsdp) -> dict[str, OffloadPolicy]:
    """Torch's refuses to pin memory without an accelerator; ours need not."""
    return {} if fsdp is api.ours else {"offload_policy": CPUOffloadPolicy(pin_memory=False)}


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_ignored_params(rank, world, reshard):
    """They stay as they are, and their gradients are this rank's own."""

    def prepare(module, fsdp):
        ignored = {*module.middle.parameters(), module.last.bias}
        for unit in (module.last, module):
            fsdp.fully_shard(unit, mesh=mesh_1d(), ignored_params=ignored, reshard_after_forward=reshard)

    run = assert_parity(prepare, build=Three, program=lambda run: run.backward(0), against=("torch",))
    names = {name for name, parameter in run.module.named_parameters() if not isinstance(parameter, DTensor)}
    run.module.reshard()
    ignored = {name for name, parameter in run.module.named_parameters() if not isinstance(parameter, DTensor)}
    assert ignored == {"middle.weight", "middle.bias", "last.bias"} <= names
    alone = play(None, prepare, build=Three, program=lambda run: None)
    alone.module(Run(alone.module, None, (rank, world)).inputs(0)).square().mean().backward()
    torch.testing.assert_close(run.module.middle.weight.grad, alone.module.middle.weight.grad)
    mean = full(alone.module.first.weight.grad)
    torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG)
    torch.testing.assert_close(full(run.module.first.weight.grad), mean)
    run.module.to(torch.float64)
    assert run.module.middle.weight.dtype == run.module.first.weight.dtype == torch.float64


@on_ranks(2)
def test_ignored_params_may_belong_to_ddp(rank, world):
    """DistributedDataParallel around the model reduces what fully_shard ignores."""

    def program(run):
        model = run.module
        if run.fsdp is not None:
            sharded = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sharded)
            model = DistributedDataParallel(model)
        for step in range(2):
            model(run.inputs(step)).square().mean().backward()
            run.update()

    def prepare(module, fsdp):
        fsdp.fully_shard(module, mesh=mesh_1d(), ignored_params=set(module.middle.parameters()))

    assert_parity(prepare, build=Three, program=program)


class Lookup(nn.Sequential):
    """Layers above an embedding, whose backward does not need its weight."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(5, 8), nn.Linear(8, 8))

    def forward(self, x):
        return super().forward(x[:, :3].gt(0).long())


@on_ranks(2)
@whens
def test_unshard_in_backward(rank, world, when):
    """A unit whose backward does not need its parameters is not gathered for it."""
    run = assert_parity(
        plain, build=Lookup, program=setting(lambda module, fsdp: module[0].set_unshard_in_backward(False), when)
    )
    counts = []
    for needed in (False, True):
        run.module[0].set_unshard_in_backward(needed)
        loss = run.loss(0)
        with Collectives() as seen:
            loss.backward()
        counts.append(seen.gathers)
        assert isinstance(run.module[0].weight, DTensor)
    assert counts == [0, 1]  # the unit that forward ended with is there


@on_ranks(2)
@whens
@pytest.mark.parametrize("value", [True, False])
def test_unshard_async_op(rank, world, when, value):
    """Both values train the same; explicit gathers ahead of forward are used."""

    def program(run):
        setter = lambda module, fsdp: module._set_unshard_async_op(value)
        if when == "before":
            run.configure(setter)
        for step in range(3):
            run.configure(lambda module, fsdp: [unit.unshard(async_op=True) for unit in module])
            run.backward(step)
            run.update()
            if step == 0 and when == "after":
                run.configure(setter)

    run = assert_parity(plain, program=program)
    for unit in run.module:
        unit.unshard(async_op=True)
    with Collectives() as seen, torch.no_grad():
        run.module(torch.ones(1, 8))
    assert seen.gathers == 0


@on_ranks(2)
@whens
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize(
    "name", ["set_reshard_after_forward", "set_reshard_after_backward", "set_requires_gradient_sync"]
)
def test_setters_of_one_or_all(rank, world, name, recurse, when):
    """``recurse=False`` changes the unit itself and nothing below it; at any time."""

    def build():
        return nn.Sequential(stack(), nn.Linear(8, 8))

    def prepare(module, fsdp):
        for unit in (module[0][1], module[0], module):
            fsdp.fully_shard(unit, mesh=mesh_1d())

    def program(run):
        for step in range(4):
            if step == (1 if when == "after" else 0):
                run.configure(lambda module, fsdp: getattr(module[0], name)(False, recurse=recurse))
            if step == 3:
                run.configure(lambda module, fsdp: getattr(module, name)(True))
            run.backward(step)
            if name != "set_requires_gradient_sync" or step == 3:
                run.update()

    run = assert_parity(prepare, build=build, program=program)
    option = {
        "set_reshard_after_forward": "reshard_after_forward",
        "set_reshard_after_backward": "reshard_after_backward",
        "set_requires_gradient_sync": "reduce_gradients",
    }[name]
    getattr(run.module[0], name)(False, recurse=recurse)
    units = (run.module, run.module[0], run.module[0][1])
    assert [getattr(options_of(unit), option) for unit in units] == [True, False, not recurse]


@api.fsdp2_only
@on_ranks(2)
def test_a_setter_that_one_unit_refuses_changes_none(rank, world):
    """``summon_full_params`` shows a unit below: the units before it were changed when that one raised."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard_each(model, api.ours, mesh=mesh_1d())
    before = options_of(model[0])
    error = "a change of how parameters are gathered while summon_full_params shows its parameters"
    with api.ours.summon_full_params(model[1]), pytest.raises(RuntimeError, match=error):
        model.set_transfer_sizes(direct_param_bytes=0)
    assert options_of(model[0]) == before
    model.set_transfer_sizes(direct_param_bytes=0)
    assert options_of(model[0]) != before
