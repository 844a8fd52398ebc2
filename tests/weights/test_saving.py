"""``save_safetensors``: earlier files survive what interrupts it; names, folders, and what files cannot hold."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import fsdp2
from fsdp2.weights import save
from tests.support.parity import mesh_1d, mesh_2d
from tests.support.pool import on_ranks
from tests.weights.models import (
    assert_holds,
    linears,
    load_new,
    once,
    plain,
    sharded,
    shared_folder,
    values_of,
)


@on_ranks(1, 2)
@pytest.mark.parametrize("size", [None, 200])
@pytest.mark.parametrize("moment", ["header", "tensor", "late", "rename"])
def test_interrupted_saves(rank, world, size, moment):
    """Every rank learns of it, the earlier files are still there and complete, and nothing is left over."""

    with shared_folder() as folder:
        module, values = sharded("mlp", meta=False), values_of(plain("mlp"))
        fsdp2.broadcast_from_rank0(module, values)
        fsdp2.save_safetensors(module, folder, size)
        there = sorted(path.name for path in folder.iterdir())
        fsdp2.broadcast_from_rank0(module, values_of(plain("mlp"), seed=4))
        calls = iter(range(1000))
        name = {"header": "write_header", "rename": "os.replace"}.get(moment, "write_tensor")
        original = {"header": save.write_header, "rename": save.os.replace}.get(moment, save.write_tensor)

        def fail(*args):
            if next(calls) >= (0 if moment in ("header", "tensor") else 3 if moment == "late" else bool(size)):
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(*args)

        with mock.patch.object(save, name, fail) if moment != "rename" else mock.patch.object(save.os, "replace", fail):
            with pytest.raises(OSError, match="No space left"):
                fsdp2.save_safetensors(module, folder, size)
        dist.barrier()
        load_new("mlp", folder, values, meta=True)
        assert sorted(path.name for path in folder.iterdir()) == there
        fsdp2.save_safetensors(module, folder, size)
        load_new("mlp", folder, values_of(plain("mlp"), seed=4), meta=True)


@on_ranks(1, 2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk(rank, world):
    """What is only noticed when buffers are written out, at the last moment, is noticed on every rank."""
    with shared_folder() as folder:
        module = sharded("mlp", meta=False)
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        full = mock.patch.object(save, "open", lambda *_: open("/dev/full", "wb"), create=True)  # noqa: SIM115
        for size in (None, 200):
            with full, pytest.raises(OSError, match="No space left"):
                fsdp2.save_safetensors(module, folder, size)
        dist.barrier()  # rank 0 removes its temporary folder while the error leaves the call
        assert not list(folder.iterdir())
        assert not before or len(os.listdir("/proc/self/fd")) == before
        fsdp2.save_safetensors(module, folder)


@on_ranks(2)
def test_saves_replace_earlier_ones(rank, world):
    """Whatever the number of files was: only the last save's are left, others' are not touched."""

    with shared_folder() as folder:
        module = sharded("mlp", meta=False)
        if rank == 0:
            (folder / "other.safetensors").write_bytes(b"mine")
            (folder / "config.json").write_text("{}")
        for seed, size in enumerate([None, 200, 200, 400, 200, None]):
            values = values_of(plain("mlp"), seed)
            fsdp2.broadcast_from_rank0(module, values)
            fsdp2.save_safetensors(module, folder, size)
            load_new("mlp", folder, values, meta=True)
            names = {path.name for path in folder.iterdir()} - {"other.safetensors", "config.json"}
            if size is None:
                assert names == {"model.safetensors"}
            else:
                index = json.loads((folder / "model.safetensors.index.json").read_text())
                assert names == {"model.safetensors.index.json", *index["weight_map"].values()}
            dist.barrier()
        assert (folder / "other.safetensors").read_bytes() == b"mine"


@on_ranks(2)
def test_names_of_files(rank, world):
    """A file of any name, split if asked for, in a folder that is made; the same path loads it."""

    with shared_folder() as folder:
        module, values = sharded("mlp", meta=False), values_of(plain("mlp"))
        fsdp2.broadcast_from_rank0(module, values)
        for size in (None, 300, None):
            path = folder / "deep" / "er" / "best.safetensors"
            fsdp2.save_safetensors(module, path, size)
            load_new("mlp", path, values, meta=True)
            assert path.exists() == (size is None)
        fsdp2.save_safetensors(module, str(folder / "new"), max_shard_bytes=1)
        count = len(once(values))
        assert len(list((folder / "new").glob(f"model-*-of-{count:05d}.safetensors"))) == count


@on_ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"max_shard_bytes": 0}, ValueError, "max_shard_bytes"),
        ({"max_shard_bytes": "5GB"}, ValueError, "max_shard_bytes"),
        ({"dtype": torch.int8}, TypeError, "dtype must be a floating-point"),
        ({"dtype": "bfloat16"}, TypeError, "dtype must be a floating-point"),
        ({"bucket_mb": 0}, ValueError, "bucket_mb"),
    ],
)
def test_wrong_arguments(rank, world, options, kind, text):
    """Refused on every rank before a file is written."""

    with shared_folder() as folder:
        with pytest.raises(kind, match=text):
            fsdp2.save_safetensors(sharded("mlp", meta=False), folder / "x", **options)
        assert not (folder / "x").exists()


class Scaled(nn.Linear):
    """Has extra state of a kind."""

    state = torch.arange(3.0)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@on_ranks(1, 2)
def test_what_files_cannot_hold(rank, world):
    """Named, before anything is written: no values, a dtype, a state, a mesh."""

    with shared_folder() as folder:
        path = folder / "x"
        with pytest.raises(RuntimeError, match="0.weight has no values; got the meta device"):
            fsdp2.save_safetensors(sharded("mlp", meta=True), path)
        module = nn.Linear(2, 2).to(torch.complex128)
        fsdp2.fully_shard(module, mesh=mesh_1d())
        with pytest.raises(NotImplementedError, match="weight has the dtype torch.complex128"):
            fsdp2.save_safetensors(module, path)
        module = nn.Sequential(Scaled(2, 2))
        fsdp2.fully_shard(module, mesh=mesh_1d())
        module[0].state = {"no": "tensor"}
        with pytest.raises(NotImplementedError, match="0._extra_state is extra state of Scaled; got a dict"):
            fsdp2.save_safetensors(module, path)
        assert not path.exists()
        module[0].state = torch.tensor([1.0, 2.0])
        fsdp2.save_safetensors(module, path)
        module[0].state = None
        fsdp2.load_safetensors(module, path)
        assert module[0].state.tolist() == [1.0, 2.0]


@on_ranks(4)
@pytest.mark.parametrize("name", ["dp", "tp"])
def test_a_parameter_on_some_ranks(rank, world, name):
    """The others hold copies of it: those of the first rank's mesh are written, and once."""

    with shared_folder() as folder:
        module = linears(4, 5, 4)()
        fsdp2.fully_shard(module[0], mesh=mesh_2d("dp", "tp")[name])
        fsdp2.fully_shard(module, mesh=mesh_1d())
        values = values_of(linears(4, 5, 4)())
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)
        assert_holds(module, values)
        fsdp2.save_safetensors(module, folder)
        assert all(torch.equal(value, values[key]) for key, value in load_file(folder / "model.safetensors").items())


@on_ranks(2)
def test_a_plain_model(rank, world):
    """Each process acts for itself; nobody else is waited for."""

    with shared_folder() as folder:
        if rank == 0:
            module, values = plain("transformer"), values_of(plain("transformer"))
            module.load_state_dict(values)
            fsdp2.save_safetensors(module, folder / "mine", 100)
            with torch.device("meta"):
                other = plain("transformer")
            fsdp2.load_safetensors(other, folder / "mine")
            assert_holds(other, values)
            assert other.head.weight is other.embed.weight
