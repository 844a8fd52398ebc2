"""``summon_full_params`` around forward and backward: what was kept stays, graphs stay usable, misuse is refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import iter_full_params, summon_full_params
from tests.support import api
from tests.support.cases import CASES, Setup, build, build_sharded
from tests.support.counting import Collectives
from tests.support.models import mlp
from tests.support.parity import assert_gradients, mesh_2d, mesh_of, on_one_axis, rows_of
from tests.support.pool import on_ranks
from tests.support.shapes import loss_of
from tests.weights.test_summon import BF16, assert_shards, assert_shows

pytestmark = api.fsdp2_only
NO_POLICY = MixedPrecisionPolicy()


def shown(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameter objects that a module shows."""
    return list(module.parameters())


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard", [None, True, False, 2])
@pytest.mark.parametrize("options", [{}, {"writeback": False, "rank0_only": True}, {"with_grads": True}])
def test_between_forward_and_backward(rank, world, reshard, options):
    """The same tensors are shown and in memory afterwards, backward gathers no more than without, and is right."""
    if reshard == 2 and world == 2:
        reshard = True  # the same thing
    results = []
    for summon in (False, True):
        module = build_sharded("transformer", world, Setup(reshard_after_forward=reshard))
        loss = loss_of(module(*rows_of(CASES["transformer"].inputs(0), rank, world)))
        before = shown(module)
        for unit in (module.blocks[1], module):
            with summon_full_params(unit, **options) if summon else nullcontext():
                if summon and (rank == 0 or "rank0_only" not in options):
                    assert not any(isinstance(parameter, DTensor) for parameter in unit.parameters())
            assert all(now is then for now, then in zip(shown(module), before))
        with Collectives() as seen:
            loss.backward()
        results.append((seen.counts, [parameter.grad.full_tensor() for parameter in module.parameters()]))
    assert results[0][0] == results[1][0]
    for one, other in zip(results[0][1], results[1][1]):
        assert torch.equal(one, other)


@on_ranks(2, 4)
@pytest.mark.parametrize("reshard", [None, True, False, 2])
@pytest.mark.parametrize("policy", [NO_POLICY, BF16], ids=["fp32", "bf16"])
def test_backward_sees_what_was_written(rank, world, reshard, policy):
    """Weights written between forward and backward are what backward multiplies with, kept or gathered anew."""
    if reshard == 2 and world == 2:
        reshard = True
    module = build_sharded("mlp_input_grad", world, Setup(reshard_after_forward=reshard, policy=policy))
    expected = build(CASES["mlp_input_grad"])
    if policy.param_dtype:
        expected = expected.to(policy.param_dtype)
    inputs = [torch.ones(2, 4, requires_grad=True) for _ in range(2)]
    outputs = [one(x.to(policy.param_dtype or torch.float32)) for one, x in zip((module, expected), inputs)]
    with summon_full_params(module):
        for one in (module, expected):
            for parameter in one.parameters():
                parameter.data.mul_(2)
    for output in outputs:
        output.float().sum().backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for one, other in zip(module.parameters(), expected.parameters()):
        torch.testing.assert_close(
            one.grad.full_tensor(), other.grad.float(), rtol=0.02 if policy.param_dtype else 1e-5, atol=1e-5
        )
    with torch.no_grad():
        assert torch.equal(module(inputs[0]), expected(inputs[1].to(policy.param_dtype or torch.float32)))


@on_ranks(2)
@pytest.mark.parametrize("change", ["written", "lost", "stepped before"])
def test_kept_parameters_stay_fresh(rank, world, change):
    """Full parameters that ``unshard()`` keeps follow what is written without a gather; after an optimizer step they
    are gathered anew."""
    module = build_sharded("mlp", world, Setup(reshard_after_forward=False))
    expected = build(CASES["mlp"])
    inputs = CASES["mlp"].inputs(0)
    shards = shown(module)
    module.unshard(recurse=True)
    kept = [(parameter, parameter.data_ptr()) for parameter in shown(module)]
    assert not any(isinstance(parameter, DTensor) for parameter, _ in kept)
    if change == "stepped before":
        optimizer = torch.optim.SGD(shards, lr=0.5)
        for parameter in shards:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for parameter in expected.parameters():
            parameter.data.sub_(0.5)
    with summon_full_params(module, writeback=change != "lost"):
        assert_shows(module, expected)
        for one in (module, expected) if change != "lost" else (module,):
            for parameter in one.parameters():
                parameter.data.mul_(0.5)
    assert [(parameter, parameter.data_ptr()) for parameter in shown(module)] == kept
    with Collectives() as seen, torch.no_grad():
        got = module(*inputs)
    assert torch.equal(got, expected(*inputs))
    assert seen.gathers == (3 if change == "stepped before" else 0)


@on_ranks(2)
def test_unsharded_by_hand(rank, world):
    """``unshard`` before the block holds after it, also one that nobody has waited for yet."""
    module, expected = build_sharded("mlp", world), build(CASES["mlp"])
    module[0].unshard()
    handle = module[2].unshard(async_op=True)
    with summon_full_params(module):
        for one in (module, expected):
            for parameter in one.parameters():
                parameter.data.add_(1)
    handle.wait()
    assert [isinstance(layer.weight, DTensor) for layer in module[::2]] == [False, False, True]
    for layer, other in zip(module[::2][:2], expected[::2]):
        assert torch.equal(layer.weight, other.weight)
        layer.reshard()
    assert_shards(module, expected, rank, world)


class Calling(nn.Module):
    """Calls back in forward."""

    def __init__(self, callback) -> None:
        super().__init__()
        self.weight, self.callback = nn.Parameter(torch.ones(4, 4)), callback

    def forward(self, x):
        self.callback()
        return x @ self.weight


@on_ranks(1, 2)
@pytest.mark.parametrize("options", [{}, {"writeback": False}, {"writeback": False, "rank0_only": True}])
def test_refused_in_forward_and_backward(rank, world, options):
    """On every rank, with a remedy; for the whole model, the unit inside and others; training goes on."""
    errors = []

    def summon(*unused) -> None:
        for target in (module, module[0], module[1]):
            with pytest.raises(RuntimeError, match="during forward/backward; expected outside of both") as error:
                with summon_full_params(target, **options):
                    pass
            errors.append(str(error.value))

    module = nn.Sequential(nn.Linear(4, 4), Calling(summon), nn.Linear(4, 4))
    on_one_axis(module, fsdp2)
    module[1].register_full_backward_hook(summon)
    output = module(torch.ones(1, 4))
    output.register_hook(summon)
    output.sum().backward()
    assert len(errors) == 9
    with summon_full_params(module, **options):
        pass
    module[1].callback = lambda: None
    module(torch.ones(1, 4)).sum().backward()


@on_ranks(1, 2)
def test_refused_arguments(rank, world):
    """Writing back what one rank shows, and what is no module."""
    module = build_sharded("mlp", world)
    with pytest.raises(NotImplementedError, match="writeback=True with rank0_only=True is not supported"):
        with summon_full_params(module, rank0_only=True):
            pass
    with pytest.raises(TypeError, match="expected an nn.Module"), summon_full_params("module"):
        pass


@on_ranks(1, 2)
@pytest.mark.parametrize("rank0_only", [True, False])
def test_refused_inside(rank, world, rank0_only):
    """What would gather, free, move or summon again what is shown; afterwards everything works."""
    module, expected = build_sharded("mlp", world), build(CASES["mlp"])
    loss = loss_of(module(*rows_of(CASES["mlp"].inputs(0), rank, world)))
    options = {"writeback": False, "rank0_only": rank0_only}
    with summon_full_params(module, **options):
        for target in (module, module[0]):
            with pytest.raises(RuntimeError, match="already shows it"), summon_full_params(target, **options):
                pass
            with pytest.raises(RuntimeError, match="already shows it"):
                iter_full_params(target)
        for refused in (
            module[0].unshard,
            module[0].reshard,
            module.double,
            lambda: loss.backward(retain_graph=True),
            lambda: module[0].set_transfer_sizes(direct_param_bytes=0),
        ):
            with pytest.raises(RuntimeError, match="while summon_full_params shows its parameters"):
                refused()
    loss.backward()
    loss_of(expected(*CASES["mlp"].inputs(0))).backward()
    assert_gradients(module, expected)


@on_ranks(2)
def test_a_refused_reshard_frees_nothing(rank, world):
    """Of units listed before the one that is shown, full parameters were freed before the error came."""
    module = build_sharded("mlp", world)
    module.unshard(recurse=True)
    with summon_full_params(module[2], writeback=False):
        with pytest.raises(RuntimeError, match="while summon_full_params shows its parameters"):
            module.reshard(recurse=True)
        assert not isinstance(module[0].weight, DTensor)


@on_ranks(2)
def test_blocks_within_blocks(rank, world):
    """Of different parameters, also of one unit; each ends on its own."""
    module, expected = build_sharded("transformer", world), build(CASES["transformer"])
    with summon_full_params(module.blocks[0]):
        module.blocks[0].qkv.weight.data.fill_(1)
        with summon_full_params(module.blocks[1].up), summon_full_params(module.blocks[1].down):
            module.blocks[1].up.weight.data.fill_(2)
            module.blocks[1].down.weight.data.fill_(3)
        assert isinstance(module.blocks[1].up.weight, DTensor)
        assert not isinstance(module.blocks[0].qkv.weight, DTensor)
        with summon_full_params(module, recurse=False, writeback=False):
            assert torch.equal(module.norm.weight, expected.norm.weight)
    for layer, value in ((expected.blocks[0].qkv, 1), (expected.blocks[1].up, 2), (expected.blocks[1].down, 3)):
        layer.weight.data.fill_(value)
    assert_shards(module, expected, rank, world)
    loss_of(module(*rows_of(CASES["transformer"].inputs(0), rank, world))).backward()


@on_ranks(2)
@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
@pytest.mark.parametrize("kept", [True, False])
def test_exception_in_the_block(rank, world, where, kept):
    """Shards are back as they were, nothing is written, and nobody waits for anybody."""
    module, expected = build_sharded("mlp", world, Setup(reshard_after_forward=not kept)), build(CASES["mlp"])
    with torch.no_grad():
        module(*CASES["mlp"].inputs(0))
    before = shown(module)
    raising = where == "everywhere" or rank == 1
    with pytest.raises(ValueError, match="mine") if raising else nullcontext():
        with summon_full_params(module, writeback=False):
            for parameter in module.parameters():
                parameter.data.zero_()
            if raising:
                raise ValueError("mine")
    if where == "everywhere":
        with pytest.raises(ValueError, match="mine"), summon_full_params(module, with_grads=True):
            module[0].weight.data.zero_()
            raise ValueError("mine")
    assert all(now is then for now, then in zip(shown(module), before))
    with summon_full_params(module):
        assert_shows(module, expected)


@on_ranks(2)
def test_what_cannot_be_written_back(rank, world):
    """A parameter of another shape, or none: an error that names it, shards back, and nothing written."""
    module, expected = build_sharded("mlp", world), build(CASES["mlp"])

    def grow():
        module[2].weight = nn.Parameter(torch.ones(9, 8))

    def resize():
        module[2].weight.data = torch.ones(3)

    def remove():
        module[2].register_parameter("weight", None)

    for spoil in (grow, resize, remove):
        with pytest.raises(RuntimeError, match=r"2.weight: cannot be written back"):
            with summon_full_params(module):
                module[0].weight.data.zero_()
                spoil()
        assert_shards(module, expected, rank, world)
        with summon_full_params(module, writeback=False):
            spoil()
        assert_shards(module, expected, rank, world)
    with summon_full_params(module):
        module[2].weight = nn.Parameter(torch.ones(8, 8))  # another one of the same shape will do
    expected[2].weight.data.fill_(1)
    assert_shards(module, expected, rank, world)


@on_ranks(2)
def test_ranks_that_differ(rank, world):
    """Parameters on the meta device on one rank, or a gradient there alone, are refused on all."""
    torch.manual_seed(0)
    module = mlp(4, 8, 4)
    if rank == 1:
        module[2].to("meta")
    for unit in (module[0], module[2], module):
        fsdp2.fully_shard(unit, mesh=mesh_of(world))
    with (
        pytest.raises(RuntimeError, match=r"on rank 1: .*weight: got a shard on the meta device"),
        summon_full_params(module),
    ):
        pass
    with pytest.raises(RuntimeError, match=r"on rank 1: .*weight: got a shard on the meta device"):
        next(iter_full_params(module))
    module.to_empty(device="cpu")
    if rank == 0:
        module[2].bias.grad = torch.ones_like(module[2].bias)
    with pytest.raises(RuntimeError, match=r"bias.grad .*only on ranks \[0\] of a dimension that cuts it"):
        with summon_full_params(module, with_grads=True):
            pass
    with summon_full_params(module):
        assert module[2].bias.grad is None


@on_ranks(4)
def test_replicas_that_differ(rank, world):
    """Where pieces are cut over replicas too, a gradient that one replica lacks is refused on all ranks of both. The
    others waited for it in a collective of their own."""
    module = mlp(4, 8, 4)
    fsdp2.fully_shard(module, mesh=mesh_2d(), shard_over_replicas=True)
    if rank < 2:
        module[2].bias.grad = torch.ones_like(module[2].bias)
    with pytest.raises(RuntimeError, match=r"bias.grad .*only on ranks \[0\] of a dimension that cuts it"):
        with summon_full_params(module, with_grads=True):
            pass
    module(torch.ones(2, 4)).sum().backward()
    with summon_full_params(module, with_grads=True):
        assert module[0].weight.grad.shape == (8, 4)


@on_ranks(2)
def test_under_inference_mode(rank, world):
    """The block may be entered, left, and the module used where tensors are inference tensors."""
    module, expected = build_sharded("mlp", world), build(CASES["mlp"])
    with torch.inference_mode(), summon_full_params(module):
        assert_shows(module, expected)
        for one in (module, expected):
            one[0].weight.data.mul_(2)
    assert_shards(module, expected, rank, world)
    loss_of(module(*rows_of(CASES["mlp"].inputs(0), rank, world))).backward()


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_state_dict_beside_a_part_that_is_shown(rank, world, reshard):
    """What is not summoned of a unit that keeps its parameters is in a state dict as shards, not as what is kept."""
    module = build_sharded("transformer", world, Setup(reshard_after_forward=reshard, policy=BF16))
    with torch.no_grad():
        module(*CASES["transformer"].inputs(0))
    before = shown(module)
    with summon_full_params(module.blocks[0].qkv):
        state = module.state_dict()
        full = [name for name, value in state.items() if not isinstance(value, DTensor)]
        assert full == ["blocks.0.qkv.weight", "blocks.0.qkv.bias"]
        assert all(value.dtype == torch.float32 for value in state.values())
    if reshard:
        assert all(now is then for now, then in zip(shown(module), before))
