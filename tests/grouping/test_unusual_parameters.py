"""Parameters that are empty, quantized, cast, replaced, or on a smaller mesh."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support import api
from tests.support.models import mlp
from tests.support.parity import mesh_1d, mesh_2d, mesh_of, sharded
from tests.support.pool import on_ranks


@api.fsdp2_only  # torch's refuses ties across calls
@on_ranks(2)
def test_tying_to_a_unit_that_was_cast(rank, world):
    """``Module.to`` swaps what a shard is, its mark as a managed parameter included. A later ``fully_shard`` that met
    it as a tie took it for a parameter of tensor parallelism and died inside torch."""
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    api.ours.fully_shard(module[0], mesh=mesh_of(world))
    module[0].to(torch.float64)
    module[1].weight = module[0].weight
    api.ours.fully_shard(module[1], mesh=mesh_of(world))
    api.ours.fully_shard(module, mesh=mesh_of(world))
    assert module[1].weight is module[0].weight and module[1].weight.to_local().shape == (2, 4)
    module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert module[0].weight.grad is not None


class Scales(nn.Module):
    """A layer with a scalar for each of eight columns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + i / 7)) for i in range(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.stack([*self.scales])


@api.fsdp2_only  # torch's refuses scalars
@on_ranks(2, 4)
@pytest.mark.parametrize("mesh", ["one axis", "two axes", "over replicas"])
def test_copies_of_a_scalar_stay_equal(rank, world, mesh):
    """All ranks hold a scalar (CLIP's ``logit_scale``). Gradients were sums in another order on each of more than two
    ranks, so the copies drifted apart, and ``full_tensor()``, norms and optimizer state differed from rank to rank."""
    options = {"mesh": mesh_1d() if mesh == "one axis" else mesh_2d()}
    module = sharded(Scales, units=lambda module: (), shard_over_replicas=mesh == "over replicas", **options)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        generator = torch.Generator().manual_seed(world * step + rank)
        module(torch.randn(3, 4, generator=generator)).square().mean().backward()
        held = [tensor.to_local().tolist() for scale in module.scales for tensor in (scale, scale.grad)]
        assert held == on_all_ranks(held)[0], f"step {step}"
        optimizer.step()
        optimizer.zero_grad()


def on_all_ranks(value: list[float]) -> list[list[float]]:
    """Return the value of each rank."""
    values: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
        api.ours.fully_shard(unit, mesh=mesh_of(world))
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
def test_a_copy_of_a_frozen_quantized_base(rank, world):
    """``copy.deepcopy`` cloned the shards, and a clone of torchao's NF4 weights quantizes them anew with other block
    sizes: it raised an error, or the copy computed with other weights."""
    torch.manual_seed(0)
    module = nn.Sequential(PackedLinear(torch.randn(4, 4)))
    api.ours.fully_shard(module, mesh=mesh_of(world))
    inputs = torch.ones(2, 4)
    with torch.no_grad():
        expected = module(inputs)
        clone = copy.deepcopy(module)
        torch.testing.assert_close(clone(inputs), expected, rtol=0, atol=0)
    old, new = (one.state_dict()["0.weight"]._local_tensor for one in (module, clone))
    assert old.scales.data_ptr() != new.scales.data_ptr() and torch.equal(old.scales, new.scales)


@api.fsdp2_only
@on_ranks(1, 2)
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("evaluated", [False, True])
def test_values_written_to_a_quantized_shard(rank, world, copied, evaluated):
    """Forward computed with the original's inner tensors: a class without ``__tensor_flatten__`` keeps them in Python
    attributes, which were copied to the full parameter as if a user had set them. So what was loaded or written had no
    effect, and each rank kept the whole tensors."""
    torch.manual_seed(0)
    module, inputs = nn.Sequential(PackedLinear(torch.randn(4, 4))), torch.ones(2, 4)
    module[0].weight.tag = "a user's"
    expected = module(inputs).detach()
    values, scales = module[0].weight.values, module[0].weight.scales
    api.ours.fully_shard(module, mesh=mesh_of(world))
    if evaluated:
        with torch.no_grad():
            module(inputs)
    module = copy.deepcopy(module) if copied else module
    module.state_dict()["0.weight"]._local_tensor.scales.mul_(2)
    torch.testing.assert_close(module(inputs), 2 * expected)
    module.unshard()
    assert module[0].weight.tag == "a user's"
    assert module[0].weight.values is not values and module[0].weight.scales is not scales
    module.reshard()
    assert module[0].weight.tag == "a user's" and not {"values", "scales"} & {*vars(module[0].weight)}


class Uncut(Packed):
    """One that cannot be cut, as those of torchao's ``quantize_``."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.split.Tensor, torch.ops.aten.slice.Tensor):
            raise NotImplementedError(f"{func} on Uncut")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Uncopied(Packed):
    """One that cannot be copied."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.new_zeros.default, torch.ops.aten.copy_.default):
            raise AttributeError("no attribute tensor_data_names")
        return super().__torch_dispatch__(func, types, args, kwargs)


class UncopiedPlain(Uncopied):
    """The same without an extension."""

    def __getattribute__(self, name):
        if name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("kind", [Uncut, Uncopied, UncopiedPlain])
@pytest.mark.filterwarnings("ignore:.*which has no fsdp_pre_all_gather")
def test_a_class_that_cannot_be_sharded(rank, world, kind):
    """torchao's ``Int8Tensor`` and ``Float8Tensor``: raw errors of theirs named no parameter, and half of the call had
    been done. The error names it, changes nothing, and its remedy works."""
    torch.manual_seed(0)
    module, inputs = nn.Sequential(PackedLinear(torch.randn(4, 4)), nn.Linear(4, 4)), torch.ones(2, 4)
    module[0].weight = nn.Parameter(kind.of(torch.randn(4, 4)), requires_grad=False)
    expected = module(inputs)
    with pytest.raises(NotImplementedError, match=rf"0\.weight: got a {kind.__name__} .*ignored_params"):
        api.ours.fully_shard(module, mesh=mesh_of(world))
    assert not any(isinstance(param, DTensor) for param in module.parameters())
    api.ours.fully_shard(module, mesh=mesh_of(world), ignored_params={module[0].weight})
    torch.testing.assert_close(module(inputs), expected)


@on_ranks(2)
def test_other_experts_on_other_ranks(rank, world):
    """Parameters on a smaller mesh than the root's were compared over all ranks: experts of other shapes were refused
    as "different models", experts of other values drew a warning about the seed."""
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("each", "one"))["one"]
    torch.manual_seed(0)
    dense = nn.Linear(4, 4)
    torch.manual_seed(rank)
    module = nn.Sequential(dense, nn.Linear(4, 3 + rank))
    api.ours.fully_shard(module[1], mesh=alone)
    api.ours.fully_shard(module, mesh=mesh_of(world))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.ones(1, 4)).sum().backward()
    assert module[1].weight.grad.full_tensor().shape == (3 + rank, 4)


class Empty(nn.Module):
    """Has an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


@on_ranks(1, 2)
def test_a_unit_of_empty_parameters(rank, world):
    """A single process has nothing to copy where all parameters of a unit are empty; torch's foreach copy refuses an
    empty list, with an error that names nothing."""
    module = sharded(lambda: nn.Sequential(nn.Linear(3, 3), Empty()))
    module(torch.ones(1, 3)).sum().backward()
    assert module[0].weight.grad is not None
    assert module[1].weight.grad is not None and module[1].weight.grad.shape == (2, 0)


@on_ranks(2)
def test_an_ignored_parameter_that_is_replaced(rank, world):
    """Ignored parameters were known as objects: loading with ``assign=True`` puts another object there, which the
    next forward took for a parameter that was added, and sharded."""
    module = mlp(4, 4, 4)
    ignored = module.get_parameter("0.weight")
    api.ours.fully_shard(module, mesh=mesh_of(world), ignored_params={ignored})
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    replaced = module.get_parameter("0.weight")
    assert replaced is not ignored
    module(torch.full((1, 4), rank + 1.0)).sum().backward()
    module.reshard()
    assert module.get_parameter("0.weight") is replaced and type(replaced) is nn.Parameter
    assert replaced.grad is not None and replaced.grad.shape == (4, 4)
