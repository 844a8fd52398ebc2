"""State dicts, meta initialisation, ``to``, and optimizers: what happens to shards outside forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support import api
from tests.support.cases import CASES, TRANSFERS, Setup, build, build_sharded, chunk, parametrize_cases, shard
from tests.support.models import linears
from tests.support.parity import assert_gradients, beside_one_process, mesh_of, rows_of, stack
from tests.support.pool import on_ranks
from tests.support.shapes import loss_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STATEFUL = ("mlp", "transformer", "uneven", "smaller_than_world", "buffers", "tied", "integer", "lstm", "channels_last")


def step(module: nn.Module, name: str, rank: int, world: int, index: int = 0) -> None:
    """Run a forward and a backward on this rank's rows."""
    case = CASES[name]
    loss_of(case.call(module, rows_of(case.inputs(index), rank, world))).backward()


def assert_state(module: nn.Module, expected: dict[str, torch.Tensor], rank: int, world: int) -> None:
    """Assert that the state dict has the expected names and pieces, and nothing but DTensors for parameters."""
    state = module.state_dict()
    assert list(state) == list(expected)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in state.items():
        assert isinstance(value, DTensor) == (name in parameters), name
        whole = expected[name]
        assert (
            torch.equal(value.to_local(), chunk(whole, 0, rank, world))
            if name in parameters
            else (value == whole).all()
        )


@on_ranks(1, 2, 4)
@parametrize_cases(*STATEFUL)
def test_state_dict_is_sharded_at_any_time(rank, world, case):
    """Names are the original ones and values are shards: at rest, unsharded, after forward, after backward."""
    expected = {name: value.clone() for name, value in build(CASES[case]).state_dict().items()}
    module = build_sharded(case, world, Setup(reshard_after_forward=False))
    assert_state(module, expected, rank, world)
    for unit in (unit for unit in module.modules() if isinstance(unit, api.ours.FSDPModule)):
        unit.unshard()
    assert_state(module, expected, rank, world)
    module.eval()
    loss = loss_of(CASES[case].call(module, CASES[case].inputs(0)))
    changing = {name for name, _ in module.named_buffers()}
    assert not changing or case == "buffers"
    state = module.state_dict()
    assert all(isinstance(value, DTensor) for name, value in state.items() if name not in changing)
    loss.backward()
    reference = build(CASES[case])
    loss_of(CASES[case].call(reference, CASES[case].inputs(0)))
    assert_state(module, reference.state_dict(), rank, world)


@on_ranks(2)
def test_state_dict_inside_forward_and_backward(rank, world):
    """A state dict taken in a forward or backward hook is sharded too, and training goes on."""
    module, reference = build_sharded("mlp", world), build(CASES["mlp"])
    seen = []
    module[2].register_forward_hook(lambda *_: seen.append(module.state_dict()))
    module[2].register_full_backward_hook(lambda *_: seen.append(module.state_dict()))
    for index in range(2):
        step(module, "mlp", rank, world, index)
        loss_of(reference(*CASES["mlp"].inputs(index))).backward()
    assert len(seen) == 4
    for state in seen:
        for name, parameter in reference.named_parameters():
            assert isinstance(state[name], DTensor), name
            assert torch.equal(state[name].to_local(), chunk(parameter.detach(), 0, rank, world))
    assert_gradients(module, reference)


@on_ranks(2, 4)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("when", ["fresh", "trained", "unsharded"])
@parametrize_cases("mlp", "uneven", "smaller_than_world", "transformer", "channels_last")
def test_load_state_dict(rank, world, case, when, assign):
    """Loaded values are what forward computes with, copied or assigned, also while full parameters are shown."""
    module = build_sharded(case, world)
    torch.manual_seed(99)
    other = CASES[case].build()
    if when == "trained":
        step(module, case, rank, world)
        module.zero_grad()
    if when == "unsharded":
        module.unshard()
    mesh = mesh_of(world)
    values = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in other.state_dict().items()}
    result = module.load_state_dict(values, assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    assert_state(module, other.state_dict(), rank, world)
    inputs = CASES[case].inputs(0)
    torch.testing.assert_close(CASES[case].call(module, inputs), CASES[case].call(other, inputs))
    step(module, case, rank, world)
    module.reshard()
    assert all(parameter.grad is not None for parameter in module.parameters() if parameter.requires_grad)


def on_meta(name: str, world: int, transfer: str = "packed", **options: object) -> nn.Module:
    """Return the named case's model sharded on the meta device."""
    with torch.device("meta"):
        module = CASES[name].build()
    return shard(module, CASES[name], api.ours, mesh_of(world), Setup(transfer=transfer, **options))


@on_ranks(2, 4)
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), BF16])
@pytest.mark.parametrize("transfer", TRANSFERS)
@parametrize_cases("mlp", "smaller_than_world", "uneven")
def test_meta_then_to_empty(rank, world, case, policy, transfer):
    """Shards allocated by ``to_empty`` and initialised in place train like those of a real model."""
    module = on_meta(case, world, transfer, policy=policy)
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in module.parameters())
    module.to_empty(device="cpu")
    reference = build(CASES[case])
    with torch.no_grad():
        for got, value in zip(module.parameters(), reference.parameters(), strict=True):
            got.copy_(distribute_tensor(value.detach(), mesh_of(world), got.placements))
    inputs = CASES[case].inputs(0)
    tolerance = {"atol": 0.05, "rtol": 0.05} if policy is not None and policy.param_dtype else {}
    torch.testing.assert_close(module(*inputs).float(), reference(*inputs), **tolerance)
    step(module, case, rank, world)
    assert all(parameter.grad is not None and not parameter.is_meta for parameter in module.parameters())


@on_ranks(2)
def test_meta_then_replaced_parameters(rank, world):
    """A Parameter set on the module before the first forward is the shard from then on."""
    module, reference = on_meta("mlp", world), build(CASES["mlp"])
    for got, real in zip(linears(module), linears(reference), strict=True):
        for name, value in list(real.named_parameters()):
            setattr(got, name, nn.Parameter(distribute_tensor(value.detach(), mesh_of(world), [Shard(0)])))
    inputs = CASES["mlp"].inputs(0)
    torch.testing.assert_close(module(*inputs), reference(*inputs))


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("trained", [False, True])
def test_to_dtype(rank, world, trained):
    """``module.to(dtype)`` changes shards, what is computed, and gradients."""
    module, reference = build_sharded("uneven", world), build(CASES["uneven"])
    if trained:
        step(module, "uneven", rank, world)
        module.zero_grad()
    for dtype in (torch.float64, torch.bfloat16):
        module.to(dtype)
        reference.to(dtype)
        inputs = CASES["uneven"].inputs(0)[0].to(dtype)
        loss_of(module(inputs)).backward()
        loss_of(reference(inputs)).backward()
        for name, parameter in module.named_parameters():
            assert parameter.dtype == parameter.to_local().dtype == parameter._spec.tensor_meta.dtype == dtype, name
            assert parameter.grad.dtype == dtype
        torch.testing.assert_close(module(inputs), reference(inputs))
        module.zero_grad()
        module.reshard()


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("trained", [False, True])
def test_a_state_dict_in_inference_mode(rank, world, trained):
    """A trainer saves where it has evaluated: "Cannot set version_counter for inference tensor", with torch's own too.
    What it gets lets training go on, and shares memory with the shards as ever."""
    module, alone = beside_one_process(stack)
    inputs = torch.ones(2, 8)
    if trained:
        for one in (module, alone):
            one(inputs).square().mean().backward()
            torch.optim.SGD(one.parameters(), lr=0.1).step()
    with torch.inference_mode():
        module(inputs)
        state = nn.Sequential(module).state_dict()  # also of a module around it
    assert not any(value.is_inference() for value in state.values())
    for (name, value), expected in zip(state.items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(value.full_tensor(), expected, msg=name)
        assert value.to_local().data_ptr() == module.get_parameter(name[2:]).to_local().data_ptr()
    for one in (module, alone):
        one.zero_grad()
        one(inputs).square().mean().backward()
    assert_gradients(module, alone)
