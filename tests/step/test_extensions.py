"""All-gather extensions: tensors that say themselves what of them travels, and how the full tensor is made of it."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import sys
import traceback
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils import _pytree as pytree

from tests.ranks.apart import run_apart
from tests.support import api
from tests.support.parity import (
    SEED,
    STEPS,
    assert_parity,
    mesh_1d,
    mesh_of,
    on_one_axis,
    on_two_axes,
    shard_each,
    sharded,
    stack,
)
from tests.support.pool import on_ranks

aten = torch.ops.aten
KEPT = {
    aten.detach.default,
    aten.clone.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.new_zeros.default,
    aten.empty_like.default,
    aten._to_copy.default,
}


class Halves(Tensor):
    """A float32 tensor that travels as two inputs: bfloat16, and what that leaves of it in float16.

    It defines the long signature of ``fsdp_pre_all_gather`` and writes the sum into memory of its own.
    """

    _tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, tensor.size(), strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = lambda tree: pytree.tree_map_only(cls, lambda t: t._tensor, tree)
        result = func(*plain(args), **plain(kwargs or {}))
        if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            return args[0]
        return pytree.tree_map_only(Tensor, cls, result) if func in KEPT else result

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_tensor"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], metadata: None, size: Any, stride: Any) -> Tensor:
        return Halves(inner["_tensor"])

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ):
        assert mesh.ndim == 1 and isinstance(module, nn.Linear) and isinstance(mp_policy, MixedPrecisionPolicy)
        assert len(outer_size) == len(outer_stride) == self.ndim
        upper = self._tensor.to(torch.bfloat16)
        lower = (self._tensor - upper.float()) * 256
        return (upper, lower.to(torch.float16)), (mesh.size(), outer_size)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None):
        upper, lower = outputs
        ranks, outer_size = metadata
        assert upper.shape == lower.shape and upper.shape[1:] == outer_size[1:]
        assert upper.shape[0] % ranks == 0 and (upper.dtype, lower.dtype) == (torch.bfloat16, torch.float16)
        whole = (upper.float() + lower.float() / 256)[: outer_size[0]].to(param_dtype)
        if out is None:
            return whole, (whole,)
        local = out.to_local() if isinstance(out, DTensor) else out
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(local):
            local.copy_(whole)
        return None


def of_halves(*widths: int, kind: type[Halves] = Halves) -> nn.Sequential:
    """Return linear layers without biases whose weights are ``Halves``, or a ``kind`` of them."""
    layers = [nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:])]
    for layer in layers:
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return nn.Sequential(*layers)


def halves_or_plain(widths: tuple[int, ...], sharded: list[bool]):
    """Return a maker of ``of_halves`` for the sharded runs, of ordinary layers for the single process."""

    def build() -> nn.Module:
        model = of_halves(*widths)
        if sharded.pop(0):
            return model
        for layer in model:
            layer.weight = nn.Parameter(layer.weight.detach()._tensor)
        return model

    return build


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 7, 5), (8, 3, 1)])
def test_subclass_with_two_inputs(rank, world, widths, reshard):
    """Two inputs of two dtypes make the parameter, even or uneven, empty shards included, again and again."""
    even = all(width % world == 0 for width in widths) and world > 1
    prepare = partial(on_one_axis, reshard_after_forward=reshard)
    build = halves_or_plain(widths, [True, True, False] if even else [True, False])
    against = ("torch", "alone") if even else ("alone",)  # torch's wants padded inputs, and one of them on one rank
    run = assert_parity(prepare, build=build, against=against, tolerance=1e-4)
    weight = run.module[0].weight
    assert (
        isinstance(weight.to_local(), Halves) and weight.to_local().shape[0] == weight.shape[0] // world
    ) or not even


@on_ranks(1, 2)
@pytest.mark.parametrize("widths", [(8, 8, 8), (8, 7, 5)])
def test_subclass_built_on_the_meta_device(rank, world, widths):
    """Shards of a meta subclass were plain tensors, so after ``to_empty`` weights were sent without its extension."""
    with torch.device("meta"):
        model = of_halves(*widths)
    shard_each(model, api.ours, mesh=mesh_1d(), reshard_after_forward=True)
    model.to_empty(device="cpu")
    torch.manual_seed(SEED)
    reference = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:])))
    for layer, original in zip(model, reference):
        local = layer.weight.to_local()
        assert isinstance(local, Halves)
        start = rank * -(-len(original.weight) // world)
        with torch.no_grad():
            local.copy_(original.weight[start : start + len(local)])
    for one in (model, reference):
        one(torch.ones(2, 8)).sum().backward()
    for layer, original in zip(model, reference):
        torch.testing.assert_close(layer.weight.grad.full_tensor(), original.weight.grad, rtol=1e-4, atol=1e-4)


@on_ranks(1, 2)
def test_an_evaluation_in_inference_mode_before_training(rank, world):
    """The subclass made its full tensor in inference mode, where autograd may not save it, and training raised."""
    model = sharded(lambda: of_halves(8, 8, 8))
    with torch.inference_mode():
        model(torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
def test_subclass_in_mixed_precision(rank, world):
    """The dtype of computation reaches the extension."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    prepare = partial(on_one_axis, mp_policy=policy)
    run = assert_parity(prepare, build=lambda: of_halves(8, 8, 8), against=("torch",), tolerance=0.05)
    run.module[0].unshard()
    assert run.module[0].weight.dtype == torch.bfloat16 and not isinstance(run.module[0].weight, Halves)


@on_ranks(4)
def test_subclass_with_a_replicate_axis(rank, world):
    """The extension is given the shard axis alone."""
    assert_parity(on_two_axes, build=halves_or_plain((8, 8, 8), [True, True, False]), tolerance=1e-4)


@on_ranks(4)
def test_subclass_that_stays_on_some_ranks(rank, world):
    """With an int to reshard to, what cannot stay is freed; other parameters of the unit stay."""
    module = stack(layers=2)
    module[0].weight = nn.Parameter(Halves(module[0].weight.detach()))
    on_one_axis(module, api.ours, reshard_after_forward=2)
    for _ in range(2):
        loss = module(torch.ones(2, 8)).sum()
        assert isinstance(module[0].weight.to_local(), Halves) and module[0].weight.device_mesh.shape == (4,)
        assert module[0].bias.device_mesh.shape == module[1].weight.device_mesh.shape == (2, 2)
        loss.backward()
    torch.testing.assert_close(module[1].bias.grad.full_tensor(), torch.full((8,), 4.0))


@on_ranks(4)
def test_subclass_over_tensor_parallelism(rank, world):
    """The local tensor of a DTensor parameter has the extension; the full parameter is a DTensor."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    torch.manual_seed(SEED)
    module, original = nn.Sequential(nn.Linear(8, 8, bias=False)), None
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel()})
    original = module[0].weight.full_tensor().detach()
    local = Halves(module[0].weight.to_local().detach())
    spread = DTensor.from_local(local, mesh["tp"], [Shard(0)], run_check=False)
    module[0].weight = nn.Parameter(spread)
    api.ours.fully_shard(module, mesh=mesh["dp"])
    for _ in range(2):
        module(torch.ones(2, 8)).sum().backward()
        module.unshard()
        assert module[0].weight.placements == (Shard(0),)
        torch.testing.assert_close(module[0].weight.full_tensor(), original, rtol=1e-4, atol=1e-4)
        module.reshard()
    torch.testing.assert_close(module[0].weight.grad.full_tensor(), torch.full((8, 8), 4.0))


def patch(layers: Iterable[nn.Module], calls: list[Any]) -> None:
    """Give the layers' local weights an extension: bfloat16 on the wire, float32 in use; the short signature."""

    def pre(local: Tensor, mesh: DeviceMesh):
        assert mesh.ndim == 1
        return (local.to(torch.bfloat16),), None

    def post(calls: list[Any], outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None):
        (output,) = outputs
        calls.append((output.dtype, out is not None))
        if out is None:
            whole = output.to(dtype)
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(output)
        return None

    for layer in layers:
        local = layer.weight._local_tensor
        local.fsdp_pre_all_gather = functools.partial(pre, local)
        local.fsdp_post_all_gather = functools.partial(post, calls)


@on_ranks(1, 2)
@pytest.mark.parametrize("meta", [False, True])
def test_patched_plain_tensors(rank, world, meta):
    """Attributes of a local tensor make an extension, also when they are set after ``to_empty``."""

    def build():
        if not meta:
            return stack()
        with torch.device("meta"):
            return stack()

    seen: list[list[Any]] = []

    def prepare(module, fsdp):
        shard_each(module, fsdp, mesh=mesh_1d())
        if meta:
            module.to_empty(device="cpu")
            torch.manual_seed(SEED)
            for parameter in module.parameters():
                with torch.no_grad():
                    parameter.to_local().copy_((torch.randn(parameter.shape) / 4).chunk(world)[rank])
        seen.append([])
        patch(module, seen[-1])

    assert_parity(prepare, build=build, against=("torch",))
    ours, theirs = sorted(seen, key=len)
    assert len(theirs) == 6 * STEPS
    assert len(ours) == 5 * STEPS + 1  # the unit that forward ends with stays from the second iteration on
    for one in seen:
        assert [out for _, out in one].count(False) == 3 and {dtype for dtype, _ in one} == {torch.bfloat16}


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_an_extension_that_writes_to_the_parameter_with_gradients_enabled(rank, world, reshard):
    """A forward enables gradients, but the full parameter, a leaf, is written to without. torch calls the extension
    with them, so autograd refuses the write of the second gather."""
    torch.manual_seed(SEED)
    module = nn.Linear(6, 5, bias=False)
    api.ours.fully_shard(module, mesh=mesh_1d(), reshard_after_forward=reshard)
    local = module.weight._local_tensor

    def post(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None):
        if out is None:
            whole = outputs[0][:5].to(dtype)
            return whole, (whole,)
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(outputs[0][:5])
        return None

    def pre(mesh: DeviceMesh):
        return (F.pad(local.detach(), (0, 0, 0, 3 - len(local))).to(torch.bfloat16),), None

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = pre, post
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        weight = module.weight.full_tensor().detach().to(torch.bfloat16).float()
        x = torch.randn(4, 6)
        y = module(x)
        torch.testing.assert_close(y, F.linear(x, weight))
        y.square().sum().backward()
        assert module.weight.grad.full_tensor().any()
        optimizer.step()
        optimizer.zero_grad()


class Aliasing(Halves):
    """What is gathered is the parameter: it keeps the gathered tensor, and asserts that it gets the same again."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh):
        return (self._tensor,), mesh.size()

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None):
        (data,) = outputs
        if out is None:
            return data, (data,)
        assert isinstance(out, nn.Parameter) and data.dtype == param_dtype
        assert data.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        assert data.untyped_storage()._cdata == out.untyped_storage()._cdata
        assert data.untyped_storage().size() > 0
        Aliasing.reused += 1
        return None

    reused = 0


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("reshard", [True, False])
def test_the_gathered_tensor_as_the_parameter(rank, world, reshard):
    """A result that aliases the gathered tensor is legal: its storage is the same object in every gather."""
    Aliasing.reused = 0
    prepare = partial(on_one_axis, reshard_after_forward=reshard)
    run = assert_parity(prepare, build=lambda: of_halves(8, 8, 4, kind=Aliasing), against=("torch",))
    gathers = 2 * STEPS * (2 if reshard else 1)
    stays = STEPS - 1 if reshard else 0  # the unit that forward ends with, with ours, from the second iteration on
    assert Aliasing.reused == 2 * (gathers - 2) - stays
    run.module[0].unshard()
    storage = run.module[0].weight.untyped_storage()
    run.module[0].reshard()
    assert storage.size() == 0
    run.module[0].unshard()
    assert run.module[0].weight.untyped_storage()._cdata == storage._cdata and storage.size() >= 256


class Doubled(Tensor):
    """A weight that counts twice in a matrix product."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


class Marked(nn.Parameter):
    """A parameter that computes as every other."""


@on_ranks(2)
def test_a_class_that_is_lost(rank, world):
    """A class without an extension is named when it is sharded, for forward computes with a plain tensor."""
    lost, kept = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    lost.weight = nn.Parameter(lost.weight.detach().as_subclass(Doubled))
    kept.weight = Marked(kept.weight.detach())
    with pytest.warns(UserWarning, match=r"^0\.weight is a Doubled, which has no fsdp_pre_all_gather") as warned:
        unit = api.ours.fully_shard(nn.Sequential(lost), mesh=mesh_1d())
        api.ours.fully_shard(kept, mesh=mesh_1d())
    assert len(warned) == 1
    inputs = torch.ones(1, 4)
    outputs = unit(inputs)
    unit.reshard()
    assert torch.equal(outputs, nn.functional.linear(inputs, lost.weight.full_tensor()))
    other = nn.Linear(4, 4, bias=False)
    other.weight = nn.Parameter(other.weight.detach().as_subclass(Doubled))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api.ours.fully_shard(nn.Sequential(other, nn.Linear(4, 4)), mesh=mesh_1d(), ignored_params={other.weight})


@on_ranks(1)
def test_wrong_extensions(rank, world):
    """Only one of the two functions, or a signature that is neither, is refused."""
    for fsdp in (api.ours, api.theirs):
        module = nn.Linear(4, 4, bias=False)
        module.weight.fsdp_pre_all_gather = lambda mesh: None
        with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and fsdp_post_all_gather"):
            fsdp.fully_shard(module, mesh=mesh_1d())
            module.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
            module(torch.ones(1, 4))
    module = api.ours.fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh_1d())
    module.weight._local_tensor.fsdp_pre_all_gather = lambda mesh, other: None
    module.weight._local_tensor.fsdp_post_all_gather = lambda *_: None
    with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather with 2 parameters"):
        module(torch.ones(1, 4))


class Releasing(Halves):
    """It says that what was gathered is not needed any more, as its sum has memory of its own."""

    release: Any = True

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], metadata: None, size: Any, stride: Any) -> Tensor:
        return Releasing(inner["_tensor"])

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return Releasing.release


RELEASE = "fsdp_should_release_all_gather_outputs_after_post_all_gather"


@api.fsdp2_only  # torch's does so since 2.15
@on_ranks(2)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("release", [False, True])
def test_what_was_gathered_is_released_where_the_subclass_says_so(rank, world, keep, release):
    """After each gather, whatever becomes of the full parameter's own memory; training is the same."""
    Releasing.release, sums = release, []
    for of in (Releasing, Halves):
        module = sharded(lambda of=of: of_halves(8, 8, kind=of), units=lambda module: (), reshard_after_forward=False)
        module.set_keep_unsharded_storage(keep)
        received: list[Tensor] = []
        decode = of.fsdp_post_all_gather

        def noted(self: Halves, outputs: Any, *args: Any, decode=decode, received=received, **others: Any) -> Any:
            received[:] = outputs
            return decode(self, outputs, *args, **others)

        for _ in range(3):
            with mock.patch.object(of, "fsdp_post_all_gather", noted):
                output = module(torch.ones(2, 8))
            held = sum(tensor.untyped_storage().size() for tensor in received)
            assert held == (0 if of is Releasing and release else 2 * 8 * 8 * 2)
            output.square().sum().backward()
        sums.append(module[0].weight.grad.full_tensor())
    assert torch.equal(*sums)


@api.fsdp2_only  # torch's refuses it since 2.15
@on_ranks(2)
def test_wrong_releases(rank, world):
    """It must be a bool, and belongs to an extension."""
    Releasing.release = 1
    with pytest.raises(AssertionError, match="must return a bool"):
        api.ours.fully_shard(of_halves(8, 8, kind=Releasing), mesh=mesh_1d())
    module = nn.Linear(8, 8)
    api.ours.fully_shard(module, mesh=mesh_1d())
    setattr(module.weight._local_tensor, RELEASE, lambda: True)
    with pytest.raises(AssertionError, match="requires fsdp_pre_all_gather and fsdp_post_all_gather"):
        module(torch.ones(1, 8))


class Lent(Halves):
    """Frozen weights on a single rank: nothing is sent, and what forward computes with is a view of the shard itself.

    torch's main calls a function of its own for this; the two that every torch has can do it, too.
    """

    def fsdp_pre_all_gather(self, mesh: DeviceMesh):
        assert mesh.size() == 1
        return (), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None):
        assert outputs == ()
        return (self._tensor.detach(), ()) if out is None else None


class Viewed(Halves):
    """The same by torch's function."""

    def fsdp_get_unsharded_view(self, mesh: DeviceMesh, module: nn.Module, mp_policy: MixedPrecisionPolicy):
        assert mesh.size() == 1 and isinstance(module, nn.Linear)
        return self._tensor.detach()


def frozen_first(kind: type[Halves] | None) -> nn.Sequential:
    """Return two layers, of which the first is frozen and of a ``kind`` of tensor."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    model[0].weight.requires_grad_(False)
    if kind is not None:
        model[0].weight = nn.Parameter(kind(model[0].weight.detach()), requires_grad=False)
    return model


@api.fsdp2_only
@on_ranks(1)
@pytest.mark.parametrize("kind", [Lent, Viewed])
@pytest.mark.parametrize("reshard", [True, False])
def test_views_of_the_shards_on_one_rank(rank, world, reshard, kind):
    """The full weights are where the shards are, in every forward, and loaded values are seen without a gather; so are
    those of a tensor that was put in the shard's place."""
    model, alone = frozen_first(kind), frozen_first(None)
    on_one_axis(model, api.ours, reshard_after_forward=reshard)
    inputs, addresses = torch.randn(2, 8), set()
    for _ in range(3):
        for one in (model, alone):
            one.zero_grad()
            one(inputs).square().sum().backward()
        torch.testing.assert_close(model[1].weight.grad.full_tensor(), alone[1].weight.grad)
        with torch.no_grad():
            shard = model[0].state_dict()["weight"].to_local()._tensor
            model.unshard(recurse=True)
            addresses |= {model[0].weight.data_ptr(), shard.data_ptr()}
            shard.mul_(2)
            alone[0].weight.mul_(2)
            torch.testing.assert_close(model[0].weight.detach(), alone[0].weight)
            model.reshard(recurse=True)
    assert len(addresses) == 1
    before = model[0].weight
    other = DTensor.from_local(kind(torch.ones(8, 8)), before.device_mesh, before.placements)
    model[0].load_state_dict({"weight": other}, assign=True)
    model(inputs)
    model.unshard(recurse=True)
    assert torch.equal(model[0].weight, torch.ones(8, 8))


def assert_same_gradients(model: Any, alone: Any, step: int, **allowed: float) -> None:
    """Assert that a step gives what trains the same gradients in both."""
    for one in (model, alone):
        one.zero_grad()
        one(torch.full((2, alone[0].in_features), step + 1.0)).square().sum().backward()
    for got, expected in zip(model.parameters(), alone.parameters()):
        if expected.requires_grad:
            torch.testing.assert_close(got.grad.full_tensor(), expected.grad, **allowed)


@torch.no_grad()
def halve_first(model: Any, alone: Any) -> None:
    """Halve the first weight of both, where the shard keeps it."""
    local = model[0].weight.to_local()
    getattr(local, "_tensor", local).mul_(0.5)
    alone[0].weight.mul_(0.5)


class OnlyViewed(Halves):
    """A tensor that cannot be gathered, and gives any view."""

    view: Any = None

    def fsdp_get_unsharded_view(self, mesh: DeviceMesh, module: nn.Module, mp_policy: MixedPrecisionPolicy):
        return type(self).view(self._tensor)

    def __getattribute__(self, name: str) -> Any:
        if name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            raise AttributeError(name)
        return super().__getattribute__(name)


@api.fsdp2_only
@on_ranks(1)
def test_wrong_views(rank, world):
    """A view that is not the parameter is refused by name."""
    inputs = torch.ones(1, 8)
    OnlyViewed.view = torch.Tensor.detach
    torch.testing.assert_close(sharded(lambda: frozen_first(OnlyViewed))(inputs), frozen_first(None)(inputs))
    for view, error, text in (
        (lambda tensor: tensor.double(), ValueError, r"0\.weight: .*shape, dtype, and device: expected .*float64"),
        (lambda tensor: tensor[:4], ValueError, r"0\.weight: .*expected"),
        (lambda tensor: tensor.no_such(), AttributeError, r"0\.weight: fsdp_get_unsharded_view of OnlyViewed raised"),
    ):
        OnlyViewed.view = view
        model = sharded(lambda: frozen_first(OnlyViewed))
        with pytest.raises(error, match=text):
            model(inputs)


@api.fsdp2_only
@on_ranks(1, 2, 4)
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("sends", ["rows", "columns"])
@pytest.mark.parametrize("widths", [(8, 8), (5, 7), (6, 1)])
def test_a_view_that_is_not_given(rank, world, trains, sends, widths):
    """Where it is None, and on more ranks or for a parameter that trains, the elements are gathered as those of a plain
    tensor, as torch's main does it. It was an AssertionError, on one rank too."""
    OnlyViewed.view = lambda tensor: None
    torch.manual_seed(SEED)
    alone = nn.Sequential(nn.Linear(*widths, bias=False), nn.Linear(widths[1], 4))
    model = copy.deepcopy(alone)
    alone[0].weight.requires_grad_(trains)
    model[0].weight = nn.Parameter(OnlyViewed(model[0].weight.detach()), requires_grad=trains)
    placement = (lambda param: Shard(param.ndim - 1)) if sends == "columns" else None
    lost = pytest.warns(UserWarning, match="0.weight is a OnlyViewed, which has no fsdp_pre_all_gather")
    with lost if trains or world > 1 else contextlib.nullcontext():
        api.ours.fully_shard(model, mesh=mesh_1d(), shard_placement_fn=placement)
    for step in range(3):
        assert_same_gradients(model, alone, step)
        model.reshard()
        halve_first(model, alone)


@api.fsdp2_only
@on_ranks(1)
@pytest.mark.parametrize("kind", [Lent, Viewed, OnlyViewed])
@pytest.mark.parametrize("trains", [True, False])
def test_a_weight_is_frozen_or_trained_after_its_first_use(rank, world, kind, trains):
    """A view of the shard is for a frozen weight. One that was gathered, and then frozen, gave a view, but its full
    weight was still the gathered one, whose memory nobody filled any more."""
    OnlyViewed.view = torch.Tensor.detach
    model, alone = frozen_first(kind), frozen_first(None)
    warns = pytest.warns(UserWarning, match="which has no fsdp_pre_all_gather") if kind is OnlyViewed else None
    model[0].weight.requires_grad_(trains)
    alone[0].weight.requires_grad_(trains)
    with warns if trains and warns else contextlib.nullcontext():
        on_one_axis(model, api.ours)
    for step in range(4):
        for one in (model, alone):
            one[0].weight.requires_grad_(trains == (step % 2 == 0))
        assert_same_gradients(model, alone, step)
        halve_first(model, alone)


@api.fsdp2_only
@on_ranks(2)
@pytest.mark.parametrize("kind", [Halves, Aliasing])
def test_shards_that_move_between_steps(rank, world, kind):
    """A setter may move the shards of a unit. Its new extensions then decoded into the full weights of the old ones,
    whose memory no gather allocates any more: the process ended."""
    torch.manual_seed(SEED)
    model = of_halves(8, 8, kind=kind).append(nn.Linear(8, 4))
    alone = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    for layer, own in zip(alone, model):
        layer.load_state_dict({name: getattr(value, "_tensor", value) for name, value in own.state_dict().items()})
    on_one_axis(model, api.ours)
    for step in range(4):
        assert_same_gradients(model, alone, step, rtol=1e-4, atol=1e-4)
        if step % 2:
            model.set_transfer_sizes(direct_group_bytes=step)


class Largest(Halves):
    """It communicates before it is gathered, as float8 weights do for their scale, which elements must be there for."""

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        largest = self._tensor.abs().amax()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


def raises_in_an_extension(rank: int, world: int) -> None:
    """Rank 1 raises before the collective of its extension, in which rank 0 waits, and ends as a process of Python."""
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    model[0].weight = nn.Parameter(Largest(model[0].weight.detach()))
    api.ours.fully_shard(model, mesh=mesh_1d())
    try:
        model(torch.ones(1, 8))
    except RuntimeError as error:
        sys.last_value = error
        traceback.print_exc()
        atexit._run_exitfuncs()
        os._exit(1)


@api.fsdp2_only
def test_ranks_learn_that_an_extension_raised_on_another():
    """A rank without rows showed what ``amax`` says of an empty tensor, and no parameter. The others showed gloo's
    "Connection closed by peer" instead of the rank that had ended, and why."""
    waited, raised = run_apart(raises_in_an_extension, 2)
    named = "0.weight: fsdp_pre_all_gather of Largest raised on this rank, whose piece has the shape (0, 8): amax"
    assert named in raised.output and "ignored_params" in raised.output, raised.output
    assert waited.error.startswith("RuntimeError: rank 1 ended") and named in waited.error, waited.output


@api.fsdp2_only  # with torch's, what arrives is read as the other dtype
@on_ranks(2)
def test_ranks_send_one_dtype(rank, world):
    """Tensors of bfloat16 and float16 have as many bytes as elements of the other: only the dtype tells them apart."""
    module = api.ours.fully_shard(nn.Linear(8, 8, bias=False), mesh=mesh_1d())
    local = module.weight._local_tensor
    dtype = torch.float16 if rank else torch.bfloat16
    local.fsdp_pre_all_gather = lambda mesh: ((local.detach().to(dtype),), None)
    local.fsdp_post_all_gather = lambda outputs, metadata, dtype, *, out=None: pytest.fail("the gather was launched")
    with pytest.raises(RuntimeError, match=r"32 elements of torch.bfloat16\).*32 elements of torch.float16\)"):
        module(torch.ones(1, 8))
