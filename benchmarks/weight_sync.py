"""Bytes that `WeightSender(delta=True)` sends while the demo's GPT is fine-tuned, beside all of its weights.

Two gloo processes train the model of `examples/train_gpt.py` on the Python manual, as the demo does, and then fine-tune
it on the source of `argparse` with AdamW, from the same weights at several learning rates. A receiver is sent the
weights after every step, or every few steps. `ours` is the mean of what a sync sends, buffers and headers, and
`torch's` all weights in the engine's dtype. At the end of each run the receiver's weights are compared with the
model's, bit for bit. Times are medians of senders that take turns; no receiver is timed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import Row, arguments, finish
from _processes import WORLD, on_two_processes, process_arguments
from torch.distributed.tensor import DTensor

import fsdp2

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

RUNS = (
    (1e-6, 1, torch.bfloat16),
    (3e-6, 1, torch.bfloat16),
    (1e-5, 1, torch.bfloat16),
    (1e-4, 1, torch.bfloat16),
    (1e-3, 1, torch.bfloat16),
    (1e-6, 8, torch.bfloat16),
    (1e-5, 8, torch.bfloat16),
    (1e-6, 1, torch.float32),
)
"""Learning rate, steps between two syncs, dtype of the engine."""


def worker(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One of the two processes: train once, then fine-tune for each run."""
    from gpt import train
    from gpt.data import held_out_batches, load_text, training_batch
    from gpt.options import Settings
    from gpt.processes import Place

    place = Place(options.rank, WORLD, torch.device("cpu"))
    settings = Settings(steps=options.steps)
    text, other = load_text(None, settings.context), load_text(Path(argparse.__file__), settings.context)
    held_out = held_out_batches(other, settings.context, place)
    model, optimizer = train.build(settings, place, "float32")
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step, settings)
        batch = training_batch(text, step, settings.batch, settings.context, settings.seed, place)
        train.update(model, optimizer, batch)
    trained = [parameter.detach().clone() for parameter in model.parameters()]
    found = []
    for rate, every, dtype in RUNS:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), trained, strict=True):
                parameter.copy_(value)
        rated = Settings(learning_rate=rate)
        optimizer = train.new_optimizer(model, rated)
        batches = (
            training_batch(other, step, rated.batch, rated.context, rated.seed, place)
            for step in range(options.syncs * every)
        )
        update = partial(trained_on_next, model, optimizer, batches)
        losses = [train.held_out_loss(model, held_out, place)]
        result = followed(model, update, every, dtype, options.syncs, place)
        result["losses"] = [*losses, train.held_out_loss(model, held_out, place)]
        found.append(result | {"rate": rate, "every": every, "dtype": str(dtype).removeprefix("torch.")})
        print(found[-1], file=sys.stderr, flush=True) if place.first else None
    return found


def trained_on_next(model: Any, optimizer: torch.optim.Optimizer, batches: Iterator[Any]) -> torch.Tensor:
    """Train on the next batch and return its loss."""
    from gpt import train

    return train.update(model, optimizer, next(batches))


def followed(
    model: torch.nn.Module, update: Callable[[], Any], every: int, dtype: torch.dtype, syncs: int, place: Any
) -> dict[str, Any]:
    """Train and send; return the bytes, the shares of weights that changed, and the seconds of a sync."""
    receiver = fsdp2.WeightReceiver()
    sender = fsdp2.WeightSender(model, dtype=dtype, delta=True)
    whole = fsdp2.WeightSender(model, dtype=dtype)
    sender.send(receiver.apply)
    reports, seconds, whole_seconds = [], [], []
    for _ in range(syncs):
        for _ in range(every):
            update()
        buckets: list[fsdp2.WeightBucket] = []
        began = time.perf_counter()
        reports.append(sender.send(buckets.append))
        seconds.append(time.perf_counter() - began)
        for bucket in buckets:
            receiver.apply(bucket)
        began = time.perf_counter()
        whole.send(lambda bucket: None)
        whole_seconds.append(time.perf_counter() - began)
    for name, tensor in fsdp2.iter_full_params(model, dtype=dtype):
        if place.first:
            got = receiver.tensors[name]
            assert got.dtype == tensor.dtype and torch.equal(got.view(torch.uint8), tensor.view(torch.uint8)), name
    return {
        "nbytes": [report.nbytes for report in reports],
        "full": reports[0].full_nbytes,
        "changed": [report.changed / report.numel for report in reports],
        "seconds": statistics.median(seconds),
        "whole_seconds": statistics.median(whole_seconds),
        "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
    }


def rows(found: list[dict[str, Any]]) -> list[Row]:
    """The figures of the table."""
    table = []
    for run in found:
        assert run["sharded"]
        when = "a step" if run["every"] == 1 else f"{run['every']} steps"
        name = f"{run['dtype']}, rate {run['rate']:g}, a sync after {when}"
        low, high = min(run["changed"]), max(run["changed"])
        before, after = run["losses"]
        note = f"{low:.1%} to {high:.1%} of weights changed; held-out loss {before:.3f} to {after:.3f}"
        nbytes = statistics.mean(run["nbytes"]) / 2**20
        table.append(Row(f"bytes, {name} (MiB)", nbytes, run["full"] / 2**20, "", None, True, note))
        table.append(Row(f"time, {name} (s)", run["seconds"], run["whole_seconds"]))
    return table


def main() -> None:
    """Train, fine-tune and print the table."""
    parser = arguments(__doc__)
    for name, value in (("steps", 154), ("syncs", 16)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--link-mbit", type=int, default=0, help="two network namespaces with a link of this speed")
    process_arguments(parser)
    options = parser.parse_args()
    finish("weight_sync", rows(on_two_processes(worker, options)), __doc__ or "", options)


if __name__ == "__main__":
    main()
