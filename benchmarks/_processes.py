"""A program on a few gloo processes: on this machine's loopback, or two in network namespaces with a limited link."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORLD, LENGTH = 2, 128
PARTS = ("forward", "backward", "optimizer")
Times = dict[str, float]
Step = Callable[[Tensor], Times]


class Training:
    """A model with its optimizer that can do one timed step; `clip` sees the parameters before the optimizer steps."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip: Callable[[list[nn.Parameter]], object] | None = None,
    ) -> None:
        self.model, self.optimizer, self.clip = model, optimizer, clip
        self.parameters = list(model.parameters())
        self.losses: list[float] = []

    def step(self, data: Tensor) -> Times:
        """Seconds of the parts, of the whole step, and of the processor on all threads of this process."""
        processor = time.process_time()
        marks = [time.perf_counter()]
        loss = self.model(data)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        if self.clip is not None:
            self.clip(self.parameters)
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


def take_turns(steps: dict[str, Step], options: argparse.Namespace) -> dict[str, list[Times]]:
    """The times of every candidate's steps. They take turns in an order that rotates, each turn behind a barrier."""
    times: dict[str, list[Times]] = {name: [] for name in steps}
    names = list(steps)
    for turn in range(options.warm + options.turns):
        data = batch(turn, options.rank, options.sequences)
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            found = steps[name](data)
            if turn >= options.warm:
                times[name].append(found)
    return times


def turn_arguments(parser: argparse.ArgumentParser, turns: int) -> None:
    """Add the options of a program that runs on two processes and takes turns there."""
    parser.add_argument("--turns", type=int, default=turns, help=f"measured steps of every candidate (default {turns})")
    parser.add_argument("--warm", type=int, default=3, help="steps before measuring (default 3)")
    parser.add_argument("--sequences", type=int, default=1, help="sequences per process and step (default 1)")
    parser.add_argument("--link-mbit", type=int, default=0, help="two network namespaces with a link of this speed")
    process_arguments(parser)


def process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a program starts itself as one of several processes."""
    for hidden, kind in (("--rank", int), ("--world", int), ("--rendezvous", str), ("--found", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)


def on_two_processes(worker: Callable[[argparse.Namespace], Any], options: argparse.Namespace) -> Any:
    """What `worker(options)` returned on rank 0 of two processes, which run this program with the same options.

    In these processes this function runs the worker and ends the process. Values travel as JSON.
    """
    return on_processes(worker, options, (WORLD,))[0]


def on_processes(
    worker: Callable[[argparse.Namespace], Any], options: argparse.Namespace, worlds: tuple[int, ...]
) -> list[Any]:
    """What `worker(options)` returned on rank 0 of so many processes, for each of `worlds`, one after the other.

    A limited link joins two processes only.
    """
    if options.rank is None:
        return [_launch(options, world) for world in worlds]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=options.rendezvous, rank=options.rank, world_size=options.world)
    options.found.write_text(json.dumps(worker(options)))
    dist.destroy_process_group()
    raise SystemExit


def _launch(options: argparse.Namespace, world: int) -> Any:
    with _network(options.link_mbit, world) as (address, interface, prefixes), tempfile.TemporaryDirectory() as folder:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"}
        processes = []
        for rank, prefix in enumerate(prefixes):
            own = [
                "--rank",
                str(rank),
                "--world",
                str(world),
                "--rendezvous",
                f"tcp://{address}:{port}",
                "--found",
                f"{folder}/{rank}.json",
            ]
            processes.append(subprocess.Popen([*prefix, sys.executable, *sys.argv, *own], env=environment))
        try:
            if any([process.wait() for process in processes]):
                raise SystemExit("a process failed; its error is above")
        finally:
            for process in processes:
                process.kill()
        return json.loads(Path(folder, "0.json").read_text())


@contextlib.contextmanager
def _network(mbit: int, world: int) -> Iterator[tuple[str, str, list[list[str]]]]:
    """Address, interface and command prefixes of the processes: this machine, or two namespaces with a link."""
    if not mbit:
        yield "127.0.0.1", "lo", [[]] * world
        return
    if world != WORLD:
        raise SystemExit(f"--link-mbit joins two processes, not {world}")
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("--link-mbit needs Linux, root, and the commands ip and tc (package iproute2)")

    def run(*command: str) -> None:
        subprocess.run(command, check=True)

    spaces = [f"fsdp2-bench-{os.getpid()}-{rank}" for rank in range(WORLD)]
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through what cleans up below
    try:
        for space in spaces:
            run("ip", "netns", "add", space)
        ends = f"bench netns {spaces[0]} type veth peer name bench netns {spaces[1]}".split()
        run("ip", "link", "add", *ends)
        for rank, space in enumerate(spaces):
            run("ip", "-n", space, "address", "add", f"10.77.0.{rank + 1}/24", "dev", "bench")
            run("ip", "-n", space, "link", "set", "bench", "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
            shaping = f"root tbf rate {mbit}mbit burst 256kb latency 50ms".split()
            run("tc", "-n", space, "qdisc", "add", "dev", "bench", *shaping)
        yield "10.77.0.1", "bench", [["ip", "netns", "exec", space] for space in spaces]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, stderr=subprocess.DEVNULL)
        signal.signal(signal.SIGTERM, before)
