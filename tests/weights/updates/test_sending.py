"""``WeightSender``: every tensor arrives whole, by its engine's name, bit for bit, in buckets of the size asked for."""

from __future__ import annotations

import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from fsdp2 import WeightReceiver, WeightSender
from tests.support import api
from tests.support.composition import composes
from tests.support.parity import full, mesh_1d, mesh_2d, mesh_of, shard_each
from tests.support.pool import on_ranks
from tests.weights.models import KINDS, NEED_FOUR, sharded
from tests.weights.test_saving import owned
from tests.weights.updates.engines import Recorded, assert_received, nudged

pytestmark = api.fsdp2_only


def follow(module: nn.Module, steps: int = 3, **options) -> None:
    """Assert that a receiver follows a model through changes, by whole tensors and by what has changed."""
    exported = {"buffers": options.get("buffers", False), "dtype": options.get("dtype")}
    for delta in (False, True):
        receiver = Recorded()
        sender = WeightSender(module, delta=delta, **options)
        for step in range(steps):
            nudged(module, step)
            report = sender.send(receiver.apply)
            assert report.full == (not delta or step == 0)
            assert_received(receiver, module, **exported)
            if dist.get_rank() == 0:
                last = receiver.buckets[-report.buckets :] if report.buckets else []
                assert report.nbytes == sum(bucket.nbytes for bucket in last)
                assert report.full_nbytes == sum(tensor.nbytes for tensor in receiver.tensors.values())
                assert report.version == receiver.version


@composes("weight sync", "uneven")
@composes("weight sync", "shard dim")
@composes("weight sync", "CPU offload")
@composes("weight sync", "mixed precision")
@on_ranks(1, 2, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(rank, world, kind):
    """Each kind of parameters: scalars, ties, frozen ones, integers, empty shards, wrappers, ignored ones, offloaded
    ones, and buffers, some of them shared."""
    module = sharded(kind, meta=False)
    follow(module, dtype=torch.bfloat16, buffers=True, bucket_mb=4e-4)


@composes("weight sync", "tensor parallel", "uneven")
@composes("weight sync", "tensor parallel", "shard dim")
@composes("weight sync", "reshard to int")
@on_ranks(4)
@pytest.mark.parametrize("kind", NEED_FOUR)
def test_kinds_of_four_ranks(rank, world, kind):
    """Tensor parallelism is undone: positions of a box of two cuts are positions of the whole tensor."""
    follow(sharded(kind, meta=False), dtype=torch.bfloat16)


@composes("weight sync", "hybrid sharding")
@composes("weight sync", "over replicas")
@composes("weight sync", "tensor parallel", "hybrid sharding")
@on_ranks(4)
@pytest.mark.parametrize("how", ["hybrid", "over replicas", "tensor parallel"])
def test_replicas(rank, world, how):
    """One copy of each shard is sent. Of a mesh of two dimensions the ranks make one group."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    if how == "tensor parallel":
        mesh = mesh_of(2, 1, 2, names=("replicate", "shard", "tp"))
        parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        shard_each(module, fsdp2, mesh=mesh["replicate", "shard"])
    else:
        shard_each(module, fsdp2, mesh=mesh_2d(), shard_over_replicas=how == "over replicas")
    follow(module)
    sender = WeightSender(module, delta=True)
    for _ in range(2):
        report = sender.send(lambda bucket: None)
    assert (report.buckets, report.nbytes, report.changed) == (0, 0, 0)
    assert report.numel == sum(parameter.numel() for parameter in module.parameters())


@composes("weight sync", "experts")
@composes("weight sync", "several meshes")
@on_ranks(2, 4)
def test_experts_of_each_rank(rank, world):
    """Each rank has an expert under a name of its own, on a mesh of its own; the first rank gets all of them."""
    module = owned(rank, world)
    receiver, sender = WeightReceiver(), WeightSender(module, delta=True)
    for step in range(3):
        nudged(module, step)
        sender.send(receiver.apply)
        everyones = [None] * world
        dist.all_gather_object(everyones, {name: full(value).clone() for name, value in module.state_dict().items()})
        expected = {name: value for state in everyones for name, value in state.items()}
        if rank == 0:
            assert receiver.tensors.keys() == expected.keys()
            assert all(torch.equal(receiver.tensors[name], value) for name, value in expected.items())


@on_ranks(2)
def test_a_part_of_the_ranks(rank, world):
    """A model of one rank beside another rank, and one that is not sharded at all."""
    torch.manual_seed(0)
    alone = nn.Linear(4, 3)
    if rank == 0:
        follow(alone)
    own = mesh_of(2, 1, names=("owner", "shard"))["shard"]
    fsdp2.fully_shard(alone, mesh=own)
    receiver = WeightReceiver()
    WeightSender(alone).send(receiver.apply)
    assert torch.equal(receiver.tensors["weight"], full(alone.weight))


@on_ranks(1)
def test_a_part_of_an_update_has_no_version(rank, world):
    """Tensors of two updates are mixed until its last bucket is written."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shard_each(module, fsdp2, mesh=mesh_1d())
    receiver, sender = WeightReceiver(), WeightSender(module, bucket_mb=1e-4)
    versions = []

    def deliver(bucket):
        receiver.apply(bucket)
        versions.append(receiver.version)

    for _ in range(2):
        sender.send(deliver)
    half = len(versions) // 2
    assert half > 1 and versions == [*[None] * (half - 1), 1, *[None] * (half - 1), 2]


def named(width: int = 6) -> nn.Sequential:
    """Return layers with the names of attention, a gated network and a stack."""
    torch.manual_seed(0)
    parts = {name: nn.Linear(width, rows) for name, rows in (("q", 6), ("k", 3), ("v", 3))}
    parts["gate_up"] = nn.Linear(width, 10, bias=False)
    parts["experts"] = nn.ParameterDict({"up": torch.randn(3, 4, width)})
    blocks = nn.Sequential(nn.Sequential(OrderedDict(parts)))
    return nn.Sequential(OrderedDict(blocks=blocks, norm=nn.LayerNorm(width), head=nn.Linear(width, 5)))


MAPPING = {
    ("blocks.*.q.*", "blocks.*.k.*", "blocks.*.v.*"): "model.*.qkv.*",
    "blocks.*.gate_up.weight": (("model.*.gate.weight", 7), ("model.*.up.weight", 3)),
    "blocks.*.experts.up": "model.*.experts.{}.up.weight",
    "norm.bias": None,
    "head.weight": "lm_head.weight",
}


def mapped(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what an engine should have of a plain state dict."""
    expected = {"norm.weight": values["norm.weight"].float(), "lm_head.weight": values["head.weight"]}
    expected["head.bias"] = values["head.bias"]
    for kind in ("weight", "bias"):
        expected[f"model.0.qkv.{kind}"] = torch.cat([values[f"blocks.0.{name}.{kind}"] for name in "qkv"])
    expected["model.0.gate.weight"], expected["model.0.up.weight"] = values["blocks.0.gate_up.weight"].split([7, 3])
    for number, value in enumerate(values["blocks.0.experts.up"]):
        expected[f"model.0.experts.{number}.up.weight"] = value
    return {name: value.to(torch.float32 if "norm" in name else torch.bfloat16) for name, value in expected.items()}


@on_ranks(2, 4)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_names_and_dtypes(rank, world, delta, dim):
    """Renamed, left out, joined, split and taken apart, across the boundaries of shards, with a dtype by name."""
    module = named()
    place = lambda parameter: torch.distributed.tensor.Shard(min(dim, parameter.ndim - 1))
    shard_each(module, fsdp2, mesh=mesh_1d(), shard_placement_fn=place)
    dtypes = {"norm.*": torch.float32, "*": torch.bfloat16}
    receiver = WeightReceiver()
    sender = WeightSender(module, mapping=MAPPING, dtype=dtypes, delta=delta, bucket_mb=1e-4)
    for step in range(3):
        nudged(module, step)
        sender.send(receiver.apply)
        expected = mapped(dict(fsdp2.iter_full_params(module)))
        if rank == 0:
            assert receiver.tensors.keys() == expected.keys()
            for name, want in expected.items():
                got = receiver.tensors[name]
                assert got.dtype == want.dtype and torch.equal(got, want), name


@on_ranks(2)
def test_names_by_a_function(rank, world):
    """A function of a name, which returns None for what is left out; the first rank's counts."""
    module = named()
    shard_each(module, fsdp2, mesh=mesh_1d())
    receiver = WeightReceiver()
    rename = lambda name: None if name.startswith("blocks") else f"model.{name}.{rank}"
    WeightSender(module, mapping=rename).send(receiver.apply)
    if rank == 0:
        assert sorted(receiver.tensors) == [
            f"model.{n}.0" for n in ("head.bias", "head.weight", "norm.bias", "norm.weight")
        ]


@on_ranks(2)
def test_a_tie_under_both_names(rank, world):
    """A tied parameter is sent once, and under its other name if a rule names it in full."""
    module = nn.Sequential(OrderedDict(embed=nn.Embedding(7, 4), head=nn.Linear(4, 7, bias=False)))
    module.head.weight = module.embed.weight
    fsdp2.fully_shard(module, mesh=mesh_1d())
    for mapping, names in (
        (None, ["embed.weight"]),
        ({"*.weight": "*"}, ["embed"]),
        ({"head.weight": "lm_head", "embed.*": "wte.*"}, ["wte.weight", "lm_head"]),
    ):
        receiver = WeightReceiver()
        WeightSender(module, mapping=mapping).send(receiver.apply)
        if rank == 0:
            assert list(receiver.tensors) == names


@on_ranks(2)
@pytest.mark.parametrize("bucket_mb", [1e-4, 5e-4, 64])
def test_buckets(rank, world, bucket_mb):
    """Buckets are flat, as large as asked for or one tensor, and say what is in them; they can be pickled."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    shard_each(module, fsdp2, mesh=mesh_1d())
    buckets = []
    WeightSender(module, bucket_mb=bucket_mb).send(lambda bucket: buckets.append(pickle.loads(pickle.dumps(bucket))))
    if rank != 0:
        assert not buckets
        return
    assert [bucket.number for bucket in buckets] == list(range(len(buckets))) and buckets[-1].last
    for bucket in buckets:
        assert bucket.buffer.dtype == torch.uint8 and bucket.buffer.ndim == 1 and bucket.buffer.is_contiguous()
        assert bucket.buffer.numel() <= bucket_mb * 2**20 or len(bucket.names) == 1
        assert [tuple(tensor.shape) for _, tensor in bucket.tensors()] == bucket.shapes
        assert {tensor.dtype for _, tensor in bucket.tensors()} == set(bucket.dtypes)
    assert [name for bucket in buckets for name in bucket.names] == [name for name, _ in module.named_parameters()]
    together = [a.buffer.numel() + b.buffer.numel() for a, b in zip(buckets, buckets[1:])]
    assert len(buckets) == 1 or max(together) > bucket_mb * 2**20, "neighbours that fit share a bucket"


@on_ranks(1, 2)
@pytest.mark.parametrize("given", [True, False])
def test_inference_mode(rank, world, given):
    """An engine may make its tensors in ``torch.inference_mode()``, or receive there, and later not. Whole tensors
    could not be written to such ones elsewhere: "Inplace update to inference tensor outside InferenceMode"."""
    module = fsdp2.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)), mesh=mesh_1d())
    with torch.inference_mode():
        tensors = {name: torch.zeros(parameter.shape) for name, parameter in module.named_parameters()}
    receiver = WeightReceiver(tensors) if given else WeightReceiver()
    sender = WeightSender(module, delta=True)
    for step, inside in enumerate([False, True, False, True, False] if given else [True, False, True, False]):
        nudged(module, step)
        with torch.inference_mode(inside):
            sender.send(receiver.apply, full=step > 2)
        assert_received(receiver, module)
