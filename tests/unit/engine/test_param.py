"""One managed parameter: what its module shows, and where its gradient is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from fsdp2.engine.param import FSDPParam, Site, accumulate_gradients, have_gradients, show, take_gradients
from fsdp2.policies import MixedPrecisionPolicy
from fsdp2.sharding.mesh import DataParallelMesh
from fsdp2.sharding.spec import ShardedSpec
from tests.support.fake import fake_mesh

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@pytest.fixture
def dp2() -> Iterator[DataParallelMesh]:
    """A shard axis of two ranks."""
    with fake_mesh(2, names=("dp",)) as mesh:
        yield DataParallelMesh.from_mesh(mesh)


def manage(original: nn.Parameter, dp: DataParallelMesh, *sites: Site, dtype: torch.dtype | None = None) -> FSDPParam:
    """Return what manages ``original``, with its shard and a full parameter of ``dtype``."""
    sites = sites or (Site(nn.Module(), "weight"),)
    for site in sites:
        site.module.register_parameter(site.name, original)
    param = FSDPParam(
        original, ShardedSpec.of(original, None, dp, "weight"), list(sites), "layers.0.weight", MixedPrecisionPolicy()
    )
    plain = original.to_local() if isinstance(original, DTensor) else original
    piece = param.spec.cut(plain.detach()).clone()
    param.set_shard(piece)
    assert param.local is piece
    param.set_full(plain.detach().clone().to(dtype or original.dtype).reshape(-1))
    return param


def weight(*shape: int) -> nn.Parameter:
    """Return 0, 1, 2... as a parameter."""
    return nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape))


def local(grad: Tensor | None) -> Tensor:
    """Return the local tensor of a sharded gradient."""
    assert isinstance(grad, DTensor)
    return grad.to_local()


@pytest.fixture
def param(dp2: DataParallelMesh) -> FSDPParam:
    """What manages a matrix of four rows, two of them here."""
    return manage(weight(4, 3), dp2)


# ---- the shard and the full parameter ----


def test_the_shard_is_a_parameter_around_the_piece_itself(param: FSDPParam) -> None:
    """And stays the same one when it moves."""
    before, piece = param.sharded, torch.ones(2, 3)
    assert isinstance(before, nn.Parameter) and isinstance(before, DTensor)
    assert before.shape == (4, 3) and before.requires_grad and param.dtype is FP32
    param.set_shard(piece)
    assert param.sharded is before and param.local is piece
    assert torch.equal(local(before), piece)


def test_the_full_parameter_is_the_place_in_the_buffer(dp2: DataParallelMesh) -> None:
    original = nn.Parameter(torch.arange(12.0).view(4, 3).t())
    param, buffer = manage(original, dp2), torch.arange(14.0)
    param.set_full(buffer[:12])
    assert param.full.data_ptr() == buffer.data_ptr() and param.full.stride() == (1, 3)
    assert torch.equal(param.full, original) and param.full.is_leaf


def test_a_new_full_parameter_takes_over_the_gradient(param: FSDPParam) -> None:
    param.full.grad = torch.ones(4, 3)
    param.set_full(torch.zeros(12))
    assert torch.equal(param.full.grad, torch.ones(4, 3)) and have_gradients([param])[0]
    assert torch.equal(take_gradients([param], CPU)[0], torch.ones(4, 3))


def test_names_and_sizes_are_shown(param: FSDPParam) -> None:
    assert repr(param) == "FSDPParam(layers.0.weight, (4, 3), dim=0, ranks=2)"
    assert param._param_fqn == "layers.0.weight" and param.fsdp_placement == Shard(0)
    assert param.sharded_param is param.sharded and param.unsharded_param is param._unsharded_param is param.full


# ---- what the module shows ----


def test_a_module_that_watches_its_attributes_is_told(dp2: DataParallelMesh) -> None:
    lstm = nn.LSTM(3, 4)
    sites = [Site(lstm, name) for name in list(lstm._parameters)]
    params = [manage(getattr(lstm, site.name), dp2, site) for site in sites]
    show(params, "full", over_others=True)  # the originals are still shown
    assert [id(w) for w in lstm._flat_weights] == [id(param.full) for param in params]
    show(params, "shards")
    assert [id(w) for w in lstm._flat_weights] == [id(param.sharded) for param in params]


def test_moving_between_modules_goes_by_its_slots(param: FSDPParam) -> None:
    other = nn.Module()
    param.set_sites([Site(other, "moved")])
    show([param], "full")
    assert other._parameters["moved"] is param.full and param.module is other


@pytest.mark.parametrize("place", ["sharded", "full"])
@pytest.mark.parametrize("trainable", [True, False])
def test_freezing_what_is_shown_freezes_all(dp2: DataParallelMesh, place: str, trainable: bool) -> None:
    param = manage(weight(4, 3).requires_grad_(not trainable), dp2)
    getattr(param, place).requires_grad_(trainable)
    assert show([param], "full")
    assert param.requires_grad == param.sharded.requires_grad == param.full.requires_grad == trainable
    assert not show([param], "shards")


def test_an_adopted_shard_brings_what_it_knows(dp2: DataParallelMesh) -> None:
    original = weight(4, 3)
    original.tag, original.other = "original", "original"
    param = manage(original, dp2)
    new = nn.Parameter(param.spec.shard_as(torch.ones(2, 3, dtype=BF16)), requires_grad=False)
    new.tag = "own"
    param.adopt_shard(new)
    assert param.sharded is new and param.dtype is BF16
    assert not param.full.requires_grad and not param.requires_grad
    assert (new.tag, new.other) == ("own", "original")
    assert param.spec.dtensor.tensor_meta.dtype is BF16


# ---- gradients ----


def test_a_sparse_gradient_is_refused_by_name(param: FSDPParam) -> None:
    nn.functional.embedding(torch.tensor([1]), param.full, sparse=True).sum().backward()
    with pytest.raises(NotImplementedError, match=r"layers.0.weight: its gradient is torch.sparse_coo.*sparse=False"):
        take_gradients([param], CPU)[0]


def test_a_differentiable_gradient_becomes_a_value(param: FSDPParam) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a cycle between parameter and gradient
        param.full.square().sum().backward(create_graph=True)
    assert not take_gradients([param], CPU)[0].requires_grad


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gradients_are_kept_in_the_reduce_dtype(dp2: DataParallelMesh, dtype: torch.dtype) -> None:
    """Where autograd adds the next: 256 + 1 is 256 in bfloat16. The last backward joins what was kept."""
    param = manage(weight(4, 3), dp2, dtype=dtype)
    for value in (256.0, 1.0):
        (param.full * value).sum().backward()
        param.expect_gradients(reduced=False, rounded=True)
        assert param.full.grad.dtype is FP32
    param.full.sum().backward()
    total = take_gradients([param], CPU)[0]
    assert total.dtype is FP32 and torch.equal(total, torch.full((4, 3), 258.0))
    assert not have_gradients([param])[0]


def test_keeping_nothing_is_nothing(param: FSDPParam) -> None:
    param.expect_gradients(reduced=False, rounded=True)
    assert not have_gradients([param])[0]


def test_recovery_forgets_all_gradients(dp2: DataParallelMesh) -> None:
    param = manage(weight(4, 3), dp2, dtype=BF16)
    param.full.sum().backward()
    param.expect_gradients(reduced=False, rounded=True)
    param.full.sum().backward()
    accumulate_gradients([param], [torch.ones(2, 3)])
    param.drop_gradient()
    assert param.sharded.grad is None
    assert not have_gradients([param])[0] and not take_gradients([param], CPU)[0].any()


def test_reduced_gradients_accumulate_on_the_shard(param: FSDPParam) -> None:
    piece = torch.ones(2, 3)
    accumulate_gradients([param], [piece])
    first = param.sharded.grad
    assert first._local_tensor is piece and first.shape == (4, 3) and first.placements == (Shard(0),)
    accumulate_gradients([param], [torch.full((2, 3), 2.0)])
    assert param.sharded.grad is first and torch.equal(local(first), torch.full((2, 3), 3.0))


def multiplied(grad: Tensor) -> Tensor:
    """A hook that returns a gradient."""
    return grad * 10


def multiply(grad: Tensor) -> None:
    """A hook that changes the gradient in place."""
    grad.mul_(10)


@pytest.mark.parametrize("hook", [multiplied, multiply])
def test_a_hook_may_change_the_reduced_gradient(param: FSDPParam, hook: Callable[[Tensor], Tensor | None]) -> None:
    seen: list[Tensor] = []
    param.sharded.register_hook(lambda grad: seen.append(local(grad).clone()))
    param.sharded.register_hook(hook)
    accumulate_gradients([param], [torch.ones(2, 3)])
    accumulate_gradients([param], [torch.ones(2, 3)])
    assert all(torch.equal(grad, torch.ones(2, 3)) for grad in seen) and len(seen) == 2
    assert torch.equal(local(param.sharded.grad), torch.full((2, 3), 20.0))


def test_a_gradient_that_tensor_parallelism_left_replicated_is_cut() -> None:
    with fake_mesh(2, 2, names=("dp", "tp")) as mesh:
        whole = torch.arange(16.0).view(4, 4)
        original = nn.Parameter(DTensor.from_local(whole[:2], mesh["tp"], (Shard(0),), run_check=False))
        param = manage(original, DataParallelMesh.from_mesh(mesh["dp"]))
        assert isinstance(param.full, DTensor) and param.full.placements == (Shard(0),)
        param.full.grad = DTensor.from_local(whole, mesh["tp"], (Replicate(),), run_check=False)
        assert torch.equal(take_gradients([param], CPU)[0], whole[:2])
        param.full.grad = DTensor.from_local(whole, mesh["tp"], (Partial(),), run_check=False)
        taken = take_gradients([param], CPU)[0]
        assert type(taken) is Tensor and taken.shape == (2, 4)
