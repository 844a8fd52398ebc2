"""``broadcast_from_rank0`` and what does not fit: all ranks raise, none hangs, nothing is changed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from tests.support.cases import CASES
from tests.support.parity import mesh_1d
from tests.support.pool import on_ranks
from tests.weights.models import assert_holds, assert_refused, plain, sharded, values_of

TINY = 100 / 2**20


def broken(values, how):
    """Return values with something wrong about them."""
    values = dict(values)
    if how == "missing":
        del values["2.weight"]
    elif how == "unexpected":
        values["3.weight"] = torch.zeros(3)
    elif how == "shape":
        values["2.weight"] = values["2.weight"].t()[:3]
    elif how == "kind":
        values["2.weight"] = values["2.weight"].to(torch.complex64)
    elif how == "no_tensor":
        values["2.weight"] = [1.0]
    elif how == "twice":  # the last was taken without a word
        values["_orig_mod.2.weight"] = values["2.weight"] + 1
    elif how == "number":
        values[2] = values["2.weight"]
    elif how == "sparse":
        values["2.weight"] = values["2.weight"].to_sparse()
    elif how == "quantized":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer versions of torch will lack them
            values["2.weight"] = torch.quantize_per_tensor(values["2.weight"], 0.1, 0, torch.qint8)
    elif how == "meta":
        values["2.weight"] = values["2.weight"].to("meta")
    else:
        values = None
    return values


@on_ranks(1, 2, 4)
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("missing", RuntimeError, "Missing key.*2.weight"),
        ("unexpected", RuntimeError, "Unexpected key.*3.weight"),
        ("shape", RuntimeError, r"size mismatch for 2.weight: got \(3, 8\), expected \(8, 8\)"),
        ("kind", RuntimeError, "dtype of 2.weight: got torch.complex64, expected torch.float32"),
        ("no_tensor", TypeError, "2.weight of rank 0's state_dict must be a full plain tensor, got list"),
        ("meta", TypeError, "2.weight of rank 0's state_dict must be a full plain tensor, got Tensor on meta"),
        ("number", TypeError, "rank 0's state_dict has the key 2; expected names"),
        (
            "sparse",
            TypeError,
            "2.weight of rank 0's state_dict must be .*, got Tensor on cpu of layout torch.sparse_coo",
        ),
        (
            "quantized",
            TypeError,
            "2.weight of rank 0's state_dict must be .*, got Tensor on cpu quantized as torch.qint8",
        ),
        ("twice", ValueError, "rank 0's state_dict holds both 2.weight and _orig_mod.2.weight"),
        ("nothing", TypeError, "must map names to tensors, got NoneType"),
    ],
)
def test_every_rank_learns_what_is_wrong(rank, world, meta, how, kind, text):
    """Only rank 0 can see it, and nothing is loaded anywhere."""
    values = broken(values_of(plain("mlp")), how)
    assert_refused(kind, text, sharded("mlp", meta=meta), values, rank)


@on_ranks(2)
def test_what_is_wrong_on_another_rank(rank, world):
    """A rank whose module differs is named."""
    module = sharded("mlp", meta=False)
    if rank == 1:
        module.extra = nn.Linear(2, 2)
    assert_refused(RuntimeError, "on rank 1: .*Missing key.*extra.weight", module, values_of(plain("mlp")), rank)


@on_ranks(2)
def test_not_strict(rank, world):
    """What does not fit is passed over and returned; without a value parameters stay what and where they are."""
    module, values = sharded("uneven", meta=True), values_of(plain("uneven"))
    given = {**values, "more": "anything"}
    del given["2.weight"]
    loaded = fsdp2.broadcast_from_rank0(module, given if rank == 0 else None, strict=False)
    assert loaded.missing_keys == ["2.weight"] and loaded.unexpected_keys == ["more"]
    assert [name for name, parameter in module.named_parameters() if parameter.is_meta] == ["2.weight"]
    assert torch.equal(module[0].weight.full_tensor(), values["0.weight"])
    assert_refused(RuntimeError, "size mismatch", module, {"0.bias": torch.zeros(2)}, rank, strict=False)
    with pytest.raises(RuntimeError, match="still on meta device.*2.weight"):
        module(torch.zeros(1, 3))
    fsdp2.broadcast_from_rank0(module, {"2.weight": values["2.weight"]} if rank == 0 else None, strict=False)
    assert_holds(module, values)
    module(torch.zeros(1, 3)).sum().backward()


@on_ranks(2)
@pytest.mark.parametrize("names", [("0.weight", "1.weight"), ("1.weight", "0.weight")])
@pytest.mark.parametrize("strict", [True, False])
def test_one_of_two_tied_values_has_another_shape(rank, world, names, strict):
    """It was passed over if it was the first; if it was the last, the right one was named as wrong, too."""
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    fsdp2.fully_shard(module, mesh=mesh_1d())
    wrong, right = names
    values = {wrong: torch.zeros(2, 2), right: torch.ones(3, 3)}
    text = rf"size mismatch for {wrong}: got \(2, 2\), expected \(3, 3\)\n  nothing was loaded"
    assert_refused(RuntimeError, text, module, values, rank, strict=strict)


@on_ranks(1, 2)
@pytest.mark.parametrize("size", [0, -1, True, "big"])
def test_wrong_bucket(rank, world, size):
    """The size of the bucket is checked on rank 0, whose counts."""
    assert_refused(ValueError, "bucket_mb", sharded("mlp", meta=False), values_of(plain("mlp")), rank, bucket_mb=size)


@on_ranks(2)
def test_not_a_module(rank, world):
    """The first argument is the module."""
    with pytest.raises(TypeError, match="expected an nn.Module, got dict"):
        fsdp2.broadcast_from_rank0({}, {})


@on_ranks(2)
def test_inside_a_forward(rank, world):
    """Refused, and the forward can go on."""
    module, values = sharded("mlp", meta=False), values_of(plain("mlp"))
    handle = module[2].register_forward_hook(
        lambda *_: assert_refused(RuntimeError, "between iterations", module, values, rank)
    )
    loss = module(*CASES["mlp"].inputs(0)).sum()
    handle.remove()
    handle = module[2].weight.register_post_accumulate_grad_hook(
        lambda _: assert_refused(RuntimeError, "between iterations", module, values, rank)
    )
    loss.backward()
    handle.remove()  # it refers to the module
    fsdp2.broadcast_from_rank0(module, values)
    assert_holds(module, values)


@on_ranks(2)
def test_while_full_parameters_are_shown(rank, world, tmp_path):
    """Inside ``summon_full_params`` nothing is loaded, synchronised or saved behind its back, on one rank or all."""
    module, values = sharded("mlp", meta=False), values_of(plain("mlp"))
    with fsdp2.summon_full_params(module, writeback=False):
        for call in (
            lambda: fsdp2.broadcast_from_rank0(module, values if rank == 0 else None),
            lambda: fsdp2.sync_module_states(module),
            lambda: fsdp2.save_safetensors(module, tmp_path),
            lambda: fsdp2.load_safetensors(module, tmp_path),
        ):
            with pytest.raises(RuntimeError, match="summon_full_params shows its parameters"):
                call()
    assert not list(tmp_path.iterdir())
    fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)
    assert_holds(module, values)


class Unsendable(nn.Linear):
    """Has extra state that cannot be pickled."""

    def get_extra_state(self):
        return {"function": lambda: None}

    def set_extra_state(self, state):
        raise AssertionError


@on_ranks(2)
def test_extra_state_that_cannot_travel(rank, world):
    """Rank 0 notices before the others wait."""
    module = Unsendable(2, 2)
    fsdp2.fully_shard(module, mesh=mesh_1d())
    with pytest.raises(RuntimeError, match="on rank 0: .*pickle"):
        fsdp2.broadcast_from_rank0(module, Unsendable(2, 2).state_dict() if rank == 0 else None)


class Refusing(nn.Linear):
    """Cannot give or take its extra state on rank 1."""

    def get_extra_state(self):
        if dist.get_rank() == 1:
            raise KeyError("no state")
        return torch.ones(2)

    def set_extra_state(self, state):
        if dist.get_rank() == 1:
            raise LookupError("no place")


@on_ranks(2)
def test_extra_state_that_a_module_refuses(rank, world, tmp_path):
    """The error names it, on every rank: it was "on rank 1: KeyError: 'no state'" alone."""
    module = fsdp2.fully_shard(nn.Sequential(Refusing(2, 2)), mesh=mesh_1d())
    with pytest.raises(
        RuntimeError, match=r"on rank 1: save_safetensors: 0._extra_state: Refusing.get_extra_state raised"
    ):
        fsdp2.save_safetensors(module, tmp_path)
    values = {**nn.Sequential(nn.Linear(2, 2)).state_dict(), "0._extra_state": torch.ones(2)}
    with pytest.raises(RuntimeError, match=r"on rank 1: .*partly loaded; got 0._extra_state: LookupError: no place"):
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else None)


@on_ranks(2)
def test_a_buffer_that_cannot_be_written(rank, world):
    """The error names it: its elements share memory."""
    module = nn.Sequential(nn.BatchNorm1d(3))
    module[0].running_mean = torch.zeros(1).expand(3)
    with pytest.raises(RuntimeError, match=r"partly loaded; got 0.running_mean: RuntimeError: unsupported operation"):
        fsdp2.sync_module_states(module)


class Failing(dict):
    """Gives one tensor to be looked at, but not its values."""

    def __getitem__(self, key):
        self.looks += key == "2.weight"
        if key == "2.weight" and self.looks > 1:
            raise OSError(f"{key} cannot be read")
        return super().__getitem__(key)


@on_ranks(1, 2)
def test_reading_fails_halfway(rank, world):
    """Nobody hangs, and everybody is told that the module is partly loaded."""
    module = sharded("mlp", meta=True)
    values = Failing(values_of(plain("mlp")))
    values.looks = 0
    with pytest.raises(RuntimeError, match="partly loaded; got 2.weight: OSError: 2.weight cannot be read"):
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else None, bucket_mb=TINY)
    fsdp2.broadcast_from_rank0(module, values_of(plain("mlp")))
    assert_holds(module, values_of(plain("mlp")))


@on_ranks(2)
@pytest.mark.parametrize("fails", ["to read", "to show progress"])
def test_what_an_error_halfway_leaves(rank, world, fails):
    """Rank 0 filled no bucket after its error, and the other ranks wrote what was there: pieces of other tensors."""

    def progress(done, total):
        raise OSError("no screen")

    values = new = values_of(plain("mlp"))
    if fails == "to read":
        values, progress = Failing(new), False
        values.looks = 0
    module, before, loaded = (sharded("mlp", meta=False, values=given) for given in (None, None, new))
    before.load_state_dict(module.state_dict())
    with pytest.raises(RuntimeError, match="partly loaded"):
        fsdp2.broadcast_from_rank0(module, values if rank == 0 else None, bucket_mb=TINY, progress=progress)
    for (name, left), *both in zip(module.named_parameters(), before.parameters(), loaded.parameters(), strict=True):
        old, made = (one.to_local() for one in both)
        if fails != "to read" or name != "2.weight":
            assert torch.all((left.to_local() == old) | (left.to_local() == made)), name
            assert rank == 0 or torch.equal(left.to_local(), made), name
