"""``summon_full_params`` shows the unsharded model, and what is changed in it lands in the shards, or does not."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import fsdp2
from fsdp2 import summon_full_params
from tests.support import api
from tests.support.cases import CASES, TRANSFERS, Setup, build, build_sharded, chunk
from tests.support.fake import fake_mesh
from tests.support.models import Transformer, mlp
from tests.support.parity import mesh_of, rows_of
from tests.support.pool import on_ranks
from tests.support.shapes import loss_of

pytestmark = api.fsdp2_only
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def named(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return all names, those of tied parameters included."""
    return list(module.named_parameters(remove_duplicate=False))


def assert_shows(module: nn.Module, expected: nn.Module) -> None:
    """Assert that a module shows exactly what another, unsharded one does."""
    assert [name for name, _ in named(module)] == [name for name, _ in named(expected)]
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in expected.named_parameters()]
    for (name, got), (_, want) in zip(named(module), named(expected)):
        assert type(got) is nn.Parameter and got.is_leaf, name
        dense = torch.empty_like(want).stride()  # shards leave gaps out
        assert (got.dtype, got.stride(), got.requires_grad) == (want.dtype, dense, want.requires_grad), name
        assert torch.equal(got, want), name
    assert [name for name, _ in module.named_buffers()] == [name for name, _ in expected.named_buffers()]
    for got, want in zip(module.buffers(), expected.buffers()):
        assert torch.equal(got, want)


def assert_shards(module: nn.Module, expected: nn.Module, rank: int, world: int) -> None:
    """Assert that a module shows this rank's pieces of another one's parameters."""
    for (name, got), (_, want) in zip(named(module), named(expected)):
        assert isinstance(got, DTensor), name
        piece = chunk(want.detach(), 0, rank, world) if want.ndim else want.detach()
        assert torch.equal(got.to_local(), piece), name


@torch.no_grad()
def change(module: nn.Module) -> None:
    """Change every parameter, each in its own way."""
    for index, parameter in enumerate(module.parameters()):
        parameter.copy_(parameter + index + 1 if parameter.dtype != torch.bool else ~parameter)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("case", CASES)
def test_shows_the_unsharded_model(rank, world, case):
    """Every case: names, order, values, dtypes, strides, buffers; afterwards the same shards are back, changed."""
    expected, module = build(CASES[case]), build_sharded(case, world, Setup(policy=BF16))
    before = [parameter for _, parameter in named(module)]
    with summon_full_params(module):
        assert_shows(module, expected)
        change(module)
    change(expected)
    assert all(now is then for (_, now), then in zip(named(module), before))
    assert_shards(module, expected, rank, world)
    with summon_full_params(module, writeback=False):
        assert_shows(module, expected)


@on_ranks(2, 4)
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("policy", [BF16, MixedPrecisionPolicy()], ids=["bf16", "fp32"])
@pytest.mark.parametrize("recurse", [True, False])
def test_writeback(rank, world, writeback, offload, policy, recurse):
    """Changes of outer and inner parameters last if they were summoned and are to be written back."""
    expected, module = build(CASES["nested"]), build_sharded("nested", world, Setup(policy=policy))
    inner = [name for name, _ in module.named_parameters() if name.startswith("0.0")]
    with summon_full_params(module[0], recurse=recurse, writeback=writeback, offload_to_cpu=offload):
        for name, parameter in module.named_parameters():
            full = name.startswith("0.") and (recurse or name not in inner)
            assert isinstance(parameter, DTensor) != full
            if full:
                with torch.no_grad():
                    parameter.fill_(rank + 1 if name == "0.2.bias" else 5)
                    if writeback and name != "0.2.bias":
                        expected.get_parameter(name).fill_(5)
    if writeback:  # each rank's own changes
        bounds = [len(part) for part in expected[0][2].bias.chunk(world)]
        values = [float(i + 1) for i, size in enumerate(bounds) for _ in range(size)]
        expected[0][2].bias.data.copy_(torch.tensor(values))
    assert_shards(module, expected, rank, world)


@on_ranks(1, 2)
@pytest.mark.parametrize("case", ["transformer", "uneven", "tied", "frozen"])
@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("reshard", [None, False])
def test_training_goes_on_with_what_was_written(rank, world, case, transfer, reshard):
    """Losses and weights are those of an unsharded model that is changed at the same times."""
    expected = build(CASES[case])
    module = build_sharded(case, world, Setup(reshard_after_forward=reshard, transfer=transfer))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (module, expected)]
    for step in range(3):
        loss_of(CASES[case].call(module, rows_of(CASES[case].inputs(step), rank, world))).backward()
        loss_of(CASES[case].call(expected, CASES[case].inputs(step))).backward()
        with summon_full_params(module), torch.no_grad():
            for one in (module, expected):
                for parameter in one.parameters():
                    parameter.mul_(0.9)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with summon_full_params(module, writeback=False):
            for (name, got), want in zip(module.named_parameters(), expected.parameters()):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("offload", [True, False])
def test_one_rank_only(rank, world, offload):
    """The first rank shows full parameters, others their shards; nothing is written."""
    expected, module = build(CASES["transformer"]), build_sharded("transformer", world)
    with summon_full_params(module, writeback=False, rank0_only=True, offload_to_cpu=offload):
        if rank == 0:
            assert_shows(module, expected)
            change(module)
        else:
            assert_shards(module, expected, rank, world)
    assert_shards(module, expected, rank, world)


@on_ranks(1, 2)
@pytest.mark.parametrize("offload", [True, False])
def test_a_model_from_the_meta_device_is_initialized_as_one_process_does(rank, world, offload):
    """``reset_parameters`` on shards drew the same numbers on every rank of a CPU mesh: the parts of a weight were
    equal. With whole values shown, one module after another, each value is that of one process."""
    with torch.device("meta"):
        module, alone = Transformer(), Transformer()
    policy = fsdp2.CPUOffloadPolicy(pin_memory=False) if offload else fsdp2.OffloadPolicy()
    for unit in (*module.blocks, module):
        fsdp2.fully_shard(unit, mesh=mesh_of(world), offload_policy=policy)
    for one in (module, alone):
        one.to_empty(device="cpu")
        alone.head.weight = alone.embed.weight  # torch unties what is on the meta device
        torch.manual_seed(0)
        for part in one.modules():
            if hasattr(part, "reset_parameters"):
                with summon_full_params(part, recurse=False) if one is module else contextlib.nullcontext():
                    part.reset_parameters()
    made = {name for name, part in alone.named_modules() if hasattr(part, "reset_parameters")}
    for (name, got), (_, want) in zip(named(module), named(alone)):
        if name.rpartition(".")[0] in made:
            assert torch.equal(got.full_tensor(), want), name
    assert made


@on_ranks(2)
@pytest.mark.parametrize("which", ["part of a unit", "unit", "plain parent", "grouped", "empty"])
def test_any_module(rank, world, which):
    """A part of a unit, a unit below the root, a parent that is no unit, one of a grouped call; others stay shards."""
    module = build_sharded("transformer_grouped" if which == "grouped" else "transformer", world)
    expected = build(CASES["transformer"])
    parent = nn.ModuleDict({"model": module, "own": nn.Linear(2, 3)})
    target = {
        "part of a unit": module.blocks[0].qkv,
        "unit": module.blocks[1],
        "plain parent": parent,
        "grouped": module.norm,
        "empty": nn.Identity(),
    }[which]
    inside = set(target.parameters())
    full = [name for name, parameter in module.named_parameters() if parameter in inside]
    with summon_full_params(target):
        assert [n for n, p in module.named_parameters() if not isinstance(p, DTensor)] == full
        for name in full:
            assert torch.equal(module.get_parameter(name), expected.get_parameter(name))
            module.get_parameter(name).data.fill_(3)
            expected.get_parameter(name).data.fill_(3)
    assert_shards(module, expected, rank, world)


@on_ranks(2)
def test_units_alone(rank, world):
    """``recurse=False`` on a module that is no unit, and holds none of its own parameters, shows nothing."""
    module = build_sharded("mlp", world)
    parent = nn.Sequential(module)
    with summon_full_params(parent, recurse=False):
        assert all(isinstance(parameter, DTensor) for parameter in parent.parameters())
    with summon_full_params(module, recurse=False):  # each linear layer is a unit of its own
        assert all(isinstance(parameter, DTensor) for parameter in parent.parameters())


@on_ranks(2)
def test_ties_are_one_object(rank, world):
    """Within a unit and across units; a change through one name is seen and written through the other."""
    for cut_head in (False, True):
        torch.manual_seed(1)
        module = Transformer()
        original = module.embed.weight.detach().clone()
        if cut_head:
            fsdp2.fully_shard(module.embed, mesh=mesh_of(world))
            fsdp2.fully_shard(module.head, mesh=mesh_of(world))
        fsdp2.fully_shard(module, mesh=mesh_of(world))
        with summon_full_params(module.head):
            assert module.head.weight is module.embed.weight and torch.equal(module.head.weight, original)
            module.embed.weight.data.add_(1)
        assert module.head.weight is module.embed.weight
        with summon_full_params(module, writeback=False):
            assert module.head.weight is module.embed.weight and torch.equal(module.embed.weight, original + 1)


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_state_dicts_inside(rank, world, reshard):
    """In the block ``state_dict`` gives plain tensors and ``load_state_dict`` takes them, assigned or copied."""
    expected = build(CASES["buffers"])
    module = build_sharded("buffers", world, Setup(reshard_after_forward=reshard))
    with torch.no_grad():
        module(*CASES["buffers"].inputs(0))
    expected(*CASES["buffers"].inputs(0))
    with summon_full_params(module):
        state = module.state_dict()
        assert list(state) == list(expected.state_dict())
        assert not any(isinstance(value, DTensor) for value in state.values())
        plain = build(CASES["buffers"])
        plain.load_state_dict(state)
        assert_shows(plain, expected)
    for assign in (False, True):
        with torch.no_grad():
            change(expected)
        with summon_full_params(module):
            module.load_state_dict({k: v.clone() for k, v in expected.state_dict().items()}, assign=assign)
        with summon_full_params(module, writeback=False):
            assert_shows(module, expected)
    module(*CASES["buffers"].inputs(1))


@on_ranks(2)
def test_requires_grad(rank, world):
    """Set just before the block it is shown, set in the block it lasts where changes do."""
    module = build_sharded("mlp", world)
    module[0].weight.requires_grad_(False)
    for writeback in (False, True):
        with summon_full_params(module, writeback=writeback):
            assert [parameter.requires_grad for parameter in module.parameters()] == [False] + [True] * 5
            module[0].weight.requires_grad_(True)
            module[2].weight.requires_grad_(False)
        shown = [parameter.requires_grad for parameter in module.parameters()]
        assert shown == ([True, True, False, True, True, True] if writeback else [False, True, True, True, True, True])
    loss_of(module(*CASES["mlp"].inputs(0))).backward()
    assert [parameter.grad is not None for parameter in module.parameters()] == shown


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True])
def test_forward_inside(rank, world, reshard):
    """Without gradients, forward computes with what is shown: also changes, also on one rank alone; else it refuses."""
    case = CASES["transformer"]
    expected, module = build(case), build_sharded("transformer", world, Setup(reshard, BF16))
    with summon_full_params(module, writeback=False):
        if rank == 0:  # nothing is gathered, so ranks may go different ways
            change(module), change(expected)
            with torch.no_grad():
                assert torch.equal(module(*case.inputs(0)), expected(*case.inputs(0)))
        with pytest.raises(RuntimeError, match="forward inside summon_full_params; a backward could follow"):
            module(*case.inputs(0))
    with summon_full_params(module, recurse=False), torch.no_grad():
        whole = module.embed(torch.tensor([1]))
        assert whole.shape == (1, 8)
        assert module.blocks[0](whole[None]).shape == (1, 1, 8)  # not summoned: gathers as usual
    with summon_full_params(module, writeback=False, rank0_only=True), torch.no_grad():
        with pytest.raises(RuntimeError, match="rank0_only shows full parameters on one rank"):
            module(*case.inputs(0))
    with summon_full_params(module.blocks[0].qkv), torch.no_grad():
        with pytest.raises(RuntimeError, match="summon the whole unit"):
            module.blocks[0](torch.ones(1, 1, 8))
    loss_of(module(*case.inputs(0))).backward()


EXPORTS = {
    "jit": torch.jit.trace,
    "onnx": lambda module, inputs: torch.onnx.export(module, inputs, io.BytesIO(), dynamo=False),
    "export": lambda module, inputs: torch.export.export(module, inputs, strict=False),
    "make_fx": lambda module, inputs: make_fx(lambda x: module(x))(*inputs),
    "linearize": lambda module, inputs: torch.func.linearize(module, *inputs),
}


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.filterwarnings("ignore:.*(torch.jit|onnx|ONNX|The feature will be removed)")
def test_export_of_shards_is_refused(export, ran):
    """It failed with a raw error of the tracer, or, in a first forward, with one about a rank that had ended. With
    ``make_fx``, ranks waited in their first meeting for as long as their process group allows."""
    with fake_mesh(2) as mesh:
        module = build(CASES["mlp"])
        for unit in (*module, module):
            fsdp2.fully_shard(unit, mesh=mesh)
        inputs = CASES["mlp"].inputs(0)
        if ran:
            module(*inputs)
        with pytest.raises(RuntimeError, match="forward inside torch.export, .*which cannot record how"):
            EXPORTS[export](module, inputs)
        module(*inputs).sum().backward()
        assert all(parameter.grad is not None for parameter in module.parameters())


@on_ranks(2)
@pytest.mark.parametrize("before", [True, False])
def test_forward_inside_of_a_root_without_parameters(rank, world, before):
    """It too stays out of the way: ranks may go different ways, also ahead of the first forward of all."""
    case = CASES["mlp"]
    expected, module = build(case), build_sharded("mlp", world)
    if before:
        loss_of(module(*rows_of(case.inputs(0), rank, world))).backward()
    with summon_full_params(module, writeback=False), torch.no_grad():
        for _ in range(3 * rank):
            torch.testing.assert_close(module(*case.inputs(0)), expected(*case.inputs(0)))
    loss_of(module(*rows_of(case.inputs(0), rank, world))).backward()


@on_ranks(2)
def test_copies_and_added_parameters(rank, world):
    """A deep copy is summoned on its own; a parameter that was added since and is not managed yet is shown as it is."""
    expected, module = build(CASES["mlp"]), build_sharded("mlp", world)
    twin = copy.deepcopy(module)
    with summon_full_params(twin):
        change(twin)
        assert_shards(module, expected, rank, world)
    assert_shards(module, expected, rank, world)
    module[0].adapter = nn.Parameter(torch.ones(3))
    with summon_full_params(module):
        assert module[0].adapter.shape == (3,) and not isinstance(module[0].adapter, DTensor)
    change(expected)
    assert_shards(twin, expected, rank, world)


@on_ranks(2)
@pytest.mark.parametrize("seed", range(12))
def test_random_models(rank, world, seed):
    """Any shapes, dtypes, units and options: what is shown and written equals an unsharded model changed alike."""
    draw = torch.Generator().manual_seed(seed)
    pick = lambda *options: options[int(torch.randint(len(options), (), generator=draw))]
    widths = [pick(1, 2, 3, 5, 8, 17) for _ in range(pick(2, 3, 5))]
    torch.manual_seed(seed)
    expected = mlp(*widths, bias=pick(True, False)).to(pick(torch.float32, torch.float64, torch.bfloat16))
    for parameter in expected.parameters():
        parameter.requires_grad_(pick(True, True, False))
    module = copy.deepcopy(expected)
    options = {"reshard_after_forward": pick(None, True, False), "mp_policy": pick(BF16, MixedPrecisionPolicy())}
    for layer in module[: len(module) // 2]:
        fsdp2.fully_shard(layer, mesh=mesh_of(world), **options)
    fsdp2.fully_shard(module, mesh=mesh_of(world), **options)
    module.set_transfer_sizes(**TRANSFERS[pick(*TRANSFERS)])
    inputs = torch.ones(2, widths[0], dtype=expected[0].weight.dtype)
    if pick(True, False):
        with torch.no_grad():
            module(inputs)
    for _ in range(2):
        with summon_full_params(module, offload_to_cpu=pick(True, False)):
            assert_shows(module, expected)
            change(module)
        change(expected)
    for unit in module.modules():
        if isinstance(unit, fsdp2.FSDPModule):
            unit.reshard()
    assert_shards(module, expected, rank, world)
    with summon_full_params(module, writeback=False):
        assert_shows(module, expected)


@on_ranks(2)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_parameter_without_elements(rank, world, dim):
    """Cut along the dimension that has a size, its pieces have other shapes than it has, but nothing is gathered."""
    module = nn.ParameterList([torch.zeros(0, 6), torch.ones(2, 6)])
    holder = nn.Module()
    holder.held = module
    fsdp2.fully_shard(holder, mesh=mesh_of(world), shard_placement_fn=lambda parameter: Shard(dim))
    with torch.no_grad(), summon_full_params(holder):
        assert module[0].shape == (0, 6) and module[1].shape == (2, 6)
        module[1].mul_(3)
    assert torch.equal(module[1].full_tensor(), torch.full((2, 6), 3.0))
