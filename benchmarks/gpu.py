"""Memory, copies, host time and idle time of a training step on one GPU: fsdp2, torch's fully_shard, not sharded.

A llama of about 1B parameters (`examples/llama.py`: width 2048, 16 layers, 2048 tokens), each block a unit, forward,
backward and fused AdamW. `nccl, 1 rank` is NCCL on a world of one. `fake, 8 ranks` and `fake, 64 ranks` pretend the
others: shards have the size they would have there, collectives are replaced by copies on the GPU. `bf16`: parameters,
computation and gradients; `mixed`: fp32 shards, computation in bf16, reduction in fp32. Memory, copies and busy time
are measured with each candidate alone, times with all of them taking turns in one process.

One GPU cannot show what sharding is for. Nothing travels between GPUs: the bandwidth of real links, how much of the
communication hides behind computation, what a kernel of NCCL takes from the compute beside it, and ranks that are early
or late are all absent (`torchrun --nproc-per-node N -m fsdp2 check` measures on several GPUs). On one rank fsdp2 calls
no collective at all. What is shown is what a rank does by itself: the memory that it holds, the copies that it makes,
and whether its host keeps the GPU busy.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _common import (
    FullyShard,
    arguments,
    candidates,
    collect_garbage,
    markdown,
    median,
    number,
    publish,
    quiet_profiler,
    shard_units,
    spread,
)
from _traces import observe, peak_of_cpu
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp2.tools.check.measure import peak_bytes, turns

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from llama import Llama, LlamaConfig, next_token_loss

WARM_STEPS = 3
LARGE = LlamaConfig(vocabulary=32_000, layers=16, width=2048, heads=16, context=2048)
TINY = LlamaConfig(vocabulary=64, layers=2, width=32, heads=2, context=16)
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MIB, MS = 1 << 20, 1e3
Found = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A process group that one process can have, and a precision."""

    backend: str
    ranks: int
    mixed: bool = False

    @property
    def title(self) -> str:
        ranks = f"{self.ranks} rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.backend}, {ranks}, {'mixed' if self.mixed else 'bf16'}"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A row of the table: which value, in which unit and how large the unit is."""

    title: str
    key: str
    unit: str = ""
    scale: float = 1.0


FIGURES = (
    Figure("peak allocated above the state", "allocated", "MiB", 1 / MIB),
    Figure("peak reserved above the state", "reserved", "MiB", 1 / MIB),
    Figure("copy kernels outside of collectives", "copies"),
    Figure("their time", "copy_seconds", "ms", MS),
    Figure("host time until all is launched", "host", "ms", MS),
    Figure("processor time until then, all threads", "processor", "ms", MS),
    Figure("GPU idle in a step", "idle", "%", 100.0),
    Figure("step", "step", "ms", MS),
)


class Machine:
    """The device that is measured; on a CPU, what only a GPU has is not a number."""

    def __init__(self, device: str) -> None:
        self.type = device
        self.cuda = device == "cuda"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def settings(self) -> list[Setting]:
        alone = Setting("nccl" if self.cuda else "gloo", 1)
        return [alone, Setting("fake", 8), Setting("fake", 64), Setting("fake", 8, mixed=True)]

    def peak(self, step: Callable[[], object]) -> Found:
        """Bytes above what is there between steps: allocated at most, reserved from the driver at most."""
        if not self.cuda:
            return {"allocated": peak_of_cpu(step), "reserved": math.nan}
        collect_garbage()
        state = torch.cuda.memory_allocated()
        return {kind: nbytes - state for kind, nbytes in peak_bytes(step, (), cuda=True).items()}


class Training:
    """A candidate that can do one step."""

    def __init__(self, options: argparse.Namespace, setting: Setting, mesh: DeviceMesh, name: str) -> None:
        torch.manual_seed(0)
        self.machine = Machine(options.device)
        config = TINY if options.tiny else LARGE
        with torch.device(options.device):
            model: Any = Llama(config)
            self.tokens = torch.randint(config.vocabulary, (1, config.context + 1))
        fully_shard: FullyShard | None = candidates(options.ours).get(name)
        if not setting.mixed:
            model = model.bfloat16()
        policy = MIXED if setting.mixed else None
        self.model: nn.Module = shard_units(model, model.blocks, fully_shard, mesh, policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        if options.local_shards and name == "ours" and options.ours == "fsdp2":
            importlib.import_module("fsdp2").use_local_shards(self.optimizer)
        self.loss = torch.zeros(())
        for _ in range(WARM_STEPS):
            self.step()
        self.machine.wait()

    def step(self) -> Tensor:
        """One training step, launched; nothing here waits for it."""
        self.loss = next_token_loss(self.model(self.tokens[:, :-1]), self.tokens[:, 1:])
        self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.loss

    def timed(self) -> Found:
        """Seconds until the step is launched, and until it is done."""
        self.machine.wait()
        processor, start = time.process_time(), time.perf_counter()
        self.step()
        processor, launched = time.process_time() - processor, time.perf_counter()
        self.machine.wait()
        return {"host": launched - start, "processor": processor, "step": time.perf_counter() - start}


@contextlib.contextmanager
def process_group(setting: Setting, device: str) -> Iterator[DeviceMesh]:
    """A default process group of that kind in this process, and the mesh over it."""
    if setting.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store: Any = FakeStore()
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(setting.backend, store=store, rank=0, world_size=setting.ranks)
    try:
        yield init_device_mesh(device, (setting.ranks,))
    finally:
        dist.destroy_process_group()


def names(setting: Setting) -> tuple[str, ...]:
    """The candidates; a model that is not sharded has no fp32 shards to compute from."""
    return ("ours", "theirs") if setting.mixed else ("ours", "theirs", "plain")


def alone(options: argparse.Namespace, setting: Setting, mesh: DeviceMesh, name: str) -> Found:
    """What is measured with the candidate alone in memory."""
    training = Training(options, setting, mesh, name)
    found = training.machine.peak(training.step)
    seen = observe(training.step, cuda=training.machine.cuda)
    found |= {"copies": seen.copies, "copy_seconds": seen.copy_seconds, "busy": seen.busy_seconds}
    return found | {"loss": training.loss.item()}


def in_turns(options: argparse.Namespace, setting: Setting, mesh: DeviceMesh) -> dict[str, list[Found]]:
    """The times of every candidate's steps, in an order that changes from turn to turn."""
    everyone = {name: Training(options, setting, mesh, name) for name in names(setting)}
    times: dict[str, list[Found]] = {name: [] for name in everyone}
    for name in turns(list(everyone), options.turns):
        times[name].append(everyone[name].timed())
    return times


def measure(options: argparse.Namespace, setting: Setting) -> dict[str, Found]:
    """{candidate: its figures}, with the ratios of steps that were measured within a turn."""
    found: dict[str, Found] = {}
    with process_group(setting, options.device) as mesh:
        for name in names(setting):
            found[name] = alone(options, setting, mesh, name)
            collect_garbage()
        times = in_turns(options, setting, mesh)
        collect_garbage()
    if setting.ranks == 1:
        check_losses({name: figures["loss"] for name, figures in found.items()})
    for name, figures in found.items():
        figures |= {key: median([step[key] for step in times[name]]) for key in ("host", "processor", "step")}
        figures["idle"] = 1 - min(figures["busy"] / figures["step"], 1.0) if figures["busy"] > 0 else math.nan
        figures["of_ours"] = median([a["step"] / b["step"] for a, b in zip(times["ours"], times[name])])
    steps = [step["step"] * MS for step in times["ours"]]
    print(f"{setting.title}: done; steps of ours {spread(steps)} ms", file=sys.stderr)
    return found


def check_losses(losses: dict[str, float]) -> None:
    """Raise where candidates that saw the same data differ by more than a hundredth."""
    if any(not abs(loss - losses["theirs"]) <= 0.01 * abs(losses["theirs"]) for loss in losses.values()):
        raise SystemExit(f"gpu: the losses of one rank differ: {losses}")


def _ratio(figure: Figure, found: dict[str, Found], base: str) -> float:
    if base not in found:
        return math.nan
    if figure.key == "step":
        return found[base]["of_ours"]
    ours, other = found["ours"][figure.key], found[base][figure.key]
    return ours / other if other else math.nan


def _cell(value: float, digits: str | None = None) -> str:
    if math.isnan(value):
        return "n/a"
    return number(value) if digits is None else format(value, digits)


def table(results: dict[str, dict[str, Found]]) -> str:
    """One row for each setting and figure."""
    head = ["setting", "figure", "ours", "torch's", "not sharded", "ours / torch's", "ours / not sharded"]
    lines = []
    for setting, found in results.items():
        for figure in FIGURES:
            values = [
                found[n][figure.key] * figure.scale if n in found else math.nan for n in ("ours", "theirs", "plain")
            ]
            ratios = [_ratio(figure, found, base) for base in ("theirs", "plain")]
            title = f"{figure.title} ({figure.unit})" if figure.unit else figure.title
            lines.append([setting, title, *(_cell(v) for v in values), *(_cell(r, ".3f") for r in ratios)])
    return markdown(head, lines)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what a CPU can show, else n/a")
    parser.add_argument("--tiny", action="store_true", help="a model of some thousand parameters, to try the program")
    parser.add_argument("--turns", type=int, default=20, help="timed steps of every candidate (default 20)")
    parser.add_argument("--local-shards", action="store_true", help="ours steps by fsdp2.use_local_shards")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu: no CUDA device; --device cpu --tiny tries the program without one", file=sys.stderr)
        raise SystemExit(2)
    if options.write and (options.device == "cpu" or options.tiny):
        parser.error("--write is for figures of a GPU and the whole model; leave out --device cpu and --tiny")
    quiet_profiler()
    if options.device == "cpu":
        torch.set_num_threads(1)
    observe(lambda: None, cuda=options.device == "cuda")  # the first profile of a process takes its time
    results = {setting.title: measure(options, setting) for setting in Machine(options.device).settings()}
    publish("gpu", table(results), _without_nan(results), __doc__ or "", options)


def _without_nan(results: dict[str, dict[str, Found]]) -> Any:
    """What JSON can hold: null where nothing was measured."""
    return {
        setting: {
            name: {key: None if math.isnan(value) else value for key, value in figures.items()}
            for name, figures in found.items()
        }
        for setting, found in results.items()
    }


if __name__ == "__main__":
    main()
