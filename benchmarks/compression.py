"""Held-out loss of the demo's GPT trained with compressed gathers and reductions, beside the same without.

Two gloo processes train the model of `examples/train_gpt.py`, smaller by default, from the same seeds, once for each
policy. The text is the Python manual; a tenth of it is held out. `ours` is the mean over the seeds with
the policy, `torch's` the mean without any, which is what torch's fully_shard trains.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from _common import Row, arguments, finish
from _processes import WORLD, on_two_processes, process_arguments
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CompressionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

POLICIES: dict[str, CompressionPolicy | None] = {
    "nothing": None,
    "int8 gathers and reductions": CompressionPolicy(gather=torch.int8, reduce=torch.int8),
    "float8 gathers and reductions": CompressionPolicy(gather=torch.float8_e4m3fn, reduce=torch.float8_e5m2),
    "int8 gathers, int4 reductions": CompressionPolicy(gather=torch.int8, reduce="int4"),
}
LIMIT = 1.01  # of the loss without, for int8


def worker(options: argparse.Namespace) -> dict[str, list[float]]:
    """One of the two processes: the held-out loss of every policy, for each seed."""
    from gpt.options import Settings
    from gpt.processes import Place

    place = Place(options.rank, WORLD, torch.device("cpu"))
    found: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        settings = Settings(options.layers, options.width, steps=options.steps, seed=seed)
        for name in ("nothing", *options.only):
            policy = POLICIES[name]
            found.setdefault(name, []).append(held_out(settings, place, policy))
            print(f"seed {seed}, {name}: {found[name][-1]:.4f}", file=sys.stderr, flush=True) if place.first else None
    return found


def held_out(settings: Any, place: Any, policy: CompressionPolicy | None) -> float:
    """The held-out loss, in nats a byte, after training with `policy`."""
    from gpt import train
    from gpt.data import held_out_batches, load_text, training_batch

    text = load_text(None, settings.context)
    model = train.new_model(settings, place)
    mesh = init_device_mesh("cpu", (place.ranks,))
    units: list[nn.Module] = [*model.blocks, model]
    for unit in units:
        fully_shard(unit, mesh=mesh, compression=policy)
    optimizer = train.new_optimizer(model, settings)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step, settings)
        batch = training_batch(text, step, settings.batch, settings.context, settings.seed, place)
        train.update(model, optimizer, batch)
    return train.held_out_loss(model, held_out_batches(text, settings.context, place), place)


def rows(found: dict[str, list[float]]) -> list[Row]:
    """The figures of the table."""
    plain = found["nothing"]
    table = []
    for name, losses in found.items():
        if name == "nothing":
            continue
        ratios = [ours / theirs for ours, theirs in zip(losses, plain, strict=True)]
        note = "with / without by seed: " + ", ".join(f"{ratio:.4f}" for ratio in ratios)
        limit = LIMIT if name.startswith("int8") and name.endswith("reductions") and "int4" not in name else None
        mean, without = (sum(values) / len(values) for values in (losses, plain))
        table.append(Row(f"held-out loss, {name} (nats a byte)", mean, without, "", limit, True, note))
    return table


def main() -> None:
    """Train and print the table."""
    parser = arguments(__doc__)
    for name, value in (("layers", 4), ("width", 128), ("steps", 200), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    names = [name for name in POLICIES if name != "nothing"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="run only these beside none")
    parser.add_argument("--link-mbit", type=int, default=0, help="two network namespaces with a link of this speed")
    process_arguments(parser)
    options = parser.parse_args()
    finish("compression", rows(on_two_processes(worker, options)), __doc__ or "", options)


if __name__ == "__main__":
    main()
