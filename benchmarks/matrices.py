"""A Muon step on whole matrices: `use_full_params` and its options, torch's Muon, and owner placement.

Modelled: the matrices of 32 layers of Llama 8B, and the experts of four layers of a mixture, float32, on 8, 64 and 512
ranks of H100s. The code runs as it is on one simulated rank, the one with most to do. Between nodes, pieces of matrices
travel at the rate of a rank's own share of the network (37.5 GB/s). *Owner placement* keeps every matrix whole on one
rank: its row is the time of the optimizer's kernels alone.

Whole iterations: forward, backward and the step of the same models, in bfloat16, with gradients reduced in float32. For
owner placement, gathers are broadcasts and reductions go to owners, priced in its favor (`_owners.py`).

Measured: a GPT on two and four gloo processes, whose matrices Muon trains. The candidates live in the same processes
and take turns; ratios are medians of the ratios within a turn, of elapsed time on the first process and of the
processor's time on all. *Alone* steps on the matrices that the rank owns, and sends nothing, as owner placement does.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from _common import arguments, candidates, markdown, median, publish, shard_units, spread
from _llama import SHAPES, Shape
from _models import GPT
from _owners import WAYS, iteration_ms, kernel_seconds, muon
from _processes import LENGTH, batch, on_processes, turn_arguments
from _simulated import torchs_streams
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import use_full_params
from fsdp2.optim.whole.owners import assign_owners, default_cost
from fsdp2.tools.forecast.clock import Clock
from fsdp2.tools.forecast.rank import simulated_rank

WIDTH, LAYERS, WORLDS, RANKS = 384, 4, (2, 4), (8, 64, 512)
NAMES = ("torch", "whole", "overlap", "kept", "alone")
PLACED = ("placed", "placed, each", "placed, layers")
TOKENS = (8192, 2048)


# ---- modelled ----


class Matrices(nn.Module):
    """The matrices of one layer, and a scalar that all of them have gradients of."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        keys = shape.width // shape.heads * shape.kv_heads
        sizes: list[tuple[int, ...]] = [(shape.width, shape.width)] * 2 + [(keys, shape.width)] * 2
        feed = [(shape.hidden, shape.width)] * 2 + [(shape.width, shape.hidden)]
        sizes += [(shape.experts, *one) for one in feed] if shape.experts else feed
        self.matrices = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in sizes)

    def forward(self) -> Tensor:
        return torch.stack([matrix.sum() for matrix in self.matrices]).sum()


class Model(nn.Module):
    """The layers."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Matrices(shape) for _ in range(layers))

    def forward(self) -> Tensor:
        return torch.stack([layer() for layer in self.layers]).sum()


def modelled(name: str, shape: Shape, layers: int, ranks: int) -> dict[str, float]:
    """Milliseconds of a step, and the bytes that arrive at this rank in a step and in backward besides reductions."""
    clock = Clock()
    fully_shard = candidates()["theirs" if name == "torch" else "ours"]
    with torchs_streams(clock), simulated_rank({"shard": ranks}, clock) as mesh:
        model = Model(shape, layers)
        if name == "alone":
            return {"ms": 1e3 * kernel_seconds(list(model.parameters()), ranks, clock)}
        shard_units(model, model.layers, fully_shard, mesh)
        optimizer = muon(list(model.parameters()), whole=name != "torch", **WAYS.get(name, {}))
        found: dict[str, float] = {}
        for _ in range(2):
            clock.begin()
            model().backward()
            moved = _moved(clock, "all_to_all")
            begin = clock.begin()
            optimizer.step()
            found = {"ms": 1e3 * (clock.now - begin), "backward": moved, "step": _moved(clock)}
            optimizer.zero_grad()
        return found


def _moved(clock: Clock, kind: str = "") -> float:
    return float(sum(span.nbytes for span in clock.spans if span.group and kind in span.kind))


def model_table(options: argparse.Namespace) -> tuple[str, list[Any]]:
    """The table of models, and its data."""
    lines, data = [], []
    for title, kind, layers in (("Llama 8B", "8b", options.layers), ("experts", "moe", 4)):
        for ranks in RANKS:
            names = [name for name in NAMES if name != "torch" or kind != "moe"]
            found = {name: modelled(name, SHAPES[kind], layers, ranks) for name in names}
            data.append({"model": title, "ranks": ranks, **found})
            alone = found["alone"]["ms"]
            cells = [
                f"{found[name]['ms']:.1f} ({found[name]['ms'] / alone:.2f})" if name in found else "" for name in NAMES
            ]
            sent = [f"{found[name]['step'] / 1e6:.0f}" for name in ("whole", "overlap", "kept")]
            lines.append([title, str(ranks), *cells, *sent, f"{found['overlap']['backward'] / 1e6:.0f}"])
    head = ["matrices", "ranks", "torch's Muon, ms", "use_full_params", "overlap_backward", "and keep_full_params"]
    head += ["owner placement", "MB of a step", "with overlap", "and kept", "in backward"]
    return markdown(head, lines), data


def iteration_table(options: argparse.Namespace) -> tuple[str, list[Any]]:
    """The table of whole iterations, and its data."""
    lines, data = [], []
    for title, kind, layers in (("Llama 8B", "8b", options.layers), ("experts", "moe", options.expert_layers)):
        for ranks in RANKS:
            for tokens in TOKENS:
                found = {name: iteration_ms(name, kind, layers, ranks, tokens) for name in (*WAYS, *PLACED)}
                data.append({"model": title, "ranks": ranks, "tokens": tokens, **found})
                print(data[-1], file=sys.stderr, flush=True)
                cells = [f"{ms:.0f} ({ms / found['placed']:.3f})" for ms in found.values()]
                lines.append([title, str(ranks), str(tokens), *cells])
    head = ["model", "ranks", "tokens", "use_full_params", "overlap_backward", "and keep_full_params"]
    head += ["owner placement", "a collective a matrix", "an owner a layer"]
    return markdown(head, lines), data


# ---- measured ----


class Candidate:
    """A model, and a step of it."""

    def __init__(self, name: str, world: int) -> None:
        torch.manual_seed(0)
        self.model: Any = GPT(WIDTH, LAYERS, LENGTH)
        fully_shard = candidates()["theirs" if name == "torch" else "ours"]
        shard_units(self.model, self.model.layers, fully_shard, init_device_mesh("cpu", (world,)))
        matrices = [param for param in self.model.layers.parameters() if param.ndim == 2]
        self._plain: list[tuple[Any, nn.Parameter]] = []
        if name == "alone":
            owners = assign_owners(matrices, default_cost)
            mine = [param for param, (owner,) in zip(matrices, owners) if owner == dist.get_rank()]
            self._plain = [(param, nn.Parameter(param.full_tensor())) for param in matrices]  # all ranks gather each
            self._plain = [(param, whole) for param, whole in self._plain if any(param is one for one in mine)]
            matrices = [whole for _, whole in self._plain]
        self.optimizer = torch.optim.Muon(matrices, lr=1e-3)
        if name in WAYS:
            use_full_params(self.optimizer, bucket_mb=8, **WAYS[name])

    def step(self, data: Tensor) -> dict[str, float]:
        """Seconds of the backward and of the optimizer, and of the processor on all threads of this process."""
        loss = self.model(data)
        for _, whole in self._plain:
            whole.grad = torch.randn_like(whole)
        processor, begin = time.process_time(), time.perf_counter()
        loss.backward()
        middle, between = time.perf_counter(), time.process_time()
        self.optimizer.step()
        end, after = time.perf_counter(), time.process_time()
        self.model.zero_grad()
        self.optimizer.zero_grad()
        return {
            "backward": middle - begin,
            "optimizer": end - middle,
            "both": end - begin,
            "processor, optimizer": after - between,
            "processor, both": after - processor,
        }


def worker(options: argparse.Namespace) -> dict[str, Any]:
    """One of the processes: {candidate: [times of a step]}, and whether all of ours have come to the same weights.

    The processor's time is that of all processes, which does not depend on what else the machine does; they wait for
    each other asleep.
    """
    everyone = {name: Candidate(name, options.world) for name in NAMES}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in NAMES}
    for turn in range(options.warm + options.turns):
        first = turn % len(NAMES)
        for name in NAMES[first:] + NAMES[:first]:
            dist.barrier()
            found = everyone[name].step(batch(turn, options.rank, options.sequences))
            dist.barrier()
            if turn >= options.warm:
                times[name].append(found)
    weights = [[*everyone[name].model.parameters()] for name in ("whole", "overlap", "kept")]
    equal = all(
        torch.equal(param.to_local(), other.to_local())
        for some in zip(*weights)
        for param, other in [some[:2], some[1:]]
    )
    everyones: list[Any] = [None] * options.world
    dist.all_gather_object(everyones, times)
    for name, turns in times.items():
        for turn, found in enumerate(turns):
            for part in [part for part in found if part.startswith("processor")]:
                found[part] = sum(one[name][turn][part] for one in everyones)
    return {"times": times, "equal": equal}


def measured_table(found: list[dict[str, Any]]) -> str:
    """The table of times."""
    lines = []
    for world, one in zip(WORLDS, found):
        times = one["times"]
        for part in times["whole"][0]:
            whole = [turn[part] for turn in times["whole"]]
            cells = [f"{1e3 * median(whole):.0f} ms"]
            for name in ("overlap", "kept", "torch", "alone"):
                ratios = [turn[part] / base for turn, base in zip(times[name], whole)]
                cells.append(f"{median(ratios):.2f} ({spread(ratios)})")
            lines.append([str(world), part, *cells])
        if not one["equal"]:
            raise SystemExit(f"matrices: overlap_backward or keep_full_params changes weights on {world} processes")
    head = ["processes", "part", "use_full_params", "overlap_backward", "and keep_full_params", "torch's Muon", "alone"]
    return markdown(head, lines)


def main() -> None:
    """Print both tables."""
    parser = arguments(__doc__)
    turn_arguments(parser, turns=15)
    parser.add_argument("--layers", type=int, default=32, help="modelled layers of Llama 8B (default 32)")
    parser.add_argument("--expert-layers", type=int, default=16, help="modelled layers with experts (default 16)")
    parser.add_argument("--only", choices=("modelled", "iterations", "measured"), help="leave the other tables out")
    options = parser.parse_args()
    tables, data = [], {}
    if options.rank is None and options.only in (None, "modelled"):
        text, data["modelled"] = model_table(options)
        tables.append(f"Modelled, milliseconds of a step, in parentheses beside owner placement:\n\n{text}")
    if options.rank is None and options.only in (None, "iterations"):
        text, data["iterations"] = iteration_table(options)
        tables.append(f"Modelled, milliseconds of an iteration, in parentheses beside owner placement:\n\n{text}")
    if options.only in (None, "measured"):
        found = on_processes(worker, options, WORLDS)
        data["measured"] = [one["times"] for one in found]
        tables.append(f"Measured, ratios to `use_full_params` of the same turn:\n\n{measured_table(found)}")
    publish("matrices", "\n\n".join(tables), data, __doc__ or "", options)


if __name__ == "__main__":
    main()
