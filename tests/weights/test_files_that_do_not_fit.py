"""``load_safetensors`` and what is wrong with files: every rank learns of it, and nothing is changed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import fsdp2
from tests.support.pool import on_ranks
from tests.weights.models import assert_holds, load_new, once, plain, sharded, values_of, write
from tests.weights.test_broadcast_refuses import broken


def spoil(folder, how, values):
    """Write files with something wrong about them and return what to load."""
    path = folder / "model.safetensors"
    values = dict(once(values))
    if how in ("missing", "unexpected", "shape", "kind"):
        values = {key: value.contiguous() for key, value in broken(values, how).items()}
    save_file(values, path)
    data = path.read_bytes()
    if how == "truncated":
        path.write_bytes(data[:-5])
    elif how == "header":
        path.write_bytes(data[:30])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "garbage":
        path.write_bytes(b"\x00" * 100)
    elif how == "no_file":
        path.unlink()
    elif how == "twice":
        # Ranks took either value, in the order of a set, which is random per process.
        save_file({**once(values), "_orig_mod.2.weight": values["2.weight"] + 1}, path)
    elif how in ("outside", "absolute", "index_twice"):
        # An index from the network could name any file that the process may read.
        (folder.parent / "secret.safetensors").write_bytes(data)
        name = {"outside": "../secret.safetensors", "absolute": str(folder.parent / "secret.safetensors")}.get(how)
        names = dict.fromkeys(values, name or "model.safetensors")
        if how == "index_twice":
            names["_orig_mod.2.weight"] = "model.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    elif how in ("index", "index_file", "index_folder", "index_key", "no_index"):
        names = {key: "model.safetensors" for key in values}
        if how in ("index_file", "index_folder"):
            names["2.weight"] = "other.safetensors"
        if how == "index_folder":
            (folder / "other.safetensors").mkdir()
        elif how == "index_key":
            names["9.weight"] = "model.safetensors"
        text = json.dumps({"weight_map": names} if how != "no_index" else {"weights": names})
        (folder / "model.safetensors.index.json").write_text(text if how != "index" else text[:-20])
    elif how == "ambiguous":
        path.rename(folder / "a.safetensors")
        shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    elif how == "no_folder":
        return folder / "nowhere"
    return folder if how != "no_file" else path


WRONG = [
    ("missing", RuntimeError, "Missing key.*'2.weight'"),
    ("unexpected", RuntimeError, "Unexpected key.*'3.weight'"),
    ("shape", RuntimeError, r"size mismatch for 2.weight: got \(3, 8\), expected \(8, 8\)"),
    ("kind", RuntimeError, "dtype of 2.weight: got torch.complex64"),
    ("truncated", ValueError, "model.safetensors is not a complete safetensors file"),
    ("header", ValueError, "model.safetensors is not a complete safetensors file"),
    ("empty", ValueError, "model.safetensors is not a complete safetensors file"),
    ("garbage", ValueError, "model.safetensors is not a complete safetensors file"),
    ("no_file", FileNotFoundError, "model.safetensors does not exist"),
    ("no_folder", FileNotFoundError, "nowhere does not exist"),
    ("index", ValueError, "index.json is not an index of safetensors files"),
    ("no_index", ValueError, "index.json is not an index of safetensors files"),
    ("index_file", FileNotFoundError, "other.safetensors is missing; its index names it"),
    ("index_folder", FileNotFoundError, "other.safetensors is a folder, not a file; its index names it"),
    ("index_key", ValueError, "model.safetensors lacks 9.weight"),
    ("twice", ValueError, "model.safetensors holds both 2.weight and _orig_mod.2.weight|holds both _orig_mod.2.weight"),
    ("outside", ValueError, r"index.json names a file outside its folder; got '../secret.safetensors'"),
    ("absolute", ValueError, r"index.json names a file outside its folder; got '/.*secret.safetensors'"),
    ("index_twice", ValueError, "index.json holds both 2.weight and _orig_mod.2.weight"),
    ("ambiguous", ValueError, "has several candidates; got a.safetensors, b.safetensors"),
]


@on_ranks(1, 2)
@pytest.mark.parametrize(("how", "kind", "text"), WRONG)
@pytest.mark.parametrize("who", ["all", "last"])
def test_every_rank_learns_what_is_wrong(rank, world, tmp_path, how, kind, text, who):
    """Whoever sees it; and nothing is loaded anywhere."""
    values = values_of(plain("mlp"))
    spoiled = tmp_path / "spoiled"
    if rank == 0:
        write_to = tmp_path / "good"
        write_to.mkdir()
        spoiled.mkdir()
        save_file(once(values), write_to / "model.safetensors")
        path = spoil(spoiled, how, values)
    box = [str(path) if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    sees_it = who == "all" or rank == world - 1
    for meta in (False, True):
        module = sharded("mlp", meta=meta)
        before = None if meta else {key: value.full_tensor() for key, value in module.state_dict().items()}
        named = f"on rank {world - 1}: .*" if who == "last" and world > 1 else ""
        with pytest.raises(kind, match=named + text):
            fsdp2.load_safetensors(module, box[0] if sees_it else tmp_path / "good")
        for key, value in module.state_dict().items():
            assert value.is_meta if meta else torch.equal(value.full_tensor(), before[key])
    fsdp2.load_safetensors(module, tmp_path / "good")
    assert_holds(module, values)


@on_ranks(2)
def test_a_head_that_is_no_longer_tied(rank, world, tmp_path):
    """accelerate's ``init_empty_weights`` parts tied weights, and files have them once. The error named the key, and
    advised to ignore it; it says what helps, which is done. A key that no other weight is like gets no such advice."""
    build = lambda: nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    if rank == 0:
        save_file({"0.weight": torch.ones(8, 4)}, tmp_path / "model.safetensors")
    box = [str(tmp_path)]
    dist.broadcast_object_list(box, src=0)
    for tied in (False, True):
        with torch.device("meta"):
            module = build()
        if tied:
            module[1].weight = module[0].weight
        fsdp2.fully_shard(module)
        if tied:
            fsdp2.load_safetensors(module, box[0])
            assert module[1].weight is module[0].weight and module[1].weight.full_tensor().sum() == 32
        else:
            with pytest.raises(RuntimeError, match=r"Missing key\(s\): '1.weight'(.|\n)*tie them before fully_shard"):
                fsdp2.load_safetensors(module, box[0])
    other = fsdp2.fully_shard(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 3, bias=False)))
    with pytest.raises(RuntimeError, match="Missing key") as error:
        fsdp2.load_safetensors(other, box[0])
    assert "tie them" not in str(error.value)


@on_ranks(2)
def test_not_strict(rank, world, tmp_path):
    """Missing keys stay what they are, unexpected ones are passed over, shapes must fit."""
    values = values_of(plain("mlp"))
    some = {key: value for key, value in values.items() if key != "2.weight"}
    write(tmp_path / "model.safetensors", {**some, "more": torch.zeros(1)}, rank)
    module = sharded("mlp", meta=True)
    loaded = fsdp2.load_safetensors(module, tmp_path, strict=False)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["2.weight"], ["more"])
    assert [name for name, value in module.named_parameters() if value.is_meta] == ["2.weight"]
    write(tmp_path / "model.safetensors", {"2.weight": torch.zeros(3)}, rank)
    with pytest.raises(RuntimeError, match="size mismatch for 2.weight"):
        fsdp2.load_safetensors(module, tmp_path, strict=False)


@on_ranks(2)
def test_ties_of_different_values(rank, world, tmp_path):
    """A file with two values for one parameter is refused, one with the same twice is not."""
    values = values_of(plain("transformer"))
    values["head.weight"] = values["embed.weight"].clone()
    write(tmp_path / "model.safetensors", values, rank)
    load_new("transformer", tmp_path, values, meta=True)
    values["head.weight"] += 1
    write(tmp_path / "model.safetensors", values, rank)
    with pytest.raises(RuntimeError, match="embed.weight and head.weight are one parameter"):
        fsdp2.load_safetensors(sharded("transformer", meta=True), tmp_path)


@on_ranks(1)
def test_links_are_followed(rank, world, tmp_path):
    """The Hugging Face cache keeps files elsewhere, with links to them beside the index."""
    values = values_of(plain("mlp"))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "blobs").mkdir()
    save_file(once(values), tmp_path / "blobs" / "abc")
    (tmp_path / "snapshot" / "model-00001-of-00001.safetensors").symlink_to("../blobs/abc")
    names = dict.fromkeys(once(values), "model-00001-of-00001.safetensors")
    (tmp_path / "blobs" / "def").write_text(json.dumps({"weight_map": names}))
    (tmp_path / "snapshot" / "model.safetensors.index.json").symlink_to("../blobs/def")
    load_new("mlp", tmp_path / "snapshot", values, meta=True)


@on_ranks(2)
def test_a_path_that_is_none(rank, world, tmp_path):
    """A configuration without a path, on one rank: pathlib's error named neither the function nor the argument."""
    module, path = sharded("mlp", meta=False), str(tmp_path) if rank else None
    for function in (fsdp2.save_safetensors, fsdp2.load_safetensors):
        with pytest.raises(TypeError, match=f"{function.__name__}: path must be a str or os.PathLike, got None"):
            function(module, path)
