"""Peak bytes of a training step above the sharded state, in units of one unsharded layer.

First on the way that a GPU takes, simulated: lanes are streams, the process group counts as NCCL. Eight layers of six
bias-free 4096x4096 matrices with one row of input: `forward` and `backward` are without the shards' gradients, which
stay behind the step. Then blocks of Llama 8B with 2048 tokens, whose activations count, and the same layers as
transformers has them, with the cache object that each layer is given. `live` is the most that is alive at once, `pools`
the sum of each stream's own peak, which is what a caching allocator reserves.

Then on the way that a CPU takes, measured: matrices of 1024 on a pretended world of 64 ranks (a `fake` process group,
treated as gloo), the third step and later. There every block that torch's CPU allocator handed out and has not got back
is counted: storage resizes, buffers held inside asynchronous works, saved activations (below 0.01 B) and the shards'
gradients of the step. Only the local parameter shards are subtracted. B is one unsharded layer in its compute dtype.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed.fsdp as torchs
from _common import (
    FullyShard,
    Row,
    arguments,
    candidates,
    collect_garbage,
    fake_sides,
    finish,
    shard_units,
)
from _llama import SHAPES
from _models import chain
from _simulated import Result, simulate, stream_row
from _simulated import Row as Step
from _traces import Event, allocations, events_of, peak_of_cpu
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile, record_function

import fsdp2
from fsdp2.sharding.platform import simulated, using

LAYERS, WIDTH, MATRICES, WORLD, WARM_STEPS, STEPS = 8, 1024, 6, 64, 2, 4
STREAM_WIDTH, RANKS, TOKENS, TRANSFORMERS_LAYERS = 4096, (8, 64, 256, 1024), 2048, 4
MANY, LESS = 256, 0.5
Build = Callable[[], nn.Module]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What one run uses; `keep` leaves every layer whole between forward and backward."""

    compute: torch.dtype = torch.float32
    reduce: torch.dtype | None = None
    keep: bool = False

    @property
    def policy(self) -> MixedPrecisionPolicy | None:
        if self.compute is torch.float32:
            return None
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.reduce)

    @property
    def layer_bytes(self) -> int:
        return self.bytes_of_layer(WIDTH)

    def bytes_of_layer(self, width: int) -> int:
        return MATRICES * width * width * self.compute.itemsize

    def most(self, ranks: int) -> float:
        """Layers that a step on streams may take on so many ranks."""
        cast = self.reduce not in (None, self.compute)
        return (4.2 if cast else 3.6) if ranks >= MANY else (3.6 if cast else 3.1)


FP32, BF16 = Setting(), Setting(torch.bfloat16)
BF16_FP32, KEPT = Setting(torch.bfloat16, torch.float32), Setting(keep=True)
KEPT_BF16 = Setting(torch.bfloat16, torch.float32, keep=True)


def layers() -> nn.Module:
    """The model that is measured."""
    return chain(LAYERS, WIDTH, MATRICES)


def trace(
    fully_shard: FullyShard, setting: Setting, mesh: DeviceMesh, *, build: Build = layers, stacks: bool = False
) -> tuple[list[Event], int]:
    """The profiler's events of `STEPS` steps from before the model exists, and the bytes of the parameter shards."""
    collect_garbage()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=stacks) as profiler:
        model = build()
        options = {"reshard_after_forward": False} if setting.keep else {}
        shard_units(model, model.children(), fully_shard, mesh, setting.policy, **options)
        data = torch.randn(1, WIDTH)
        for step in range(STEPS):
            with record_function(f"measure:forward:{step}"):
                loss = model(data).sum()
            with record_function(f"measure:backward:{step}"):
                loss.backward()
            model.zero_grad()
    state = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return events_of(profiler), state


def _window(event: Event) -> tuple[str, int] | None:
    """The part and step that a marker stands for."""
    if event.get("cat") != "user_annotation" or not event["name"].startswith("measure:"):
        return None
    _, part, step = event["name"].split(":")
    return part, int(step)


def peaks(events: Sequence[Event], state: int, layer_bytes: int) -> dict[str, float]:
    """Peak of forward and of backward in layers, over the steps after the warm ones."""
    blocks = allocations(events)
    before = blocks[0][1] - blocks[0][2]
    found = {"forward": 0.0, "backward": 0.0}
    for event in events:
        window = _window(event)
        if window is None or window[1] < WARM_STEPS:
            continue
        start, end = event["ts"], event["ts"] + event["dur"]
        inside = max(total for time, total, _ in blocks if start <= time <= end) - before - state
        found[window[0]] = max(found[window[0]], inside / layer_bytes)
    return found


def measure(fully_shard: FullyShard, setting: Setting, mesh: DeviceMesh, build: Build = layers) -> dict[str, float]:
    """Forward and backward peak in units of one layer."""
    events, state = trace(fully_shard, setting, mesh, build=build)
    return peaks(events, state, setting.layer_bytes)


def product_scratch() -> str:
    """A note on what torch's bf16 matrix product allocates beside its result, which processors without bf16 need."""
    column = torch.ones(WIDTH, 1, dtype=torch.bfloat16)

    def gradient() -> torch.Tensor:
        return column @ column.t()

    extra = peak_of_cpu(gradient) - gradient().nbytes
    layers = extra / BF16.layer_bytes
    return f"a bf16 matrix product takes {layers:.2f} B of scratch here" if layers >= 0.01 else ""


def on_streams(fully_shard: FullyShard, setting: Setting, ranks: int) -> Result:
    """One step of the model with wide matrices, on streams."""

    def build(mesh: DeviceMesh) -> nn.Module:
        model = chain(LAYERS, STREAM_WIDTH, MATRICES)
        return shard_units(model, model.children(), fully_shard, mesh, setting.policy)

    return simulate(build, lambda: torch.empty(1, STREAM_WIDTH, dtype=setting.compute), {"shard": ranks})


def stream_rows(sides: dict[str, FullyShard]) -> list[Row]:
    """The peaks on streams: transient bytes, with the shards' gradients, and of the pools.

    The last two are to be half a layer below torch's.
    """
    found = []
    settings = (("fp32", FP32), ("bf16", BF16), ("bf16, fp32 reduce", BF16_FP32))
    for ranks in RANKS:
        for name, setting in settings:
            unit, most = setting.bytes_of_layer(STREAM_WIDTH), setting.most(ranks)
            ours, theirs = (on_streams(sides[side], setting, ranks) for side in ("ours", "theirs"))
            title = f"streams, {ranks} ranks, {name}"
            parts = (("forward", ours.forward, theirs.forward), ("backward", ours.backward, theirs.backward))
            for part, *memories in parts:
                transient = [one.transient / unit for one in memories]
                found.append(Row(f"{title}: {part}", *transient, "B", most, relative=False))
            live = [one.live / unit for one in (ours, theirs)]
            found.append(Row(f"{title}: with gradients", *live, "B", live[1] - LESS, relative=False))
            pools = [one.reserved / unit for one in (ours, theirs)]
            found.append(Row(f"{title}: pools", *pools, "B", pools[1] - LESS, relative=False, note=lanes(ours, unit)))
    return found


def llama_rows(itself: bool) -> list[Row]:
    """Peaks of the step of Llama blocks; they are to be half a block below torch's.

    The live bytes of compiled blocks that are reduced in one dtype are only not to be above torch's: all gradients
    appear at once, while those of the block before are on their way.
    """
    found = []
    libraries = (torchs if itself else fsdp2, torchs)
    for kind in ("eager", "compiled"):
        for ranks in RANKS[:3]:
            for name, reduce in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
                compiled, unit = kind == "compiled", Step(model="8b").block
                ours, theirs = (
                    stream_row("8b", ranks, compiled, reduce, "h100", library, tokens=TOKENS) for library in libraries
                )
                title = f"llama 8b blocks, {kind}, {ranks} ranks, {name} reduce"
                live = [one.live / unit for one in (ours, theirs)]
                pools = [one.reserved / unit for one in (ours, theirs)]
                less = 0 if compiled and name == "bf16" else LESS
                found.append(Row(f"{title}: live", *live, "B", live[1] - less, relative=False))
                found.append(
                    Row(f"{title}: pools", *pools, "B", pools[1] - LESS, relative=False, note=lanes(ours, unit))
                )
    return found


class Transformers(nn.Module):
    """The Llama layers of transformers as they come: each leaves its keys and values in a cache."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaModel

        shape = SHAPES["8b"]
        self.model = LlamaModel(
            LlamaConfig(
                hidden_size=shape.width,
                intermediate_size=shape.hidden,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                num_hidden_layers=layers,
                vocab_size=32,
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.model(inputs_embeds=x)
        assert output.past_key_values is not None
        return output.last_hidden_state


def transformers_rows(sides: dict[str, FullyShard]) -> list[Row]:
    """Peaks of the step of transformers' layers: half a block below torch's, too."""
    if importlib.util.find_spec("transformers") is None:
        print("skipped: transformers' llama, because transformers is not installed", file=sys.stderr)
        return []
    found, unit = [], Step(model="8b").block
    for name, setting in (("bf16, fp32 reduce", BF16_FP32), ("bf16", BF16)):

        def on(side: str, setting: Setting = setting) -> Result:
            def build(mesh: DeviceMesh) -> nn.Module:
                model = Transformers(TRANSFORMERS_LAYERS)
                return shard_units(model, model.model.layers, sides[side], mesh, setting.policy)

            def data() -> torch.Tensor:
                return torch.empty(1, TOKENS, SHAPES["8b"].width, dtype=setting.compute)

            return simulate(build, data, {"shard": WORLD})

        ours, theirs = on("ours"), on("theirs")
        title = f"streams, transformers' llama with its cache, {WORLD} ranks, {name}"
        live, pools = [ours.live / unit, theirs.live / unit], [ours.reserved / unit, theirs.reserved / unit]
        found.append(Row(f"{title}: live", *live, "B", live[1] - LESS, relative=False))
        found.append(Row(f"{title}: pools", *pools, "B", pools[1] - LESS, relative=False, note=lanes(ours, unit)))
    return found


def lanes(result: Result, unit: int) -> str:
    """What each of our lanes takes."""
    return ", ".join(f"{lane} {nbytes / unit:.2f}" for lane, nbytes in sorted(result.pools.items()))


def rows(sides: dict[str, FullyShard], mesh: DeviceMesh) -> list[Row]:
    """The figures of the table."""
    settings = (FP32, BF16, BF16_FP32, KEPT, KEPT_BF16)
    with using(simulated("gloo")):
        found = {s: {side: measure(function, s, mesh) for side, function in sides.items()} for s in settings}
    scratch = product_scratch()

    def row(figure: str, setting: Setting, part: str, limit: float | None = None) -> Row:
        ours, theirs = (found[setting][side][part] for side in ("ours", "theirs"))
        limit = theirs if limit is None else limit
        note = scratch if setting.compute is torch.bfloat16 and part == "backward" else ""
        return Row(figure, ours, theirs, "B", limit, relative=False, note=note)

    return [
        row("CPU, 64 ranks: forward peak, fp32", FP32, "forward", 2.05),
        row("CPU, 64 ranks: forward peak, bf16", BF16, "forward", 2.05),
        row("CPU, 64 ranks: backward peak, fp32", FP32, "backward"),
        row("CPU, 64 ranks: backward peak, bf16", BF16, "backward"),
        row("CPU, 64 ranks: forward peak, bf16, fp32 reduce", BF16_FP32, "forward", 2.05),
        row("CPU, 64 ranks: backward peak, bf16, fp32 reduce", BF16_FP32, "backward"),
        row("CPU, 64 ranks: kept after forward, forward peak, fp32", KEPT, "forward", 8.1),
        row("CPU, 64 ranks: kept after forward, forward peak, bf16", KEPT_BF16, "forward", 8.1),
        row("CPU, 64 ranks: kept after forward, backward peak, fp32", KEPT, "backward"),
    ]


def _caller(time: float, events: Sequence[Event], word: str) -> str:
    """The innermost Python frames with `word` in their path that were running at `time`, else the operator."""
    running = sorted((e for e in events if e["ts"] <= time <= e["ts"] + e["dur"]), key=lambda e: e["dur"])
    frames = [e["name"] for e in running if e["cat"] == "python_function" and word in e["name"]][:3]
    if frames:
        return " < ".join("/".join(name.split("/")[-2:]) for name in frames)
    return next((e["name"] for e in reversed(running) if e["cat"] == "cpu_op"), "elsewhere")


def _alive(blocks: Sequence[Event], peak: Event) -> list[Event]:
    """The allocations that are not given back when `peak` happens."""
    alive: dict[int, Event] = {}
    for block in blocks[: blocks.index(peak) + 1]:
        if block["args"]["Bytes"] > 0:
            alive[block["args"]["Addr"]] = block
        else:
            alive.pop(block["args"]["Addr"], None)
    return list(alive.values())


def explain(fully_shard: FullyShard, setting: Setting, mesh: DeviceMesh, part: str, word: str) -> str:
    """What lives at the peak of `part`: number and size of the blocks above 0.002 B by who allocated them."""
    events, state = trace(fully_shard, setting, mesh, stacks=True)
    blocks = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    marker = next(e for e in events if _window(e) == (part, STEPS - 1))
    end = marker["ts"] + marker["dur"]
    peak = max((e for e in blocks if marker["ts"] <= e["ts"] <= end), key=lambda e: e["args"]["Total Allocated"])
    calls = [e for e in events if e.get("cat") in ("python_function", "cpu_op")]
    first = min(e["ts"] for e in events if _window(e))
    found: dict[str, list[float]] = {}
    for block in _alive(blocks, peak):
        when = "before the steps" if block["ts"] < first else "last" if block is peak else ""
        size = block["args"]["Bytes"] / setting.layer_bytes
        if size >= 0.002:
            found.setdefault(f"{_caller(block['ts'], calls, word)} {when}", []).append(size)
    lines = [f"{part} peak, {setting} (shards: {state / setting.layer_bytes:.3f} B)"]
    for who, sizes in sorted(found.items(), key=lambda item: -sum(item[1])):
        lines.append(f"  {sum(sizes):6.3f} B in {len(sizes):2d} blocks: {who}")
    return "\n".join(lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--explain", action="store_true", help="list the blocks that live at each of our CPU peaks")
    parts = ("streams", "llama", "cpu")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="only these parts")
    options = parser.parse_args()
    found = []
    if "streams" in options.only and not options.explain:
        found += stream_rows(candidates(options.ours))
    if "llama" in options.only and not options.explain:
        found += llama_rows(options.ours == "torch") + transformers_rows(candidates(options.ours))
    sides, mesh = fake_sides(options, WORLD)
    if options.explain:
        word = "fsdp" if options.ours == "torch" else "fsdp2/"
        for setting in (FP32, BF16_FP32, KEPT):
            for part in ("forward", "backward"):
                print(explain(sides["ours"], setting, mesh, part, word))
        return
    if "cpu" in options.only:
        found += rows(sides, mesh)
    finish("memory", found, __doc__ or "", options)


if __name__ == "__main__":
    main()
