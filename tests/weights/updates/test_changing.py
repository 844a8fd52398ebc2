"""Models that change between two updates, updates that break off, and receivers that miss something."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2 import WeightReceiver, WeightSender
from tests.support import api
from tests.support.parity import mesh_1d, shard_each
from tests.support.pool import on_ranks
from tests.weights.updates.engines import assert_received, nudged, raised

pytestmark = api.fsdp2_only


def model() -> nn.Sequential:
    """Return layers, one of them frozen, one with a buffer."""
    torch.manual_seed(0)
    layers = OrderedDict(a=nn.Linear(6, 5), b=nn.Linear(5, 5), norm=nn.BatchNorm1d(5), c=nn.Linear(5, 3))
    layers["b"].requires_grad_(False)
    return nn.Sequential(layers)


@on_ranks(2, 4)
def test_a_model_that_changes(rank, world):
    """A parameter that is replaced by one of the same shape is a change of values. One that is added, removed, of
    another shape or dtype, or a buffer beside: the next update is full, and the receiver drops what is gone."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    receiver, sender = WeightReceiver(), WeightSender(module, delta=True, buffers=True)

    def sent(full: bool) -> None:
        assert sender.send(receiver.apply).full == full
        assert_received(receiver, module, buffers=True)

    sent(True)
    sent(False)
    module.a.weight = nn.Parameter(torch.ones(5, 6))
    sent(False)
    module.b = nn.Linear(5, 5)
    fsdp2.fully_shard(module.b, mesh=mesh_1d())
    sent(False)
    module.c = nn.Linear(5, 4, bias=False)
    fsdp2.fully_shard(module.c, mesh=mesh_1d())
    sent(True)
    module.add_module("d", nn.Linear(4, 2))
    fsdp2.fully_shard(module.d, mesh=mesh_1d())
    sent(True)
    nudged(module, 1)
    sent(False)
    module.norm.register_buffer("more", torch.ones(3))
    sent(True)
    del module.norm.more
    sent(True)
    module.d.to(torch.bfloat16)
    sent(True)
    sent(False)


@on_ranks(2)
def test_training(rank, world):
    """Frozen parameters are sent once; an optimizer that replaces nothing, gradients that wait, and a forward that has
    gathered parameters make no difference."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d(), reshard_after_forward=False)
    receiver, sender = WeightReceiver(), WeightSender(module, dtype=torch.bfloat16, delta=True, buffers=True)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    sender.send(receiver.apply)
    names: set[str] = set()

    def apply(bucket: fsdp2.WeightBucket) -> None:
        names.update(bucket.names)
        receiver.apply(bucket)

    for _ in range(3):
        loss = module(torch.randn(4, 6)).square().mean()
        report = sender.send(apply)  # between a forward and its backward
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = sender.send(apply)
        assert 0 < report.changed <= report.numel
        assert_received(receiver, module, buffers=True, dtype=torch.bfloat16)
    assert rank or names == {
        *(f"{layer}.{kind}" for layer in "ac" for kind in ("weight", "bias")),
        *(f"norm.{kind}" for kind in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")),
    }


@on_ranks(2, 4)
@pytest.mark.parametrize("broken", [0, 1])
def test_a_function_that_raises(rank, world, broken):
    """An update that breaks off at a bucket: every rank raises the function's error, and the next update is full. The
    receiver, which has parts of two versions, says that it has none, and refuses changes."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    receiver, sender = WeightReceiver(), WeightSender(module, delta=True, bucket_mb=1e-4)

    def breaks(bucket: fsdp2.WeightBucket) -> None:
        if bucket.number == broken:
            raise ConnectionError("gone")
        receiver.apply(bucket)

    sender.send(receiver.apply)
    nudged(module, 1)
    error = raised(lambda: sender.send(breaks, full=True))
    assert "gone" in error, error
    assert rank or receiver.version == (1 if broken == 0 else None)
    for full in (True, False):
        nudged(module, 2)
        assert sender.send(receiver.apply).full == full
        assert_received(receiver, module)


@on_ranks(2)
def test_a_receiver_that_lacks_the_version(rank, world):
    """Behind a function a receiver that has restarted, or that missed a bucket, cannot ask: it refuses changes, before
    it writes, with an error that says what helps."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    sender = WeightSender(module, delta=True, bucket_mb=1e-4)
    receiver = WeightReceiver()
    sender.send(receiver.apply)
    nudged(module, 1)
    fresh = WeightReceiver()
    error = raised(lambda: sender.send(fresh.apply))
    assert "got changes relative to version 1, and has no complete version" in error, error
    assert "WeightSender.send(to, full=True)" in error and not fresh.tensors
    assert sender.send(fresh.apply, full=True).full
    assert_received(fresh, module)
    nudged(module, 2)
    error = raised(lambda: WeightSender(module).send(fresh.apply) and sender.send(fresh.apply))
    assert "got changes relative to version 3, and has version 1 of another sender" in error, error


@on_ranks(2)
def test_buckets_out_of_order(rank, world):
    """Left out, twice, or of two updates: refused before it is written."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    kept: list[fsdp2.WeightBucket] = []
    sender = WeightSender(module, bucket_mb=1e-4)
    for _ in range(2):
        sender.send(kept.append)
    if rank:
        return
    count = len(kept) // 2
    assert count > 2
    for order in ([1], [0, 2], [0, 0, 1, 1], [0, count + 1]):
        receiver = WeightReceiver()
        error = raised(lambda order=order, receiver=receiver: [receiver.apply(kept[i]) for i in order])
        assert "buckets of an update are written in their order, each once" in error, (order, error)
        assert receiver.version is None
    receiver = WeightReceiver()
    for bucket in kept[:count]:
        assert receiver.version is None
        receiver.apply(bucket)
    assert receiver.version == 1


@on_ranks(2)
@pytest.mark.parametrize("delta", [False, True])
def test_a_function_that_loads(rank, world, delta):
    """``load`` gets whole tensors of what is in each bucket; copies are kept only if changes are to follow."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    engine: dict[str, torch.Tensor] = {}

    def load(tensors: list[tuple[str, torch.Tensor]]) -> None:
        engine.update((name, tensor.clone()) for name, tensor in tensors)

    receiver = WeightReceiver(load=load)
    sender = WeightSender(module, delta=delta, bucket_mb=1e-4)
    for step in range(3):
        nudged(module, step)
        engine.clear()
        sender.send(receiver.apply)
        expected = dict(fsdp2.iter_full_params(module))
        if rank == 0:
            assert all(torch.equal(tensor, expected[name]) for name, tensor in engine.items())
            assert (engine.keys() == expected.keys()) == (not delta or step == 0)
            assert len(receiver.tensors) == (len(expected) if delta else 0)
    WeightSender(module, bucket_mb=1e-4).send(receiver.apply)
    assert not receiver.tensors


@on_ranks(2)
@pytest.mark.parametrize("device", [None, "cpu"])
def test_whole_tensors_and_changes_of_a_bucket(rank, world, device):
    """A bucket of changes has no whole tensors; positions and values are what other engines take."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    patched: dict[str, torch.Tensor] = {}

    def patch(bucket: fsdp2.WeightBucket) -> None:
        if bucket.full:
            patched.update((name, tensor.clone()) for name, tensor in bucket.tensors())
            return
        for name, positions, values in bucket.changes():
            patched[name].view(-1)[positions] = values
        with pytest.raises(RuntimeError, match="got no whole tensors"):
            list(bucket.tensors())

    sender = WeightSender(module, delta=True)
    for step in range(3):
        nudged(module, step)
        sender.send(patch)
        expected = dict(fsdp2.iter_full_params(module, device=device))
        assert rank or all(torch.equal(patched[name], value) for name, value in expected.items())


@on_ranks(2)
def test_refused_before_anything_is_sent(rank, world):
    """Every rank raises, also where one rank alone has the mistake, and the sender can be used afterwards."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    seen: list[fsdp2.WeightBucket] = []
    sender = WeightSender(module, delta=True)
    for to in (None, 3, "tcp://"):
        error = raised(lambda to=to: sender.send(to if rank == 0 else seen.append))
        assert "expected a function or a process group on the first rank of the model, got" in error
    with fsdp2.summon_full_params(module, writeback=False):
        assert "summon" in raised(lambda: sender.send(seen.append))
    module.norm.register_buffer("extra", torch.zeros(2, device="meta" if rank else "cpu"))
    error = raised(lambda: WeightSender(module, buffers=True).send(seen.append))
    assert "norm.extra has no values; got the meta device" in error
    module.norm.register_buffer("extra", torch.zeros(2, dtype=torch.complex128))
    error = raised(lambda: WeightSender(module, buffers=True, delta=True).send(seen.append))
    assert "norm.extra is torch.complex128, whose changes cannot be found" in error
    error = raised(lambda: WeightSender(module, mapping={"x": "y"} if rank == 0 else None).send(seen.append))
    assert "the mapping has 'x', which is no name of the model's" in error
    for options, text in (
        ({"bucket_mb": 0}, "ValueError: WeightSender: bucket_mb must be a positive, finite number"),
        ({"dtype": torch.int8}, "TypeError: WeightSender: dtype must be a floating-point"),
        ({"mapping": [1]}, "TypeError: WeightSender: mapping must be a mapping"),
    ):
        error = raised(lambda options=options: WeightSender(module, **(options if rank == 1 else {})))
        assert text in error or f"on rank 1: {text.split(': ', 1)[1]}" in error, error
    assert "expected an nn.Module, got list" in raised(lambda: WeightSender([module]))
    assert "got a model without parameters" in raised(lambda: WeightSender(nn.Tanh()).send(seen.append))
    assert not seen
    receiver = WeightReceiver()
    assert sender.send(receiver.apply).full
    assert_received(receiver, module)
    with pytest.raises(TypeError, match="got both tensors and load"):
        WeightReceiver({}, load=seen.append)


@on_ranks(1)
def test_what_is_no_engine_and_no_bucket(rank, world):
    """Errors were Python's own, and a part of a buffer raised "shape '[]' is invalid for input of size 0"."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    for wrong, got in (
        (module, "Sequential"),
        (print, "builtin_function_or_method"),
        (3, "int"),
        ({"a": 1}, "'a': 1"),
    ):
        text = f"WeightReceiver: tensors must be a mapping from names to tensors, got {got}; pass dict"
        assert text in raised(lambda wrong=wrong: WeightReceiver(wrong))
    assert "load= must be a function of a list" in raised(lambda: WeightReceiver(load=3))
    assert WeightReceiver(module.named_parameters()).tensors.keys() == dict(module.named_parameters()).keys()
    buckets: list[fsdp2.WeightBucket] = []
    WeightSender(module).send(buckets.append)
    (bucket,) = buckets
    receiver = WeightReceiver()
    assert "TypeError: WeightReceiver.apply: expected a WeightBucket, got tuple" in raised(lambda: receiver.apply((1,)))
    again = fsdp2.WeightBucket.from_metadata
    for wrong in ("", "{}", "[]", '{"update": 3}', None):
        assert "is not the metadata of a bucket" in raised(lambda wrong=wrong: again(wrong, bucket.buffer))
    for buffer in (bucket.buffer[:-16], bucket.buffer.view(torch.int32), bucket.buffer[None]):
        text = raised(lambda buffer=buffer: again(bucket.metadata, buffer))
        assert "bucket 0 of update 1: got a buffer of dtype and shape" in text and "send bucket.buffer whole" in text
    receiver.apply(again(bucket.metadata, bucket.buffer))
    assert_received(receiver, module)


@on_ranks(4)
def test_one_name_for_experts_of_several_ranks(rank, world):
    """Different tensors under one name are refused, as in files."""
    torch.manual_seed(rank)
    module = nn.ModuleDict({"expert": nn.Linear(8, 6), "dense": nn.Linear(3, 2)})
    fsdp2.fully_shard(module["dense"], mesh=mesh_1d())
    error = raised(lambda: WeightSender(module).send(lambda bucket: None))
    assert "WeightSender: ranks have different tensors under the name expert.weight" in error
    assert isinstance(module["dense"].weight, DTensor)


@on_ranks(2)
def test_other_options_on_other_ranks(rank, world):
    """The first rank's count, since ranks would misread each other's bytes."""
    module = model()
    shard_each(module, fsdp2, mesh=mesh_1d())
    receiver = WeightReceiver()
    options = {"bucket_mb": 1e-4 * (rank + 1), "dtype": (torch.bfloat16, torch.float64)[rank]}
    sender = WeightSender(module, delta=rank == 0, mapping={f"{'ab'[rank]}.*": "x.*"}, **options)
    for step in range(3):
        nudged(module, step)
        assert sender.send(receiver.apply, full=rank == 1).full == (step == 0)
        expected = dict(fsdp2.iter_full_params(module, dtype=torch.bfloat16))
        if rank == 0:
            assert {name.replace("x.", "a.") for name in receiver.tensors} == set(expected)
            assert torch.equal(receiver.tensors["x.weight"], expected["a.weight"])


@on_ranks(2, 4)
@pytest.mark.parametrize("seed", range(6))
def test_random_histories(rank, world, seed):
    """Changes of values, replaced and added parameters, updates that break off at any bucket, receivers that start
    anew, and full updates when nobody needs one, in any order: what arrives complete is right, and what a receiver
    cannot take is refused."""
    draw = random.Random(seed)
    module = model()
    dim = draw.choice([0, 1])
    place = lambda parameter: Shard(min(dim, parameter.ndim - 1))
    shard_each(module, fsdp2, mesh=mesh_1d(), shard_placement_fn=place)
    dtype, bucket_mb = draw.choice([None, torch.bfloat16]), draw.choice([1e-5, 1e-4, 64])
    receiver, sender = WeightReceiver(), WeightSender(module, delta=True, dtype=dtype, bucket_mb=bucket_mb)
    complete = False  # whether the receiver has what the sender thinks it has
    for step in range(14):
        action = draw.choice(["nudge", "nudge", "nudge", "replace", "add", "break", "restart", "full", "nothing"])
        if action == "replace":
            module.a.weight = nn.Parameter(torch.full((5, 6), float(step)))
        elif action == "add":
            module.add_module(f"more{step}", nn.Linear(3, 3))
            fsdp2.fully_shard(getattr(module, f"more{step}"), mesh=mesh_1d())
        elif action == "restart":
            receiver, complete = WeightReceiver(), False
        if action != "nothing":
            nudged(module, step)
        stop = draw.randrange(4)

        def apply(bucket: fsdp2.WeightBucket, stop=stop, breaks=action == "break", receiver=receiver) -> None:
            if breaks and bucket.number == stop:
                raise ConnectionError("gone")
            receiver.apply(bucket)

        try:
            report = sender.send(apply, full=action == "full")
        except (OSError, RuntimeError) as error:
            refused = not complete and "has no complete version" in str(error)
            assert refused or (action == "break" and "gone" in str(error)), error
            complete = False
        else:
            complete = complete or report.full or report.buckets > 0
            if complete:
                assert_received(receiver, module, dtype=dtype)
