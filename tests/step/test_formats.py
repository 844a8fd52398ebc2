"""Formats of users: custom gathers and reductions that choose what is sent, parameter by parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp2.compression.collectives import CompressedGather, CompressedReduction
from fsdp2.engine.formats import Formats
from tests.step.test_communication import Gather, Scatter
from tests.step.test_compression import Products, Sent, assert_equal, policy, result, shard, ternary
from tests.support import api
from tests.support.parity import full, mesh_1d, mesh_2d
from tests.support.pool import on_ranks

pytestmark = api.fsdp2_only


class Sixteenths:
    """Sends multiples of a sixteenth in a byte each, in blocks of 24: what no alignment suggests."""

    block = 24

    def __init__(self) -> None:
        self.calls: dict[str, list[Any]] = {"encode": [], "new_state": []}

    def nbytes(self, numel: int) -> int:
        return numel + 1  # a row need not be aligned

    def encode(self, values: Tensor, sent: Tensor, state: Any) -> None:
        self.calls["encode"].append(state)
        assert sent.shape == (len(values), self.nbytes(values.shape[1])) and values.shape[1] % self.block == 0
        sent[:, 1:].view(torch.int8).copy_(values * 16)

    def decode(self, sent: Tensor, numel: int, values: Tensor, first: int) -> None:
        assert first % self.block == 0 and sent.shape[1] == self.nbytes(numel)
        values.copy_(sent[:, 1 + first : 1 + first + values.shape[1]].view(torch.int8) / 16)

    def add(self, sent: Tensor, total: Tensor, divisor: int) -> None:
        total.add_((sent[:, 1:].view(torch.int8) / 16).sum(0)).div_(divisor)

    def new_state(self, stream: int) -> str:
        self.calls["new_state"].append(stream)
        return f"of stream {stream}"


class Chooser:
    """Chooses it for weights; a gather or a reduction that fsdp2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.form = Sixteenths()
        self.asked: list[tuple[str, int, int]] = []

    def format_of(self, name: str, param: Any, numel: int, piece_numel: int) -> Sixteenths | None:
        self.asked.append((name, numel, piece_numel))
        return self.form if name.endswith("weight") and numel > 64 else None


class _Gathers(Chooser, Gather):
    """One that gathers, too."""


class _Scatters(Chooser, Scatter):
    """One that reduces what has no format."""


class Twice(Chooser):
    """Chooses it for both dimensions."""

    replica_format_of = Chooser.format_of


@on_ranks(2, 3)
@pytest.mark.parametrize("transport", [False, True])
def test_a_format_of_the_user(rank, world, transport):
    """What it represents is trained as without, bit by bit, in about a quarter of the bytes; whoever communicates."""
    plain, model = shard(Products(), mesh=mesh_1d()), shard(Products(), mesh=mesh_1d())
    if transport:
        gather, scatter = _Gathers(), _Scatters()
    else:
        gather, scatter = Chooser(), Chooser()
    model.set_custom_all_gather(gather, recurse=True)
    model.set_custom_reduce_scatter(scatter, recurse=True)
    expected = result(plain)
    with Sent() as before:
        assert_equal(result(plain), expected)
    with Sent() as seen:
        assert_equal(result(model), expected)
    assert sum(map(sum, seen.bytes.values())) < 0.6 * sum(map(sum, before.bytes.values()))
    assert ("even.weight", 64 * 64, -(-64 // world) * 64) in gather.asked
    assert set(gather.form.calls["encode"]) == {None}, "a gather has no state"
    assert set(scatter.form.calls["encode"]) == {"of stream 0"} and scatter.form.calls["new_state"] == [0]
    assert_equal(result(model, 2), result(plain, 2))
    model.set_custom_all_gather(None, recurse=True)
    model.set_custom_reduce_scatter(None, recurse=True)
    with Sent() as seen:
        assert_equal(result(model), expected)
    assert seen.bytes == before.bytes
    if transport:
        assert gather.calls and scatter.calls


@on_ranks(4)
@pytest.mark.parametrize("over_replicas", [False, True])
def test_a_format_on_the_replicate_dimension(rank, world, over_replicas):
    """With a state of its own, since another stream encodes there."""
    models = [shard(Products(), mesh=mesh_2d(), shard_over_replicas=over_replicas) for _ in range(2)]
    chooser = Twice()
    models[1].set_custom_reduce_scatter(chooser, recurse=True)
    assert_equal(result(models[1]), result(models[0]))
    assert set(chooser.form.calls["encode"]) == {"of stream 0", "of stream 1"}
    assert chooser.form.calls["new_state"] == [0, 1]


@on_ranks(2)
def test_compression_is_a_gather_and_a_reduction_that_choose_formats(rank, world):
    """The same bytes and the same values, of numbers that are rounded by chance."""
    options = policy(gather=torch.int8, reduce=torch.int8)
    results = []
    for given in (options, None):
        torch.manual_seed(5)
        model = shard(Products(), mesh=mesh_1d(), compression=given)
        if given is None:
            model.set_custom_all_gather(CompressedGather(options), recurse=True)
            model.set_custom_reduce_scatter(CompressedReduction(options), recurse=True)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(rank))
        with Sent() as seen:
            model(x).square().sum().backward()
        results.append((seen.bytes, {name: full(p.grad) for name, p in model.named_parameters()}))
    assert results[0][0] == results[1][0]
    assert_equal(results[1][1], results[0][1])


@on_ranks(2)
def test_formats_are_set_between_two_steps(rank, world):
    """They move shards, as ``set_compression`` does. Two that would choose for the same tensors are refused."""
    model = shard(Products(), mesh=mesh_1d())
    out = model(ternary(1, 64))
    with pytest.raises(RuntimeError, match="set_custom_all_gather was called between a forward and its backward"):
        model.set_custom_all_gather(Chooser(), recurse=True)
    out.sum().backward()
    model.set_compression(policy(gather=torch.int8, reduce=torch.int8))
    with pytest.raises(ValueError, match=r"compression.gather: .*custom all-gather \(Chooser\)"):
        model.set_custom_all_gather(Chooser(), recurse=True)
    with pytest.raises(ValueError, match=r"compression.reduce: .*custom reduce-scatter \(Chooser\)"):
        model.set_custom_reduce_scatter(Chooser(), recurse=True)
    with pytest.raises(TypeError, match="all_gather: expected a callable with an allocate method, or .* format_of"):
        model.set_custom_all_gather(object())
    model(ternary(1, 64)).sum().backward()


def test_ranks_compare_formats_by_texts_without_addresses() -> None:
    """A class without a text of its own is named."""
    assert str(Formats(gather=Sixteenths())) == "gather=Sixteenths"
