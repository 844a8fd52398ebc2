"""``Tensor.grad_dtype``: the dtype that a parameter's gradient is to have, which is not always its own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.support import api
from tests.support.parity import mesh_2d, mesh_of, shard_each
from tests.support.pool import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KNOWS = hasattr(torch.Tensor, "_has_grad_dtype_override")
"""Whether torch's own fully_shard heeds it (2.15)."""
IMPLEMENTATIONS = (api.ours, api.theirs) if KNOWS else (api.ours,)
DEFAULT = "default"


def layers(dtype: torch.dtype, grad_dtype: object) -> nn.Sequential:
    """Return two linear layers whose weights were told the dtype of their gradients."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to(dtype)
    for weight in module.parameters():
        if grad_dtype != DEFAULT:
            weight.grad_dtype = grad_dtype
    return module


def sharded(fsdp, dtype, grad_dtype, **options) -> nn.Sequential:
    """Return them sharded."""
    module = layers(dtype, grad_dtype)
    shard_each(module, fsdp, **options)
    return module


def backward(module: nn.Module, step: int = 0, dtype: torch.dtype | None = None) -> None:
    """Run a step on rows that differ between ranks and do not fit in bfloat16 exactly."""
    width = module[0].in_features
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    rows = torch.randn(4, width, generator=generator).to(dtype or module[0].weight.dtype)
    module(rows).float().square().mean().backward()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """Return this rank's pieces, having checked that a gradient's two ideas of its dtype agree."""
    found = []
    for weight in module.parameters():
        assert isinstance(weight.grad, DTensor) and weight.grad.dtype is weight.grad.to_local().dtype
        assert weight.grad._spec.tensor_meta.dtype is weight.grad.dtype
        found.append(weight.grad.to_local())
    return found


POLICIES = {
    "none": MixedPrecisionPolicy(),
    "reduce bf16": MixedPrecisionPolicy(reduce_dtype=BF16),
    "bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "reduce fp32": MixedPrecisionPolicy(reduce_dtype=FP32),
    "bf16, reduce fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    "bf16, reduce bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
}


@on_ranks(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("told", [BF16, FP32, None, DEFAULT], ids=["bf16", "fp32", "any", "default"])
def test_a_reduced_gradient_has_the_dtype_that_was_chosen(rank, world, policy, dtype, told):
    """Whatever it was computed and reduced in; torch's has the same bits, also where backwards do not reduce. The
    dtypes are those of torch 2.15 on every torch."""
    seen = []
    for fsdp in IMPLEMENTATIONS:
        module, found = sharded(fsdp, dtype, told, mp_policy=POLICIES[policy]), []
        for step in range(2):
            for last in (False, True):
                module.set_requires_gradient_sync(last)
                backward(module, 2 * step + last)
            found += [grad.clone() for grad in gradients(module)]
        for weight in module.parameters():
            assert told == DEFAULT or weight.grad_dtype is told
        seen.append(found)
    reduced = POLICIES[policy].reduce_dtype or POLICIES[policy].param_dtype or dtype
    assert {grad.dtype for grad in seen[0]} == {{DEFAULT: dtype, None: reduced}.get(told, told)}
    if POLICIES[policy].reduce_dtype is not None:  # rounded to it; later ones are sums of several
        assert all(torch.equal(grad, grad.to(reduced).to(grad.dtype)) for grad in seen[0][:2])
    assert all(map(torch.equal, seen[0], seen[-1]))


@on_ranks(2, 4)
@pytest.mark.parametrize("hybrid", [False, True])
def test_dtypes_may_differ_within_a_group(rank, world, hybrid):
    """They are summed together in the widest, and each is delivered in its own."""
    seen = []
    for fsdp in IMPLEMENTATIONS:
        module = layers(BF16, DEFAULT)
        module[1].weight.grad_dtype = FP32
        fsdp.fully_shard(module, mesh=mesh_2d() if hybrid else None)
        for step in range(2):
            module.set_requires_all_reduce(step == 1, recurse=False)
            backward(module, step)
        seen.append(gradients(module))
    assert [grad.dtype for grad in seen[0]] == [BF16, FP32]
    assert all(map(torch.equal, seen[0], seen[-1]))


class WideGradient(torch.autograd.Function):
    """A linear layer whose weight gradient is computed in float32 whatever the weight is."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return rows @ weight.T

    @staticmethod
    def backward(ctx, grad):
        rows, weight = ctx.saved_tensors
        return grad @ weight, grad.float().T @ rows.float()


class WideLinear(nn.Module):
    """It as a module."""

    def __init__(self, width: int, dtype: torch.dtype, grad_dtype: object) -> None:
        super().__init__()
        self.in_features = width
        self.weight = nn.Parameter(torch.full((width, width), 0.125, dtype=dtype))
        if grad_dtype != DEFAULT:
            self.weight.grad_dtype = grad_dtype

    def forward(self, rows):
        return WideGradient.apply(rows, self.weight)


@on_ranks(2)
@pytest.mark.parametrize("width", [8, 512], ids=["small", "exchanged"])
@pytest.mark.parametrize("told", [FP32, None], ids=["fp32", "any"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_wide_gradient_of_a_narrow_weight_is_not_rounded(rank, world, width, told, sync):
    """That is what a grad_dtype is for: the kernel's own float32 reaches the shard, also by a parameter made anew."""
    torch.manual_seed(0)
    module = nn.Sequential(WideLinear(width, BF16, told))
    api.ours.fully_shard(module)
    total = torch.zeros(width, width)
    for step in range(2):
        module.set_requires_gradient_sync(sync or step == 1)
        module.set_transfer_sizes(direct_param_bytes=1 << step, direct_group_bytes=0)
        rows = torch.randn(4, width, generator=torch.Generator().manual_seed(2 * step + rank)).to(BF16)
        output = module(rows)
        grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(7 + rank)).to(BF16)
        output.backward(grad)
        total += grad.float().T @ rows.float()
    assert not torch.equal(total, total.to(BF16).float())
    dist.all_reduce(total)
    mine = gradients(module)[0]
    assert mine.dtype is FP32
    torch.testing.assert_close(mine, (total / world).chunk(world)[rank], rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_unused_parameters_need_a_dtype(rank, world):
    """Zeros for the sake of other ranks must be of one dtype, so that any does not do without a dtype to reduce in."""
    for fsdp in IMPLEMENTATIONS:
        module = sharded(fsdp, FP32, None)
        module.set_reduce_scatter_unused_params(True)
        with pytest.raises(ValueError, match="Reducing unused parameters with grad_dtype=None requires an explicit"):
            backward(module)
        module.reset_iter_state()
        module = layers(BF16, None)
        module.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=BF16)))
        module.unused.grad_dtype = None
        fsdp.fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
        module.set_reduce_scatter_unused_params(True)
        backward(module)
        assert {grad.dtype for grad in gradients(module)} == {FP32}


# ---- what keeps it ----


@on_ranks(2)
@pytest.mark.parametrize("convert", ["half", "bfloat16", "float", "double"])
def test_conversion_leaves_a_chosen_gradient_alone(rank, world, convert):
    """The parameter changes its dtype; the gradient has its own, and the next is added to it."""
    for fsdp in IMPLEMENTATIONS:
        module = sharded(fsdp, BF16, FP32)
        backward(module)
        before = [grad.clone() for grad in gradients(module)]
        getattr(module, convert)()
        assert (
            module[0].weight.dtype is {"half": FP16, "bfloat16": BF16, "float": FP32, "double": torch.float64}[convert]
        )
        for grad, weight, old in zip(gradients(module), module.parameters(), before):
            assert weight.grad_dtype is FP32 is grad.dtype and torch.equal(grad, old)
        module.to(BF16)
        backward(module)
        assert all(map(torch.equal, gradients(module), [2 * old for old in before]))


@on_ranks(2)
def test_conversion_that_fails_loses_no_gradient(rank, world):
    """Whichever parameter it fails at: each keeps its gradient, the same object as before, as in a plain module."""

    def fail(tensor):
        raise ArithmeticError

    module = sharded(api.ours, BF16, FP32)
    backward(module)
    before, values = [weight.grad for weight in module.parameters()], [grad.clone() for grad in gradients(module)]
    with pytest.raises(ArithmeticError):
        module._apply(fail)
    assert all(map(torch.equal, gradients(module), values))
    assert all(weight.grad is grad for weight, grad in zip(module.parameters(), before, strict=True))


@on_ranks(2)
def test_it_may_be_set_on_shards_until_the_first_forward(rank, world):
    """So that code which sets it after fully_shard works."""
    for fsdp in IMPLEMENTATIONS:
        module = sharded(fsdp, BF16, DEFAULT)
        module.to(FP32).to(BF16)
        for weight in module.parameters():
            weight.grad_dtype = FP32
        if fsdp is api.theirs:
            module.to(BF16)  # where torch's reads it again
        backward(module)
        assert {grad.dtype for grad in gradients(module)} == {FP32}


@on_ranks(2)
def test_it_may_not_be_set_on_shards_after_the_first_forward(rank, world):
    """Gradients are reduced for the dtype before, and torch refuses them on the shard; the error names it."""
    module = sharded(api.ours, BF16, DEFAULT)
    backward(module)
    module.zero_grad()
    module[1].weight.grad_dtype = FP32
    with pytest.raises(RuntimeError, match=r"^1\.weight: its grad_dtype was set to torch\.float32 after the first .*"):
        backward(module)


@on_ranks(2)
@pytest.mark.parametrize("own", [None, FP16])
def test_loading_by_assignment_inherits_it_or_brings_its_own(rank, world, own):
    """A new parameter that was told nothing is told what the one before was."""
    module, other = sharded(api.ours, BF16, FP32), sharded(api.ours, BF16, DEFAULT)
    state = {name: nn.Parameter(value.detach()) for name, value in other.state_dict().items()}
    for value in state.values():
        if own is not None:
            value.grad_dtype = own
    module.load_state_dict(state, assign=True)
    backward(module)
    assert {grad.dtype for grad in gradients(module)} == {own or FP32}
    assert all(weight.grad_dtype is (own or FP32) for weight in module.parameters())


@on_ranks(2)
def test_copies_have_it(rank, world):
    """Of a sharded module, which torch refuses to copy."""
    module = sharded(api.ours, BF16, FP32)
    clone = copy.deepcopy(module)
    backward(module), backward(clone)
    assert {grad.dtype for grad in gradients(module)} == {FP32}
    assert all(map(torch.equal, gradients(module), gradients(clone)))


@on_ranks(2)
def test_a_meta_parameter_keeps_it(rank, world):
    """From meta to memory, as large models are built."""
    with torch.device("meta"):
        module = layers(BF16, FP32)
    shard_each(module, api.ours)
    module.to_empty(device="cpu")
    for weight in module.parameters():
        nn.init.ones_(weight)
    backward(module)
    assert {grad.dtype for grad in gradients(module)} == {FP32}


@on_ranks(2)
def test_optimizers_step_with_it(rank, world):
    """A weight in bfloat16 steps with its gradient in float32, also as a local tensor and from a full gradient."""
    module, expected = sharded(api.ours, BF16, FP32), layers(BF16, FP32)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (module, expected)]
    api.ours.use_local_shards(optimizers[0])
    backward(module)
    whole = [weight.grad.full_tensor() for weight in module.parameters()]
    for weight, grad in zip(expected.parameters(), whole):
        weight.grad = grad
    with api.ours.summon_full_params(module, with_grads=True):
        for weight, grad in zip(module.parameters(), whole):
            assert weight.grad.dtype is FP32 and torch.equal(weight.grad, grad)
    for optimizer in optimizers:
        optimizer.step()
    for mine, theirs in zip(module.parameters(), expected.parameters()):
        assert mine.dtype is BF16 and torch.equal(mine.full_tensor(), theirs)


@on_ranks(4)
@pytest.mark.parametrize("told", [FP32, DEFAULT], ids=["fp32", "default"])
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_tensor_parallel_parameters_have_it(rank, world, told, placement):
    """On the shard and on the full DTensor that forward computes with."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    for fsdp in IMPLEMENTATIONS:
        module = layers(BF16, DEFAULT)
        for layer in module:
            weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [placement]))
            if told != DEFAULT:
                weight.grad_dtype = told
            layer.weight = weight
            fsdp.fully_shard(layer, mesh=mesh["dp"])
        rows = distribute_tensor(torch.ones(2, 8, dtype=BF16), mesh["tp"], [Replicate()])
        for last in (False, True):
            for layer in module:
                layer.set_requires_gradient_sync(last)
            output = module[1](module[0](rows)).full_tensor()
            output.float().sum().backward()
        assert {grad.dtype for grad in gradients(module)} == {BF16 if told == DEFAULT else told}


# ---- gradients that are not reduced yet ----


@on_ranks(2)
@pytest.mark.parametrize("policy", ["none", "bf16, reduce fp32"])
def test_gradients_that_were_not_reduced_are_on_the_full_parameters(rank, world, policy):
    """In the dtype they accumulate in; dropping them there is dropping them, so the next step has its own alone.

    They used to be kept elsewhere, out of ``zero_grad``'s reach, and came back with the next reduction. torch's own do
    before 2.15.
    """
    for fsdp in IMPLEMENTATIONS:
        once = sharded(fsdp, FP32, DEFAULT, mp_policy=POLICIES[policy])
        backward(once, step=1)
        module = sharded(fsdp, FP32, DEFAULT, mp_policy=POLICIES[policy])
        module.set_requires_gradient_sync(False)
        module.set_reshard_after_backward(False)
        for _ in range(2):
            backward(module)
            for weight in module.parameters():
                assert not isinstance(weight, DTensor) and weight.grad.dtype is FP32
        module.zero_grad()
        module.set_requires_gradient_sync(True)
        module.set_reshard_after_backward(True)
        backward(module, step=1)
        assert all(map(torch.equal, gradients(module), gradients(once)))


@on_ranks(2)
def test_gradients_outlive_full_parameters_that_are_made_anew(rank, world):
    """Options that move parameters to other memory leave what was accumulated."""
    module, expected = sharded(api.ours, BF16, FP32), sharded(api.ours, BF16, FP32)
    for part in (module, expected):
        part.set_requires_gradient_sync(False)
        backward(part)
        part.set_requires_gradient_sync(True)
        if part is module:
            part.set_transfer_sizes(direct_param_bytes=1, direct_group_bytes=1)
        backward(part, step=1)
    assert all(map(torch.equal, gradients(module), gradients(expected)))


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("told", [None, BF16, DEFAULT], ids=["any", "bf16", "default"])
def test_a_gradient_follows_its_parameter_to_another_dtype(rank, world, told):
    """``None`` asks for no dtype of its own, so the gradient is cast with the parameter, as a plain module's is: it
    stayed float32, and AdamW raised. Only a dtype that was asked for stays."""
    alone, module = layers(FP32, told), sharded(api.ours, FP32, told)
    for one in (alone, module):
        one(torch.ones(4, 8)).sum().backward()
    module.double()
    assert {gradient.dtype for gradient in gradients(module)} == {BF16 if told is BF16 else torch.float64}
    if told is not BF16:
        alone.double()
        for weight, expected in zip(module.parameters(), alone.parameters()):
            assert torch.equal(weight.grad.full_tensor(), expected.grad)
        torch.optim.AdamW(module.parameters()).step()
