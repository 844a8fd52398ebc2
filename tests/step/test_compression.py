"""Compressed gathers and reductions: exact where values are representable, bounded elsewhere, in every composition."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2.compression.formats import BlockFormat, decode, encode, encoded_views
from tests.step.test_communication import Gather, Scatter
from tests.step.test_extensions import Halves
from tests.support import api
from tests.support.parity import assert_gradients, full, mesh_1d, mesh_2d, mesh_of
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only
BLOCK = 32


def policy(**options: Any) -> Any:
    """Return a policy for small parameters."""
    return api.ours.CompressionPolicy(**{"block": BLOCK, "min_numel": 256, **options})


class Sent(TorchDispatchMode):
    """Notes the bytes that collectives send, by what they do."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            sent = args[1] if isinstance(args[1], Tensor) else args[0][0]
            self.bytes.setdefault(func.__name__.split(".")[0].strip("_"), []).append(sent.nbytes)
        return func(*args, **(kwargs or {}))


def ternary(*shape: int, seed: int = 0) -> Tensor:
    """Return values that every format represents: blocks of -1/4, 0 and 1/4."""
    return (torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed))) / 4


class Products(nn.Module):
    """Weights side by side, so that their gradients are products of an input and a given factor."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.even, self.uneven = nn.Linear(width, 64, bias=False), nn.Linear(width, 37)
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 48, bias=False)
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(ternary(*parameter.shape, seed=i))

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.even, self.uneven, self.inner)
        outs = [layer(x) * ternary(layer.weight.shape[0], seed=9).to(x.dtype) for layer in layers]
        return torch.cat([*outs, self.norm(x)], -1)


def shard(model: Products, **options: Any) -> Any:
    """Make a unit of one layer, and one of the rest."""
    api.ours.fully_shard(model.inner, **options)
    return api.ours.fully_shard(model, **options)


def result(model: nn.Module, micro_batches: int = 1) -> dict[str, Tensor]:
    """Return the output, the input's gradient and all gradients, whole, of a row that every rank has."""
    x = ternary(1, 64, seed=20).requires_grad_()
    for i in range(micro_batches):
        if isinstance(model, api.ours.FSDPModule):
            model.set_requires_gradient_sync(i == micro_batches - 1)
        out = model(x)
        out.sum().backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"out": full(out.detach()), "x": full(x.grad), **grads}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Assert bit-equality, by name."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


BF16 = api.ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, Any] = {
    "plainly": {},
    "kept": {"reshard_after_forward": False},
    "in bfloat16": {"mp_policy": BF16},
    "along the second dimension": {"shard_placement_fn": lambda p: Shard(p.ndim - 1)},
    "offloaded": {"offload_policy": api.ours.CPUOffloadPolicy()},
}
BOTH = {"gather": torch.int8, "reduce": torch.int8, "replicate": torch.int8}


@on_ranks(2, 3)
@pytest.mark.parametrize("how", OPTIONS)
def test_compression(rank, world, how):
    """What the formats represent is trained as without, bit by bit: by a gather or two, micro-batches, frozen weights.

    ``set_compression`` takes it back and gives it again.
    """
    plain = shard(Products(), mesh=mesh_1d(), **OPTIONS[how])
    model = shard(Products(), mesh=mesh_1d(), compression=policy(**BOTH), **OPTIONS[how])
    for one in (plain, model):
        one.uneven.weight.requires_grad_(False)
    expected = result(plain)
    with Sent() as before:
        assert_equal(result(plain), expected)
    assert_equal(result(model), expected)
    with Sent() as seen:
        assert_equal(result(model), expected)
    assert sum(map(sum, seen.bytes.values())) < 0.6 * sum(map(sum, before.bytes.values()))
    assert_equal(result(model, 2), result(plain, 2))
    model.set_compression(None)
    with Sent() as seen:
        assert_equal(result(model), expected)
    assert seen.bytes == before.bytes
    model.set_compression(policy(gather=torch.float8_e4m3fn, reduce="int4"))
    assert_equal(result(model), expected)


@on_ranks(4)
@pytest.mark.parametrize("how", ["hybrid", "on two ranks", "tensor parallel", "extension", "custom gather"])
def test_compositions(rank, world, how):
    """Four ranks: two hops, pieces on neighbouring ranks, weights cut before, tensors with a format of their own."""
    meshes = {"hybrid": mesh_2d, "tensor parallel": lambda: mesh_of(2, 2, names=("dp", "tp"))}
    mesh = meshes.get(how, mesh_1d)()
    models = []
    for compression in (None, policy(**BOTH)):
        model: Any = Products()
        options: dict[str, Any] = {"reshard_after_forward": 2} if how == "on two ranks" else {}
        if how == "tensor parallel":
            cut_rows(model.even, mesh["tp"])
        elif how == "extension":
            model.even.weight = nn.Parameter(Halves(model.even.weight.detach()))
        used = mesh["dp"] if how == "tensor parallel" else mesh
        shard(model, mesh=used, compression=compression, **options)
        if how == "custom gather":
            model.set_custom_all_gather(Gather(), recurse=True)
        models.append(model)
    assert_equal(result(models[1]), result(models[0]))
    assert_equal(result(models[1], 2), result(models[0], 2))


def cut_rows(linear: nn.Linear, mesh: Any) -> None:
    """Cut the rows of a linear layer over ``mesh``; its output is whole."""
    weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
    linear.weight = weight

    def forward(module: nn.Module, inputs: Any) -> Any:
        return (DTensor.from_local(inputs[0], mesh),)

    distribute_module(linear, mesh)
    linear.register_forward_pre_hook(forward)
    linear.register_forward_hook(lambda module, inputs, out: out.full_tensor())


def decoded(weight: Tensor, world: int, form: BlockFormat) -> Tensor:
    """Return what a weight cut along its rows becomes in a gather."""
    pieces = []
    for piece in weight.chunk(world):
        flat = torch.zeros(1, -(-weight.shape[0] // world) * weight.shape[1])
        flat[0, : piece.numel()] = piece.flatten()
        sent = torch.empty(1, form.nbytes(flat.numel()), dtype=torch.uint8)
        encode(flat, encoded_views(sent, flat.numel(), form), form)
        decode(encoded_views(sent, flat.numel(), form), flat, form)
        pieces.append(flat[0, : piece.numel()].view_as(piece))
    return torch.cat(pieces)


@on_ranks(2)
def test_forward_and_backward_compute_with_the_same_weights(rank, world):
    """Those are what each rank's piece decodes to; shards, and so optimizers and checkpoints, have the original."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 64))
    alone, form = copy.deepcopy(original), BlockFormat(torch.int8, BLOCK)
    with torch.no_grad():
        for layer in (alone[0], alone[2]):
            layer.weight.copy_(decoded(layer.weight, world, form))
    model = copy.deepcopy(original)
    for unit in (model[0], model[2], model):
        api.ours.fully_shard(unit, mesh=mesh_1d(), compression=policy(gather=torch.int8))
    inputs = [torch.randn(3, 64, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    expected = [x.clone().requires_grad_() for x in inputs]
    losses = [alone(x).square().mean() for x in expected]
    sum(losses).div(world).backward()
    x = inputs[rank].clone().requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    assert torch.equal(loss, losses[rank]) and torch.equal(x.grad * (1 / world), expected[rank].grad)
    assert_gradients(model, alone)
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), original.get_parameter(name))
    assert not torch.equal(alone[0].weight, original[0].weight)


@on_ranks(2)
def test_bytes_on_the_wire(rank, world):
    """Per unit: numbers and scales are at most 1.05 times the elements, and small parameters travel beside them."""
    model = nn.Linear(256, 512)
    options = {"gather": torch.int8, "reduce": "int4", "block": 256, "min_numel": 1024}
    api.ours.fully_shard(model, mesh=mesh_1d(), compression=policy(**options))
    with Sent() as seen:
        model(torch.ones(1, 256)).sum().backward()
    elements, bias = 256 * 512, 4 * 512
    scales = elements // 256 * 4
    assert seen.bytes["allgather_base"] == [(elements + scales + bias) // 2]  # one: the root stays gathered
    assert seen.bytes["alltoall_base"] == [(elements // 2 + scales) // 2]  # what is for the other rank
    assert scales + elements // 2 <= 1.05 * elements // 2


@on_ranks(2)
def test_gradients_are_within_a_step_of_the_largest_of_their_block(rank, world):
    """Rounded by chance or to the nearest, and what is not finite arrives so, for scalers of losses to see."""
    torch.manual_seed(0)
    original = nn.Linear(64, 64, bias=False)
    inputs = [torch.randn(5, 64, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    grads = [torch.autograd.grad(original(x).square().sum(), original.weight)[0] for x in inputs]
    mean, largest = sum(grads) / world, max(grad.abs().max() for grad in grads)
    for kind, steps in ((torch.int8, 127), ("int4", 7)):
        for stochastic in (True, False):
            model = copy.deepcopy(original)
            api.ours.fully_shard(model, mesh=mesh_1d(), compression=policy(reduce=kind, stochastic=stochastic))
            model(inputs[rank]).square().sum().backward()
            error = (full(model.weight.grad) - mean).abs().max()
            assert 0 < error <= largest / steps * (1.001 if stochastic else 0.501)
            norm = api.ours.clip_grad_norm_(model.parameters(), 1e9)
            torch.testing.assert_close(norm, full(model.weight.grad).norm())
            model.zero_grad()
            (model(inputs[rank]).sum() * (torch.inf if rank else 1.0)).backward()
            assert not full(model.weight.grad).isfinite().any()


@on_ranks(4)
def test_copies_of_hybrid_sharding_stay_equal(rank, world):
    """Two hops, each rounded by chance; every copy has the same sums, within a step for each time they are encoded."""
    mesh = mesh_2d()
    torch.manual_seed(0)
    original = nn.Linear(64, 64, bias=False)
    grads = [
        torch.autograd.grad((original(torch.ones(2, 64) * r) ** 2).sum(), original.weight)[0] for r in range(world)
    ]
    model = api.ours.fully_shard(copy.deepcopy(original), mesh=mesh, compression=policy(**BOTH))
    (model(torch.ones(2, 64) * rank) ** 2).sum().backward()
    local = model.weight.grad.to_local()
    copies = [torch.empty_like(local) for _ in range(2)]
    torch.distributed.all_gather(copies, local, group=mesh.get_group("replicate"))
    assert torch.equal(*copies)
    error = (full(model.weight.grad) - sum(grads) / world).abs().max()
    assert 0 < error <= 3.01 * max(grad.abs().max() for grad in grads) / 127


@on_ranks(2)
def test_what_is_skipped_travels_as_it_is(rank, world):
    """Small parameters, and those that ``skip`` says, by their names in the unit; the others beside them do not."""
    names = []

    def skip(name, parameter):
        names.append(name)
        assert isinstance(parameter, nn.Parameter)
        return name == "uneven.weight"

    torch.manual_seed(1)
    model = Products()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    originals = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shard(model, mesh=mesh_1d(), compression=policy(gather=torch.int8, skip=skip))
    model.unshard(recurse=True)
    kept = {name for name, parameter in model.named_parameters() if torch.equal(parameter, originals[name])}
    assert kept == {"uneven.weight", "uneven.bias", "norm.weight", "norm.bias"}
    assert names == ["weight", "even.weight", "uneven.weight"]
    model.reshard(recurse=True)


@on_ranks(2)
def test_what_does_not_compose_is_refused_by_name(rank, world):
    """And changes nothing."""
    FSDP = api.ours
    model = shard(Products(), mesh=mesh_1d())
    with pytest.raises(TypeError, match="compression must be a CompressionPolicy"):
        FSDP.fully_shard(nn.Linear(2, 2), mesh=mesh_1d(), compression=torch.int8)
    with pytest.raises(TypeError, match="compression must be a CompressionPolicy"):
        model.set_compression("int8")
    model.inner.set_custom_reduce_scatter(Scatter())
    with pytest.raises(ValueError, match=r"compression.reduce: .*custom reduce-scatter \(Scatter\)"):
        model.set_compression(policy(reduce=torch.int8))
    model.set_compression(policy(gather=torch.int8))
    assert_equal(result(model), result(shard(Products(), mesh=mesh_1d())))


@on_ranks(2)
def test_set_compression_between_forward_and_backward(rank, world):
    """It was refused in the backward, and in later steps until a reset, not at the call."""
    model = shard(Products(), mesh=mesh_1d(), compression=policy(gather=torch.int8))
    x = ternary(1, 64)
    out = model(x)
    for unit in (model, model.inner):
        with pytest.raises(RuntimeError, match=r"set_compression was called between a forward and its backward; .*"):
            unit.set_compression(None)
    out.sum().backward()  # as if nothing had been called
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.set_compression(None)
    with torch.no_grad():
        model(x)
    model.set_compression(policy(gather=torch.int8))  # no backward follows an evaluation
    model(x)
    model.reset_iter_state()
    model.set_compression(None)
    model(x).sum().backward()


@on_ranks(2)
def test_a_policy_that_raises_changes_nothing(rank, world):
    """The formats of parameters before the one that its function raised on were kept: their gradients were compressed,
    also after ``set_compression(None)``."""

    def skip(name, parameter):
        if name == "uneven.weight":
            raise LookupError(name)
        return False

    model = shard(Products(), mesh=mesh_1d())
    with pytest.raises(LookupError):
        model.set_compression(policy(**BOTH, skip=skip))
    with Sent() as seen:
        result(model)
    assert "alltoall_base" not in seen.bytes


@on_ranks(2)
def test_set_compression_of_one_unit(rank, world):
    """Without ``recurse`` units below stay as they are."""
    model = shard(Products(), mesh=mesh_1d())
    model.set_compression(policy(reduce=torch.int8), recurse=False)
    with Sent() as seen:
        result(model)
    assert len(seen.bytes["alltoall_base"]) == 1 and seen.bytes["reduce_scatter_base"]
    model.set_compression(policy(reduce=torch.int8), recurse=True)
    with Sent() as seen:
        result(model)
    assert len(seen.bytes["alltoall_base"]) == 2


@on_ranks(2)
def test_a_deep_copy_and_other_dtypes(rank, world):
    """A copy is gathered like the original; cast to float64 it travels as it is."""
    model = shard(Products(), mesh=mesh_1d(), compression=policy(**BOTH))
    expected = result(model)
    assert_equal(result(copy.deepcopy(model)), expected)
    model.double()
    with Sent() as seen:
        model(ternary(1, 64).double()).sum().backward()
    assert model.even.weight.grad.dtype == torch.float64 and "alltoall_base" not in seen.bytes


def test_policies_are_checked() -> None:
    """A value that is not known is named with those that are."""
    for options, text in (
        ({"gather": torch.float16}, "compression.gather: expected one of .*int8.*got torch.float16"),
        ({"gather": "int4"}, "compression.gather"),
        ({"reduce": torch.float8_e4m3fn}, "compression.reduce"),
        ({"replicate": 8}, "compression.replicate"),
        ({"block": 24}, "compression.block: expected a multiple of 16"),
        ({"min_numel": -1}, "compression.min_numel"),
    ):
        with pytest.raises(ValueError, match=text):
            api.ours.CompressionPolicy(**options)
    for options in ({"stochastic": 1}, {"skip": "norm"}):
        with pytest.raises(TypeError, match="compression"):
            api.ours.CompressionPolicy(**options)
