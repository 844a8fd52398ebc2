"""Training iterations with Muon on a simulated rank: matrices that visit their owners, and matrices that live there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from _common import candidates, shard_units
from _llama import SHAPES, Block
from _simulated import torchs_streams
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, use_full_params
from fsdp2.optim.whole.owners import assign_owners, default_cost
from fsdp2.tools.forecast.clock import Clock
from fsdp2.tools.forecast.cost import H100, Hardware
from fsdp2.tools.forecast.rank import simulated_rank

WAYS: dict[str, dict[str, bool]] = {
    "whole": {},
    "overlap": {"overlap_backward": True},
    "kept": {"overlap_backward": True, "keep_full_params": True},
}
"""Options of `use_full_params` by the name of a candidate."""


@dataclass(frozen=True)
class OwnerPlaced(Hardware):
    """The cost model for parameters that are whole on one rank: gathers are broadcasts from owners, and reductions go
    to owners.

    Every byte then passes each edge of the ring, as in a gather of even pieces but for one part in n. With ``messages``
    of 1, a unit's parameters come in one collective, whoever owns them: that favors owner placement. With more, each of
    so many matrices has a collective of its own, with its latency.
    """

    messages: int = 1

    def collective_seconds(self, nbytes: float, ranks: Any, kind: str = "all_gather") -> float:
        """See `Hardware.collective_seconds`."""
        placed = {"all_gather": "broadcast", "reduce_scatter": "reduce"}.get(kind)
        seconds = super().collective_seconds(nbytes, ranks, placed or kind)
        return seconds + (self.messages - 1) * self.link(len(ranks)).seconds * bool(placed and len(ranks) > 1)


def muon(params: list[Any], **options: Any) -> torch.optim.Optimizer:
    """Muon of matrices, and of stacks of them, which its constructor refuses."""
    optimizer = torch.optim.Muon([param for param in params if param.ndim == 2], lr=1e-3)
    if options.pop("whole", True):
        use_full_params(optimizer, **options)
    stacks = [param for param in params if param.ndim == 3]
    if stacks:
        optimizer.add_param_group({"params": stacks})
    return optimizer


def kernel_seconds(params: list[Any], ranks: int, clock: Clock) -> float:
    """Seconds of Muon's kernels for the matrices that rank 0 owns of these plain tensors, and nothing else."""
    model = nn.ParameterList(params)
    candidates()["ours"](model, mesh=init_device_mesh("cpu", (ranks,)))
    sharded: list[Any] = list(model.parameters())
    counts = [param.shape[0] if param.ndim == 3 else 1 for param in sharded]
    owners = assign_owners(sharded, default_cost, counts)
    mine = [
        nn.Parameter(torch.empty(param.shape[-2:])) for param, own in zip(sharded, owners) for one in own if one == 0
    ]
    for param in mine:
        param.grad = torch.empty_like(param)
    optimizer = torch.optim.Muon(mine, lr=1e-3)
    begin = 0.0
    for _ in range(2):
        begin = clock.begin()
        optimizer.step()
    return clock.now - begin


def iteration_ms(name: str, kind: str, layers: int, ranks: int, tokens: int) -> float:
    """Milliseconds of forward, backward and the step of the matrices, of layers of `SHAPES[kind]`.

    `name` is one of `WAYS`, or "placed": owner placement, with one collective a unit; "placed, each": with one for each
    matrix; "placed, layers": with one, and an owner for each layer.
    """
    if name in WAYS:
        return 1e3 * _seconds(kind, layers, ranks, tokens, H100, name)
    machine = OwnerPlaced(messages=_messages(kind) if name == "placed, each" else 1)
    passes = _seconds(kind, layers, ranks, tokens, machine, None)
    return 1e3 * (passes + placed_step_seconds(kind, layers, ranks, by_layer=name == "placed, layers"))


@cache
def _seconds(kind: str, layers: int, ranks: int, tokens: int, machine: Hardware, name: str | None) -> float:
    """Seconds of an iteration with `use_full_params`, or of its forward and backward alone."""
    shape, clock = SHAPES[kind], Clock(machine)
    with torchs_streams(clock), simulated_rank({"shard": ranks}, clock) as mesh:
        model = nn.Sequential(*(Block(shape) for _ in range(layers)))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        spread = {"shard_placement_fn": "auto"} if shape.experts else {}
        shard_units(model, model, candidates()["ours"], mesh, policy, **spread)
        matrices = [param for param in model.parameters() if param.ndim > 1]
        optimizer = None if name is None else muon(matrices, **WAYS[name])
        data = torch.empty(max(tokens // 2048, 1), min(tokens, 2048), shape.width, dtype=torch.bfloat16)
        begin = 0.0
        for _ in range(2):
            begin = clock.begin()
            output = model(data)
            output.backward(torch.empty_like(output))
            if optimizer is not None:
                optimizer.step()
            model.zero_grad()
        return clock.now - begin


def _messages(kind: str) -> int:
    return 7 + 2 + bool(SHAPES[kind].experts)  # four of attention, three of the feed-forward; norms; the router


def placed_step_seconds(kind: str, layers: int, ranks: int, *, by_layer: bool = False) -> float:
    """Seconds of the kernels of the rank with most to do, where each matrix, or each layer, lives on one rank."""
    clock = Clock()
    with torchs_streams(clock), simulated_rank({"shard": ranks}, clock):
        if by_layer:
            layers, ranks = -(-layers // ranks), 1
        blocks = nn.Sequential(*(Block(SHAPES[kind]) for _ in range(layers)))
        return kernel_seconds([param for param in blocks.parameters() if param.ndim > 1], ranks, clock)
