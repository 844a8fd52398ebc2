"""AdamW and Muon steps and gradient clipping on sharded parameters, beside the same work on plain tensors.

600 parameters of 64x64 in 20 units on a pretended world of 2 ranks (`fake` process group); the plain tensors have the
shards' shapes. Ours is `fsdp2.use_local_shards(optimizer)` and `fsdp2.clip_grad_norm_`; torch's is its optimizer and
its clipping on its own DTensors. Clipping plain tensors is torch's norm and scaling around one all-reduce. Medians of
processor time over calls in which the candidates take turns. Muon steps over 24 matrices on two gloo processes,
`fsdp2.use_full_params(optimizer)` beside Muon on torch's DTensors and in one process with plain tensors.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import _muon
import torch
import torch.distributed as dist
from _common import FullyShard, Row, arguments, fake_sides, finish, median, shard_units, spread
from _processes import on_two_processes, turn_arguments
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

COUNT, UNITS, SIZE, WORLD = 600, 20, 64, 2
Call = Callable[[], object]
Limits = tuple[float | None, float | None]  # of ours / torch's, of ours / plain


class Sum(nn.Module):
    """Adds its parameters to the input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(SIZE, SIZE)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x + matrix
        return x


def sharded(fully_shard: FullyShard, mesh: DeviceMesh) -> list[nn.Parameter]:
    """600 sharded parameters with gradients."""
    model = nn.Sequential(*(Sum(COUNT // UNITS) for _ in range(UNITS)))
    shard_units(model, model.children(), fully_shard, mesh)
    model(torch.randn(SIZE, SIZE)).square().mean().backward()
    return list(model.parameters())


def plain(like: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Ordinary parameters with the local shapes, values and gradients of sharded ones."""
    copies = []
    for parameter in like:
        copy = nn.Parameter(parameter.to_local().detach().clone())
        copy.grad = parameter.grad.to_local().clone()
        copies.append(copy)
    return copies


def alternate(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of every call in every round, after three rounds that do not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items() if turn % 2 else reversed(calls.items()):
            start = time.thread_time()
            call()
            if turn >= 3:
                times[name].append(time.thread_time() - start)
    return times


def step_of(parameters: list[nn.Parameter], use_local_shards: Callable[..., Any] | None, **options: Any) -> Call:
    """The step of an AdamW over the parameters."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, **options)
    if use_local_shards is not None:
        use_local_shards(optimizer)
    return optimizer.step


def clip_plain(parameters: list[nn.Parameter]) -> Tensor:
    """What clipping takes at least: a norm, one number from all ranks, and scaling."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm(grads).square()
    dist.all_reduce(total)
    total = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, total)
    return total


def to_rows(title: str, times: dict[str, list[float]], limits: Limits) -> list[Row]:
    """Milliseconds beside torch's, and both in multiples of the plain tensors' time of the same round."""
    ours, theirs, base = (median(times[name]) for name in ("ours", "theirs", "plain"))
    of_plain = {side: [a / b for a, b in zip(times[side], times["plain"])] for side in ("ours", "theirs")}
    multiples = {side: median(values) for side, values in of_plain.items()}
    text = f"plain {1e3 * base:.2f} ms"
    return [
        Row(title, 1e3 * ours, 1e3 * theirs, "ms", limits[0], True, text),
        Row(f"{title} / plain", multiples["ours"], multiples["theirs"], "", limits[1], False, spread(of_plain["ours"])),
    ]


def rows(sides: dict[str, FullyShard], mesh: DeviceMesh, package: Any, rounds: int) -> list[Row]:
    """The figures of the table."""
    parameters = {side: sharded(fully_shard, mesh) for side, fully_shard in sides.items()}
    parameters["plain"] = plain(parameters["theirs"])
    use_local_shards = getattr(package, "use_local_shards", None)
    table = []
    for kind in ("foreach", "fused"):
        local = {"ours": use_local_shards}
        calls = {side: step_of(found, local.get(side), **{kind: True}) for side, found in parameters.items()}
        table += to_rows(f"AdamW step, {kind}", alternate(calls, rounds), (None, 1.15))
    clip = getattr(package, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    calls = {
        "ours": functools.partial(clip, parameters["ours"], 1.0),
        "theirs": functools.partial(torch.nn.utils.clip_grad_norm_, parameters["theirs"], 1.0),
        "plain": functools.partial(clip_plain, parameters["plain"]),
    }
    return table + to_rows("clip_grad_norm_", alternate(calls, rounds), (0.5, None))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="calls of every candidate (default 40)")
    turn_arguments(parser, turns=15)
    options = parser.parse_args()
    muon = _muon.rows(on_two_processes(_muon.worker, options))
    muon.append(_muon.modelled_row(options))
    sides, mesh = fake_sides(options, WORLD)
    package = None if options.ours == "torch" else importlib.import_module("fsdp2")
    found = rows(sides, mesh, package, options.rounds) + muon
    finish("optimizer", found, __doc__ or "", options)


if __name__ == "__main__":
    main()
