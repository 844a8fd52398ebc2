"""``sync_module_states``: copies that ranks initialised differently become one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fsdp2
from fsdp2.tools.check.strict import LiveBytes
from tests.support.models import Counting
from tests.support.parity import full, mesh_1d, mesh_2d, on_two_axes, shard_each
from tests.support.pool import on_ranks
from tests.weights.models import CASE_NAMES, assert_holds, linears, plain

TINY = 100 / 2**20


def fill(module: nn.Module, rank: int) -> None:
    """Give everything in a module values that differ between ranks."""
    with torch.no_grad():
        for number, tensor in enumerate([*module.parameters(), *module.buffers()]):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            local.copy_(torch.arange(local.numel()).reshape(local.shape) % 100 + 10 * number + rank)


def filled(name: str, rank: int) -> nn.Module:
    """Return an unsharded model with the values of a rank."""
    module = plain(name)
    fill(module, rank)
    return module


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("name", CASE_NAMES)
@pytest.mark.parametrize("meta", [False, True])
def test_before_sharding(rank, world, name, meta):
    """Everything becomes rank 0's, and the model can be sharded."""
    with torch.device("meta" if meta and rank else "cpu"):
        module = plain(name)
    if not (meta and rank):
        fill(module, rank)
    before = list(module.parameters())
    fsdp2.sync_module_states(module, bucket_mb=TINY)
    expected = filled(name, 0)
    assert_holds(module, expected.state_dict())
    for mine, theirs in zip(module.buffers(), expected.buffers(), strict=True):  # also those no state dict has
        assert torch.equal(mine, theirs)
    if name != "lstm":  # which holds weak references, so that its parameters cannot change in place
        assert all(mine is known for mine, known in zip(module.parameters(), before, strict=True))
    if name == "channels_last":
        assert [p.stride() for p in module.parameters()] == [p.stride() for p in expected.parameters()]
    fsdp2.fully_shard(module, mesh=mesh_1d())
    assert_holds(module, expected.state_dict())


@on_ranks(2, 4)
@pytest.mark.parametrize("meta", [False, True])
def test_hybrid_sharding(rank, world, meta):
    """The first replica's shards are those of all replicas; shards in one replica stay what they are."""
    replica, part = divmod(rank, world // 2)
    with torch.device("meta" if meta and replica else "cpu"):
        module = linears(5, 7, 3, 1)()
    on_two_axes(module, fsdp2)
    if not (meta and replica):
        fill(module, rank)
    before = list(module.parameters())
    fsdp2.sync_module_states(module, bucket_mb=TINY)
    other = linears(5, 7, 3, 1)()
    on_two_axes(other, fsdp2)
    fill(other, part)
    for mine, expected, known in zip(module.parameters(), other.parameters(), before, strict=True):
        assert mine is known and torch.equal(mine.to_local(), expected.to_local())
    assert torch.isfinite(module(torch.ones(2, 5))).all()


class Mixed(nn.Module):
    """Parameters to shard, to ignore, and that have one element, and buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.kept = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(()))
        self.counting = Counting()


@on_ranks(2, 4)
@pytest.mark.parametrize("kept", [False, True])
def test_after_sharding(rank, world, kept):
    """Shards that nobody else has stay; ignored parameters, buffers and what every rank holds whole become rank 0's."""
    module, other = Mixed(), Mixed()
    for one, values in ((module, rank), (other, 0)):
        fsdp2.fully_shard(one, mesh=mesh_1d(), ignored_params=set(one.kept.parameters()))
        fill(one, values)
    own = {name: module.get_parameter(name).to_local().clone() for name in ("inner.weight", "counting.weight")}
    if kept:
        module.unshard()
    fsdp2.sync_module_states(module)
    module.reshard()
    for name, value in own.items():
        assert torch.equal(module.get_parameter(name).to_local(), value)
    for name in ("kept.weight", "kept.bias", "scale"):
        mine, expected = module.get_parameter(name), other.get_parameter(name)
        assert torch.equal(full(mine), full(expected)), name
    for mine, expected in zip(module.buffers(), other.buffers(), strict=True):
        assert torch.equal(mine, expected)


@on_ranks(4)
def test_tensor_parallelism(rank, world):
    """What tensor parallelism cut becomes what it is on the mesh that rank 0 is in."""
    mesh = mesh_2d("dp", "tp")
    module = linears(5, 7, 3)()
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel()})
    fill(module, rank)
    fsdp2.sync_module_states(module, bucket_mb=TINY)
    column = rank % 2
    other = linears(5, 7, 3)()
    parallelize_module(other, mesh["tp"], {"0": ColwiseParallel()})
    fill(other, column)
    for mine, expected in zip(module[0].parameters(), other[0].parameters(), strict=True):
        assert torch.equal(mine.to_local(), expected.to_local())
    fill(other, 0)
    for mine, expected in zip(module[1].parameters(), other[1].parameters(), strict=True):
        assert torch.equal(full(mine), expected)


@on_ranks(4)
def test_sharded_over_tensor_parallelism(rank, world):
    """Shards of what tensor parallelism replicates become equal along it; what it cut stays."""
    mesh = mesh_2d("dp", "tp")
    module = linears(5, 7, 3)()
    replicate = lambda _, child, mesh: [
        child.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
        for name, parameter in list(child.named_parameters(recurse=False))
    ]
    parallelize_module(module[0], mesh["tp"], ColwiseParallel())
    distribute_module(module[1], mesh["tp"], replicate)
    shard_each(module, fsdp2, mesh=mesh["dp"])
    fill(module, rank)
    fsdp2.sync_module_states(module)
    for number, parameter in enumerate(module.parameters()):
        local = parameter.to_local()
        source = rank if number < 2 else rank - rank % 2
        expected = torch.arange(local.numel()).reshape(local.shape) % 100 + 10 * number + source
        assert torch.equal(local, expected.to(local.dtype)), number


@on_ranks(2, 4)
def test_nothing_to_copy(rank, world):
    """What has no values on the first rank is named on every rank, and nothing is changed."""
    with torch.device("meta" if rank == 0 else "cpu"):
        module = plain("mlp")
    before = None if rank == 0 else module[0].weight.clone()
    with pytest.raises(RuntimeError, match=r"no values to copy for \['0.weight', .*'4.bias'\]"):
        fsdp2.sync_module_states(module)
    assert module[0].weight.is_meta if rank == 0 else torch.equal(module[0].weight, before)
    with torch.device("meta" if rank == 1 else "cpu"):
        module = plain("mlp")
    fsdp2.fully_shard(module, mesh=mesh_1d())
    with pytest.raises(RuntimeError, match=r"on rank 1: .*no values to copy for \['0.weight'"):
        fsdp2.sync_module_states(module)


@on_ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_differ(rank, world, sharded):
    """Names and shapes must be equal on all ranks."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 + rank))
    if sharded:
        fsdp2.fully_shard(module, mesh=mesh_1d())
    with pytest.raises(RuntimeError, match="ranks differ in .*1.weight"):
        fsdp2.sync_module_states(module)
    with pytest.raises(TypeError, match="expected an nn.Module"):
        fsdp2.sync_module_states(None)
    with pytest.raises(ValueError, match="bucket_mb must be a positive, finite number"):
        fsdp2.sync_module_states(module, bucket_mb=0 if rank else 64)


@on_ranks(2)
@pytest.mark.parametrize("meta", [False, True])
def test_memory(rank, world, meta):
    """One bucket beside the module."""
    bucket = 64 << 10
    with torch.device("meta" if meta and rank else "cpu"):
        module = linears(256, 384, 256)()
    stays = sum(p.nbytes for p in module.parameters()) if meta and rank else 0
    with LiveBytes(p for p in module.parameters() if not p.is_meta) as live:
        before = live.now
        fsdp2.sync_module_states(module, bucket_mb=bucket / 2**20)
    assert bucket <= live.peak - before <= stays + bucket + 4096


@on_ranks(1, 2)
def test_values_of_every_dtype(rank, world):
    """Bits are kept, whatever the backend carries."""
    dtypes = [torch.float8_e4m3fn, torch.bool, torch.int16, torch.complex64, torch.uint8, torch.float64]
    module = nn.Module()
    values = torch.arange(-5, 6) * (rank + 1)
    for number, dtype in enumerate(dtypes):
        module.register_buffer(f"b{number}", values.to(torch.float32).to(dtype))
    fsdp2.sync_module_states(module)
    for number, dtype in enumerate(dtypes):
        expected = torch.arange(-5, 6).to(torch.float32).to(dtype)
        assert torch.equal(module.get_buffer(f"b{number}").view(torch.uint8), expected.view(torch.uint8))


@on_ranks(2)
def test_the_remedy_for_fsdp1s_argument(rank, world):
    """FSDP1's ``sync_module_states=True`` spread the checkpoint that rank 0 had loaded. The error for it named a call
    after sharding, which copies replicas alone: the other ranks kept half of a model of their own."""
    module = nn.Linear(2, 2, bias=False)
    nn.init.constant_(module.weight, 0.0 if rank else 7.0)
    with pytest.raises(TypeError, match=r"call fsdp2.sync_module_states\(model\) before the first fully_shard"):
        fsdp2.fully_shard(module, mesh=mesh_1d(), sync_module_states=True)
    fsdp2.sync_module_states(module)
    fsdp2.fully_shard(module, mesh=mesh_1d())
    assert full(module.weight).tolist() == [[7, 7], [7, 7]]


@on_ranks(2)
def test_buckets_of_the_first_rank(rank, world):
    """Ranks with different ``bucket_mb`` sent and received different numbers of bytes, and mixed up tensors."""
    module = filled("mlp", rank)
    fsdp2.sync_module_states(module, bucket_mb=TINY * (1 + rank))
    assert_holds(module, filled("mlp", 0).state_dict())
    fsdp2.fully_shard(module, mesh=mesh_1d())
    for bucket in (TINY * (1 + rank), 1.0):
        exported = dict(fsdp2.iter_full_params(module, bucket_mb=bucket))
        assert all(torch.equal(value, exported[name]) for name, value in filled("mlp", 0).named_parameters())
