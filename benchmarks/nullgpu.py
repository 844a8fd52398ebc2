"""Memory and host work of a step on torch's own CUDA code, beside torch's fully_shard, without a GPU.

The device computes nothing and does not limit time (`tests/nullgpu`); torch's CUDA build runs on it, with its caching
allocator, streams, events, NCCL's process group and Inductor. One process is rank 0 of any number. So *live* and
*reserved* are what a GPU's allocator says, up to the workspaces of libraries, and *calls* and *host* are what the host
does for a block; nothing here says how long a GPU takes. Times are processor time, medians of processes in turn. What
the model takes without sharding (parallelized, where it is tensor parallel) is taken off calls, host and kernels. Rows
that say `compiled` are of blocks that Inductor compiles.

    python benchmarks/nullgpu.py            every row, a quarter of an hour
    python benchmarks/nullgpu.py --only hybrid
    python benchmarks/nullgpu.py --jobs 3   several rows at once: bytes and counts stay as they are, times do not

It needs an environment with torch's CUDA build, as `make test-cuda` makes: .venv-cuda/bin/python benchmarks/nullgpu.py
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import Row, arguments, finish, median
from _llama import SHAPES, Block, Language
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
null: Any = importlib.import_module("tests.nullgpu.device")
STEPS = 30
ROUNDS = 4
"""How many processes measure each library, in turn: the time of one of them says little."""
LIBRARIES = ("fsdp2", "torch", "unsharded")
COUNTED = ("kernels", "memcpys", "event_records", "stream_waits", "nccl_calls", "nccl_groups")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model, and how it is sharded."""

    name: str
    shape: str = "8b"
    layers: int = 6
    tokens: int = 2048
    ranks: int = 64
    replicas: int = 1
    tensor_parallel: int = 1
    reduce: str = "float32"
    kind: str = ""
    """`compiled`, `recomputed`, `offloaded` or `language model`."""
    expandable: bool = False


SETTINGS = (
    Setting("1 rank", layers=3, ranks=1),
    Setting("8 ranks", ranks=8),
    Setting("64 ranks"),
    Setting("64 ranks, bf16 reduced", reduce="bfloat16"),
    Setting("64 ranks, expandable segments", expandable=True),
    Setting("1024 ranks", ranks=1024),
    Setting("8192 tokens, 64 ranks", tokens=8192),
    Setting("hybrid, 8 copies of 8 ranks", replicas=8),
    Setting("tensor parallel, 8 of 64 ranks", tensor_parallel=8),
    Setting("recomputed, 64 ranks", kind="recomputed"),
    Setting("compiled, 8192 tokens, 64 ranks", tokens=8192, kind="compiled"),
    Setting("offloaded, 64 ranks", kind="offloaded"),
    Setting("language model, 1024 tokens, 64 ranks", tokens=1024, kind="language model"),
    Setting("13b, 8192 tokens, 64 ranks", shape="13b", layers=4, tokens=8192),
    Setting("70b, 8192 tokens, 256 ranks", shape="70b", layers=4, tokens=8192, ranks=256),
    Setting("experts, 64 ranks", shape="moe"),
)


# ---- one process ----


def build(setting: Setting, library: str) -> nn.Module:
    """Return the model, sharded by a library or whole in bfloat16."""
    with torch.device("meta"):
        blocks: list[nn.Module] = [Block(SHAPES[setting.shape]) for _ in range(setting.layers)]
        language = setting.kind == "language model"
        model = Language(SHAPES[setting.shape], blocks) if language else nn.Sequential(*blocks)
    model.to(torch.bfloat16 if library == "unsharded" else torch.float32)
    for block in blocks:
        if setting.kind == "recomputed":
            block.forward = _recomputed(block.forward)
        if setting.kind == "compiled":
            block.compile()
    ends = [child for child in model.children() if isinstance(child, (nn.Embedding, nn.Linear))]
    _shard(setting, library, model, [*ends, *blocks])
    return model.to_empty(device="cpu" if setting.kind == "offloaded" and library != "unsharded" else "cuda")


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.utils.checkpoint import checkpoint

    return lambda x: checkpoint(forward, x, use_reentrant=False)


def _shard(setting: Setting, library: str, model: nn.Module, units: list[nn.Module]) -> None:
    mesh: DeviceMesh
    if setting.tensor_parallel > 1:
        shape = (dist.get_world_size() // setting.tensor_parallel, setting.tensor_parallel)
        both = init_device_mesh("cuda", shape, mesh_dim_names=("dp", "tp"))
        across = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        across |= {"feed.gate": ColwiseParallel(), "feed.up": ColwiseParallel()}
        along = {"attention.out": RowwiseParallel(), "feed.down": RowwiseParallel()}
        for unit in units:
            parallelize_module(unit, both["tp"], across | along)
        mesh = both["dp"]
    elif setting.replicas > 1 and library != "unsharded":
        shape = (setting.replicas, setting.ranks // setting.replicas)
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    if library == "unsharded":
        return
    if library == "fsdp2":
        import fsdp2 as api

        api.set_rank_checks(False)  # the other ranks would have to answer
    else:
        import torch.distributed.fsdp as api
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": api.MixedPrecisionPolicy(torch.bfloat16, getattr(torch, setting.reduce)),
    }
    if setting.kind == "offloaded":
        options["offload_policy"] = api.CPUOffloadPolicy()
    for unit in (*units, model):
        api.fully_shard(unit, **options)


def measure(setting: Setting, library: str) -> dict[str, float]:
    """Return the figures of one process."""
    calls: Any = importlib.import_module("tests.nullgpu.calls")
    torch.cuda.set_device(0)
    torch.backends.cuda.enable_cudnn_sdp(False)
    ranks = setting.tensor_parallel if library == "unsharded" else setting.ranks
    dist.init_process_group("nccl", rank=0, world_size=ranks, store=dist.HashStore())
    began = time.process_time()
    model = build(setting, library)
    wrapped = time.process_time() - began
    tokens, width = setting.tokens, SHAPES[setting.shape].width

    def step() -> None:
        if setting.kind == "language model":
            rows = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
            nn.functional.cross_entropy(model(rows).float().flatten(0, 1), rows.flatten()).backward()
        else:
            rows = torch.empty(1, tokens, width, device="cuda", dtype=torch.bfloat16)
            model(rows).backward(torch.empty_like(rows))
        for parameter in model.parameters():
            parameter.grad = None

    began = time.process_time()
    step()
    first = time.process_time() - began
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    gc.collect()
    rest = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    with null.Counts() as counts:
        for _ in range(STEPS):
            began = time.process_time()
            step()
            times.append(time.process_time() - began)
    one, blocks = 2 * SHAPES[setting.shape].numel, setting.layers
    pools: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        pools[segment["stream"]] = pools.get(segment["stream"], 0) + segment["total_size"]
    figures = {
        "live": (torch.cuda.max_memory_allocated() - rest) / one,
        "reserved": (torch.cuda.max_memory_reserved() - rest) / one,
        "host ms": median(times) * 1e3 / blocks,
        "calls": sum(calls.calls_of(step).values()) / blocks,
        "first step ms": first * 1e3,
        "wrapping ms": wrapped * 1e3,
        "pools": len(pools),
    }
    figures |= {f"pool {index}": n / one for index, n in enumerate(sorted(pools.values(), reverse=True))}
    return figures | {name: counts[name] / STEPS / blocks for name in COUNTED}


# ---- all of them ----


def run(setting: Setting, library: str) -> dict[str, float]:
    """Return what one process of its own measures."""
    given = null.environment() | {"PYTHONPATH": str(ROOT)}
    if setting.expandable:
        given["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    command = [sys.executable, __file__, "--worker", json.dumps([setting.name, library])]
    done = subprocess.run(command, env=os.environ | given, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{setting.name}, {library}:\n{done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def rows_of(setting: Setting) -> list[Row]:
    """Measure both libraries and the model without sharding, and compare: the median of each figure."""
    rounds = [{library: run(setting, library) for library in LIBRARIES} for _ in range(ROUNDS)]
    ours, theirs, alone = (
        {figure: median([found[library][figure] for found in rounds]) for figure in rounds[0][library]}
        for library in LIBRARIES
    )

    def row(figure: str, unit: str, limit: float | None = None, note: str = "", less: bool = False) -> Row:
        own, other = (side[figure] - (alone[figure] if less else 0.0) for side in (ours, theirs))
        return Row(f"{setting.name}: {figure}", own, other, unit, limit, note=note)

    pools = " + ".join(f"{ours[f'pool {i}']:.2f}" for i in range(int(ours["pools"])))
    rows = [row("live", "blocks", 1.0), row("reserved", "blocks", 1.0, f"pools with the shards: {pools}")]
    rows += [row("calls", "per block", 1.0, less=True), row("host ms", "per block", less=True)]
    rows += [row("first step ms", "ms"), *(row(name, "per block", less=name == "kernels") for name in COUNTED)]
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", metavar="TEXT", help="rows whose names have this")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many settings to measure at once")
    parser.add_argument("--worker", help="for the processes that this one starts")
    options = parser.parse_args()
    if options.worker:
        name, library = json.loads(options.worker)
        print(json.dumps(measure(next(setting for setting in SETTINGS if setting.name == name), library)))
        sys.stdout.flush()
        os._exit(0)
    if reason := null.missing():
        sys.exit(f"no null device: {reason}")
    chosen = [setting for setting in SETTINGS if (options.only or "") in setting.name]
    rows, failed = [], 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in [pool.submit(rows_of, setting) for setting in chosen]:
            try:
                rows += result.result()
            except RuntimeError as error:  # the others are still worth having
                print(error, file=sys.stderr)
                failed += 1
    finish("nullgpu", rows, __doc__ or "", options)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
