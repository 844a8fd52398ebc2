"""Weights used outside forward, and parameters that were replaced by whole ones."""

from __future__ import annotations

import contextlib
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from tests.support.parity import assert_gradients, assert_weights, beside_one_process
from tests.support.pool import on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Speaker(nn.Module):
    """A body and a head; the head's weight is used by the loss alone."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(width, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def made(seed: int = 0) -> Speaker:
    """The same model on every rank."""
    torch.manual_seed(seed)
    return Speaker()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one rank."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randint(5, (4,), generator=generator)


def penalized(model: Speaker, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that reads two weights itself, one of them used in forward as well."""
    logits = F.linear(hidden, model.head.weight)
    return F.cross_entropy(logits, targets) + 0.1 * (model.body[2].weight @ model.head.weight.t()).square().mean()


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("units", ["head", "head and body", "root"])
def test_a_loss_that_uses_weights(rank, world, units):
    """A fused cross-entropy takes the head's weight, not its output. torch's fully_shard has the sharded weight there,
    and the product with a plain tensor is refused without a word about which weight it was."""
    parts = {"head": lambda m: [m.head], "head and body": lambda m: [m.head, m.body[2]], "root": lambda m: []}[units]
    model, whole = beside_one_process(Speaker, parts)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, whole)]
    for step in range(3):
        x, targets = batch(step, rank)
        hidden = model(x)
        with fsdp2.use_weights(model):
            loss = penalized(model, hidden, targets)
        if units == "head and body":  # also what stays for backward alone, from the second step on
            assert isinstance(model.head.weight, DTensor) and isinstance(model.body[2].weight, DTensor)
        loss.backward()
        sum(penalized(whole, whole(x), y) / world for x, y in (batch(step, r) for r in range(world))).backward()
        assert_gradients(model, whole, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("how", ["block inside", "argument"])
def test_a_loss_that_is_checkpointed(rank, world, how, reentrant):
    """Its function runs again in backward, when the weight that it finds on the module is a shard."""
    model, whole = beside_one_process(Speaker, lambda m: [m.head])

    def loss_in_block(rows: torch.Tensor, weight: None) -> torch.Tensor:
        with fsdp2.use_weights(model.head):
            return F.linear(rows, model.head.weight).square().mean()

    for step in range(3):
        hidden, total = model(batch(step, rank)[0]), torch.zeros(())
        for rows in hidden.split(2):
            if how == "argument":
                with fsdp2.use_weights(model.head):
                    given = (lambda x, weight: F.linear(x, weight).square().mean(), rows, model.head.weight)
                    total = total + checkpoint(*given, use_reentrant=reentrant)
            else:
                total = total + checkpoint(loss_in_block, rows, None, use_reentrant=reentrant)
        (total / 2).backward()
        assert isinstance(model.head.weight, DTensor)
        sum(whole.head(whole(batch(step, r)[0])).square().mean() / world for r in range(world)).backward()
        assert_gradients(model, whole, step)


@on_ranks(2)
def test_blocks_inside_each_other(rank, world):
    """A loss of two weights that are in units of their own, each with a block. Autograd calls the hooks of the inner
    block alone for what it saves, so backward read the weight of the outer one when it was freed: "setStorage: sizes
    [5, 8] ... out of bounds for storage of size 0"."""
    model, whole = beside_one_process(Speaker, lambda m: [m.head, m.body[2]])
    for step in range(3):
        x, targets = batch(step, rank)
        hidden = model(x)
        with fsdp2.use_weights(model.head), fsdp2.use_weights(model.body[2]):
            loss = penalized(model, hidden, targets)
        loss.backward()
        assert isinstance(model.head.weight, DTensor) and isinstance(model.body[2].weight, DTensor)
        sum(penalized(whole, whole(x), y) / world for x, y in (batch(step, r) for r in range(world))).backward()
        assert_gradients(model, whole, step)


class Doubled(torch.autograd.Function):
    """A result that backward needs, as a fused loss needs its logits; ``alive`` tells which are in memory."""

    alive = weakref.WeakSet()

    @staticmethod
    def forward(ctx, x):
        doubled = 2 * x
        Doubled.alive.add(doubled.untyped_storage())
        ctx.save_for_backward(doubled)
        return doubled

    @staticmethod
    def backward(ctx, grad):
        (doubled,) = ctx.saved_tensors
        assert doubled.numel()
        return 2 * grad


@on_ranks(2)
def test_what_a_checkpoint_around_a_block_saves(rank, world):
    """Autograd called the hooks of the block alone, so the checkpoint around it freed none of the logits in it: the
    fused loss took as much memory as without one."""
    model, whole = beside_one_process(Speaker, lambda m: [m.head])

    def loss_of(model: Speaker, block: contextlib.AbstractContextManager, rows: torch.Tensor) -> torch.Tensor:
        with block:
            return Doubled.apply(F.linear(rows, model.head.weight)).square().mean()

    for step in range(3):
        Doubled.alive.clear()
        hidden = model(batch(step, rank)[0])
        loss = checkpoint(lambda x: loss_of(model, fsdp2.use_weights(model.head), x), hidden, use_reentrant=False)
        assert not Doubled.alive
        loss.backward()
        assert isinstance(model.head.weight, DTensor)
        rows = [whole(batch(step, r)[0]) for r in range(world)]
        sum(loss_of(whole, contextlib.nullcontext(), x) / world for x in rows).backward()
        assert_gradients(model, whole, step)


@on_ranks(2)
def test_hooks_of_saved_tensors_around_a_block(rank, world):
    """As ``save_on_cpu``: they get what is saved in the block, except the weights that are gathered again anyway."""
    model, whole = beside_one_process(Speaker, lambda m: [m.head])
    x, targets = batch(0, rank)
    packed, unpacked = [], []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor.shape)
        return tensor

    hidden = model(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), fsdp2.use_weights(model.head):
        loss = F.cross_entropy(F.linear(hidden, model.head.weight).tanh(), targets)
    loss.backward()
    assert (4, 8) in packed and (4, 5) in packed and (5, 8) not in packed and (8, 5) not in packed
    assert sorted(unpacked) == sorted(packed)
    losses = [F.cross_entropy(whole.head(whole(x)).tanh(), y) / world for x, y in (batch(0, r) for r in range(world))]
    sum(losses).backward()
    assert_gradients(model, whole)


@on_ranks(2)
def test_weights_in_the_dtype_of_computation_without_a_forward_before(rank, world):
    model = fsdp2.fully_shard(made(), mp_policy=BF16)
    with fsdp2.use_weights(model.head) as head:
        assert head is model.head and type(head.weight) is nn.Parameter and head.weight.dtype == torch.bfloat16
        head.weight.float().square().sum().backward()
    assert isinstance(model.head.weight, DTensor) and model.head.weight.grad.dtype == torch.float32
    torch.testing.assert_close(
        model.head.weight.grad.full_tensor(), 2 * made().head.weight.detach(), rtol=1e-2, atol=1e-3
    )
    assert model.body[0].weight.grad is None


@on_ranks(2)
def test_a_loss_without_a_backward_frees_the_model(rank, world):
    """A node that saves its own result was held by it: a fused loss that nobody took a backward of, as in a validation,
    kept the whole model in memory for ever. The pool looks for modules that are still alive."""
    model = made()
    fsdp2.fully_shard(model)
    inputs, targets = batch(0, rank)
    with fsdp2.use_weights(model.head):
        loss = F.cross_entropy(F.linear(model(inputs), model.head.weight).tanh(), targets)
    assert loss.requires_grad


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
def test_a_product_with_a_sparse_matrix(rank, world, kind):
    """Autograd saves the matrix, such as a graph's neighbours. The block asked every saved tensor for its storage:
    ``NotImplementedError: Cannot access storage of SparseTensorImpl``."""
    model, whole = beside_one_process(Speaker, lambda m: [m.head])
    matrix = getattr(torch.eye(5) + torch.ones(5, 5).triu(2), kind)()
    for one in (model, whole):
        with fsdp2.use_weights(one.head) if one is model else contextlib.nullcontext():
            loss = (matrix @ one.head.weight).square().mean()
        loss.backward()
    assert_gradients(model, whole)


@on_ranks(1, 2)
@pytest.mark.parametrize("before", ["nothing", "a forward"])
def test_a_block_inside_of_a_summoning(rank, world, before):
    """The parameters are full already. Unless the model had run before, a metric that uses them in a block ended with
    ``'NoneType' object has no attribute 'untyped_storage'``."""
    model, whole = beside_one_process(Speaker, lambda m: [m.head])
    if before == "a forward":
        with torch.no_grad():
            model(batch(0, rank)[0])
    with torch.no_grad(), fsdp2.summon_full_params(model, writeback=False), fsdp2.use_weights(model) as used:
        torch.testing.assert_close(used.head.weight.norm(), whole.head.weight.norm())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(2)
def test_weights_of_a_plain_module_are_refused(rank, world):
    with pytest.raises(ValueError, match="no parameter of Speaker is managed by fsdp2.fully_shard"):
        with fsdp2.use_weights(made()):
            pass


@on_ranks(2)
def test_dtypes_by_name_are_checked(rank, world):
    """Neither a mapping nor a function may give anything but policies, and the module stays as it was."""
    for policy, text in (
        ({"head.*": torch.float32}, "got torch.float32"),
        (lambda name: "bf16", "got 'bf16'"),
        ("bf16", "got 'bf16'"),
    ):
        model = made()
        with pytest.raises(TypeError, match=f"mp_policy must be a MixedPrecisionPolicy, a mapping.*{text}"):
            fsdp2.fully_shard(model, mp_policy=policy)
        assert type(model) is Speaker and type(model.head.weight) is nn.Parameter


@on_ranks(2)
def test_a_parameter_that_was_replaced_by_one_that_does_not_fit_is_refused(rank, world):
    for value in (torch.randn(9, 8), torch.randn(8, 8).double()):
        model = fsdp2.fully_shard(made())
        model(batch(0, rank)[0]).sum().backward()
        model.body[0].weight = nn.Parameter(value)
        with pytest.raises(
            RuntimeError, match=r"body.0.weight: the sharded parameter was replaced on its module; got a"
        ):
            model(batch(0, rank)[0])


class Fused(Speaker):
    """Its forward reads the head's weight and nobody calls the head."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x)
        with fsdp2.use_weights(self.head) if isinstance(self, fsdp2.FSDPModule) else contextlib.nullcontext():
            return F.linear(hidden, self.head.weight)


@on_ranks(1, 2, 4)
def test_a_forward_that_uses_weights(rank, world):
    """A fused loss inside the model: a unit's weight is used within the forward of the root."""
    model, whole = beside_one_process(Fused)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, whole)]
    for step in range(3):
        losses = []
        for one, ranks in ((model, [rank]), (whole, range(world))):
            batches = [batch(step, other) for other in ranks]
            loss = sum(F.cross_entropy(one(x), y) for x, y in batches) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        torch.distributed.all_reduce(losses[0], torch.distributed.ReduceOp.AVG)
        torch.testing.assert_close(*losses)
        assert isinstance(model.head.weight, DTensor)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_weights(model, whole)


@on_ranks(1)
def test_only_errors_about_shards_are_explained(rank, world):
    """Others, and those about tensors that nobody sharded here, keep their text; a local variable is recognised."""
    model, _ = beside_one_process(Speaker)
    alone = DTensor.from_local(torch.randn(8, 8), model.head.weight.device_mesh, [Replicate()])

    def of_nobody(x):
        return x @ alone

    def of_another_kind(x):
        raise RuntimeError("got mixed feelings about DTensor")

    def held(x):
        weight = model.head.weight
        return x @ weight.t()

    model(torch.randn(2, 8))

    def in_lines(x):
        return F.linear(
            x,
            model.head.weight,
        )

    def derived(x):
        head = model.head.weight.t()
        return x @ head

    is_head = "head.weight (unit 'head')"
    for forward, expected in (
        (of_nobody, ""),
        (of_another_kind, ""),
        (held, is_head),
        (in_lines, is_head if sys.version_info >= (3, 11) else f"possibly {is_head}"),
        (derived, f"possibly {is_head}"),
    ):
        model.forward = forward
        with pytest.raises(RuntimeError) as caught:
            model(torch.randn(2, 8))
        _, _, explained = str(caught.value).partition("\n")
        assert explained.startswith(expected) and bool(explained) == bool(expected)
        model.reset_iter_state()
    del model.forward, forward, of_nobody, of_another_kind, held, in_lines, derived, caught
