"""Every method of a sharded module has the effect it is there for."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support import api
from tests.support.cases import CASES, Setup, assert_case, build, build_sharded
from tests.support.counting import Collectives, Operators
from tests.support.models import mlp
from tests.support.parity import (
    WIDTH,
    Run,
    assert_gradients,
    assert_parity,
    batch,
    beside_one_process,
    mesh_of,
    sharded,
    stack,
    step_alike,
)
from tests.support.pool import on_ranks

chain = partial(sharded, partial(stack, 4))
"""Makes linear units under a root without parameters of its own."""


def data() -> torch.Tensor:
    """Return the same rows on every rank."""
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def is_sharded(module: nn.Module) -> bool:
    """Return whether the module shows its shards; fail if it shows some of both."""
    kinds = {isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)}
    assert len(kinds) == 1
    return kinds.pop()


@on_ranks(1, 2)
def test_unshard_and_reshard(rank, world):
    """``unshard`` shows whole parameters, of this module only; ``reshard`` shows shards and frees the memory."""
    original = build(CASES["nested"])
    module = build_sharded("nested", world)
    assert module[0].unshard() is None
    weight = module[0][2].weight
    assert torch.equal(weight, original[0][2].weight) and is_sharded(module[0][0])
    assert weight.untyped_storage().size() > 0
    module[0].unshard()
    assert module[0][2].weight is weight
    module[0].reshard()
    assert is_sharded(module[0][2]) and weight.untyped_storage().size() == 0
    module[0].reshard()
    assert is_sharded(module[0][2])


@on_ranks(2)
def test_asynchronous_unshard(rank, world):
    """The handle may be waited for, or not: forward waits by itself."""
    module, original = build_sharded("mlp", world), build(CASES["mlp"])
    expected = original(data())
    handle = module[0].unshard(async_op=True)
    handle.wait()
    assert torch.equal(module[0].weight, original[0].weight)
    handle.wait()
    module[2].unshard(async_op=True)
    torch.testing.assert_close(module(data()), expected)
    for _ in range(2):
        module[2].unshard(async_op=True)
        module[2].reshard()
        assert is_sharded(module[2])
    torch.testing.assert_close(module(data()), expected)


@on_ranks(2)
def test_unshard_without_parameters(rank, world):
    """A unit without parameters has nothing to gather, and says so in the same way."""
    module = chain()
    with Collectives() as seen:
        module.unshard()
        module.unshard(async_op=True).wait()
        module.reshard()
    assert seen.gathers == 0 and all(is_sharded(layer) for layer in module)


@on_ranks(2)
def test_reshard_after_forward(rank, world):
    """The setter changes what is gathered again in backward, for all units below or for one."""
    module = chain()
    for recurse, value, gathers in [(True, False, 0), (True, True, 3), (False, False, 2)]:
        module.set_reshard_after_forward(value, recurse=recurse)
        loss = module(data()).sum()
        # From the second iteration on the last one stays for backward, but shows its shards meanwhile.
        assert [is_sharded(layer) for layer in module] == [gathers > 0] * 3
        with Collectives() as seen:
            loss.backward()
        assert seen.gathers == gathers
    module[1].set_reshard_after_forward(False)
    loss = module(data()).sum()
    assert [is_sharded(layer) for layer in module] == [True, False, True]
    with Collectives() as seen:
        loss.backward()
    assert seen.gathers == 1 and all(is_sharded(layer) for layer in module)


@on_ranks(2)
def test_reshard_after_backward(rank, world):
    """Kept parameters are not gathered again for the next forward; new weights are, after a step."""
    module = chain()
    module.set_reshard_after_backward(False)
    with Collectives() as seen:
        module(data()).sum().backward()
    assert seen.gathers == 6 and not any(is_sharded(layer) for layer in module)
    with Collectives() as seen:
        module(data()).sum().backward()
    assert seen.gathers == 2  # forward needs none; it frees all but the last, backward gathers
    module.set_reshard_after_backward(True)
    module(data()).sum().backward()
    assert all(is_sharded(layer) for layer in module)


def accumulate_keeping_parameters(run: Run) -> None:
    """Accumulate three micro-batches without sync and without resharding in between."""
    for step in range(3):
        for part in range(3):
            for root in run.root:
                root.set_requires_gradient_sync(part == 2)
                root.set_reshard_after_backward(part == 2)
            run.loss(step + 10 * part).backward()
        run.update()


def two_backwards_of_one_iteration(run: Run) -> None:
    """Two losses of separate forwards; only the last backward is the last."""
    for step in range(3):
        losses = [run.loss(step), run.loss(step + 10)]
        for root in run.root:
            root.set_is_last_backward(False)
        losses[0].backward()
        for root in run.root:
            root.set_is_last_backward(True)
        losses[1].backward()
        run.update()


def explicit_prefetch(run: Run) -> None:
    """Prefetch lists that look two units ahead, and one that names the wrong unit."""
    layers = [unit for unit in run.units if unit not in run.root]
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
        layer.set_modules_to_backward_prefetch(list(reversed(layers[max(index - 2, 0) : index])) or layers[-1:])
    for step in range(3):
        run.loss(step).backward()
        run.update()


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("program", [accumulate_keeping_parameters, two_backwards_of_one_iteration, explicit_prefetch])
@pytest.mark.parametrize("case", ["mlp", "transformer", "nested"])
def test_settings_keep_training_right(rank, world, case, program, reshard):
    """The settings are about when, not what."""
    assert_case(case, Setup(reshard), program)


@on_ranks(2)
def test_is_last_backward_with_one_forward(rank, world):
    """Two backwards through parts of one forward, hooks of the shards firing in each."""
    module, alone = beside_one_process(partial(mlp, 4, 8, 8, 4))
    fired = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    for one in (module, alone):
        output = one(data())
        if one is module:
            module.set_is_last_backward(False)
        output[:1].sum().backward(retain_graph=True)
        if one is module:
            module.set_is_last_backward(True)
        output[1:].sum().backward()
    assert sorted(fired) == sorted(2 * [name for name, _ in alone.named_parameters()])
    assert_gradients(module, alone)


class Encoder(nn.Module):
    """Computes with its parameters in methods other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(self.encode(x))

    def encode(self, x, *, scale=1.0):
        return {"code": torch.tanh(self.inner(x)) * scale}["code"]


@on_ranks(2)
def test_registered_forward_method(rank, world):
    """A registered method gathers, frees and reduces as forward does; for a plain module it is left alone."""
    module, alone = beside_one_process(Encoder, lambda module: (), reshard_after_forward=True)
    api.ours.register_fsdp_forward_method(alone, "encode")
    assert "encode" not in vars(alone)
    api.ours.register_fsdp_forward_method(module, "encode")
    with pytest.raises(ValueError, match="does not have a method missing"):
        api.ours.register_fsdp_forward_method(module, "missing")
    for _ in range(2):
        module.zero_grad()
        alone.zero_grad()
        code = module.encode(data(), scale=2.0)
        assert is_sharded(module.inner)
        code.sum().backward()
        alone.encode(data(), scale=2.0).sum().backward()
        assert_gradients(module, alone)
        assert module.outer.weight.grad is None


@on_ranks(2)
def test_indexing_and_names(rank, world):
    """Names of parameters and modules do not change, a slice is plain, the class says what it was."""
    plain = mlp(4, 8, 4)
    names, modules = [n for n, _ in plain.named_parameters()], [n for n, _ in plain.named_modules()]
    assert api.ours.fully_shard(plain, mesh=mesh_of(world)) is plain
    assert [n for n, _ in plain.named_parameters()] == names and [n for n, _ in plain.named_modules()] == modules
    assert type(plain).__name__ == "FSDPSequential" and isinstance(plain, nn.Sequential)
    assert isinstance(plain, api.theirs.FSDPModule) and isinstance(plain, api.ours.FSDPModule)
    assert type(plain[:2]) is nn.Sequential and type(plain[0]) is nn.Linear


@api.fsdp2_only
@on_ranks(2)
def test_transfer_sizes_say_what_is_packed(rank, world):
    """Parameters above the sizes get a gather of their own, and gradients leave in chunks."""
    module = build_sharded("transformer", world)
    inputs = torch.randint(11, (2, 5))
    counts = []
    for sizes in ({}, {"direct_param_bytes": 0, "direct_group_bytes": 0}, {"direct_param_bytes": 1 << 40}):
        module.set_transfer_sizes(**sizes)
        with Collectives() as seen:
            module(inputs).sum().backward()
        counts.append((seen.gathers, seen.reductions))
    parameters = sum(1 for _ in module.blocks.parameters())
    last = sum(1 for _ in module.blocks[-1].parameters())  # stays for backward from the second iteration on
    assert counts == [(5, 3), (2 * parameters + 3 - last, 3), (4, 3)]
    with pytest.raises(ValueError, match="chunk_bytes"):
        module.set_transfer_sizes(chunk_bytes=-1)


def dtype_of_an_exchange(func, args):
    """Return the dtype of what ranks send each other directly."""
    return args[1].dtype if func.overloadpacket is torch.ops.c10d.alltoall_base_ else None


@api.fsdp2_only
@on_ranks(2, 3)
def test_gradients_are_exchanged_where_asked(rank, world):
    """They travel in bfloat16 and are summed in float32, however small they are; a huge size leaves them to gloo."""
    torch.manual_seed(0)
    module = nn.Linear(4, 6, bias=False)
    alone = copy.deepcopy(module).bfloat16()
    batches = torch.randn(world, 5, 4)
    gradients = [torch.autograd.grad(alone(rows.bfloat16()).float().sin().sum(), alone.weight)[0] for rows in batches]
    policy = api.ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    api.ours.fully_shard(module, mesh=mesh_of(world), mp_policy=policy)
    for size, dtypes in ((0, [torch.bfloat16]), (1 << 30, [])):
        module.set_transfer_sizes(exchange_bytes=size)
        with Operators(dtype_of_an_exchange) as exchanged:
            module(batches[rank]).float().sin().sum().backward()
        assert exchanged.seen == dtypes
        found, expected = module.weight.grad.full_tensor(), sum(gradient.float() for gradient in gradients) / world
        torch.testing.assert_close(found, expected, rtol=0, atol=0 if size == 0 else 1e-6)
        module.zero_grad()


@on_ranks(2)
@pytest.mark.parametrize("ahead", [True, False], ids=["before forward", "after it"])
def test_a_method_that_computes_and_calls_forward(rank, world, ahead):
    """Backward may enter by what a registered method has computed itself, before or after the forward that it calls."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x)

        def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if ahead:
                hidden = torch.relu(self.first(self.first(x)))
                return hidden, self(hidden.detach())
            y = self(x)
            return torch.relu(self.first(self.first(x))), y

    def program(run: Run) -> None:
        if run.fsdp is not None:
            run.fsdp.register_fsdp_forward_method(run.module, "encode")
        for step in range(2):
            run.note_loss(run.module.encode(batch(step)[0])[0].square().mean()).backward()
            run.update()

    assert_parity(lambda module, fsdp: fsdp.fully_shard(module, mesh=mesh_of(world)), build=Encoder, program=program)


@on_ranks(2)
@pytest.mark.parametrize("below", [False, True], ids=["the root", "a unit below"])
def test_a_forward_that_calls_a_registered_method(rank, world, below):
    """An autoencoder registers ``encode``, which its forward calls. The method's end was taken for that of the forward,
    which then found shards: "got mixed torch.Tensor and DTensor"."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unit, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.unit(self.first(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.encode(x)) + self.encode(x)

    def program(run: Run) -> None:
        coder = run.module[0] if below else run.module
        if run.fsdp is not None:
            run.fsdp.register_fsdp_forward_method(coder, "encode")
        for step in range(3):
            with torch.no_grad():
                run.note_loss(run.module(batch(step)[0]).sum())
            run.note_loss(run.module(batch(step)[0]).square().mean()).backward()
            run.update()

    def shard(module: Any, fsdp: Any) -> None:
        coder = module[0] if below else module
        for unit in (coder.unit, coder, *([module] if below else [])):
            fsdp.fully_shard(unit, mesh=mesh_of(world))

    build = (lambda: nn.Sequential(Coder(), nn.Linear(WIDTH, WIDTH))) if below else Coder
    assert_parity(shard, build=build, program=program, against=("alone",))


@on_ranks(2)
def test_a_method_that_calls_forward_is_one_pass(rank, world):
    """``generate`` calls the model for each token. Each inner call was a pass of its own, at whose end the method's
    weights were freed, and each ``generate`` cost a meeting of the ranks for ever."""

    class Speaker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.block, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(x))

        @torch.no_grad()
        def generate(self, ids: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                ids = torch.cat([ids, self(self.embed(ids))[:, -1].argmax(-1, keepdim=True)], 1)
            return ids

    module, alone = beside_one_process(Speaker, lambda module: (module.block,))
    api.ours.register_fsdp_forward_method(module, "generate")
    ids = torch.tensor([[1, 2]])
    for enabled in (False, True, False, True):
        with torch.set_grad_enabled(enabled), Collectives() as collectives:
            assert torch.equal(module.generate(ids), alone.generate(ids))
        assert collectives.gathers == 4  # of the root once, and of the block for each token
        assert all(is_sharded(inner) for inner in (module.embed, module.block, module.head))
    module(alone.embed(ids).detach()).sum().backward()


class Streams(nn.Module):
    """A method, or forward itself, that is a generator, which computes with the module's own weight and a unit's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.rand(8)), nn.Linear(8, 8)

    def stream(self, x, parts=3):
        for _ in range(parts):
            try:
                sent = yield (x := self.layer(x * self.scale).tanh())
            except KeyError:
                sent = self.scale.detach().clone()
            if sent is not None:
                x = x + sent
        return (x * self.scale).sum()

    def forward(self, x, parts=3):
        return self.stream(x, parts)


class CallsStreams(nn.Module):
    """A root that goes through the generator of a unit below it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.below = nn.Linear(8, 8), Streams()

    def forward(self, x):
        return sum(self.below(self.first(x)))

    def stream(self, x):
        for part in self.below.stream(self.first(x)):
            yield part + self.first.bias


def stream_of(module: nn.Module, how: str, x: torch.Tensor) -> Any:
    """What ``module`` computes in parts: by a registered method, or by forward."""
    return module(x) if how == "forward" else module.stream(x)


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", ["forward", "method"])
def test_a_generator_without_gradients(rank, world, how, reshard):
    """Its body runs when the call that made it is over, which had freed the parameters: "mixed torch.Tensor and
    DTensor". Each part is a call of its own: what the caller does in between, a step or a forward, is no matter."""
    module, alone = beside_one_process(Streams, lambda module: [module.layer], reshard_after_forward=reshard)
    if how == "method":
        api.ours.register_fsdp_forward_method(module, "stream")
    x = torch.ones(2, 8)
    with torch.no_grad():
        assert [torch.equal(a, b) for a, b in zip(stream_of(module, how, x), stream_of(alone, how, x))] == [True] * 3
        ours, theirs = stream_of(module, how, x), stream_of(alone, how, x)
        assert torch.equal(next(ours), next(theirs))
        assert is_sharded(module) and is_sharded(module.layer)
        for one in (module, alone):
            one.scale.mul_(2)
        assert torch.equal(ours.send(x * 3), theirs.send(x * 3))
        assert torch.equal(ours.throw(KeyError()), theirs.throw(KeyError()))
        with pytest.raises(StopIteration) as ended:
            next(ours)
        with pytest.raises(StopIteration) as expected:
            next(theirs)
        assert torch.equal(ended.value.value, expected.value.value)
        left = stream_of(module, how, x)
        next(left)
        left.close()
        wrong = stream_of(module, how, torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="must match"):
            next(wrong)
    for one in (module, alone):
        sum([part.mean() for part in stream_of(one, how, x)]).backward()
    assert_gradients(module, alone)


@api.fsdp2_only
@on_ranks(2)
def test_a_generator_of_a_unit_inside_another_call(rank, world):
    """The root goes through the unit's parts in its own forward, and in a generator of its own."""
    module, alone = beside_one_process(CallsStreams, lambda module: [module.below], reshard_after_forward=True)
    api.ours.register_fsdp_forward_method(module.below, "stream")
    api.ours.register_fsdp_forward_method(module, "stream")
    x = torch.ones(2, 8)
    with torch.no_grad():
        assert torch.equal(module(x), alone(x))
        assert [torch.equal(a, b) for a, b in zip(module.stream(x), alone.stream(x))] == [True] * 3
    assert is_sharded(module.below) and is_sharded(module.first)
    for one in (module, alone):
        one(x).square().mean().backward()
    assert_gradients(module, alone)


class LeavesLast(nn.Module):
    """A root whose last unit leaves a generator, or a function, that computes with the unit's weights."""

    def __init__(self, last: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), last()

    def forward(self, x):
        x = self.first(x)
        return sum(self.last(x)) if isinstance(self.last, Streams) else self.last(x)(x)


class Scaled(nn.Linear):
    """A layer that returns a function."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x):
        scale = super().forward(x)
        return lambda y: scale * F.linear(y, self.weight)


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("last", [Streams, Scaled])
def test_a_generator_or_function_of_the_last_unit(rank, world, last):
    """From the second step on, the unit that forward ends with stays in memory, and its module shows shards until
    backward: with these the generator computed, "mixed torch.Tensor and DTensor"."""
    module, alone = beside_one_process(lambda: LeavesLast(last))
    for step in range(3):
        step_alike(module, alone, lambda one, x=1.0 + step: one(torch.full((2, 8), x)).square().mean(), step)


class CallsTwice(LeavesLast):
    """A root that calls such a unit on what the unit left to an earlier call."""

    def forward(self, x):
        return super().forward(super().forward(x).tanh())


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("last", [Streams, Scaled])
def test_a_generator_or_function_of_a_unit_that_is_called_again(rank, world, last):
    """Backward has the gradients of the later call's inputs before it comes to what the earlier one left, by no hook:
    the unit was freed, "modified by an inplace operation"."""
    module, alone = beside_one_process(lambda: CallsTwice(last))
    for step in range(2):
        step_alike(module, alone, lambda one: one(torch.ones(2, 8)).square().mean(), step)
