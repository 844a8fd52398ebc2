"""One training step on one rank of many: what it has in memory, how long it takes, and what the host does for it.

The program runs as it is, with either library, on tensors without memory, with collectives that send nothing, and on
the streams of a `Clock`. That is the way that a GPU takes: lanes are streams, the backend counts as NCCL, and the host
waits for nothing. `simulate` runs any model, `stream_row` a model of real shapes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from _calls import calls_of, no_garbage
from _llama import SHAPES, VOCABULARY, Block, Compiled, Language, running_on
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from fsdp2._torch.forecast import torch_placement
from fsdp2.sharding.platform import simulated, using
from fsdp2.tools.forecast.clock import Clock
from fsdp2.tools.forecast.cost import H100, Hardware
from fsdp2.tools.forecast.memory import Memory
from fsdp2.tools.forecast.rank import simulated_rank
from fsdp2.tools.forecast.timeline import COMPUTE, Exposed, Span, lane_names

LENGTH = 2048
"""Tokens in a sequence."""
MACHINES = {
    "h100": H100,
    "half the network": replace(
        H100, name="half the network", network_bytes_per_second=H100.network_bytes_per_second / 2
    ),
    "b200": replace(H100, name="b200", flops_per_second=2 * H100.flops_per_second),
}
"""The H100 of the cost model, the same with half its network between nodes, and with a B200's arithmetic."""
LANGUAGE = ("blocks", "ends", "end kept")
"""Kinds of rows whose model is a language model."""
STAYS = "other"
"""The kind of memory that the shards' gradients are said to be."""
REDUCTIONS = ("reduce_scatter", "all_to_all")


@dataclass
class Memories:
    """The most bytes above the shards: alive at once, and of each stream's own pool.

    `transient` leaves the shards' gradients out as well, which stay behind the step.
    """

    live: int = 0
    transient: int = 0
    pools: dict[str, int] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """What a caching allocator takes for it: a stream cannot have what another one gave back."""
        return sum(self.pools.values())

    def named(self, lanes: Mapping[str, str]) -> Memories:
        """The same with streams called by what they are for."""
        pools = Counter[str]()
        for lane, nbytes in self.pools.items():
            pools[lanes.get(lane, lane)] += nbytes
        return replace(self, pools=dict(pools))

    def __or__(self, other: Memories) -> Memories:
        lanes = self.pools.keys() | other.pools.keys()
        pools = {lane: max(self.pools.get(lane, 0), other.pools.get(lane, 0)) for lane in sorted(lanes)}
        return Memories(max(self.live, other.live), max(self.transient, other.transient), pools)


@dataclass
class Result:
    """What one step took, in seconds and bytes, and what it did."""

    total: float = 0.0
    busy: float = 0.0
    launches: int = 0
    reductions: int = 0
    sent: int = 0
    calls: int = 0
    """Python calls of the step, those of the model itself included; 0 where they were not counted."""
    forward: Memories = field(default_factory=Memories)
    backward: Memories = field(default_factory=Memories)
    spans: list[Span] = field(default_factory=list)
    waits: list[Exposed] = field(default_factory=list)

    @property
    def exposed(self) -> float:
        """How long compute had nothing to do."""
        return self.total - self.busy

    @property
    def memory(self) -> Memories:
        """The peaks of the whole step."""
        return self.forward | self.backward

    @property
    def live(self) -> int:
        """The most bytes above the shards that were alive at once."""
        return self.memory.live

    @property
    def pools(self) -> dict[str, int]:
        """For each stream the most bytes of its own pool that were alive at once, compute's above the shards."""
        return self.memory.pools

    @property
    def reserved(self) -> int:
        """The sum of the pools."""
        return self.memory.reserved


# ---- any model ----


@contextlib.contextmanager
def torchs_streams(clock: Clock) -> Iterator[None]:
    """Let torch's own fully_shard, which asks `torch.cpu` for streams, have those of `clock`."""
    names = ("Stream", "Event", "current_stream", "stream")
    with mock.patch.multiple(torch.cpu, **{name: getattr(clock, name) for name in names}):
        yield


@contextlib.contextmanager
def lanes_on_streams() -> Iterator[None]:
    """Let both libraries do the host work that they do on a GPU: in the block, models of tensors with memory have the
    streams of a clock, and process groups that send nothing count as NCCL."""
    clock = Clock()
    with torchs_streams(clock), using(simulated("nccl", clock)):
        yield


def simulate(
    build: Callable[[DeviceMesh], nn.Module],
    data: Callable[[], Tensor],
    mesh: Mapping[str, int],
    *,
    hardware: Hardware = H100,
    backend: str = "nccl",
    calls: bool = False,
) -> Result:
    """Forward and backward of the second step; in the first one the order of units is not known yet.

    `build(mesh)` returns the sharded model, `data()` its input, of whole numbers if they are tokens, which the model is
    to predict. With the backend "gloo" lanes are a CPU's, without streams. `calls`: count the Python calls of one more
    step.
    """
    clock = Clock(hardware)
    running_on[:] = [clock]
    memory = Memory(lane=clock.lane)
    with torchs_streams(clock), simulated_rank(mesh, clock, backend=backend) as made, memory, no_garbage():
        model, x = build(made), data()
        memory.set_kind(model.parameters(), "shards")
        shards = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in model.parameters())
        _step(model, x)
        model.zero_grad()
        begin = clock.begin()
        memory.begin()
        output = model(x)
        forward = _above(shards, memory)
        memory.begin()
        _backward(output, x)
        memory.set_kind([p.grad for p in model.parameters() if p.grad is not None], STAYS)
        backward = _above(shards, memory)
        model.zero_grad()
        del output
        result = _result(clock, begin)
        lanes = lane_names(clock.spans)
        result.forward, result.backward = forward.named(lanes), backward.named(lanes)
        if calls:
            result.calls = sum(calls_of(partial(_step, model, x)).values())
        del model
    return result


def _step(model: nn.Module, x: Tensor) -> None:
    _backward(model(x), x)


def _backward(output: Tensor, x: Tensor) -> None:
    if x.is_floating_point():
        output.backward(torch.empty_like(x))
    else:
        nn.functional.cross_entropy(output.float().flatten(0, -2), x.flatten()).backward()


def _above(shards: int, memory: Memory) -> Memories:
    """The peaks since `memory.begin()`, without the shards, which compute's pool has."""
    live, pools = memory.peak().nbytes - shards, Counter(memory.pools)
    pools[COMPUTE] -= shards
    transient = max((sum(kinds.values()) - kinds.get(STAYS, 0) for _, kinds in memory.points()), default=0) - shards
    return Memories(live, transient, dict(pools))


def _result(clock: Clock, begin: float) -> Result:
    compute = [span for span in clock.spans if span.lane == COMPUTE and not span.group]
    sent = [span for span in clock.spans if span.group]
    return Result(
        total=clock.now - begin,
        busy=sum(span.seconds for span in compute),
        launches=len(sent),
        reductions=sum(span.kind in REDUCTIONS for span in sent),
        sent=sum(span.nbytes for span in sent),
        spans=list(clock.spans),
        waits=list(clock.exposed),
    )


# ---- models of real shapes ----


@dataclass(frozen=True)
class Row:
    """One training step to be measured."""

    model: str = "8b"
    ranks: int = 8
    tokens: int = 8192
    layers: int = 6
    kind: str = "eager"
    """eager, compiled, lists (experts are units, prefetched by hand), groups (two in a unit), hybrid, a copy in each
    node, or one of these with compression (`COMPRESSED`, ours alone), or a language model of eager blocks: blocks (are
    units, the root has the rest), ends (are units too), end kept (likewise, the output layer with its norm, which stay
    after forward)."""
    gigabits: float = 0.0
    """Of a node's network a second; 0 for the hardware's."""
    reduce: str = "fp32"
    """fp32, or bf16 as it is computed with."""
    hardware: str = "h100"
    """A name in `MACHINES`."""
    keep_last: bool = False
    """Whether the last block stays gathered between forward and backward."""
    constants: tuple[tuple[str, float], ...] = ()
    """Of the cost model, in place of the machine's."""

    def __str__(self) -> str:
        network = f", {self.gigabits:g} Gbit/s" if self.gigabits else ""
        machine = f", {self.hardware}" if self.hardware != "h100" else ""
        name = f"{self.model} {self.layers} layers, {self.tokens} tokens, {self.kind}, {self.ranks} ranks"
        kept = ", last kept" if self.keep_last else ""
        return f"{name}, {self.reduce} reduce{kept}{machine}{network}"

    @property
    def block(self) -> int:
        """Bytes of one unsharded block as it is computed with."""
        return SHAPES[self.model].numel * torch.bfloat16.itemsize

    @property
    def is_language(self) -> bool:
        """Whether the model has an embedding, an output layer and a loss."""
        return self.kind in LANGUAGE

    @property
    def machine(self) -> Hardware:
        """The constants of the row."""
        machine = replace(MACHINES[self.hardware], **dict(self.constants))
        if not self.gigabits:
            return machine
        return replace(machine, network_bytes_per_second=self.gigabits * 1e9 / 8 / machine.ranks_per_node)


COMPRESSED = {
    "int8": fsdp2.CompressionPolicy(gather=torch.int8, reduce=torch.int8),
    "int8 gathers": fsdp2.CompressionPolicy(gather=torch.int8),
    "copy in each node, int8 copies": fsdp2.CompressionPolicy(replicate=torch.int8),
}


def stream_row(
    model: str,
    ranks: int,
    compiled: bool,
    reduce_dtype: torch.dtype,
    hardware: str,
    library: ModuleType,
    **more: Any,
) -> Result:
    """One step of `model` ("8b", "13b", "70b", "moe") with `library`: fsdp2 or torch.distributed.fsdp.

    `hardware` is a name in `MACHINES`; `more` are other fields of `Row`. The result has `live`, `pools`, `reserved`,
    `exposed` and `total`, and `calls` (with `calls=True`).
    """
    calls = more.pop("calls", False)
    reduce = {torch.float32: "fp32", torch.bfloat16: "bf16"}[reduce_dtype]
    kind = "compiled" if compiled else "eager"
    return measure(Row(model, ranks, kind=kind, reduce=reduce, hardware=hardware, **more), library, calls=calls)


def measure(row: Row, which: ModuleType, *, calls: bool = False) -> Result:
    """One step of `row` with `which` library: fsdp2 or torch.distributed.fsdp."""
    copies = 2 if row.kind in ("hybrid", "groups") else row.ranks // 8 if "copy in each node" in row.kind else 1
    sizes = {"replicate": copies, "shard": row.ranks // copies} if copies > 1 else {"shard": row.ranks}
    return simulate(lambda mesh: build(row, which, mesh), lambda: data(row), sizes, hardware=row.machine, calls=calls)


@cache
def unsharded(row: Row, *, calls: bool = False) -> Result:
    """The step of one rank by itself, without communication and copies, all parameters in memory."""

    def plain(mesh: DeviceMesh) -> nn.Module:
        blocks = [Block(SHAPES[row.model]) for _ in range(row.layers)]
        if row.is_language:
            return Language(SHAPES[row.model], [*blocks]).to(torch.bfloat16)
        model = nn.Sequential(*(Compiled(block) if row.kind == "compiled" else block for block in blocks))
        return model.to(torch.bfloat16)

    return simulate(plain, lambda: data(row), {"shard": 1}, hardware=row.machine, calls=calls)


def alone(row: Row, *, calls: bool = False) -> Result:
    """`unsharded`, which does not depend on ranks and on what is reduced."""
    kind = "compiled" if row.kind == "compiled" else LANGUAGE[0] if row.is_language else "eager"
    row = replace(row, ranks=1, reduce="fp32", gigabits=0.0, kind=kind, keep_last=False)
    return unsharded(row, calls=calls)


def least_seconds(row: Row) -> float:
    """No step whose units are gathered whole can be shorter: by compute, or by what is sent.

    Compute is that of the model by itself. It begins behind the first gather; behind it comes at least the latency of a
    reduction, and a whole one where all gradients of a block appear at once. What is sent is two gathers of each unit,
    one of the last, and a reduction.
    """
    machine, ranks = row.machine, range(row.ranks)
    ends = [VOCABULARY * SHAPES[row.model].width * torch.bfloat16.itemsize] if row.is_language else []
    units = [*ends, *[row.block] * row.layers, *ends]
    gathers = [machine.collective_seconds(nbytes, ranks) for nbytes in units]
    reductions = [machine.collective_seconds(nbytes * (2 if row.reduce == "fp32" else 1), ranks) for nbytes in units]
    last = reductions[0] if row.kind == "compiled" else machine.collective_seconds(0, ranks)
    return max(gathers[0] + alone(row).busy + last, 2 * sum(gathers) - gathers[-1] + sum(reductions))


def data(row: Row) -> Tensor:
    """Input of the first block, or tokens."""
    if row.is_language:
        return torch.zeros(max(row.tokens // LENGTH, 1), min(row.tokens, LENGTH), dtype=torch.int64)
    return torch.empty(max(row.tokens // LENGTH, 1), LENGTH, SHAPES[row.model].width, dtype=torch.bfloat16)


def build(row: Row, which: ModuleType, mesh: DeviceMesh) -> nn.Module:
    """The sharded model of `row`."""
    shape, layers = SHAPES[row.model], []
    reduce = torch.float32 if row.reduce == "fp32" else torch.bfloat16
    policy = which.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    if row.kind in COMPRESSED and which is fsdp2:
        options["compression"] = COMPRESSED[row.kind]
    for number in range(row.layers):
        block = Block(shape)
        if row.keep_last and number == row.layers - 1:
            options["reshard_after_forward"] = False
        if row.kind == "lists":
            which.fully_shard(block.feed.experts, **options)
        layers.append(Compiled(block) if row.kind == "compiled" else block)
        if row.kind == "groups":
            options |= two_groups(block, mesh, which)
        which.fully_shard(layers[-1], **options)
    options.pop("reshard_after_forward", None)
    if row.is_language:
        return language(row, which, layers, options)
    model = which.fully_shard(nn.Sequential(*layers), **options)
    if row.kind == "lists":
        prefetch(layers)
    return model


def language(row: Row, which: ModuleType, blocks: list[nn.Module], options: dict[str, Any]) -> nn.Module:
    """The language model around `blocks`, which are units."""
    model = Language(SHAPES[row.model], blocks)
    if row.kind != LANGUAGE[0]:
        which.fully_shard(model.embedding, **options)
    if row.kind == "ends":
        which.fully_shard(model.output, **options)
    elif row.kind == "end kept":
        which.fully_shard([model.norm, model.output], reshard_after_forward=False, **options)
    return which.fully_shard(model, **options)


def two_groups(block: Block, mesh: DeviceMesh, which: ModuleType) -> dict[str, Any]:
    """Options that give a unit two groups, as experts have: its feed-forward is cut over half of the ranks."""
    feed = {id(parameter) for parameter in block.feed.parameters()}
    half, own = fsdp2.ShardPlacementResult(Shard(0), mesh["shard"]), flattened(mesh)

    def place(parameter: nn.Parameter) -> fsdp2.ShardPlacementResult | None:
        return half if id(parameter) in feed else None

    return {"mesh": own, "shard_placement_fn": place if which is fsdp2 else torch_placement(place, own)}


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Every rank of `mesh` in one dimension."""
    return mesh._flatten("all")


def prefetch(blocks: list[Any]) -> None:
    """The lists that torchtitan sets for a mixture of experts: the next block and its experts."""
    for block, following in zip(blocks, blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following, following.feed.experts])
    for block, before in zip(blocks[1:], blocks, strict=False):
        block.set_modules_to_backward_prefetch([before, before.feed.experts])
