"""``iter_full_params``: every parameter in full, in order, in step, and nothing left behind."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import iter_full_params, summon_full_params
from tests.support import api
from tests.support.cases import CASES, Setup, build, build_sharded
from tests.support.counting import Collectives
from tests.support.models import mlp
from tests.support.parity import mesh_2d, mesh_of, rows_of
from tests.support.pool import on_ranks
from tests.support.shapes import loss_of
from tests.weights.test_summon import BF16

pytestmark = api.fsdp2_only


def assert_exports(module: nn.Module, expected: nn.Module, **options) -> None:
    """Assert that what is exported is what an unsharded module has."""
    exported = list(iter_full_params(module, **options))
    assert [name for name, _ in exported] == [name for name, _ in expected.named_parameters()]
    for (name, got), want in zip(exported, expected.parameters()):
        assert type(got) is torch.Tensor and not got.requires_grad, name
        assert got.dtype == want.dtype and torch.equal(got, want), name
        assert got.untyped_storage().nbytes() == got.nbytes, f"{name}: no padding, no neighbours"


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("case", CASES)
def test_exports_every_parameter(rank, world, case):
    """Every case, with small and large buckets: names once, in order, in the dtype they are kept in."""
    expected, module = build(CASES[case]), build_sharded(case, world, Setup(policy=BF16))
    for bucket_mb in (1e-6, 4e-4, 64):
        assert_exports(module, expected, bucket_mb=bucket_mb)


@on_ranks(1, 2)
@pytest.mark.parametrize("case", ["buffers", "tied", "transformer"])
@pytest.mark.parametrize("bucket_mb", [1e-6, 64])
def test_buffers(rank, world, case, bucket_mb):
    """With ``buffers`` it yields every tensor of the state dict once: parameters, then persistent buffers."""
    expected, module = build(CASES[case]), build_sharded(case, world, Setup(policy=BF16))
    state = {name: value for name, value in expected.state_dict().items() if isinstance(value, torch.Tensor)}
    exported = list(iter_full_params(module, bucket_mb=bucket_mb, buffers=True))
    names = [name for name, _ in exported]
    buffers = [name for name, _ in expected.named_buffers() if name in state]
    assert names == [name for name, _ in expected.named_parameters()] + buffers
    once = {value.data_ptr(): name for name, value in reversed(state.items())}
    assert set(once.values()) <= set(names) <= set(state)
    for name, got in exported:
        assert type(got) is torch.Tensor and got.dtype == state[name].dtype and torch.equal(got, state[name]), name
    low = dict(iter_full_params(module, dtype=torch.bfloat16, device="meta", buffers=True))
    for name, got in low.items():
        assert got.dtype == (torch.bfloat16 if state[name].is_floating_point() else state[name].dtype) and got.is_meta


@on_ranks(2)
@pytest.mark.parametrize("reshard", [None, True, False])
def test_at_any_time(rank, world, reshard):
    """Also between forward and backward and after a step, with kept parameters; always the values of the shards."""
    expected, module = build(CASES["transformer"]), build_sharded("transformer", world, Setup(reshard, BF16))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        loss = loss_of(module(*rows_of(CASES["transformer"].inputs(step), rank, world)))
        before = list(module.parameters())
        assert_exports(module, expected)
        assert all(now is then for now, then in zip(module.parameters(), before))
        loss.backward()
        assert_exports(module, expected)
        optimizer.step()
        for got, want in zip(module.parameters(), expected.parameters()):
            full = got.full_tensor() if isinstance(got, DTensor) else None
            assert full is not None
            want.data.copy_(full)
        assert_exports(module, expected)
        optimizer.zero_grad()


@on_ranks(2)
def test_inside_forward(rank, world):
    """It changes nothing, so it may run there too."""
    expected, module = build(CASES["mlp"]), build_sharded("mlp", world)
    module[2].register_forward_hook(lambda *_: assert_exports(module, expected))
    loss_of(module(*rows_of(CASES["mlp"].inputs(0), rank, world))).backward()


@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_dtype_and_device(rank, world, dtype):
    """Floating-point parameters are cast as a cast of the whole would; others keep theirs."""
    expected, module = build(CASES["mixed_frozen_dtypes"]), build_sharded("mixed_frozen_dtypes", world)
    for (name, got), want in zip(iter_full_params(module, dtype=dtype, device="cpu"), expected.parameters()):
        want = want.detach().to(dtype) if want.is_floating_point() else want
        assert got.dtype == want.dtype and got.device.type == "cpu", name
        assert torch.equal(got.double(), want.double()), name


@on_ranks(2)
def test_buckets(rank, world):
    """Small neighbours share a collective, beside those in which ranks agree that they can, and on the bucket."""
    module = mlp(8, 8, 8, 8)  # layers of 256 and 32 bytes
    for unit in (module[0], module[2], module[4], module):
        fsdp2.fully_shard(unit, mesh=mesh_of(world))
    for nbytes, gathers in ((1e9, 1), (1, 6), (2 * (256 + 32), 3), (4 * (256 + 32), 2)):
        with Collectives() as seen:
            list(iter_full_params(module, bucket_mb=nbytes / 2**20))
        assert (seen.gathers, seen.reductions) == (gathers, 3)


@on_ranks(4)
def test_over_replicas(rank, world):
    """Pieces that are cut twice share collectives too, one for each axis, in any dtype and in the one asked for.

    Each parameter was two collectives of DTensor's, in its own dtype: gloo has none for eight bits, and torch warned of
    their order.
    """
    module = mlp(8, 6, 5, 7)
    frozen = {"rounded": torch.randn(3, 5).to(torch.float8_e4m3fn), "mask": torch.rand(7) > 0.5}
    for name, value in frozen.items():
        module[2].register_parameter(name, nn.Parameter(value, requires_grad=False))
    expected = copy.deepcopy(module)
    for unit in (module[2], module):
        fsdp2.fully_shard(unit, mesh=mesh_2d(), shard_over_replicas=True)
    with Collectives() as seen:
        assert_exports(module, expected)
    assert seen.gathers == 2
    for bucket_mb in (1e-6, 2e-4):
        assert_exports(module, expected, bucket_mb=bucket_mb)
    expected.to(torch.bfloat16)
    for name, value in frozen.items():
        expected[2].register_parameter(name, nn.Parameter(value, requires_grad=False))
    with Collectives() as seen:
        for (name, got), want in zip(iter_full_params(module, dtype=torch.bfloat16), expected.parameters()):
            assert torch.equal(got.float(), want.float()), name
    assert seen.gathers == 2


@on_ranks(2, 4)
@pytest.mark.parametrize("stop", ["break", "close", "exception", "forget", "before the first"])
def test_stopping_midway(rank, world, stop):
    """All ranks may stop after the same parameter: nothing hangs, nothing is kept, and everything works afterwards."""
    expected, module = build(CASES["transformer"]), build_sharded("transformer", world)
    iterator = iter_full_params(module, bucket_mb=1e-4)
    seen = 0
    try:
        for _ in iterator if stop != "before the first" else ():
            seen += 1
            if seen == 7:
                if stop == "exception":
                    raise ValueError("mine")
                break
    except ValueError:
        pass
    assert seen == (0 if stop == "before the first" else 7)
    if stop == "close":
        iterator.close()
        assert next(iterator, None) is None
    del iterator
    assert_exports(module, expected)
    loss_of(module(*rows_of(CASES["transformer"].inputs(0), rank, world))).backward()
    del module
    gc.collect()


@on_ranks(2)
def test_what_nobody_manages(rank, world):
    """Parameters beside, below and inside units that are not sharded come too, in their place, as copies."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"a": nn.Linear(3, 3), "unit": mlp(3, 4, 3), "b": nn.Linear(3, 2)})
    module["b"].register_buffer("scale", torch.ones(3))
    expected = nn.ModuleDict({"a": nn.Linear(3, 3), "unit": mlp(3, 4, 3), "b": nn.Linear(3, 2)})
    expected.load_state_dict(module.state_dict(), strict=False)
    fsdp2.fully_shard(module["unit"], mesh=mesh_of(world), ignored_params={module["unit"][0].bias})
    assert_exports(module, expected)
    assert_exports(module["unit"][2], expected["unit"][2])
    for _, tensor in iter_full_params(module, dtype=torch.float32):
        tensor.zero_()
    assert_exports(module, expected)


@on_ranks(2)
def test_names_that_a_module_gives_its_own_way(rank, world):
    """A checkpoint wrapper leaves its own name out of ``named_parameters``, and so does the export."""
    module = build_sharded("mlp", world)
    wrapped = checkpoint_wrapper(module)
    assert_exports(wrapped, build(CASES["mlp"]))
    with summon_full_params(wrapped):
        wrapped.get_parameter("_checkpoint_wrapped_module.0.weight").data.fill_(1)
    assert (next(iter_full_params(wrapped))[1] == 1).all()


@on_ranks(2)
def test_offloaded_shards(rank, world):
    """Shards that live on the CPU by policy."""
    module, expected = mlp(4, 8, 4), mlp(4, 8, 4)
    expected.load_state_dict(module.state_dict())
    fsdp2.fully_shard(module, mesh=mesh_of(world), offload_policy=fsdp2.CPUOffloadPolicy())
    for _ in range(2):
        assert_exports(module, expected)
        with summon_full_params(module, with_grads=True):
            for one in (module, expected):
                one[0].weight.data.add_(1)
        module(torch.ones(1, 4)).sum().backward()


@on_ranks(1)
def test_refused_arguments(rank, world):
    """At the call, not at the first item."""
    module = build_sharded("mlp", world)
    for options, error, text in (
        ({"bucket_mb": 0}, ValueError, "bucket_mb must be a positive, finite number"),
        ({"bucket_mb": float("nan")}, ValueError, "bucket_mb must be a positive, finite number"),
        ({"bucket_mb": "1"}, ValueError, "bucket_mb must be a positive, finite number"),
        ({"dtype": torch.int32}, TypeError, "floating-point torch.dtype"),
        ({"dtype": "bf16"}, TypeError, "floating-point torch.dtype"),
    ):
        with pytest.raises(error, match=text):
            iter_full_params(module, **options)
    with pytest.raises(TypeError, match="expected an nn.Module"):
        iter_full_params(module.parameters())
