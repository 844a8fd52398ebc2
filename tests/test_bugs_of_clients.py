"""Bugs that libraries which use ``fully_shard`` brought to light; each test opens with the story of its bug."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp2._trace import listening
from fsdp2.engine.group import FSDPParamGroup
from tests.support import api
from tests.support.models import children, mlp
from tests.support.oracle import cpu_mesh
from tests.support.pool import on_ranks


def sharded(world: int, **options) -> nn.Module:
    torch.manual_seed(0)
    module = mlp(4, 4, 4)
    for unit in (*children(module)[:-1], module):  # the root has parameters of its own
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), **options)
    return module


@api.fsdp2_only
@on_ranks(4)
@pytest.mark.parametrize("reshard", [None, False, 2])
def test_an_optimizer_built_after_an_evaluation(rank, world, reshard):
    """A Trainer evaluates before it trains. The units that keep their parameters after forward then show full ones, so
    an optimizer built now held tensors that are freed at the next backward, and trained nothing, without a word (torch
    has the same)."""
    module, reference = sharded(world, reshard_after_forward=reshard), sharded(world)
    with torch.no_grad():
        module(torch.ones(2, 4))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (module, reference)]
    for step in range(3):
        losses = []
        for m, optimizer in zip((module, reference), optimizers):
            loss = m(torch.full((2, 4), rank + step + 1.0)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    for optimizer in optimizers:
        assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert all(parameter.grad is None for parameter in module.parameters())


@on_ranks(2)
def test_shards_after_a_registered_method(rank, world):
    """``generate``, registered as a forward method, calls ``forward`` for each token; torch's root shows shards after
    it. Ours went on showing full parameters, so what was made from them next, an optimizer or a copy of the weights for
    an inference engine, was made from tensors that are no DTensors."""
    module = sharded(world)

    def generate(inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            inputs = module(inputs)
        return inputs

    module.generate = generate
    api.ours.register_fsdp_forward_method(module, "generate")
    with torch.no_grad():
        expected = module(module(torch.ones(2, 4)))
        torch.testing.assert_close(module.generate(torch.ones(2, 4)), expected)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    module.generate(torch.ones(2, 4)).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in module.parameters())


class Packed(torch.Tensor):
    """A quantized matrix as torchao's NF4 is one: what it does not need to be cut and gathered, it does not know."""

    def __new__(cls, values: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> Packed:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, shape: tuple[int, ...]) -> None:
        self.values, self.scales = values, scales  # int8, flat, and one for each row

    @classmethod
    def of(cls, whole: torch.Tensor) -> Packed:
        scales = whole.abs().amax(1) / 127
        return cls((whole / scales[:, None]).round().to(torch.int8).flatten(), scales, tuple(whole.shape))

    def unpack(self) -> torch.Tensor:
        return self.values.view(self.shape).float() * self.scales[:, None]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        aten, self = torch.ops.aten, args[0]
        if func is aten.detach.default:
            return cls(self.values.detach(), self.scales.detach(), tuple(self.shape))
        if func is aten.clone.default:  # loses what was not quantized like this
            return cls.of(self.unpack().mul(1.5))
        if func is aten.split.Tensor:
            parts = zip(self.scales.split(args[1]), self.values.split(args[1] * self.shape[1]))
            return [cls(values, scales, (len(scales), self.shape[1])) for scales, values in parts]
        if func is aten.new_zeros.default:
            rows, columns = args[1]
            return cls(self.values.new_zeros(rows * columns), self.scales.new_zeros(rows), (rows, columns))
        if func is aten.copy_.default:
            self.values.copy_(args[1].values)
            self.scales.copy_(args[1].scales)
            return self
        if func is aten.as_strided.default and tuple(args[1]) == tuple(self.shape) and args[3] == 0:
            return cls(self.values, self.scales, tuple(self.shape))
        raise NotImplementedError(f"{func} on a packed tensor")

    def fsdp_pre_all_gather(self, mesh):
        return (self.values, self.scales), self.shape[1]

    def fsdp_post_all_gather(self, gathered, columns, dtype, *, out=None):
        if out is not None:
            return None
        values, scales = gathered
        return Packed(values, scales, (len(scales), columns)), (values, scales)


class PackedLinear(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(Packed.of(weight), requires_grad=False)
        self.adapter = nn.Parameter(torch.zeros(weight.shape[0]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight.unpack().T + self.adapter


@on_ranks(2)
def test_a_frozen_quantized_base(rank, world):
    """torchao's NF4 weights, the frozen base of a QLoRA, can be split but not narrowed, take as_strided only with an
    offset, and are quantized anew by clone. ``fully_shard`` narrowed and cloned: it raised, though torch's works."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4)
    reference, module = nn.Sequential(PackedLinear(weight)), nn.Sequential(PackedLinear(weight))
    for unit in (module[0], module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    for step in range(2):
        inputs = torch.full((2, 4), step + 1.0)
        got, expected = module(inputs), reference(inputs)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
        got.sum().backward()
        expected.sum().backward()
    torch.testing.assert_close(module[0].adapter.grad.full_tensor(), reference[0].adapter.grad)
    assert module[0].weight.grad is None


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_gathers_asked_for_once(rank, world, reshard):
    """Who wraps ``unshard`` of groups to record it, as torch's own tests do, saw it called twice for the first layer of
    a second forward before backward: once ahead of time and in vain, since the last forward had gathered the kept root
    before, and once for the layer's forward."""
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    for unit in (*module[:2], module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world), reshard_after_forward=reshard)
    asked: list[str] = []
    unshard = FSDPParamGroup.unshard

    def noting(group: FSDPParamGroup, *args: bool) -> None:
        if group.is_sharded and group._all_gather_result is None:
            asked.append(group._module_fqn)
        unshard(group, *args)

    with mock.patch.object(FSDPParamGroup, "unshard", noting):
        for _ in range(3):
            module(torch.ones(2, 4))
    expected = {True: ["", "0", "1"] * 3, None: ["", *["0", "1"] * 3], False: ["", "0", "1"]}
    assert asked == expected[reshard]


class Branches(nn.Module):
    """Two outputs that share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


@api.fsdp2_only
@on_ranks(2)
def test_a_gather_for_the_next_of_several_backwards(rank, world):
    """The first of two backwards on one forward gathers the branch that it meets next in reverse, which only the second
    one uses. It was dropped at the end of the first, to be gathered again by the second, and that one's other gathers
    were never started ahead of time: each was another order than the last backward's."""
    torch.manual_seed(0)
    module = Branches()
    for unit in (*module.children(), module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    inputs, events = torch.full((2, 4), rank + 1.0), []

    def backward(output: torch.Tensor, *, last: bool) -> list[tuple[str, str]]:
        module.set_is_last_backward(last)
        events.clear()
        output.sum().backward(retain_graph=not last)
        return [event for event in events if event[0] in ("unshard", "post_backward")]

    with listening(lambda event, name: events.append((event, name))):
        for _ in range(3):
            left, right = module(inputs)
            first = [("unshard", "right"), ("unshard", "left"), ("post_backward", "right"), ("unshard", "trunk")]
            assert backward(right, last=False)[:4] == first
            assert backward(left, last=True)[:2] == [("unshard", "trunk"), ("post_backward", "left")]
        backward(module(inputs)[1], last=False)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)  # what was gathered for a backward that never comes is not what a forward wants
    weight, bias = module.left.weight.full_tensor(), module.left.bias.full_tensor()
    trunk = nn.functional.linear(inputs, module.trunk.weight.full_tensor(), module.trunk.bias.full_tensor())
    torch.testing.assert_close(module(inputs)[0], nn.functional.linear(trunk, weight, bias))


class Modulated(nn.Module):
    """A diffusion transformer's block: its embedding of the time is of use to others too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder, self.linear = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedder(inputs))


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Modulated() for _ in range(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.blocks[0].embedder(inputs)


@on_ranks(2)
def test_the_error_names_the_weight_that_failed(rank, world):
    """diffusers' DiT calls a submodule of its first block after the blocks. The error arises in ``nn.Linear``, whose
    line reads ``F.linear(input, self.weight, self.bias)``: every parameter called ``linear.weight`` was blamed for it,
    and not the one that failed."""
    module = Borrowing()
    for unit in (*module.blocks, module):
        api.ours.fully_shard(unit, mesh=cpu_mesh(world))
    with pytest.raises(RuntimeError) as caught:
        module(torch.ones(2, 4))
    _, _, explained = str(caught.value).partition("\n")
    names, _, _ = explained.partition(": got a shard")
    assert names == "blocks.0.embedder.weight (unit 'blocks.0'), blocks.0.embedder.bias (unit 'blocks.0')"
