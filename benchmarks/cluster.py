"""Where communication is hidden behind compute and where it is not, on a pretended cluster, beside torch's own.

    python benchmarks/cluster.py [--ranks 8 64] [--models 8b] [--picture lanes.png] [--set memory_bytes_per_second=3e12]

The training code of both runs as it is, on one rank of many: with tensors that have no memory, a process group that
sends nothing, and streams on which time passes as a cost model says (`fsdp2/forecasting/cost.py`; printed first, every
constant can be set). The times are estimates; the order of kernels, collectives and waits is that of the real program.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp as torchs
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2.forecasting.clock import Clock
from fsdp2.forecasting.cost import H100, Hardware
from fsdp2.forecasting.pictures import draw_lanes
from fsdp2.forecasting.rank import simulated_rank
from fsdp2.forecasting.timeline import Exposed, Span

LENGTH = 2048
"""Tokens in a sequence."""
MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


# ---- models ----


@dataclass(frozen=True)
class Shape:
    """One layer's sizes; with ``experts`` its feed-forward is that many, ``active`` for a token."""

    width: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int = 0
    active: int = 0


SHAPES = {
    "8b": Shape(4096, 14336, 32, 8),
    "70b": Shape(8192, 28672, 64, 8),
    "moe": Shape(2048, 768, 32, 4, experts=128, active=8),
}


class Attention(nn.Module):
    """Causal attention whose keys and values are shared by several heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head, keys = shape.width // shape.heads, shape.width // shape.heads * shape.kv_heads
        self.query, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(shape.width, keys, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """The gated feed-forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Feed-forwards side by side, each for an equal part of the tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Parameter(torch.empty(shape.experts, shape.width, shape.hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.hidden, shape.width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


class Routed(nn.Module):
    """A router and the experts."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.active, self.count = shape.active, shape.experts
        self.router, self.experts = nn.Linear(shape.width, shape.experts, bias=False), Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight = self.router(flat).softmax(-1)[:, : self.active]
        routed = flat.repeat(self.active, 1).view(self.count, -1, flat.shape[-1])
        out = self.experts(routed).view(self.active, *flat.shape)
        return (out * weight.t().unsqueeze(-1)).sum(0).view_as(x)


class Block(nn.Module):
    """One layer. Its norms are torch's layer norms without bias, which are one kernel everywhere."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(shape.width, bias=False) for _ in range(2))
        self.attention = Attention(shape)
        self.feed = Routed(shape) if shape.experts else FeedForward(shape.width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Compiled(nn.Module):
    """A block as torch.compile leaves it: one node of autograd, so that all gradients appear at once."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        names, values = zip(*self.block.named_parameters(), strict=True)
        return _Graph.apply(self.block, names, x, *values)


class _Graph(torch.autograd.Function):
    """A block whose forward makes one node. The graph that backward needs is made there, while no time passes."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, names: Any, *inputs: Tensor) -> Tensor:
        ctx.block, ctx.names, ctx.inputs = block, names, [value.detach() for value in inputs]
        return _called(ctx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        clock = _clocks[-1]
        clock.stopped = True
        with torch.enable_grad():
            ctx.inputs = [value.requires_grad_() for value in ctx.inputs]
            output = _called(ctx)
        clock.stopped = False
        return (None, None, *torch.autograd.grad(output, ctx.inputs, grad))


def _called(ctx: Any) -> Tensor:
    x, *values = ctx.inputs
    return torch.func.functional_call(ctx.block, dict(zip(ctx.names, values, strict=True)), (x,))


_clocks: list[Clock] = []
"""What runs is timed by the last of them."""


# ---- what is compared ----


@dataclass(frozen=True)
class Row:
    """One training step to be timed."""

    model: str = "8b"
    ranks: int = 8
    tokens: int = 8192
    layers: int = 6
    kind: str = "eager"
    """eager, compiled, lists (experts are units, prefetched by hand), groups (two in a unit), hybrid, int8 (ours)."""
    gigabits: float = 0.0
    """Of a node's network a second; 0 for the hardware's."""

    def __str__(self) -> str:
        network = f", {self.gigabits:g} Gbit/s" if self.gigabits else ""
        return f"{self.model} {self.layers} layers, {self.tokens} tokens, {self.kind}, {self.ranks} ranks{network}"


@dataclass
class Result:
    """What one step took, in seconds, and what it did."""

    total: float = 0.0
    busy: float = 0.0
    launches: int = 0
    sent: int = 0
    spans: list[Span] = field(default_factory=list)
    waits: list[Exposed] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        """How long compute had nothing to do."""
        return self.total - self.busy


def build(row: Row, which: ModuleType, mesh: DeviceMesh) -> nn.Module:
    """The sharded model of ``row``."""
    shape, layers = SHAPES[row.model], []
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": which.MixedPrecisionPolicy(**MIXED)}
    if row.kind == "int8" and which is fsdp2:
        options["compression"] = fsdp2.CompressionPolicy(gather=torch.int8, reduce=torch.int8)
    for _ in range(row.layers):
        block = Block(shape)
        if row.kind == "lists":
            which.fully_shard(block.feed.experts, **options)
        layers.append(Compiled(block) if row.kind == "compiled" else block)
        if row.kind == "groups":
            options |= two_groups(block, mesh)
        which.fully_shard(layers[-1], **options)
    model = which.fully_shard(nn.Sequential(*layers), **options)
    if row.kind == "lists":
        prefetch(layers)
    return model


def two_groups(block: Block, mesh: DeviceMesh) -> dict[str, Any]:
    """Options that give a unit two groups, as experts have: its feed-forward is cut over half of the ranks."""
    most, half = (FSDPMeshInfo(one, shard_mesh_dim=0) for one in (flattened(mesh), mesh["shard"]))
    feed = {id(parameter) for parameter in block.feed.parameters()}

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), half if id(parameter) in feed else most)

    return {"mesh": flattened(mesh), "shard_placement_fn": place}


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Every rank of ``mesh`` in one dimension."""
    return mesh._flatten("all")


def prefetch(blocks: list[Any]) -> None:
    """The lists that torchtitan sets for a mixture of experts: the next block and its experts."""
    for block, following in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following, following.feed.experts])
    for block, before in zip(blocks[1:], blocks, strict=False):
        block.set_modules_to_backward_prefetch([before, before.feed.experts])


def measure(row: Row, which: ModuleType, hardware: Hardware = H100) -> Result:
    """Forward and backward of the second step; in the first one the order of units is not known yet."""
    if row.gigabits:
        each = row.gigabits * 1e9 / 8 / hardware.ranks_per_node
        hardware = replace(hardware, network_bytes_per_second=each)
    clock = Clock(hardware)
    _clocks[:] = [clock]
    sizes = {"replicate": 2, "shard": row.ranks // 2} if row.kind in ("hybrid", "groups") else {"shard": row.ranks}
    streams = {name: getattr(clock, name) for name in ("Stream", "Event", "current_stream", "stream")}
    with mock.patch.multiple(torch.cpu, **streams), simulated_rank(sizes, clock) as mesh:  # torch.cpu is torch's own's
        model = build(row, which, mesh)
        x = torch.empty(row.tokens // LENGTH, LENGTH, SHAPES[row.model].width, dtype=torch.bfloat16)
        for _ in range(2):
            begin = clock.begin()
            model(x).backward(torch.empty_like(x))
            model.zero_grad()
        compute = [span for span in clock.spans if span.lane == "compute"]
        sent = [span for span in clock.spans if span.group]
        busy, total = sum(span.seconds for span in compute), clock.now - begin
        result = Result(total, busy, len(sent), sum(span.nbytes for span in sent), clock.spans, clock.exposed)
        del model
    gc.collect()
    return result


ROWS = [
    *(Row(ranks=ranks, kind=kind) for kind in ("eager", "compiled") for ranks in (8, 64, 256, 1024)),
    *(Row(ranks=ranks, kind="compiled", tokens=4096) for ranks in (8, 64)),
    *(Row("70b", ranks=ranks, kind=kind, layers=4) for kind in ("eager", "compiled") for ranks in (64, 1024)),
    *(Row("moe", ranks=ranks, kind=kind) for kind in ("eager", "lists") for ranks in (8, 64)),
    *(Row(ranks=64, kind=kind) for kind in ("groups", "hybrid")),
    *(Row(ranks=64, kind=kind, gigabits=25) for kind in ("eager", "int8")),
]


def line(row: Row, ours: Result, theirs: Result) -> str:
    """One line of the table."""
    cells = [str(row), *(f"{one.total * 1e3:.1f}" for one in (theirs, ours)), f"{ours.total / theirs.total:.3f}"]
    for one in (theirs, ours):
        cells += [f"{one.busy * 1e3:.1f}", f"{one.exposed * 1e3:.1f}", str(one.launches)]
    return f"| {' | '.join(cells)} |"


HEAD = """| step | torch ms | fsdp2 ms | ratio | torch busy | exposed | launches | fsdp2 busy | exposed | launches |
|---|---|---|---|---|---|---|---|---|---|"""


def picture(path: str, row: Row, results: dict[str, Result]) -> None:
    """Draw the lanes of both below one another, on one scale."""
    import matplotlib.pyplot as plt

    figure, parts = plt.subplots(len(results), figsize=(16, 3.2 * len(results)), sharex=True, layout="constrained")
    for axes, (name, result) in zip(parts, results.items(), strict=True):
        draw_lanes(axes, result.spans, result.waits)
        axes.set_title(f"{name}: {row}: {result.total * 1e3:.1f} ms, {result.exposed * 1e3:.1f} ms exposed")
    parts[-1].set_xlabel("ms")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Print the table, and draw one row of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this, such as 'compiled, 64 ranks'")
    parser.add_argument("--picture", help="draw the lanes of the first row into this file")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="constants of the cost model")
    arguments = parser.parse_args()
    hardware = replace(H100, **{name: float(value) for name, _, value in (one.partition("=") for one in arguments.set)})
    print(f"{hardware}\n\n{HEAD}")
    for row in [row for row in ROWS if arguments.only in str(row)]:
        results = {"torch": measure(row, torchs, hardware), "fsdp2": measure(row, fsdp2, hardware)}
        print(line(row, results["fsdp2"], results["torch"]), flush=True)
        if arguments.picture:
            picture(arguments.picture, row, results)
            arguments.picture = None


if __name__ == "__main__":
    main()
