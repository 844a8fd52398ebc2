"""Seconds of a training step on two gloo processes: fsdp2, torch's fully_shard, DDP and the bare computation.

A 26M-parameter GPT (width 512, 8 layers, 128 bytes per sequence, fp32, AdamW), one thread per process. All candidates
live in the same processes and take turns, every turn between two barriers; figures are medians over the turns, ratios
are medians of the ratios within a turn. The losses of all candidates must agree. `--link-mbit 2000` puts the processes
into two network namespaces joined by a link of that speed (Linux, root).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import Row, arguments, candidates, finish, median, quiet_profiler, shard_units, spread
from _models import GPT
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

WORLD, WIDTH, LAYERS, LENGTH, COMPARED_STEPS = 2, 512, 8, 128, 5
SPACES = ("fsdp2-bench-0", "fsdp2-bench-1")
PARTS = ("forward", "backward", "optimizer")
Times = dict[str, float]


class Candidate:
    """A model with its optimizer that can do one timed step on the data of that step's number."""

    def __init__(self, name: str, ours: str, local_shards: bool) -> None:
        torch.manual_seed(0)
        model: nn.Module = GPT(WIDTH, LAYERS, LENGTH)
        if name == "ddp":
            model = DistributedDataParallel(model)
        elif name != "compute":
            shard_units(model, model.layers, candidates(ours)[name], init_device_mesh("cpu", (WORLD,)))  # type: ignore[arg-type]
        self.name, self.model = name, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        if name == "ours" and local_shards:
            importlib.import_module("fsdp2").use_local_shards(self.optimizer)
        self.losses: list[float] = []

    def step(self, data: Tensor) -> Times:
        """Seconds of the parts, of the whole step, and of the processor on all threads of this process."""
        processor = time.process_time()
        marks = [time.perf_counter()]
        loss = self.model(data)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        marks.append(time.perf_counter())
        spent = time.process_time() - processor
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        times = {part: end - start for part, start, end in zip(PARTS, marks, marks[1:])}
        return {**times, "step": marks[-1] - marks[0], "processor": spent}


def batch(step: int, rank: int, sequences: int) -> Tensor:
    """Random bytes that depend on the step and the rank only."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(256, (sequences, LENGTH + 1), generator=generator)


def worker(options: argparse.Namespace) -> dict[str, Any]:
    """One of the two processes: {"times": {candidate: [times of a step]}, "losses": {candidate: [loss]}}."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.rendezvous, rank=options.rank, world_size=WORLD)
    everyone = [Candidate(name, options.ours, options.local_shards) for name in ("ours", "theirs", "ddp", "compute")]
    times: dict[str, list[Times]] = {candidate.name: [] for candidate in everyone}
    for turn in range(options.warm + options.turns):
        data = batch(turn, options.rank, options.sequences)
        order = everyone[turn % len(everyone) :] + everyone[: turn % len(everyone)]
        for candidate in order:
            dist.barrier()
            found = candidate.step(data)
            if turn >= options.warm:
                times[candidate.name].append(found)
    if options.profile:
        show_profile(everyone[0], batch(0, options.rank, options.sequences), options)
    return {"times": times, "losses": {candidate.name: candidate.losses for candidate in everyone}}


def show_profile(candidate: Candidate, data: Tensor, options: argparse.Namespace) -> None:
    """Rank 0 prints where one of our steps goes: operators by own time, then Python functions by own time."""
    import cProfile
    import pstats

    quiet_profiler()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        candidate.step(data)
    dist.barrier()
    python = cProfile.Profile()
    python.runcall(candidate.step, data)
    if options.rank == 0:
        print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))
        pstats.Stats(python).strip_dirs().sort_stats("tottime").print_stats(25)
        if options.trace:
            profiler.export_chrome_trace(options.trace)
    dist.barrier()


@contextlib.contextmanager
def network(mbit: int) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Address, interface and command prefixes of the two processes: this machine, or two namespaces with a link."""
    if not mbit:
        yield "127.0.0.1", "lo", [[], []]
        return

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    try:
        for space in SPACES:
            run("ip", "netns", "add", space)
        ends = f"bench netns {SPACES[0]} type veth peer name bench netns {SPACES[1]}".split()
        run("ip", "link", "add", *ends)
        for rank, space in enumerate(SPACES):
            run("ip", "-n", space, "address", "add", f"10.77.0.{rank + 1}/24", "dev", "bench")
            run("ip", "-n", space, "link", "set", "bench", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
            shaping = f"root tbf rate {mbit}mbit burst 256kb latency 50ms".split()
            run("tc", "-n", space, "qdisc", "add", "dev", "bench", *shaping)
        yield "10.77.0.1", "bench", [["ip", "netns", "exec", space] for space in SPACES]
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "delete", space], check=False, stderr=subprocess.DEVNULL)


def launch(options: argparse.Namespace) -> dict[str, Any]:
    """Run both processes to their end; what rank 0 measured."""
    with network(options.link_mbit) as (address, interface, prefixes), tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        processes = []
        for rank, prefix in enumerate(prefixes):
            own = ["--rank", str(rank), "--rendezvous", f"tcp://{address}:{port}", "--found", f"{folder}/{rank}.json"]
            command = [*prefix, sys.executable, __file__, *sys.argv[1:], *own]
            processes.append(subprocess.Popen(command, env=environment))
        try:
            if any([process.wait() for process in processes]):
                raise SystemExit("step: a process failed; its error is above")
        finally:
            for process in processes:
                process.kill()
        return json.loads(Path(folder, "0.json").read_text())


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
    parser.add_argument("--turns", type=int, default=15, help="measured steps of every candidate (default 15)")
    parser.add_argument("--warm", type=int, default=3, help="steps before measuring (default 3)")
    parser.add_argument("--sequences", type=int, default=1, help="sequences per process and step (default 1)")
    parser.add_argument("--local-shards", action="store_true", help="ours steps by fsdp2.use_local_shards")
    parser.add_argument("--link-mbit", type=int, default=0, help="two network namespaces with a link of this speed")
    parser.add_argument("--profile", action="store_true", help="also print where one of our steps goes")
    parser.add_argument("--trace", help="with --profile: write rank 0's trace of one of our steps to this file")
    for hidden, kind in (("--rank", int), ("--rendezvous", str), ("--found", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        options.found.write_text(json.dumps(worker(options)))
        dist.destroy_process_group()
        return
    theme = f"step_{options.link_mbit}mbit" if options.link_mbit else "step"
    finish(theme, rows(launch(options), bool(options.link_mbit)), __doc__ or "", options)


if __name__ == "__main__":
    main()
