"""The instruments themselves: they count what is known by hand, whoever is measured.

Memory by the stream whose pool it comes from, Python calls without those of the simulation, and the peaks of torch's
own fully_shard, which are whole units.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torchs
from torch import nn

import fsdp2
from fsdp2.tools.forecast.clock import Clock
from fsdp2.tools.forecast.memory import Memory
from fsdp2.tools.forecast.rank import simulated_rank
from tests.support import ROOT, api

sys.path.append(str(ROOT / "benchmarks"))
calls: Any = importlib.import_module("_calls")
simulated: Any = importlib.import_module("_simulated")
cluster: Any = importlib.import_module("cluster")
memory_benchmark: Any = importlib.import_module("memory")
muon: Any = importlib.import_module("_muon")

pytestmark = api.fsdp2_only
KIB = 1 << 10

# ---- whose pool memory comes from ----


def made(kib: int) -> torch.Tensor:
    """Return a tensor of so many KiB."""
    return torch.empty(kib * KIB, dtype=torch.uint8)


def program() -> Memory:
    """Use 3 KiB of compute's memory, then 5 of a side stream, then 2 of compute's again, and 1 that is there before."""
    clock = Clock()
    memory = Memory(lane=clock.lane)
    with simulated_rank({"shard": 2}, clock), memory:
        there = made(1)
        side = clock.Stream()
        memory.begin()
        first = made(3)
        del first
        with clock.stream(side):
            second = made(5)
        del second
        third = made(2)
        del third, there
    return memory


def test_what_is_reserved_is_the_sum_of_the_peaks_of_streams():
    """A stream cannot have what another one gave back, so more is taken than is ever alive at once."""
    memory = program()
    assert memory.peak().nbytes == 6 * KIB
    assert memory.pools == {"compute": 4 * KIB, "stream 1": 5 * KIB}
    assert memory.reserved == 9 * KIB


def test_a_storage_that_gets_memory_again_is_of_the_stream_that_gives_it():
    """An unsharded parameter is emptied and filled again: it belongs to the stream that is current at the filling."""
    clock = Clock()
    memory = Memory(lane=clock.lane)
    with simulated_rank({"shard": 2}, clock), memory:
        memory.begin()
        tensor = made(4)
        tensor.untyped_storage().resize_(0)
        with clock.stream(clock.Stream()):
            tensor.untyped_storage().resize_(4 * KIB)
        assert memory.peak().nbytes == 4 * KIB
        assert memory.pools == {"compute": 4 * KIB, "stream 1": 4 * KIB}
        memory.begin()
        assert memory.pools == {"stream 1": 4 * KIB}  # what is alive counts, what was given back before does not


def test_pools_without_streams_are_one():
    """With gloo everything is of the one pool of the host."""
    clock = Clock()
    memory = Memory(lane=clock.lane)
    with simulated_rank({"shard": 2}, clock, backend="gloo"), memory:
        memory.begin()
        made(4)
        tensor = made(2)
        assert memory.pools == {"compute": 4 * KIB} and memory.reserved == memory.peak().nbytes
        del tensor


# ---- what simulated steps take ----


@pytest.mark.parametrize(
    ("setting", "transient"),
    [("FP32", (3, 4)), pytest.param("BF16", (3, 4), marks=pytest.mark.slow), ("BF16_FP32", (3, 5))],
    ids=str,
)
def test_peaks_of_torchs_are_whole_units(setting, transient, monkeypatch):
    """In forward a unit, the next one as it is received, and as it is unpacked; in backward also its gradients, twice
    if they are cast. What stays behind, the shards' gradients, is on top of that."""
    monkeypatch.setattr(memory_benchmark, "LAYERS", 3)
    monkeypatch.setattr(memory_benchmark, "STREAM_WIDTH", 256)
    setting, ranks = getattr(memory_benchmark, setting), 8
    result = memory_benchmark.on_streams(torchs.fully_shard, setting, ranks)
    unit = setting.bytes_of_layer(256)
    row = 0.02 * unit  # what activations of a single row take, at most
    shards = (3 if setting.compute == torch.float32 else 6) / ranks
    assert result.forward.transient == pytest.approx(transient[0] * unit, abs=row)
    assert result.backward.transient == pytest.approx(transient[1] * unit, abs=row)
    assert result.live == pytest.approx((transient[1] + shards) * unit, abs=shards * unit)
    assert result.reserved >= result.live


@pytest.mark.parametrize("library", [fsdp2, pytest.param(torchs, marks=pytest.mark.slow)], ids=["fsdp2", "torch"])
def test_a_step_of_real_layers(library):
    """Two runs say the same; no step is shorter than it can be, nor are pools smaller than what is alive; sharding
    costs Python calls."""
    first, again = (
        simulated.stream_row("8b", 8, True, torch.bfloat16, "h100", library, layers=1, tokens=2048, calls=True)
        for _ in range(2)
    )
    row = simulated.Row(ranks=8, kind="compiled", reduce="bf16", layers=1, tokens=2048)
    assert (first.live, first.pools, first.total, first.calls) == (again.live, again.pools, again.total, again.calls)
    assert simulated.least_seconds(row) <= first.total == pytest.approx(first.busy + first.exposed)
    assert first.live <= first.reserved and set(first.pools) <= {"compute", "gather", "copies", "reduce"}
    assert first.calls > simulated.alone(row, calls=True).calls > 0


def test_sizes_of_layers():
    """A block is as large as its shape says."""
    for name, shape in simulated.SHAPES.items():
        with torch.device("meta"):
            block = simulated.Block(shape)
        numel = sum(parameter.numel() for parameter in block.parameters())
        assert numel == shape.numel and simulated.Row(name).block == 2 * numel


@pytest.mark.slow
def test_a_simulated_step_of_an_optimizer_with_whole_matrices():
    """Names of its state are exchanged, although the pretended ranks have none. The sizes of a simulated exchange
    were read, which gave numbers that are no sizes."""
    ours, theirs = (muon.modelled(which.fully_shard, whole=which is fsdp2, ranks=4) for which in (fsdp2, torchs))
    assert 0 < ours < theirs


# ---- calls ----


def test_calls_of_the_simulation_do_not_count():
    """A stream's method counts once, and what dispatch modes do with an operator not at all."""

    class Operators(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add(1).mul(2)

    clock, module = Clock(), Operators()
    x = torch.ones(4)
    plain = calls.calls_of(lambda: module(x))
    with simulated_rank({"shard": 2}, clock), Memory(lane=clock.lane):
        fake, side = torch.empty(4), clock.Stream()
        assert calls.calls_of(lambda: module(fake)) == plain
        assert calls.calls_of(lambda: side.wait_stream(clock.compute))["call"] == 2  # the lambda's own, and one


# ---- what a row is to reach ----


def compared(**ours: Any) -> Any:
    """Return a row on which torch's take ten blocks, a second and a thousand calls a unit."""
    row = cluster.Row(ranks=256, layers=2)
    pools = {"compute": 10 * row.block}
    memory = simulated.Memories(10 * row.block, 0, pools)
    theirs = simulated.Result(1.0, 0.9, reductions=2, calls=2100, backward=memory)
    return cluster.Compared(row, replace(theirs, **ours), theirs, 0.935, 100)


def missed(one: Any) -> list[str]:
    """Return the names of the targets that a row misses."""
    return [name for name, reached in one.reached().items() if not reached]


def test_targets():
    """Half a block less, in pools too; no more exposed; three hundredths of the time; half of the calls; one
    reduction."""
    row = compared().row
    less = simulated.Memories(int(9.5 * row.block), 0, {"compute": 5 * row.block, "gather": int(4.5 * row.block)})
    good = {"total": 0.97, "busy": 0.87, "calls": 1100, "backward": less}
    assert missed(compared(**good)) == []
    assert missed(compared()) == ["live", "pools", "time", "close", "calls"]
    assert missed(compared(**good | {"busy": 0.86})) == ["exposed"]
    assert missed(compared(**good | {"reductions": 4})) == ["reductions"]
    more = replace(less, pools={"compute": 5 * row.block, "gather": 5 * row.block})
    assert missed(compared(**good | {"backward": more})) == ["pools"]
    slow = compared(**good | {"total": 0.98, "busy": 0.88})
    assert missed(slow) == ["time"]
    slow.row = replace(row, hardware="b200")
    assert missed(slow) == []
    slow.least = 0.9
    assert missed(slow) == ["close"]
    at_once = compared(**good | {"backward": replace(less, live=10 * row.block)})
    assert missed(at_once) == ["live"]
    at_once.row = replace(row, kind="compiled", reduce="bf16")
    assert missed(at_once) == []


def test_rows_that_are_asked_for():
    """A few by default, all combinations with ``--all``, and those of the options."""

    def rows(*given: str) -> list[Any]:
        return cluster.chosen(cluster.parser().parse_args(given))

    assert {row.model for row in rows()} == {"8b"} and len(rows()) == 8
    everything = rows("--all")
    assert len(set(everything)) == len(everything) == 4 * 2 * 4 * 2 * 3 + len(cluster.EXTRA)
    some = rows("--models", "13b", "moe", "--hardware", "b200", "--ranks", "128", "--set", "flops_per_second=1e15")
    assert [str(row) for row in some if row.kind == "eager"] == [
        f"{model} 4 layers, 8192 tokens, eager, 128 ranks, fp32 reduce, b200" for model in ("13b", "moe")
    ]
    assert {row.machine.flops_per_second for row in some} == {1e15}
    assert rows("--only", "compiled, 64 ranks") == [cluster.Row(ranks=64, kind="compiled")]
