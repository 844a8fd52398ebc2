"""``save_safetensors``: earlier files survive what interrupts it; names, folders, and what files cannot hold."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import fsdp2
from fsdp2.weights import save
from tests.support import processes
from tests.support.parity import full, mesh_1d, mesh_2d, mesh_of
from tests.support.pool import on_ranks
from tests.weights.models import assert_holds, linears, load_new, once, plain, sharded, values_of


@on_ranks(1, 2)
@pytest.mark.parametrize("size", [None, 200])
@pytest.mark.parametrize("moment", ["header", "tensor", "late", "rename"])
def test_interrupted_saves(rank, world, tmp_path, size, moment):
    """Every rank learns of it, the earlier files are still there and complete, and nothing is left over."""
    module, values = sharded("mlp", meta=False), values_of(plain("mlp"))
    fsdp2.broadcast_from_rank0(module, values)
    fsdp2.save_safetensors(module, tmp_path, size)
    there = sorted(path.name for path in tmp_path.iterdir())
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
            fsdp2.save_safetensors(module, tmp_path, size)
    dist.barrier()
    load_new("mlp", tmp_path, values, meta=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    fsdp2.save_safetensors(module, tmp_path, size)
    load_new("mlp", tmp_path, values_of(plain("mlp"), seed=4), meta=True)


@on_ranks(1, 2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk(rank, world, tmp_path):
    """What is only noticed when buffers are written out, at the last moment, is noticed on every rank."""
    module = sharded("mlp", meta=False)
    full = mock.patch.object(save, "open", lambda *_: open("/dev/full", "wb"), create=True)  # noqa: SIM115
    for size in (None, 200):
        with full, pytest.raises(OSError, match="No space left"):
            fsdp2.save_safetensors(module, tmp_path, size)
    dist.barrier()  # rank 0 removes its temporary folder while the error leaves the call
    assert not list(tmp_path.iterdir())
    # Not the number of open files: a thread that waits long for another rank connects to the store.
    assert not [one for one in Path("/proc/self/fd").glob("*") if one.is_symlink() and os.readlink(one) == "/dev/full"]
    fsdp2.save_safetensors(module, tmp_path)


@on_ranks(2)
def test_saves_replace_earlier_ones(rank, world, tmp_path):
    """Whatever the number of files was: only the last save's are left, others' are not touched."""
    module = sharded("mlp", meta=False)
    if rank == 0:
        (tmp_path / "other.safetensors").write_bytes(b"mine")
        (tmp_path / "config.json").write_text("{}")
    for seed, size in enumerate([None, 200, 200, 400, 200, None]):
        values = values_of(plain("mlp"), seed)
        fsdp2.broadcast_from_rank0(module, values)
        fsdp2.save_safetensors(module, tmp_path, size)
        load_new("mlp", tmp_path, values, meta=True)
        names = {path.name for path in tmp_path.iterdir()} - {"other.safetensors", "config.json"}
        if size is None:
            assert names == {"model.safetensors"}
        else:
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            assert names == {"model.safetensors.index.json", *index["weight_map"].values()}
        dist.barrier()
    assert (tmp_path / "other.safetensors").read_bytes() == b"mine"


@on_ranks(2)
def test_names_of_files(rank, world, tmp_path):
    """A file of any name, split if asked for, in a folder that is made; the same path loads it."""
    module, values = sharded("mlp", meta=False), values_of(plain("mlp"))
    fsdp2.broadcast_from_rank0(module, values)
    for size in (None, 300, None):
        path = tmp_path / "deep" / "er" / "best.safetensors"
        fsdp2.save_safetensors(module, path, size)
        load_new("mlp", path, values, meta=True)
        assert path.exists() == (size is None)
    fsdp2.save_safetensors(module, str(tmp_path / "new"), max_shard_bytes=1)
    count = len(once(values))
    assert len(list((tmp_path / "new").glob(f"model-*-of-{count:05d}.safetensors"))) == count


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
def test_wrong_arguments(rank, world, tmp_path, options, kind, text):
    """Refused on every rank before a file is written."""
    with pytest.raises(kind, match=text):
        fsdp2.save_safetensors(sharded("mlp", meta=False), tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


class Scaled(nn.Linear):
    """Has extra state of a kind."""

    state = torch.arange(3.0)

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@on_ranks(1, 2)
def test_what_files_cannot_hold(rank, world, tmp_path):
    """Named, before anything is written: no values, a dtype, a state, a mesh."""
    path = tmp_path / "x"
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
def test_a_parameter_on_some_ranks(rank, world, tmp_path, name):
    """The others hold copies of it: those of the first rank's mesh are written, and once."""
    module = linears(4, 5, 4)()
    fsdp2.fully_shard(module[0], mesh=mesh_2d("dp", "tp")[name])
    fsdp2.fully_shard(module, mesh=mesh_1d())
    values = values_of(linears(4, 5, 4)())
    fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)
    assert_holds(module, values)
    fsdp2.save_safetensors(module, tmp_path)
    assert all(torch.equal(value, values[key]) for key, value in load_file(tmp_path / "model.safetensors").items())


@on_ranks(2)
def test_a_plain_model(rank, world, tmp_path):
    """Each process acts for itself; nobody else is waited for."""
    if rank == 0:
        module, values = plain("transformer"), values_of(plain("transformer"))
        module.load_state_dict(values)
        fsdp2.save_safetensors(module, tmp_path / "mine", 100)
        with torch.device("meta"):
            other = plain("transformer")
        fsdp2.load_safetensors(other, tmp_path / "mine")
        assert_holds(other, values)
        assert other.head.weight is other.embed.weight


# ---- ranks that hold different tensors ----


def owned(rank: int, world: int) -> nn.Module:
    """Return a model with a layer that all ranks hold and an expert for each rank, under a name of its own."""
    module = nn.ModuleDict({"dense": nn.Linear(3, 2), f"expert{rank}": nn.Linear(2, 4), "all": nn.Linear(2, 2)})
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(
                torch.arange(parameter.numel()).view_as(parameter) + (100 * rank if "expert" in name else 0)
            )
    own = mesh_of(world, 1, names=("owner", "shard"))["shard"]
    fsdp2.fully_shard(module[f"expert{rank}"], mesh=own)
    fsdp2.fully_shard(module["dense"], mesh=mesh_1d())
    fsdp2.fully_shard(module["all"], mesh=mesh_1d())
    return module


@on_ranks(2, 4)
@pytest.mark.parametrize("size", [None, 30])
def test_ranks_with_experts_of_their_own(rank, world, tmp_path, size):
    """Each rank has an expert under a name of its own. The files held rank 0's names alone, without an error, so that
    all other experts were lost."""
    module = owned(rank, world)
    before = {name: full(value) for name, value in module.state_dict().items()}
    fsdp2.save_safetensors(module, tmp_path, size, bucket_mb=40 / 2**20)
    written = {key: value for path in tmp_path.glob("*.safetensors") for key, value in load_file(path).items()}
    experts = {f"expert{r}.{kind}" for r in range(world) for kind in ("weight", "bias")}
    assert written.keys() == experts | {f"{name}.{kind}" for name in ("dense", "all") for kind in ("weight", "bias")}
    for r in range(world):
        assert written[f"expert{r}.weight"].flatten().tolist() == [100 * r + i for i in range(8)]
    for parameter in module.parameters():
        torch.nn.init.zeros_(parameter)
    assert fsdp2.load_safetensors(module, tmp_path, strict=False).missing_keys == []
    for name, value in module.state_dict().items():
        assert torch.equal(full(value), before[name]), name


@on_ranks(4)
def test_one_name_for_experts_of_several_ranks(rank, world, tmp_path):
    """Each pair of ranks calls its own expert "expert". The file held that of rank 0's mesh, without an error. Copies
    under one name that only differ by roundings are written once, as before."""
    for different in (True, False):
        torch.manual_seed(rank // 2 if different else 0)
        module = nn.ModuleDict({"expert": nn.Linear(8, 6), "dense": nn.Linear(3, 2)})
        with torch.no_grad():
            module["expert"].weight.mul_(1 + 1e-3 * (rank // 2))
        fsdp2.fully_shard(module["expert"], mesh=mesh_of(2, 2, names=("owner", "shard"))["shard"])
        fsdp2.fully_shard(module["dense"], mesh=mesh_1d())
        if different:
            error = r"different tensors under the name expert.weight; got the mesh of rank 0 with .* rank 2"
            with pytest.raises(RuntimeError, match=error):
                fsdp2.save_safetensors(module, tmp_path / "x")
        else:
            fsdp2.save_safetensors(module, tmp_path / "x")
    written = load_file(tmp_path / "x" / "model.safetensors")
    assert torch.equal(written["expert.weight"], full(module["expert"].weight)) == (rank < 2)


@on_ranks(4)
@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("change", [0.0, 1e-5, 2.0])
def test_values_that_ranks_have_for_themselves(rank, world, tmp_path, ignored, change):
    """Experts that began alike were one tensor, without a word, and so were plain parameters however they differed."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"expert": nn.Linear(8, 6), "dense": nn.Linear(3, 2), "norm": nn.BatchNorm1d(2)})
    module["norm"].running_mean.fill_(rank)  # each rank's own by design
    nn.init.constant_(module["expert"].bias, float("nan"))
    with torch.no_grad():
        module["expert"].weight[5:].mul_(1 + change * (rank // 2))  # beyond the first elements
        module["expert"].weight[0].mul_(1 + (change > 1) * (rank // 2))
    if not ignored:
        fsdp2.fully_shard(module["expert"], mesh=mesh_of(2, 2, names=("owner", "shard"))["shard"])
    fsdp2.fully_shard(module["dense"], mesh=mesh_1d())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if change > 1:
            with pytest.raises(RuntimeError, match="different tensors under the name expert.weight"):
                fsdp2.save_safetensors(module, tmp_path)
            if not ignored:
                return
            fsdp2.sync_module_states(module)
        fsdp2.save_safetensors(module, tmp_path)
    told = [str(one.message) for one in seen if "save_safetensors" in str(one.message)]
    assert len(told) == (change == 1e-5 and rank == 0)
    assert all("the copies of ['expert.weight'] on different ranks are not equal" in text for text in told)
    written = load_file(tmp_path / "model.safetensors")["expert.weight"]
    assert torch.equal(written, full(module["expert"].weight)) == (rank < 2 or change != 1e-5)


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2])
def test_values_of_other_dtypes_that_ranks_have_for_themselves(rank, world, tmp_path, dtype):
    """Also complex numbers that differ in their imaginary parts: rank 0's were written without a word."""
    own = torch.ones(4).to(dtype) if dtype.is_floating_point else torch.complex(torch.ones(4), torch.ones(4))
    module = nn.ModuleDict({"own": nn.ParameterDict({"weight": own}), "dense": nn.Linear(3, 2)})
    fsdp2.fully_shard(module["dense"], mesh=mesh_1d())
    fsdp2.save_safetensors(module, tmp_path)
    if rank == 1:
        own.copy_(own.conj() if dtype.is_complex else -own.float())
    with pytest.raises(RuntimeError, match="different tensors under the name own.weight"):
        fsdp2.save_safetensors(module, tmp_path)


@on_ranks(2)
def test_where_that_warning_is_an_error(rank, world, tmp_path):
    """Rank 0, which alone showed it, raised it and left the other waiting in the next collective."""
    module = nn.ModuleDict({"own": nn.Linear(8, 6), "dense": nn.Linear(3, 2)})
    nn.init.constant_(module["own"].weight, 1 + 1e-5 * rank)
    fsdp2.fully_shard(module["dense"], mesh=mesh_1d())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"the copies of \['own.weight'\] on different ranks are not equal"):
            fsdp2.save_safetensors(module, tmp_path)
        warnings.simplefilter("ignore")
        fsdp2.save_safetensors(module, tmp_path)


@on_ranks(2)
def test_ranks_that_disagree(rank, world, tmp_path):
    """One name with different shapes, or names in another order: ranks would add up each other's bytes."""
    module = nn.ModuleDict({"dense": nn.Linear(3, 2), "extra": nn.Linear(2, 2 + rank)})
    fsdp2.fully_shard(module["dense"], mesh=mesh_1d())
    with pytest.raises(RuntimeError, match=r"ranks differ in extra.weight; got .*\(3, 2\).* on rank 1"):
        fsdp2.save_safetensors(module, tmp_path / "x")
    assert not (tmp_path / "x").exists()
    layers = {"dense": nn.Linear(3, 2), "other": nn.Linear(2, 5)}
    module = nn.ModuleDict(dict(reversed(layers.items())) if rank else layers)
    for layer in layers.values():
        fsdp2.fully_shard(layer, mesh=mesh_1d())
    fsdp2.save_safetensors(module, tmp_path, bucket_mb=(1 + rank) * 32 / 2**20, max_shard_bytes=40 + 40 * rank)
    written = {key: value for path in tmp_path.glob("*.safetensors") for key, value in load_file(path).items()}
    for name, value in sorted(module.state_dict().items()):
        assert torch.equal(full(value), written[name]), name


# ---- killed processes ----


@on_ranks(1)
def test_killed_while_old_files_are_removed(rank, world, tmp_path):
    """A split checkpoint was replaced by a single file, and the process was killed while the old files went, in any
    order: an index stayed, which is preferred, and named files that were gone. The folder could not be loaded."""
    module, old, new = sharded("mlp", meta=False), values_of(plain("mlp")), values_of(plain("mlp"), seed=4)
    unlink = Path.unlink
    for allowed in range(8):
        fsdp2.broadcast_from_rank0(module, old)
        fsdp2.save_safetensors(module, tmp_path, 200)
        fsdp2.broadcast_from_rank0(module, new)
        calls = iter(range(1000))

        def stop(path, *args, allowed=allowed, calls=calls, **kwargs):
            if next(calls) == allowed:
                raise KeyboardInterrupt
            unlink(path, *args, **kwargs)

        with mock.patch.object(Path, "unlink", stop), contextlib.suppress(KeyboardInterrupt):
            fsdp2.save_safetensors(module, tmp_path)
        load_new("mlp", tmp_path, old if allowed == 0 else new, meta=True)
        for path in tmp_path.iterdir():
            unlink(path)


def killed_save(folder: str) -> None:
    """Save a plain model and be killed in the middle."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with mock.patch.object(save, "write_tensor", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        fsdp2.save_safetensors(module, folder)


def test_folders_of_killed_saves(tmp_path):
    """A killed process cannot remove its temporary folder, which is as large as the model. Restarted jobs that were
    killed again filled the disk with them. The next save removes those whose process is gone, and no other."""
    process = processes.start(killed_save, str(tmp_path), log=str(tmp_path / "log"))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.glob(".model-*.partial")
    (tmp_path / ".other-1.partial").mkdir()
    (tmp_path / ".model-1.partial").mkdir()  # without a lock: its process may just have begun
    module = nn.Linear(3, 3)

    def inner(done: int, total: int) -> None:
        """Save the same files while this process is at it already."""
        assert not left.exists()
        fsdp2.save_safetensors(nn.Linear(2, 2), tmp_path)

    fsdp2.save_safetensors(module, tmp_path, progress=inner)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["weight"], module.weight)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("log", "model.safetensors", ".other-1.partial", ".model-1.partial")
    }


# ---- names ----


def test_only_pieces_of_this_model_are_removed(tmp_path):
    """An index may name any file in its folder. The save that replaces it removes pieces of a model of this name."""
    values = {"weight": torch.ones(3, 3), "bias": torch.ones(3)}
    mine, others = "model-00001-of-00002.safetensors", "model-lora.safetensors"
    for name in (mine, others, "precious.safetensors"):
        save_file(values, tmp_path / name)
    weight_map = {"weight": mine, "bias": others, "more": "precious.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    fsdp2.save_safetensors(nn.Linear(3, 3), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [others, "model.safetensors", "precious.safetensors"]


def test_names_that_files_cannot_have(tmp_path):
    """A tensor named like the header's own entry made a file that nobody can read; a path of the suffix alone made a
    folder of that name; two tensors of one name in the plain model overwrote each other in the header."""
    module = nn.Module()
    module.register_parameter("__metadata__", nn.Parameter(torch.ones(2)))
    with pytest.raises(NotImplementedError, match="a tensor is named __metadata__"):
        fsdp2.save_safetensors(module, tmp_path / "x")
    with pytest.raises(ValueError, match=r"'.*\.safetensors' names no file"):
        fsdp2.save_safetensors(nn.Linear(2, 2), tmp_path / ".safetensors")
    module = nn.Linear(2, 2)
    module._orig_mod = nn.Linear(2, 3)
    with pytest.raises(RuntimeError, match="two tensors of the module are weight without the prefixes"):
        fsdp2.save_safetensors(module, tmp_path / "x")
    assert not list(tmp_path.iterdir())
