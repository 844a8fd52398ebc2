"""``save_safetensors`` and ``load_safetensors``: the library itself reads what is written and writes what is read."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import fsdp2
from fsdp2.tools.check.strict import LiveBytes
from fsdp2.weights import safetensors as files
from tests.step.test_extensions import of_halves
from tests.support.cases import CASES
from tests.support.parity import full, mesh_1d, on_one_axis
from tests.support.pool import on_ranks
from tests.weights.models import (
    assert_holds,
    linears,
    load_new,
    once,
    plain,
    sharded,
    values_of,
    write,
)

TINY = 100 / 2**20


def round_trip(name, rank, folder, **options):
    """Save a sharded model, read it by the library and load it into another."""
    values = values_of(plain(name))
    module = sharded(name, meta=False)
    fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)
    fsdp2.save_safetensors(module, folder, bucket_mb=TINY, **options)
    assert_holds(module, values)
    written = {}
    for path in folder.glob("*.safetensors"):
        written |= load_file(path)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert written.keys() == once(values).keys()
    for key, value in written.items():
        assert value.dtype == values[key].dtype and torch.equal(value, values[key]), key
    for meta in (False, True):
        load_new(name, folder, values, meta=meta)


@on_ranks(2, 4)
@pytest.mark.parametrize("name", ["mlp", "buffers", "hybrid", pytest.param("transformer", marks=pytest.mark.slow)])
def test_several_files(rank, world, tmp_path, name):
    """A folder of files with an index."""
    round_trip(name, rank, tmp_path, max_shard_bytes=100)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    values = once(values_of(plain(name)))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    assert index["weight_map"].keys() == values.keys()
    load_new(name, tmp_path / "model.safetensors.index.json", values_of(plain(name)), meta=True)


@on_ranks(2)
@pytest.mark.parametrize("name", ["mlp", "transformer", "uneven", "integer"])
@pytest.mark.parametrize("target", ["file", "index", "folder", "other_name"])
def test_files_of_the_library(rank, world, tmp_path, name, target):
    """Files that others wrote, named in any of the usual ways."""
    values = values_of(plain(name))
    if target == "index":
        names = list(once(values))
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, keys in parts.items():
            write(tmp_path / file, {key: values[key] for key in keys}, rank)
        if rank == 0:
            weights = {key: file for file, keys in parts.items() for key in keys}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        dist.barrier()
    else:
        file = "adapter.safetensors" if target == "other_name" else "model.safetensors"
        write(tmp_path / file, values, rank)
    path = tmp_path / "model.safetensors" if target in ("file", "index") else tmp_path
    load_new(name, path, values, meta=True)
    load_new(name, str(path), values, meta=False)


@on_ranks(1, 2)
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_dtypes(rank, world, tmp_path, cast):
    """Loading casts to the parameters' dtypes; saving to the one asked for, whole numbers excepted."""
    values = values_of(plain("mixed_frozen_dtypes"))
    low = {key: value.to(cast) if value.is_floating_point() else value for key, value in values.items()}
    write(tmp_path / "model.safetensors", low, rank)
    module = load_new("mixed_frozen_dtypes", tmp_path, low, meta=True)
    fsdp2.broadcast_from_rank0(module, values)
    fsdp2.save_safetensors(module, tmp_path / "cast.safetensors", dtype=cast)
    written = load_file(tmp_path / "cast.safetensors")
    for key, value in low.items():
        assert written[key].dtype == value.dtype
        assert torch.equal(written[key].view(torch.uint8), value.view(torch.uint8)), key


@on_ranks(1, 2)
def test_every_dtype(rank, world, tmp_path):
    """All that the format knows, of sizes that would break alignment in another order, and the order of a plain one."""
    known = list(files.DTYPE_NAMES)
    module = nn.Module()
    for number, dtype in enumerate(reversed(known)):
        value = torch.arange(1, 4).to(torch.float32)
        value = value.view(torch.uint8)[:3].view(dtype) if dtype.itemsize == 1 else value.to(dtype)
        module.register_buffer(f"b{number}", value)
    module.register_parameter("weight", nn.Parameter(torch.randn(5)))
    module.register_buffer("none", torch.zeros(0, 3))
    expected = {key: value.clone() for key, value in module.state_dict().items()}
    fsdp2.fully_shard(module, mesh=mesh_1d())
    expected["weight"] = module.weight.full_tensor().detach()
    fsdp2.save_safetensors(module, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    for key, value in expected.items():
        assert written[key].dtype == value.dtype and written[key].shape == value.shape
        same = written[key].view(torch.uint8), value.view(torch.uint8)
        assert torch.equal(*same), key
    for tensor in (*module.buffers(), module.weight.to_local()):
        tensor.detach().view(torch.uint8).zero_()
    fsdp2.load_safetensors(module, tmp_path)
    for key, value in module.state_dict().items():
        assert torch.equal(full(value).view(torch.uint8), expected[key].view(torch.uint8)), key


@on_ranks(1, 2)
def test_training_and_copies(rank, world, tmp_path):
    """What is saved while full parameters are kept, or after training, are the shards' values; loading reaches them."""
    module, reference = sharded("transformer", meta=False), plain("transformer")
    inputs = CASES["transformer"].inputs(0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(*inputs).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        expected = module(*inputs)
    fsdp2.save_safetensors(module, tmp_path)
    reference.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    torch.testing.assert_close(reference(*inputs), expected)
    optimizer.step()
    with torch.no_grad():
        assert not torch.allclose(module(*inputs), expected)
    fsdp2.load_safetensors(module, tmp_path)
    torch.testing.assert_close(module(*inputs), expected)


@on_ranks(1, 2)
def test_extensions(rank, world, tmp_path):
    """Tensor subclasses are loaded and saved as the values they stand for."""
    module = of_halves(5, 7, 3)
    on_one_axis(module, fsdp2)
    values = values_of(linears(5, 7, 3)())
    values = {key: value for key, value in values.items() if "weight" in key}
    write(tmp_path / "model.safetensors", values, rank)
    fsdp2.load_safetensors(module, tmp_path)
    rows = torch.randn(2, 5)
    expected = rows @ values["0.weight"].t() @ values["1.weight"].t()
    torch.testing.assert_close(module(rows), expected, rtol=1e-3, atol=1e-3)
    fsdp2.save_safetensors(module, tmp_path / "again.safetensors", bucket_mb=TINY)
    written = load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(written[key], value) for key, value in values.items())
    zeros = {key: torch.zeros_like(value) for key, value in values.items()}
    fsdp2.broadcast_from_rank0(module, zeros if rank == 0 else None, bucket_mb=TINY)
    assert not module(rows).any()


# ---- memory and communication ----


@on_ranks(2, 4)
@pytest.mark.parametrize("meta", [False, True])
def test_memory_of_loading(rank, world, tmp_path, meta):
    """Nothing beside the shards: slices are copied from where the file is mapped."""
    values = values_of(linears(256, 384, 256)())
    write(tmp_path / "model.safetensors", values, rank)
    with torch.device("meta" if meta else "cpu"):
        module = linears(256, 384, 256)()
    on_one_axis(module, fsdp2)
    with LiveBytes(p for p in module.parameters() if not p.is_meta) as live:
        before = live.now
        fsdp2.load_safetensors(module, tmp_path)
    shards = sum(parameter.to_local().nbytes for parameter in module.parameters())
    mapped = max(value.nbytes for value in values.values())  # the file's bytes, counted like memory
    stays = 2 * shards if meta else 0  # counted as the flat buffer, and as storages of their own that lie in it
    assert live.peak - before <= stays + mapped + 4096
    assert_holds(module, values)


@on_ranks(2, 4)
@pytest.mark.parametrize("size", [None, 1])
def test_memory_of_saving(rank, world, tmp_path, size):
    """One bucket on every rank, however large the tensors and files are."""
    bucket = 64 << 10
    module = linears(256, 384, 256)()
    on_one_axis(module, fsdp2)
    with LiveBytes(module.parameters()) as live:
        before = live.now
        fsdp2.save_safetensors(module, tmp_path, size, bucket_mb=bucket / 2**20)
    assert bucket <= live.peak - before <= bucket + 4096


@on_ranks(2)
def test_loading_reads_slices_without_communication(rank, world, tmp_path):
    """Each rank copies no more than its shards; ranks exchange their outcomes and nothing else."""
    values = values_of(linears(64, 96, 64)())
    write(tmp_path / "model.safetensors", values, rank)
    module = linears(64, 96, 64)()
    on_one_axis(module, fsdp2)
    read, original = [], files.WeightFiles.read

    def reading(self, name, box):
        part = original(self, name, box)
        read.append(part.numel())
        return part

    tensors = mock.patch.multiple(dist, broadcast=None, all_reduce=None, all_gather_into_tensor=None)
    with mock.patch.object(files.WeightFiles, "read", reading), tensors:
        fsdp2.load_safetensors(module, tmp_path)
    assert sum(read) == sum(parameter.to_local().numel() for parameter in module.parameters())
    assert_holds(module, values)
