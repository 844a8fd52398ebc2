"""Shards, buffers and dtypes that somebody changes behind the unit's back, between passes or inside one."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import swap_tensors

import fsdp2
from tests.support import api
from tests.support.inside import options_of
from tests.support.models import mlp
from tests.support.parity import assert_gradients, beside_one_process, mesh_of, sharded
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


def models() -> tuple[nn.Module, nn.Module]:
    """A unit, and a layer of the root's own; the same without sharding."""
    return beside_one_process(partial(mlp, 3, 4, 3), lambda module: module[:1])


@on_ranks(1, 2)
@pytest.mark.parametrize("how", ["swap_tensors", "local tensor"])
@pytest.mark.parametrize("evaluated", [False, True])
def test_shards_with_other_content(rank, world, how, evaluated):
    """``torch.utils.swap_tensors`` on parameters, or another ``_local_tensor``: forward went on with the old values."""
    module, alone = models()
    shards = list(module.parameters())
    inputs = torch.ones(2, 3)
    if evaluated:
        with torch.no_grad():
            module(inputs)
    for shard, whole in zip(shards, alone.parameters(), strict=True):
        local = shard.to_local().detach() * 2
        if how == "swap_tensors":
            other = DTensor.from_local(
                local, shard.device_mesh, shard.placements, shape=shard.shape, stride=shard.stride()
            )
            swap_tensors(shard, nn.Parameter(other))
        else:
            shard._local_tensor = local
        whole.data.mul_(2)
    for _ in range(2):
        outputs = [one(inputs) for one in (module, alone)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.sum().backward()
    assert_gradients(module, alone)
    for got, expected in zip(module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), expected)


@on_ranks(1, 2)
@pytest.mark.parametrize("names", [["0.weight"], ["0.weight", "0.bias", "2.weight", "2.bias"]])
def test_what_is_swapped_out_keeps_its_value(rank, world, names):
    """``torch.utils.swap_tensors`` gives the tensor that is swapped out the shard's own memory. The next forward put
    the new values there, so it showed the trained weight; swapped back in, it brought that along."""
    module, alone = models()
    inputs, others = torch.ones(2, 3), {}
    expected = {name: alone.get_parameter(name).detach().clone() for name in names}
    for name in names:
        shard = module.get_parameter(name)
        other = nn.Parameter(shard.detach() * 2)
        swap_tensors(shard, other)
        others[name] = other
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        module(inputs).sum().backward()
        optimizer.step()
    for name, other in others.items():
        torch.testing.assert_close(other.full_tensor(), expected[name], rtol=0, atol=0)
    trained = {name: parameter.full_tensor().detach().clone() for name, parameter in module.named_parameters()}
    for name, other in others.items():
        swap_tensors(module.get_parameter(name), other)
        assert torch.equal(module.get_parameter(name).full_tensor(), expected[name])
    whole = copy.deepcopy(alone)
    whole.load_state_dict({**trained, **expected})
    torch.testing.assert_close(module(inputs), whole(inputs))
    for name, other in others.items():
        torch.testing.assert_close(other.full_tensor(), trained[name], rtol=0, atol=0)


@on_ranks(2)
def test_cast_between_forward_and_backward(rank, world):
    """``model.double()`` there made backward fail with "setStorage"; it says what was done, and the model goes on."""
    module, _ = models()
    loss = module(torch.ones(2, 3)).sum()
    module.double()
    with pytest.raises(RuntimeError, match=r"the root: .* cast, moved .* between forward and backward \(model.double"):
        loss.backward()
    module.reset_iter_state()
    module(torch.ones(2, 3).double()).sum().backward()
    module(torch.ones(2, 3).double()).sum()  # without a backward
    module.float()
    module(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("when", ["before", "later", "back"])
def test_batch_norm_follows_its_buffers(rank, world, when):
    """torch's documentation casts the running statistics to the compute dtype after ``fully_shard``. The weights went
    on in the dtype that they had at the call: "mixed dtype (CPU): expect parameter to have scalar type of Float"."""
    policy = api.ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    build = lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module = sharded(build, units=lambda module: [*module][:2], mp_policy=policy)

    def cast(dtype: torch.dtype) -> None:
        for name in ("running_mean", "running_var"):
            setattr(module[1], name, getattr(module[1], name).to(dtype))

    def computed_in() -> torch.dtype:
        with torch.no_grad(), fsdp2.use_weights(module[1]):
            return module[1].weight.dtype

    def step() -> None:
        module(torch.randn(4, 3)).float().square().sum().backward()
        assert all(p.grad.to_local().isfinite().all() for p in module.parameters())

    if when != "before":
        step()
    cast(torch.bfloat16)
    step()
    assert computed_in() == torch.bfloat16
    if when == "back":
        module[1].unshard()
        held = module[1].weight
        cast(torch.float32)
        step()
        assert not held.untyped_storage().size()  # what was gathered in bfloat16 is freed, whoever refers to it
        assert computed_in() == torch.float32
    assert module[1].weight.dtype == torch.float32


@on_ranks(2)
def test_settings_that_reach_below(rank, world):
    """``recurse=True`` sets what torch sets for one module only in all units below, too."""
    module, _ = models()
    settings = {
        "set_gradient_divide_factor": (4.0, "divide_factor"),
        "set_force_sum_reduction_for_comms": (True, "force_sum"),
        "set_unshard_in_backward": (False, "unshard_in_backward"),
        "set_all_reduce_hook": (torch.Tensor.zero_, "all_reduce_hook"),
    }
    for method, (value, name) in settings.items():
        before = getattr(options_of(module[0]), name)
        getattr(module, method)(value)
        assert getattr(options_of(module), name) == value and getattr(options_of(module[0]), name) == before
        getattr(module, method)(value, recurse=True)
        assert getattr(options_of(module[0]), name) == value


@on_ranks(2)
def test_words_of_fsdp1(rank, world):
    """Arguments of FSDP1 are refused with what to pass instead; the methods that training loops call exist."""
    for name, remedy in {
        "auto_wrap_policy": "policy=",
        "mixed_precision": "mp_policy=",
        "device_id": "leave it out",
    }.items():
        with pytest.raises(TypeError, match=f"fully_shard: {name}= is an argument of FSDP1, .*{remedy}"):
            api.ours.fully_shard(nn.Linear(2, 2), **{name: None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        api.ours.fully_shard(nn.Linear(2, 2), nonsense=1)
    module, alone = models()
    with module.no_sync():
        module(torch.ones(2, 3)).sum().backward()
    module(torch.ones(2, 3)).sum().backward()
    (2 * alone(torch.ones(2, 3)).sum()).backward()
    torch.testing.assert_close(module.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
    assert_gradients(module, alone)

    class Own(nn.Linear):
        def no_sync(self) -> str:
            return "its own"

    assert api.ours.fully_shard(Own(2, 2), mesh=mesh_of(world)).no_sync() == "its own"
