"""Seconds of a training step on two gloo processes: fsdp2, torch's fully_shard, DDP and the bare computation.

A 26M-parameter GPT (width 512, 8 layers, 128 bytes per sequence, fp32, AdamW), one thread per process. All candidates
live in the same processes and take turns, every turn between two barriers; figures are medians over the turns, ratios
are medians of the ratios within a turn. The losses of all candidates must agree. `--link-mbit 2000` puts the processes
into two network namespaces joined by a link of that speed (Linux, root). `--compression` adds fsdp2 with int8 gathers
and reductions, and torch's with bfloat16 parameters and gradients.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

import torch
import torch.distributed as dist
from _common import Row, arguments, candidates, finish, median, quiet_profiler, shard_units, spread
from _models import GPT
from _processes import (
    LENGTH,
    PARTS,
    WORLD,
    Step,
    Times,
    Training,
    batch,
    on_two_processes,
    take_turns,
    turn_arguments,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

WIDTH, LAYERS, COMPARED_STEPS = 512, 8, 5
NAMES = ("ours", "theirs", "ddp", "compute")
COMPRESSED = ("int8", "theirs_bf16")
"""More candidates with `--compression`."""


def build(name: str, options: argparse.Namespace) -> Training:
    """The candidate of that name, equal to the others at the start."""
    torch.manual_seed(0)
    model: nn.Module = GPT(WIDTH, LAYERS, LENGTH)
    if name == "ddp":
        model = DistributedDataParallel(model)
    elif name == "int8":
        ours, mesh = importlib.import_module("fsdp2"), init_device_mesh("cpu", (WORLD,))
        policy = ours.CompressionPolicy(gather=torch.int8, reduce=torch.int8)
        shard_units(model, model.layers, ours.fully_shard, mesh, compression=policy)
    elif name == "theirs_bf16":
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        shard_units(model, model.layers, candidates()["theirs"], init_device_mesh("cpu", (WORLD,)), mixed)
    elif name != "compute":
        fully_shard = candidates(options.ours)[name]
        shard_units(model, model.layers, fully_shard, init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if name == "ours" and options.local_shards:
        importlib.import_module("fsdp2").use_local_shards(optimizer)
    return Training(model, optimizer)


def worker(options: argparse.Namespace) -> dict[str, Any]:
    """One of the two processes: {"times": {candidate: [times of a step]}, "losses": {candidate: [loss]}}."""
    everyone = {name: build(name, options) for name in (*NAMES, *(COMPRESSED if options.compression else ()))}
    times = take_turns({name: training.step for name, training in everyone.items()}, options)
    if options.profile:
        show_profile(everyone["ours"].step, options)
    return {"times": times, "losses": {name: training.losses for name, training in everyone.items()}}


def show_profile(step: Step, options: argparse.Namespace) -> None:
    """Rank 0 prints where one of our steps goes: operators by own time, then Python functions by own time."""
    import cProfile
    import pstats

    quiet_profiler()
    data = batch(0, options.rank, options.sequences)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(data)
    dist.barrier()
    python = cProfile.Profile()
    python.runcall(step, data)
    if options.rank == 0:
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))
        pstats.Stats(python).strip_dirs().sort_stats("tottime").print_stats(25)
        if options.trace:
            profiler.export_chrome_trace(options.trace)
    dist.barrier()


def check_losses(losses: dict[str, list[float]]) -> float:
    """The largest relative difference of ours from torch's and DDP's in the first steps; raises above one percent."""
    ours = losses["ours"][:COMPARED_STEPS]
    others = [losses[side][:COMPARED_STEPS] for side in ("theirs", "ddp")]
    worst = max(abs(a - b) / abs(b) for other in others for a, b in zip(ours, other))
    if worst > 0.01:
        raise SystemExit(f"step: the losses differ by {worst:.1%}: ours {ours}, torch's and DDP's {others}")
    return worst


def rows(found: dict[str, Any], linked: bool) -> list[Row]:
    """The figures of the table."""
    times: dict[str, list[Times]] = found["times"]
    whole = {name: [step["step"] for step in steps] for name, steps in times.items()}
    quiet = {name: sorted(values)[len(values) // 4] for name, values in whole.items()}

    def ratios(side: str, base: str) -> list[float]:
        return [a / b for a, b in zip(whole[side], whole[base])]

    table = [
        Row("step", median(whole["ours"]), median(whole["theirs"]), "s", 0.6, True, spread(whole["ours"])),
        Row("step, quietest quarter", quiet["ours"], quiet["theirs"], "s", 0.6, True, f"DDP {quiet['ddp']:.3f} s"),
        Row("step / torch's of the same turn", median(ratios("ours", "theirs")), 1.0, "", 0.6, False),
    ]
    for base, title, limit in (("ddp", "DDP's", None if linked else 1.05), ("compute", "the computation alone", None)):
        ours, theirs = ratios("ours", base), ratios("theirs", base)
        note = f"{spread(ours)}; {title} {median(whole[base]):.3f} s"
        table.append(Row(f"step / {title}", median(ours), median(theirs), "", limit, False, note))
    if "int8" in times:
        for base, title, limit in (("theirs", "torch's", 0.3), ("theirs_bf16", "torch's in bfloat16", 0.55)):
            note = f"{median(whole['int8']):.3f} s, {title} {median(whole[base]):.3f} s"
            table.append(Row(f"step with int8 / {title}", median(ratios("int8", base)), 1.0, "", limit, False, note))
    for part in (*PARTS, "processor"):
        parts = {name: median([step[part] for step in steps]) for name, steps in times.items()}
        note = f"DDP {parts['ddp']:.3f} s, computation {parts['compute']:.3f} s"
        title = "processor time of a step, all threads" if part == "processor" else part
        table.append(Row(title, parts["ours"], parts["theirs"], "s", None, True, note))
    worst = check_losses(found["losses"])
    note = f"over {COMPARED_STEPS} steps, against torch's and DDP's"
    table.append(Row("largest relative difference of the losses", 100 * worst, None, "%", None, False, note))
    return table


def main() -> None:
    parser = arguments(__doc__)
    turn_arguments(parser, turns=15)
    parser.add_argument("--local-shards", action="store_true", help="ours steps by fsdp2.use_local_shards")
    parser.add_argument("--compression", action="store_true", help="also fsdp2 with int8, and torch's with bfloat16")
    parser.add_argument("--profile", action="store_true", help="also print where one of our steps goes")
    parser.add_argument("--trace", help="with --profile: write rank 0's trace of one of our steps to this file")
    options = parser.parse_args()
    found = on_two_processes(worker, options)
    theme = f"step_{options.link_mbit}mbit" if options.link_mbit else "step"
    theme += "_compressed" if options.compression else ""
    finish(theme, rows(found, bool(options.link_mbit)), __doc__ or "", options)


if __name__ == "__main__":
    main()
